"""Attention by tokamax, in its XLA implementation, against the plain one."""

import importlib.util

import jax
import pytest
from models.layers import attention_cases

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import attention_backends, attention_kernels

Case = attention_cases.Case

CASES = {
  "all": Case(L=9, S=12),
  "window": Case(L=13, causal=True, window=5, softcap=0.7, heads=4),
  "documents": Case(L=12, causal=True, documents=True, scaled=False),
  "prefix": Case(L=10, causal=True, prefix=True, padding=True, rows=2),
  "narrow values": Case(L=10, causal=True, value_width=5),
}
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_equals_the_plain_one(monkeypatch, name, tensor):
  pytest.importorskip("tokamax")
  monkeypatch.setattr(attention_kernels, "_TOKAMAX", ("xla",))
  case = CASES[name]
  arrays = case.arrays("bfloat16")
  expected = case.results(case.arrays(), "xla")
  monkeypatch.setattr(sharding, "device", lambda: ("gpu", H100))
  mesh = sharding.make_mesh(
    fsdp=1, tensor=tensor, devices=jax.devices()[:tensor]
  )
  with jax.set_mesh(mesh):
    actual = case.results(arrays, "tokamax")
  attention_cases.check_close(actual, expected, 0.03)


@pytest.mark.parametrize(
  ("installed", "changes", "message"),
  [
    (False, {}, "pip install 'bigtrain.tokamax.'"),
    (True, dict(sinks=True), "no sinks"),
    (True, dict(bias=True), "bias is a matrix"),
    (True, dict(documents=True, queries=16_384), "more than 128 MiB"),
    (True, dict(dtype="float32"), "not float32"),
    (True, dict(platform="tpu"), "not a tpu"),
  ],
)
def test_what_it_cannot_compute_is_an_error(
  monkeypatch, installed, changes, message
):
  spec = lambda name: object() if installed else None
  monkeypatch.setattr(importlib.util, "find_spec", spec)
  values = dict(
    platform="gpu", device_kind=H100, splits=True, queries=8192,
    positions=8192, heads=8, kv_heads=8, width=256, dtype="bfloat16",
    softcap=True,
  )  # fmt: skip
  call = attention_backends.Call(**{**values, **changes})
  with pytest.raises(ConfigError, match=message):
    attention_backends.choose("tokamax", call)
  if installed:
    call = attention_backends.Call(**values)
    assert attention_backends.choose("tokamax", call) == "tokamax"
