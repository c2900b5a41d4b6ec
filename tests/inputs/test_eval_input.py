"""Evaluation input: a fixed order, padding, masks and cached batches."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.array_inputs import assert_equal, fetch, make_eval, rows_of

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.inputs import cache


def test_examples_are_in_order_padded_and_masked():
  data = make_eval()
  assert (data.num_examples, data.num_batches) == (37, 3)
  assert data.spec["_mask"] == jax.ShapeDtypeStruct((16,), np.float32)
  for _ in range(2):
    batches = fetch(data.batches())
    assert len(batches) == 3
    labels = np.concatenate([b["label"] for b in batches])
    mask = np.concatenate([b["_mask"] for b in batches])
    assert labels[mask == 1].tolist() == list(range(37))
    assert mask.tolist() == [1] * 37 + [0] * 11
  (batch, *_) = data.batches()
  for name, array in batch.items():
    assert array.sharding.spec == PartitionSpec(("replica", "fsdp"))
    assert array.shape == data.spec[name].shape
    assert array.dtype == data.spec[name].dtype


def test_sets_smaller_than_a_batch_and_num_examples():
  data = make_eval(rows_of(3))
  (batch,) = fetch(data.batches())
  assert batch["_mask"].sum() == 3
  data = make_eval(num_examples=20)
  assert sum(b["_mask"].sum() for b in fetch(data.batches())) == 20
  for wrong in (0, 38):
    with pytest.raises(
      ConfigError, match="num_examples: .* at least 1 and at most 37"
    ):
      make_eval(num_examples=wrong)


def test_cached_batches_are_made_once(reads, caplog):
  caplog.set_level("DEBUG", logger="absl")
  data = make_eval(cache=True, path="config.evals.val")
  assert "config.evals.val: its 3 batches take about 192 bytes" in caplog.text
  partial = data.batches()
  next(partial)
  partial.close()  # An incomplete pass must not be cached.
  expected = fetch(data.batches())
  del reads[:]
  for a, b in zip(fetch(data.batches()), expected, strict=True):
    assert_equal(a, b)
  assert not reads


def test_batches_too_large_to_cache_are_made_again(reads, monkeypatch, caplog):
  monkeypatch.setattr(cache, "available_bytes", lambda: 300)
  data = make_eval(cache=True)
  assert "each evaluation makes its batches again" in caplog.text
  fetch(data.batches())
  del reads[:]
  assert len(fetch(data.batches())) == 3
  assert reads


def test_a_failing_example_is_named():
  data = make_eval(pp="test_fail_if([36])")
  with pytest.raises(DataError, match="arrays, row 36: op"):
    fetch(data.batches())
