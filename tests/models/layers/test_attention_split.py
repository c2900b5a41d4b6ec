"""Attention of examples that are split over devices, against one device."""

import functools
import re

import jax
import numpy as np
import pytest
from models.layers import attention_cases

from bigtrain import sharding
from bigtrain.models.layers import attention_blockwise, attention_split, masks

Case = attention_cases.Case

# Odd lengths have padding on some devices, or on all of one.
CASES = {
  "all": Case(L=19),
  "cross": Case(L=9, S=23, padding=True, heads=4),
  "causal": Case(L=32, causal=True, heads=4),
  "odd": Case(L=27, causal=True),
  "window": Case(L=37, causal=True, window=5, softcap=0.7),
  "prefix": Case(L=21, causal=True, prefix=True),
  "documents": Case(L=33, causal=True, documents=True, heads=6, width=5),
  "two-sided documents": Case(L=18, documents=True, bias=True, scaled=False),
  "bias": Case(L=29, causal=True, bias=True, heads=4, softcap=2.0),
  "cross bias": Case(L=12, S=17, bias=True, padding=True),
  "sinks": Case(L=29, causal=True, documents=True, heads=4, sinks=True),
  "narrow values": Case(L=27, causal=True, heads=4, value_width=5),
  "wide values": Case(L=19, value_width=11),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(attention_blockwise, "_BLOCK_ON_CPU", 3)


@functools.cache
def expected(name):
  case = CASES[name]
  return case.results(case.arrays(), "xla")


QUICK = (
  ("odd", "auto", 4),
  ("bias", "ring", 4),
  ("sinks", "ring", 2),
  ("narrow values", "auto", 4),
)
SLOW = [
  (name, kind, size)
  for name in CASES
  for kind in ("auto", "ring")
  for size in (2, 8)
  if (name, kind, size) not in QUICK
]
ALL = [*QUICK, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)]


@pytest.mark.parametrize(("name", "implementation", "sequence"), ALL)
def test_equals_one_device(name, implementation, sequence):
  case = CASES[name]
  devices = jax.devices()[: 2 * sequence]  # The rows of the batch are split.
  mesh = sharding.make_mesh(sequence=sequence, fsdp=-1, devices=devices)
  with jax.set_mesh(mesh):
    actual = case.results(case.arrays(), implementation)
  attention_cases.check_close(actual, expected(name), 1e-5)


@pytest.mark.parametrize("implementation", ["blockwise", "xla"])
def test_every_implementation_can_be_split(implementation):
  case = CASES["cross"]
  devices = jax.devices()[:4]
  with jax.set_mesh(sharding.make_mesh(sequence=4, devices=devices)):
    actual = case.results(case.arrays(), implementation)
  attention_cases.check_close(actual, expected("cross"), 1e-5)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("ways", [2, 5, 8])
def test_causal_work_is_balanced(ring, ways):
  """All devices have as many visible pairs of blocks, at each step."""
  mask = masks.Mask(causal=True)
  length = 2 * ways * 3 * 4
  plan = attention_split.plan_of(
    ways, length, length, mask, ring=ring, balanced=True
  )
  tables = attention_split.tables_of(plan)
  assert len(tables.pairs) == (ways if ring else 1)
  for columns, pairs in zip(tables.columns, tables.pairs):
    for i in range(ways):
      first = tables.rows[i][pairs[i][:, 0]]
      assert (columns[i][pairs[i][:, 1]] <= first + plan.block_q - 1).all()
  blocks = length // plan.block_q
  visible = blocks * (blocks + 1) // 2
  assert ways * sum(p.shape[1] for p in tables.pairs) == visible


@pytest.mark.parametrize("implementation", ["auto", "ring"])
def test_no_device_has_a_matrix_of_scores(monkeypatch, implementation):
  monkeypatch.undo()  # Blocks of the usual size.
  case = Case(L=4096, causal=True, rows=1, heads=2)
  arrays = jax.eval_shape(lambda: case.arrays("bfloat16"))

  def loss(arrays):
    return case.attend(arrays, implementation).astype(np.float32).sum()

  devices = jax.devices()[:4]
  with jax.set_mesh(sharding.make_mesh(sequence=4, devices=devices)):
    program = jax.jit(jax.grad(loss)).lower(arrays).compile()
  for shape in set(re.findall(r"\w+\[([\d,]+)\]", program.as_text())):
    long = [n for n in map(int, shape.split(",")) if n >= 1024]
    assert len(long) < 2, shape
