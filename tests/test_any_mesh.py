"""Any mesh, the same loss: every config on random meshes of eight devices.

A case is a config's :runlocal in float32, a factorisation of eight devices into
the axes of the mesh, a number of microbatches, the axis of experts, and whether
rows are packed, the model has dropout and the vocabulary divides. One device
gives the reference.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_runlocal
from flax import linen as nn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import any_mesh

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.models import resnet

# Of the largest number of an array. An array whose numbers are all rounding,
# such as the gradient of a key's bias, counts as no smaller than this share of
# the largest of all arrays.
_RELATIVE = {"float32": 1e-5, "float64": 1e-9}
_SMALLEST = 1e-2

# Metrics that only experts on several devices have, which exchange tokens.
_OF_EXCHANGE = {"experts/rounds", "experts/max_rounds"}

# A depth that only the fixed cases have.
_TWO_BLOCKS = 2

# Fixed cases of one-layer models of every kind: the number of microbatches, the
# rate of dropout, and meshes.
_FIXED_CASES = {
  "digits:runlocal": (
    2, 0.0, ["fsdp=2,tensor=4", "fsdp=8", "replica=2,sequence=2,tensor=2"],
  ),
  "digits_siglip:runlocal": (
    1, 0.0, ["replica=2,fsdp=4", "fsdp=2,sequence=2,tensor=2"],
  ),
  "digits_captions:runlocal": (
    1, 0.0, ["replica=4,tensor=2", "fsdp=2,sequence=4"],
  ),
  "llama_8b:runlocal": (
    2, 0.1,
    ["fsdp=2,sequence=2,tensor=2", "sequence=4,fsdp=2", "replica=2,fsdp=4",
     "fsdp=4,tensor=2"],
  ),
  "mixtral_8x7b:runlocal": (
    1, 0.0, ["fsdp=4,tensor=2", "fsdp=8", "replica=2,fsdp=2,sequence=2"],
  ),
  "pydoc_t5:runlocal": (
    1, 0.0,
    ["fsdp=4,sequence=2", "replica=2,fsdp=2,tensor=2", "fsdp=2,tensor=4"],
  ),
  "resnet": (1, 0.0, ["replica=2,fsdp=4", "fsdp=4,sequence=2", "replica=8"]),
}  # fmt: skip
_QUICK = {
  "digits:runlocal": ["replica=2,sequence=2,tensor=2"],
  "digits_siglip:runlocal": ["replica=2,fsdp=4"],
  "digits_captions:runlocal": [],
  "llama_8b:runlocal": ["fsdp=2,sequence=2,tensor=2"],
  "mixtral_8x7b:runlocal": ["fsdp=4,tensor=2"],
  "pydoc_t5:runlocal": [],
  "resnet": ["fsdp=4,sequence=2"],
}


@functools.cache
def load(spec, vocab_size, packed, dropout):
  return any_mesh.load(
    spec, vocab_size=vocab_size, packed=packed, dropout=dropout
  )


@functools.cache
def load_small(spec, dropout):
  """The config of a fixed case. Rows are packed, and the vocabulary divides."""
  if spec != "resnet":
    return any_mesh.load(
      spec, vocab_size=320, packed=True, dropout=dropout, small=True
    )
  config = any_mesh.load("digits:runlocal", small=True)
  model = dict(num_classes=10, depth=_TWO_BLOCKS, width=0.125, dtype="float64")
  return {**config, "model_name": "resnet", "model": model}


@functools.lru_cache(maxsize=32)
def reference(text, microbatches):
  return any_mesh.train(json.loads(text), dict(fsdp=1), microbatches)


@st.composite
def cases(draw, spec):
  """(spec, config, sizes of the axes, microbatches, the experts' axis)."""
  vocab_size = draw(st.sampled_from([None, 320]))
  packed = draw(st.booleans())
  dropout = draw(st.sampled_from([0.0, 0.1]))
  config = load(spec, vocab_size, packed, dropout)
  tensor = draw(st.sampled_from(any_mesh.tensor_sizes(config)))
  left = 8 // tensor
  sequence = draw(st.sampled_from([n for n in (1, 2, 4) if left % n == 0]))
  left //= sequence  # The batch is split over these.
  fsdp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if left % n == 0]))
  sizes = dict(
    replica=left // fsdp, fsdp=fsdp, sequence=sequence, tensor=tensor
  )
  most = config["input"]["batch_size"] // left
  microbatches = draw(st.sampled_from([n for n in (1, 2) if n <= most]))
  axis = draw(st.sampled_from(any_mesh.expert_axes(config, sizes)))
  return spec, config, sizes, microbatches, axis


