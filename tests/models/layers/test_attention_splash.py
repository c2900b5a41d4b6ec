"""Splash attention, interpreted on a CPU, against the plain one."""

import jax
import numpy as np
import pytest
from models.layers import attention_cases

from bigtrain import sharding
from bigtrain.models.layers import attention_kernels, masks

Case = attention_cases.Case

# Blocks of 128 are the smallest.
CASES = {
  "causal": Case(L=256, causal=True, heads=4),
  "window": Case(L=384, causal=True, window=100, softcap=2.0),
  "documents": Case(L=200, causal=True, documents=True, width=16),
  "padding": Case(L=130, S=200, padding=True, scaled=False),
  "all": Case(L=197, heads=3, kv_heads=1),
  "sinks": Case(
    L=200, causal=True, window=70, heads=4, documents=True, sinks=True
  ),
  "narrow values": Case(L=256, causal=True, width=24, value_width=16),
}


# Compiling the interpreted kernels takes seconds.
QUICK = ("sinks", "padding")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  monkeypatch.setattr(attention_kernels, "_BLOCK", 128)
  monkeypatch.setattr(attention_kernels, "_INTERPRET", True)
  monkeypatch.setattr(sharding, "device", lambda: ("tpu", "TPU v5"))


@pytest.mark.parametrize(
  "name",
  [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
  ],
)
def test_equals_the_plain_one(name):
  case = CASES[name]
  arrays = case.arrays()
  expected = case.results(arrays, "xla")
  actual = case.results(arrays, "splash")
  attention_cases.check_close(actual, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "sinks"])
def test_bfloat16_is_as_near_to_float32_as_the_plain_one(name):
  case = CASES[name]
  expected = case.results(case.arrays(), "xla")
  actual = case.results(case.arrays("bfloat16"), "splash")
  attention_cases.check_close(actual, expected, 0.03)


def test_what_may_not_be_seen_changes_nothing():
  case = CASES["documents"]
  arrays = case.arrays()
  before = case.attend(arrays, "splash")
  segments = np.asarray(case.mask().segments_BL)
  other = (segments != segments[:, 100:101])[..., None, None] * 7.0
  for name in ("k_BSGK", "v_BSGK"):
    arrays = {**arrays, name: arrays[name] + other}
  after = case.attend(arrays, "splash")
  np.testing.assert_array_equal(after[:, 100], before[:, 100])
  assert not np.array_equal(after, before)


def test_heads_are_split_over_tensor():
  case = Case(L=128, causal=True, documents=True, heads=4, kv_heads=2)
  arrays = case.arrays()
  expected = case.results(arrays, "xla")
  mesh = sharding.make_mesh(fsdp=1, tensor=2, devices=jax.devices()[:2])
  with jax.set_mesh(mesh):
    actual = case.results(arrays, "splash")
  attention_cases.check_close(actual, expected, 1e-5)


@pytest.mark.parametrize("window", [None, 128, 200, 600])
def test_the_tables_of_blocks_are_those_of_jax(window, monkeypatch):
  # The queries of two devices, with early and late ones each.
  parts = np.arange(1024).reshape(4, 256)
  numbers = np.concatenate([parts[i] for i in (0, 3, 1, 2)])

  def tables():
    kernel = attention_kernels._splash_kernel(
      numbers,
      1024,
      (128, 128),
      masks.Mask(causal=True, window=window),
      None,
      heads=2,
      shards=2,
    )
    return jax.tree.leaves(kernel)

  quick = tables()
  monkeypatch.setattr(
    attention_kernels, "_quick", lambda mask_class: mask_class
  )
  expected = tables()
  assert len(quick) == len(expected) > 3
  for mine, other in zip(quick, expected):
    np.testing.assert_array_equal(mine, other)
