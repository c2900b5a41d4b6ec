"""Experts by the kernels of TPUs, interpreted on a CPU.

Against a loop over tokens, and on meshes against blocks on one device.
"""

import jax
import numpy as np
import pytest
from models.layers import test_moe, test_moe_exchange

from bigtrain.models.layers import moe_experts


def interpret(monkeypatch):
  monkeypatch.setattr(moe_experts, "tile_rows", lambda *_: 8)
  monkeypatch.setattr(moe_experts, "_columns", lambda width: 16)
  monkeypatch.setattr(moe_experts, "_INTERPRET", True)
  monkeypatch.setattr(moe_experts, "by_kernels", lambda batch_size: True)


def test_outputs_equal_a_loop_over_tokens(monkeypatch):
  variables = test_moe.params()
  interpret(monkeypatch)
  jaxpr = jax.make_jaxpr(test_moe.layer(top_k=2).apply, static_argnums=3)
  assert "pallas_call" in str(jaxpr(variables, test_moe.X, None, True))
  _, y, _ = test_moe.run_of.__wrapped__("swiglu", (("top_k", 2),), 1)
  expected, _ = test_moe.plain(2, True)
  got = y * test_moe.REAL[..., None]
  np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  "axis, sizes",
  [
    (None, dict(replica=2, fsdp=2, tensor=2)),
    ("fsdp", dict(replica=2, fsdp=4)),
    ("replica", dict(replica=2, fsdp=1)),
  ],
)
def test_gradients_equal_those_of_blocks(axis, sizes, monkeypatch):
  test_moe_exchange.one_device(())
  interpret(monkeypatch)
  devices = jax.devices()[: int(np.prod([*sizes.values()]))]
  test_moe_exchange.check(sizes | dict(devices=devices), axis=axis)


@pytest.mark.slow
def test_further_rounds_equal_one_device(monkeypatch):
  test_moe_exchange.one_device((("skew", "two"),))
  interpret(monkeypatch)
  sizes = dict(replica=1, fsdp=4, devices=jax.devices()[:4])
  options = dict(axis="fsdp", buffer_factor=0.1, skew="two")
  assert test_moe_exchange.check(sizes, **options) > 1
