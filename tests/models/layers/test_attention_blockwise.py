"""Attention block by block: against the plain one, and its memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.layers import attention_cases
from support import cases

from bigtrain.models.layers import attention_blockwise

Case = attention_cases.Case

# Blocks of 4: several of them, and odd lengths.
CASES = {
  "all": Case(L=9),
  "cross": Case(L=5, S=11, padding=True),
  "causal": Case(L=11, causal=True, heads=4),
  "window": Case(L=13, causal=True, window=5, softcap=0.7),
  "prefix": Case(L=10, causal=True, prefix=True),
  "documents": Case(L=12, causal=True, documents=True, heads=6, width=5),
  "two-sided documents": Case(L=9, documents=True, bias=True, scaled=False),
  "bias": Case(L=11, causal=True, bias=True, heads=4, softcap=2.0),
  "cross bias": Case(L=6, S=9, bias=True, padding=True),
  "sinks": Case(L=11, causal=True, window=5, heads=4, sinks=True),
  "sinks of documents": Case(
    L=13, causal=True, documents=True, softcap=0.7, bias=True, sinks=True
  ),
  "narrow values": Case(L=11, causal=True, heads=4, value_width=5),
  "wide values": Case(L=9, documents=True, value_width=11, sinks=True),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(attention_blockwise, "_BLOCK_ON_CPU", 4)


@pytest.mark.parametrize(
  "name",
  cases.quick(
    CASES,
    *("all", "cross", "prefix", "two-sided documents", "cross bias"),
    *("sinks of documents", "narrow values"),
  ),
)
def test_equals_the_plain_one(name):
  case = CASES[name]
  arrays = case.arrays()
  expected = case.results(arrays, "xla")
  actual = case.results(arrays, "blockwise")
  attention_cases.check_close(actual, expected, 1e-5)


@pytest.mark.parametrize("name", ["window", "documents", "bias", "sinks"])
def test_bfloat16_is_as_near_to_float32_as_the_plain_one(name):
  case = CASES[name]
  expected = case.results(case.arrays(), "xla")
  actual = case.results(case.arrays("bfloat16"), "blockwise")
  attention_cases.check_close(actual, expected, 0.03)


@pytest.mark.parametrize("name", ["window", "documents", "prefix", "cross"])
def test_what_may_not_be_seen_changes_nothing(name):
  case = CASES[name]
  arrays, mask = case.arrays(), case.mask()
  hidden = ~np.asarray(mask.matrix(case.L, case.S or case.L))
  hidden = np.broadcast_to(hidden, (case.rows, case.L, case.S or case.L))
  before = case.results(arrays, "blockwise")["out"]
  query = case.L // 2
  rows = np.arange(case.rows)
  assert hidden[rows, query].any()
  spoil = jnp.asarray(hidden[:, query, :, None, None]) * 7.0
  for name in ("k_BSGK", "v_BSGK"):
    arrays = {**arrays, name: arrays[name] + spoil}
  after = case.results(arrays, "blockwise")["out"]
  np.testing.assert_array_equal(after[:, query], before[:, query])


def test_memory_is_linear_in_the_length(monkeypatch):
  monkeypatch.undo()  # Blocks of the usual size.

  def compiled(L):
    case = Case(L=L, causal=True, bias=True, rows=1, heads=2)
    arrays = jax.eval_shape(lambda: case.arrays("bfloat16"))

    def loss(arrays):
      return case.attend(arrays, "blockwise").astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss)).lower(arrays).compile()

  sizes = []
  for L in (4096, 8192):
    program = compiled(L)
    sizes.append(program.memory_analysis().temp_size_in_bytes)
    shapes = re.findall(r"\w+\[([\d,]+)\]", program.as_text())
    for shape in set(shapes):
      long = [n for n in map(int, shape.split(",")) if n >= L]
      assert len(long) < 2, shape
  assert sizes[1] < 2.1 * sizes[0]


def test_a_scan_over_layers_keeps_no_masks():
  """Masks do not depend on a layer's input, so jax could compute them once."""
  case = Case(L=32, causal=True, rows=1, heads=2)
  arrays = jax.eval_shape(case.arrays)

  @functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable
  )
  def layer(arrays, _):
    out = case.attend(arrays, "blockwise")
    return {**arrays, "q": arrays["q"] + out.reshape(arrays["q"].shape)}, None

  def loss(arrays):
    return jax.lax.scan(layer, arrays, length=3)[0]["q"].sum()

  text = jax.jit(jax.grad(loss)).lower(arrays).as_text()
  shapes = re.findall(r"tensor<([\dx]+)xi1>", text)
  sizes = [math.prod(map(int, shape.split("x"))) for shape in shapes]
  assert max(sizes) == 2 * 32  # Queries that see anything, for both heads.
