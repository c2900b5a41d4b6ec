"""Engines: failing examples are named, replaced and counted."""

import threading
import time

import numpy as np
import pytest
from support.array_inputs import (
  PP,
  assert_equal,
  config,
  fetch,
  make_train,
  rows_of,
)

from bigtrain.config.errors import DataError
from bigtrain.data import arrays
from bigtrain.inputs import engine as engines
from bigtrain.inputs import pipeline


@pytest.mark.parametrize("batched", [True, False])
def test_a_failing_op_is_named_with_the_example(batched):
  pp = f"keep('label')|test_fail_if([33], batched={batched})"
  train = make_train(pp, data=rows_of(64))
  with pytest.raises(DataError) as error:
    fetch(train.start(0, 4))
  assert str(error.value) == (
    f"arrays, row 33: op 'test_fail_if([33], batched={batched})': bad label 33."
  )


def test_batches_before_the_failing_one_are_delivered():
  train = make_train("keep('label')|test_fail_if([33])", data=rows_of(64))
  (step,) = [s for s in range(4) if 33 in train.order(s).index]
  iterator = train.start(0, 4)
  for s in range(step):
    assert next(iterator)["label"].tolist() == train.order(s).index.tolist()
  with pytest.raises(DataError):
    next(iterator)


def test_an_example_of_another_shape_is_named():
  labels = np.arange(64)
  labels[40] = 77
  data = {"type": "arrays", "arrays": {"label": labels}}
  train = make_train("test_widen", data=data)
  with pytest.raises(
    DataError,
    match=r"arrays, row 40: feature 'wide' has "
    r"shape \(2,\) .* in the first example is \(3,\)",
  ):
    fetch(train.start(0, 4))


def test_integers_out_of_range_of_jaxs_dtype_are_an_error():
  labels = np.arange(64)
  labels[7] = 2**31
  data = {"type": "arrays", "arrays": {"label": labels}}
  with pytest.raises(DataError, match="'label' contains 2147483648"):
    fetch(make_train("", data=data).start(0, 4))


def test_skipped_examples_are_replaced_and_counted_alike_on_all_hosts():
  pp = "keep('label')|test_fail_if([3, 33, 60])"
  train = make_train(pp, data=rows_of(64), skip_errors=3)
  batches = fetch(train.start(0, 8))  # Two epochs.
  assert train.skipped == 3
  for step, batch in enumerate(batches):
    index = train.order(step).index
    bad = np.isin(index, [3, 33, 60])
    np.testing.assert_array_equal(batch["label"][~bad], index[~bad])
    assert not np.isin(batch["label"], [3, 33, 60]).any()
  for rows in np.split(np.arange(16), 2):
    cfg = config(pp, data=rows_of(64), skip_errors=3)
    engine, _ = pipeline.train_engine(cfg.input, seed=0, rows=rows)
    for whole, local in zip(batches[4:], engine.batches(4, 8), strict=True):
      np.testing.assert_array_equal(local["label"], whole["label"][rows])


def test_skipping_has_a_cap():
  train = make_train(
    "keep('label')|test_fail_if([3, 33, 60])", data=rows_of(64), skip_errors=2
  )
  with pytest.raises(DataError, match=r"arrays, row \d+: .*skip_errors=2"):
    fetch(train.start(0, 8))
  assert train.skipped == 2


def test_a_source_without_usable_examples_is_an_error():
  start = time.monotonic()
  bad = list(range(5))
  with pytest.raises(DataError, match="replacements"):
    make_train(
      f"keep('label')|test_fail_if({bad})", data=rows_of(5), skip_errors=1000
    )
  assert time.monotonic() - start < 100


def test_an_error_that_does_not_repeat_is_reported(monkeypatch):
  train = make_train(num_threads=1)
  read, calls = arrays.Source.read, []

  def failing_once(self, indices):
    calls.append(1)
    if len(calls) == 1:
      raise OSError("stale file handle")
    return read(self, indices)

  monkeypatch.setattr(arrays.Source, "read", failing_once)
  with pytest.raises(DataError, match=r"step 4 failed.*stale file handle"):
    fetch(train.start(4, 5))


def test_an_input_that_ends_early_is_an_error(monkeypatch):
  engine, _ = pipeline.train_engine(config().input, seed=0, rows=np.arange(16))
  stream = engine._stream
  monkeypatch.setattr(
    engine, "_stream", lambda steps, end: stream(steps[:-1], end)
  )
  with pytest.raises(DataError, match=r"ended at step 3 of 4"):
    list(engine.batches(0, 4))


def test_a_stop_ends_a_batch_in_the_middle(monkeypatch):
  cfg = config(f"{PP}|test_fail_if([], batched=False)").input
  engine, _ = pipeline.train_engine(cfg, seed=0, rows=np.arange(16))
  stopping, rows = threading.Event(), []
  example_of = engines._example_of

  def stop_at_third_row(batch, i):
    rows.append(i)
    if len(rows) >= 3:
      stopping.set()
    return example_of(batch, i)

  monkeypatch.setattr(engines, "_example_of", stop_at_third_row)
  assert list(engine.batches(0, 50, stopping)) == []
  assert len(rows) <= 2 + engine.num_threads
  del rows[:]
  assert list(engine.batches(0, 50, stopping)) == [] and not rows


def test_batched_and_unbatched_ops_give_the_same():
  batched = fetch(make_train(f"{PP}|test_fail_if([])").start(0, 2))
  single = fetch(
    make_train(f"{PP}|test_fail_if([], batched=False)").start(0, 2)
  )
  for a, b in zip(single, batched, strict=True):
    assert_equal(a, b)


def test_private_features_are_left_out_of_the_batch():
  train = make_train(
    "copy('label', '_secret')|copy('label', 'open')|drop('image')"
  )
  assert set(train.spec) == {"label", "open"}
  assert set(next(train.start(0, 1))) == {"label", "open"}