def check_case(case):
  spec, config, sizes, microbatches, axis = case
  relative = _RELATIVE["float64" if any_mesh.is_double(config) else "float32"]
  text = json.dumps(config, sort_keys=True)
  want_pairs, *want = reference(text, microbatches)
  config = any_mesh.with_expert_axis(config, axis)
  mesh = f"{sizes}, experts over {axis}" if axis else f"{sizes}"
  pairs, *got = any_mesh.train(config, sizes, microbatches)
  for step, (ours, theirs) in enumerate(zip(pairs, want_pairs, strict=True)):
    assert ours.keys() - _OF_EXCHANGE == theirs.keys()
    for name, (want_total, want_weight) in theirs.items():
      total, weight = ours[name]
      where = f"{spec} on {mesh}, step {step}: {name}"
      # A weight that is no count is a sum that rounds, as the totals do. On one
      # device it may happen to be whole.
      is_count = weight % 1 == 0 and want_weight % 1 == 0
      bound = 1e-6 if is_count else relative
      np.testing.assert_allclose(weight, want_weight, bound, err_msg=where)
      np.testing.assert_allclose(
        total, want_total, relative, relative, err_msg=where
      )
  for what, ours, theirs in zip(("gradient", "state"), got, want, strict=True):
    named = trees.flatten_with_names(theirs)
    top = max(np.abs(x).max(initial=0) for _, x in named)
    for (name, want_x), x in zip(named, jax.tree.leaves(ours)):
      size = max(np.abs(want_x).max(initial=0), _SMALLEST * top)
      error = np.abs(np.asarray(x, float) - want_x).max(initial=0)
      assert error <= relative * size, f"{spec} on {mesh}: {what} of {name}"


_FIXED = dict(
  derandomize=True,
  database=None,
  deadline=None,
  phases=[Phase.generate],
  suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(
  ("spec", "mesh"),
  [
    pytest.param(
      spec, mesh, marks=[pytest.mark.slow] * (mesh not in _QUICK[spec])
    )
    for spec, (_, _, meshes) in _FIXED_CASES.items()
    for mesh in meshes
  ],
)
def test_twenty_cases_of_small_models(monkeypatch, spec, mesh):
  monkeypatch.setitem(resnet.DEPTHS, _TWO_BLOCKS, (1, 1))
  microbatches, dropout, _ = _FIXED_CASES[spec]
  sizes = {
    axis: int(size)
    for axis, size in (part.split("=") for part in mesh.split(","))
  }
  check_case((spec, load_small(spec, dropout), sizes, microbatches, None))


def _first_share(norm, x_BHWD, mask):
  """Statistics of the examples of one device, not of all."""
  return norm(x_BHWD, mask=mask)


def _float32_sums(norm, x_BHWD, mask):
  return norm(x_BHWD.astype(np.float32)).astype(x_BHWD.dtype)


def _wrong_norm(reduction):
  """BatchNorm that is wrong on several devices."""

  class WrongNorm(nn.BatchNorm):
    def __call__(self, x_BHWD):
      norm = super().__call__
      ways = sharding.batch_ways(jax.sharding.get_abstract_mesh())
      if ways == 1:
        return norm(x_BHWD)
      B = len(x_BHWD)
      mask_B111 = (jnp.arange(B) < B // ways).reshape(B, 1, 1, 1)
      return reduction(norm, x_BHWD, mask_B111)

  return WrongNorm


def test_a_wrong_reduction_fails(monkeypatch):
  monkeypatch.setitem(resnet.DEPTHS, _TWO_BLOCKS, (1, 1))
  config, sizes = load_small("resnet", 0.0), dict(fsdp=2)
  check_case(("resnet", config, sizes, 1, None))
  for reduction in (_first_share, _float32_sums):
    monkeypatch.setattr(nn, "BatchNorm", _wrong_norm(reduction))
    with pytest.raises(AssertionError, match="resnet on .*'fsdp': 2"):
      check_case(("resnet", config, sizes, 1, None))


# Adapters have a base, and rewards a sampler: their tests are in tests/tasks.
_SPECS = [
  spec for spec in test_runlocal.SPECS if spec[:4] not in ("dpo:", "grpo")
]


@pytest.mark.mesh
@pytest.mark.parametrize("spec", _SPECS)
@settings(max_examples=9, **_FIXED)
@given(st.data())
def test_nine_cases_of_every_config(spec, data):
  check_case(data.draw(cases(spec)))
