"""Batches as a function of config and step, on the numpy engine."""

import json
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from bigtrain import settings, sharding
from bigtrain.data import arrays
from bigtrain.inputs import cache, order, pipeline
from bigtrain.pp import registry
from bigtrain.settings import ConfigError, DataError

PP = "random_crop(8, pad=1)|flip_lr|value_range(-1, 1, 0, 16)"


@registry.register("test_fail_if")
def fail_if(values: list[int], batched: bool = True):
  """Fails on examples whose label is among the values."""

  def fn(features, u):
    bad = np.isin(features["label"], values)
    if bad.any():
      raise ValueError(f"bad label {features['label']}")
    return features

  return registry.Op(fn, batched=batched, reads=("label",))


@registry.register("test_widen")
def widen():
  """A feature whose shape depends on the example."""

  def fn(features, u):
    size = 2 if features["label"] == 77 else 3
    return {**features, "wide": np.zeros(size, np.float32)}

  return registry.Op(fn)


def config(pp=PP, batch_size=16, data=None, **kwargs):
  if data is None and "mixture" not in kwargs:
    data = {"type": "arrays", "name": "digits"}
  given = {"pp": pp, "batch_size": batch_size, **kwargs}
  if data is not None:
    given["data"] = data
  return settings.Config({"input": given})


def rows_of(count, **features):
  """A source of `count` rows with labels 0, 1, 2, ..."""
  given = {"label": np.arange(count), **features}
  return {"type": "arrays", "arrays": given}


def make(*args, seed=0, mesh=None, **kwargs):
  mesh = mesh or sharding.make_mesh()
  cfg = config(*args, **kwargs)
  return pipeline.make_train(cfg.input, seed=seed, mesh=mesh)


def fetch(iterator):
  return [jax.device_get(batch) for batch in iterator]


def assert_equal(got, want):
  assert got.keys() == want.keys()
  for name in want:
    np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.fixture
def reads(monkeypatch):
  """The indices that arrays sources were asked for, call by call."""
  calls = []
  read = arrays.Source.read

  def counted(self, indices):
    calls.append(np.asarray(indices).tolist())
    return read(self, indices)

  monkeypatch.setattr(arrays.Source, "read", counted)
  return calls


# What a batch is.


def test_a_batch_is_order_then_records_then_ops():
  train = make("value_range(-1, 1, 0, 16)|keep('image', 'label')")
  source = arrays.Source(name="digits")
  for step, batch in enumerate(fetch(train.start(0, 3))):
    found = train.order(step)
    want = source.read(found.index)
    np.testing.assert_array_equal(batch["label"], want["label"])
    np.testing.assert_allclose(batch["image"], want["image"] / 8.0 - 1)
    rows = np.arange(16 * step, 16 * step + 16)
    schedule = order.Schedule((1438,), seed=0)
    np.testing.assert_array_equal(found.index, schedule.rows(rows).index)


def test_spec_and_sharding_are_known_before_the_data():
  for replica, fsdp in ((1, 8), (2, 4)):
    mesh = sharding.make_mesh(replica, fsdp)
    train = make(mesh=mesh)
    assert train.num_examples == 1438
    assert train.batch_size == 16
    batch = next(train.start(0, 1))
    assert set(batch) == {"image", "label"}
    for name, array in batch.items():
      assert (array.shape, array.dtype) == (
        train.spec[name].shape,
        train.spec[name].dtype,
      )
      assert array.sharding.spec == PartitionSpec(("replica", "fsdp"))
    assert train.spec["image"].shape == (16, 8, 8, 1)
    assert train.spec["label"].dtype == np.int32


def test_devices_and_hosts_do_not_change_a_batch():
  want = fetch(
    make(mesh=sharding.make_mesh(devices=jax.devices()[:1])).start(3, 6)
  )
  for got, expected in zip(fetch(make().start(3, 6)), want, strict=True):
    assert_equal(got, expected)
  for hosts in (2, 4):
    per_host = []
    for host in range(hosts):
      rows = np.split(np.arange(16), hosts)[host]
      engine, _ = pipeline.train_engine(config().input, seed=0, rows=rows)
      per_host.append(list(engine.batches(3, 6)))
    for step, expected in enumerate(want):
      parts = [batches[step] for batches in per_host]
      joined = {
        name: np.concatenate([part[name] for part in parts])
        for name in expected
      }
      assert_equal(joined, expected)


def test_threads_prefetch_and_restarts_do_not_change_a_batch():
  want = fetch(make().start(0, 8))
  for options in ({"num_threads": 1}, {"num_threads": 5, "prefetch": 0}):
    train = make(**options)
    got = fetch(train.start(0, 3)) + fetch(train.start(3, 8))
    for a, b in zip(got, want, strict=True):
      assert_equal(a, b)


def test_epochs_and_seeds_draw_anew():
  data = rows_of(
    16,
    image=np.random.default_rng(0)
    .integers(0, 16, (16, 8, 8, 1))
    .astype(np.uint8),
  )
  train = make(data=data)
  first, second = fetch(train.start(0, 2))
  assert sorted(first["label"]) == sorted(second["label"]) == list(range(16))
  assert first["label"].tolist() != second["label"].tolist()
  images = [b["image"][np.argsort(b["label"])] for b in (first, second)]
  same = (images[0] == images[1]).all(axis=(1, 2, 3))
  assert same.sum() < 6  # A crop has 9 positions, a flip 2 sides.
  (other,) = fetch(make(data=data, seed=1).start(0, 1))
  assert other["label"].tolist() != first["label"].tolist()


def test_a_late_step_costs_what_an_early_one_costs(reads):
  train = make(num_threads=1)
  del reads[:]
  for step in (100, 10**6, 10**12):
    fetch(train.start(step, step + 1))
    assert [len(call) for call in reads] == [16]
    assert reads.pop() == train.order(step).index.tolist()


def test_small_sources_repeat_within_a_batch():
  train = make("keep('label')", data=rows_of(3))
  (batch,) = fetch(train.start(0, 1))
  counts = np.bincount(batch["label"])
  assert sorted(counts) == [5, 5, 6]
  assert train.order(0).epoch.tolist() == [i // 3 for i in range(16)]


def test_no_shuffling():
  train = make("keep('label')", data=rows_of(10), shuffle=False, batch_size=8)
  labels = [batch["label"].tolist() for batch in fetch(train.start(0, 2))]
  assert labels == [list(range(8)), [8, 9, 0, 1, 2, 3, 4, 5]]


def test_ops_that_take_one_example_at_a_time_give_the_same():
  batched = fetch(make(f"{PP}|test_fail_if([])").start(0, 2))
  single = fetch(make(f"{PP}|test_fail_if([], batched=False)").start(0, 2))
  for got, want in zip(single, batched, strict=True):
    assert_equal(got, want)


def test_private_features_stay_out():
  train = make("copy('label', '_secret')|copy('label', 'open')|drop('image')")
  assert set(train.spec) == {"label", "open"}
  assert set(next(train.start(0, 1))) == {"label", "open"}


# Mixtures.


def test_mixture():
  mixture = {
    "digits": {"data": {"type": "arrays", "name": "digits"}, "weight": 3},
    "ones": {
      "data": rows_of(5, image=np.ones((5, 8, 8, 1), np.uint8)),
      "weight": 1,
      "pp": "value_range(0, 2, 0, 1)|keep('image', 'label')",
    },
  }
  train = make("value_range(-1, 1, 0, 16)", mixture=mixture)
  assert train.num_examples == 1443
  sources = [arrays.Source(name="digits"), None]
  from_ones = 0
  for step, batch in enumerate(fetch(train.start(0, 256))):
    found = train.order(step)
    ones = found.source == 1
    from_ones += ones.sum()
    assert (batch["image"][ones] == 2).all()
    np.testing.assert_array_equal(batch["label"][ones], found.index[ones])
    want = sources[0].read(found.index[~ones])
    np.testing.assert_array_equal(batch["label"][~ones], want["label"])
    assert (batch["image"][~ones] <= 1).all()
  assert from_ones == 1024  # A block of 4096 rows has the exact share.


@pytest.mark.parametrize(
  "change, message",
  [
    ({"weight": None}, "mixture.b.weight: expected a number"),
    ({"weight": -1}, "positive weight"),
    ({"wieght": 1}, "mixture.b.wieght: unknown key. Did you mean 'weight'"),
    ({"pp": "keep('image')"}, r"mixture.b.pp: feature 'label' is missing"),
    (
      {"pp": "keep('image', 'label')|cast('float32', key='label')"},
      r"'label' is float32 \(\), but int32 \(\) in config.input.mixture.a",
    ),
    ({"data": {"type": "arrays", "name": "digitz"}}, "mixture.b.data: "),
  ],
)
def test_mistakes_in_mixtures(change, message):
  digits = {"type": "arrays", "name": "digits"}
  mixture = {
    "a": {"data": digits, "weight": 1},
    "b": {"data": digits, "weight": 1, **change},
  }
  with pytest.raises(ConfigError, match=message):
    make("keep('image', 'label')", mixture=mixture)


# Mistakes, told before any data flows.


@pytest.mark.parametrize(
  "change, message",
  [
    ({"batch_size": 12}, "batch_size=12 does not divide among 8 devices"),
    ({"batch_size": 0}, "positive whole number"),
    ({"data": {"type": "array"}}, "no data module 'array'.*'arrays'"),
    ({"data": {"name": "digits"}}, "input.data.type: missing"),
    ({"data": {"type": "files"}}, "the module has no Source"),
    (
      {"data": {"type": "arrays", "nam": "digits"}},
      "input.data.nam: unknown key. Did you mean 'name'",
    ),
    ({"data": {"type": "arrays", "name": "x"}}, "config.input.data: arrays"),
    ({"mixture": {}}, "input.mixture: expected at least one"),
    (
      {"mixture": {"a": {}}, "data": {"type": "arrays"}},
      "give either config.input.data or",
    ),
    ({"cache": "row"}, "Did you mean 'raw'"),
    ({"prefetch": -1}, "input.prefetch: expected a whole number"),
    ({"num_threads": 0}, "at least 1"),
    ({"skip_errors": 0.5}, "whole number"),
    ({"pp": "valu_range(-1, 1)"}, "input.pp: .*Did you mean 'value_range'"),
    ({"pp": "onehot(10, key='lable')"}, "input.pp: .*needs .*'lable'"),
    ({"pp": "drop('image', 'label')"}, "no feature is left"),
    (
      {"data": rows_of(3, name=["a", "b", "c"]), "pp": ""},
      r"'name' holds strings.*keep\(...\).*drop\('name'\)",
    ),
  ],
)
def test_mistakes(change, message):
  with pytest.raises(ConfigError, match=message):
    make(**change)


def test_an_empty_source_is_a_data_error():
  with pytest.raises(DataError, match=r"config\.input\.data: .*no example"):
    make("", data=rows_of(0))


def test_every_key_is_read():
  cfg = config(
    prefetch=1, cache="none", num_threads=1, shuffle=True, skip_errors=0
  )
  pipeline.make_train(cfg.input, seed=0, mesh=sharding.make_mesh())
  assert cfg.unread() == []
  cfg = config(shufle=True)
  pipeline.make_train(cfg.input, seed=0, mesh=sharding.make_mesh())
  assert cfg.unread() == [
    "config.input.shufle: unknown key. Did you mean 'shuffle'?"
  ]


def test_tokens_per_example():
  tokens = rows_of(4, tokens=np.zeros((4, 17), np.int32))
  assert pipeline.tokens_per_example(make("", data=tokens).spec) == 17
  assert pipeline.tokens_per_example(make().spec) is None
  pairs = rows_of(
    4, inputs=np.zeros((4, 12), np.int32), targets=np.zeros((4, 5), np.int32)
  )
  assert pipeline.tokens_per_example(make("", data=pairs).spec) == 17
  # Not every target is text.
  for one in (
    dict(targets=np.zeros((4, 5), np.int32)),
    dict(inputs=np.zeros((4, 5)), targets=np.zeros((4, 5))),
  ):
    spec = make("", data=rows_of(4, **one)).spec
    assert pipeline.tokens_per_example(spec) is None


# Examples that cannot be used.


@pytest.mark.parametrize("batched", [True, False])
def test_a_failing_op_is_named_with_the_example(batched):
  pp = f"keep('label')|test_fail_if([33], batched={batched})"
  train = make(pp, data=rows_of(64))
  with pytest.raises(DataError) as error:
    fetch(train.start(0, 4))
  assert str(error.value) == (
    f"arrays, row 33: op 'test_fail_if([33], batched={batched})': bad label 33."
  )


def test_batches_before_the_failing_one_arrive():
  train = make("keep('label')|test_fail_if([33])", data=rows_of(64))
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
  train = make("test_widen", data=data)
  with pytest.raises(
    DataError,
    match=r"arrays, row 40: feature 'wide' has "
    r"shape \(2,\) .* in the first example \(3,\)",
  ):
    fetch(train.start(0, 4))


def test_numbers_that_jax_would_wrap_are_an_error():
  labels = np.arange(64)
  labels[7] = 2**31
  data = {"type": "arrays", "arrays": {"label": labels}}
  with pytest.raises(DataError, match="'label' holds 2147483648"):
    fetch(make("", data=data).start(0, 4))


def test_skipped_examples_are_replaced_counted_and_the_same_everywhere():
  pp = "keep('label')|test_fail_if([3, 33, 60])"
  train = make(pp, data=rows_of(64), skip_errors=3)
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
    for want, got in zip(batches[4:], engine.batches(4, 8), strict=True):
      np.testing.assert_array_equal(got["label"], want["label"][rows])


def test_skipping_has_a_cap():
  train = make(
    "keep('label')|test_fail_if([3, 33, 60])", data=rows_of(64), skip_errors=2
  )
  with pytest.raises(DataError, match=r"arrays, row \d+: .*skip_errors=2"):
    fetch(train.start(0, 8))
  assert train.skipped == 2


def test_all_failing_ends():
  began = time.monotonic()
  bad = list(range(5))
  with pytest.raises(DataError, match="replacements"):
    make(
      f"keep('label')|test_fail_if({bad})", data=rows_of(5), skip_errors=1000
    )
  assert time.monotonic() - began < 20


def test_an_error_that_does_not_repeat_is_reported_as_it_was(monkeypatch):
  train = make(num_threads=1)
  read, calls = arrays.Source.read, []

  def sometimes(self, indices):
    calls.append(1)
    if len(calls) == 1:
      raise OSError("stale file handle")
    return read(self, indices)

  monkeypatch.setattr(arrays.Source, "read", sometimes)
  with pytest.raises(DataError, match=r"step 4 failed.*stale file handle"):
    fetch(train.start(4, 5))


def test_an_input_that_ends_early_is_an_error(monkeypatch):
  engine, _ = pipeline.train_engine(config().input, seed=0, rows=np.arange(16))
  stream = engine._stream
  monkeypatch.setattr(
    engine, "_stream", lambda first, last: stream(first, last - 1)
  )
  with pytest.raises(DataError, match=r"ended at step 3 of 4"):
    list(engine.batches(0, 4))


# Caching.


def test_raw_cache_reads_each_record_once(reads, caplog):
  caplog.set_level("INFO")
  train = make(
    data=rows_of(40, image=np.zeros((40, 8, 8, 1), np.uint8)),
    cache="raw",
    num_threads=1,
  )
  assert "config.input.cache: 40 records take about 2.88 kB" in caplog.text
  del reads[:]
  want = fetch(
    make(data=rows_of(40, image=np.zeros((40, 8, 8, 1), np.uint8))).start(0, 10)
  )
  del reads[:]
  for a, b in zip(fetch(train.start(0, 10)), want, strict=True):
    assert_equal(a, b)
  read = sorted(i for call in reads for i in call)
  assert len(read) == len(set(read)) <= 40
  with_cache, without = train.fingerprint, make().fingerprint
  assert with_cache != without


def test_raw_cache_larger_than_memory(monkeypatch):
  monkeypatch.setattr(cache, "available_bytes", lambda: 1000)
  with pytest.raises(ConfigError, match=r"input\.cache='raw'.*1 kB are avail"):
    make(cache="raw")


def test_memory_is_measured():
  assert 1e6 < cache.available_bytes() < 1e15
  assert cache.readable(1234567) == "1.23 MB"


# Evaluation.


def make_eval(data=None, pp="keep('label')", **kwargs):
  return pipeline.make_eval(
    data=data or rows_of(37),
    pp=pp,
    batch_size=16,
    mesh=sharding.make_mesh(),
    **kwargs,
  )


def test_evaluation_is_in_order_padded_and_masked():
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


def test_evaluation_smaller_than_a_batch_and_num_examples():
  data = make_eval(rows_of(3))
  (batch,) = fetch(data.batches())
  assert batch["_mask"].sum() == 3
  data = make_eval(num_examples=20)
  assert sum(b["_mask"].sum() for b in fetch(data.batches())) == 20
  for wrong in (0, 38):
    with pytest.raises(ConfigError, match="expected 1 to 37"):
      make_eval(num_examples=wrong)


def test_cached_evaluation_is_made_once(reads, caplog):
  caplog.set_level("INFO")
  data = make_eval(cache=True, path="config.evals.val")
  assert "config.evals.val: its 3 batches take 192 B" in caplog.text
  partial = data.batches()
  next(partial)
  partial.close()  # Not the whole set: nothing may be kept of it.
  want = fetch(data.batches())
  del reads[:]
  for got, expected in zip(fetch(data.batches()), want, strict=True):
    assert_equal(got, expected)
  assert not reads


def test_evaluation_too_large_to_cache(reads, monkeypatch, caplog):
  monkeypatch.setattr(pipeline, "available_bytes", lambda: 300)
  data = make_eval(cache=True)
  assert "made again each time" in caplog.text
  fetch(data.batches())
  del reads[:]
  assert len(fetch(data.batches())) == 3
  assert reads


def test_evaluation_names_the_failing_example():
  data = make_eval(pp="test_fail_if([36])")
  with pytest.raises(DataError, match="arrays, row 36: op"):
    fetch(data.batches())


# Processes.


def run(code, *args, **kwargs):
  return subprocess.run(
    [sys.executable, "-c", code, *args],
    capture_output=True,
    text=True,
    timeout=120,
    **kwargs,
  )


def test_arrays_do_not_import_tensorflow_and_open_inputs_do_not_hang():
  done = run("""
import sys
from bigtrain import input_pipeline, settings, sharding
cfg = settings.Config({"data": {"type": "arrays", "name": "digits"},
  "pp": "random_crop(8, pad=1)|value_range(-1, 1, 0, 16)", "batch_size": 32})
train = input_pipeline.make_train(cfg, seed=0, mesh=sharding.make_mesh())
batches = train.start(0, 10**9)
next(batches)
print(sorted({"tensorflow", "sklearn", "tensorflow_datasets"} & {*sys.modules}))
""")
  assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


TWO_PROCESSES = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
from bigtrain import input_pipeline, settings, sharding
mesh = sharding.make_mesh(2, 4)
data = {"type": "arrays", "name": "digits", "split": "test[:37]"}
cfg = settings.Config({"data": data, "pp": "", "batch_size": 16})
train = input_pipeline.make_train(cfg, seed=0, mesh=mesh)
held = input_pipeline.make_eval(data=data, pp="", batch_size=16, mesh=mesh)
def shards(array):
  return [
    [shard.index[0].indices(16)[:2], shard.data.tolist()]
    for shard in array.addressable_shards
  ]
found = [
  [shards(batch["label"]) for batch in train.start(5, 7)],
  [shards(batch["_mask"]) for batch in held.batches()],
]
print("found", json.dumps(found))
"""


def test_two_processes_make_the_same_global_batches():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    address = f"localhost:{s.getsockname()[1]}"
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", TWO_PROCESSES, address, str(i)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=_without_device_flags(),
    )
    for i in range(2)
  ]
  results = []
  for process in processes:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (line,) = [row for row in out.splitlines() if row.startswith("found")]
    results.append(json.loads(line.removeprefix("found")))
  data = {"type": "arrays", "name": "digits", "split": "test[:37]"}
  train = [b["label"] for b in fetch(make("", data=data).start(5, 7))]
  masks = [b["_mask"] for b in fetch(make_eval(data, pp="").batches())]
  for kind, want in enumerate((train, masks)):
    for step, batch in enumerate(want):
      spans = [span for r in results for span in r[kind][step]]
      assert len(spans) == 8
      got = np.zeros_like(batch)
      for (start, stop), values in spans:
        got[start:stop] = values
      np.testing.assert_array_equal(got, batch)


def _without_device_flags():
  env = dict(os.environ)
  env.pop("XLA_FLAGS")
  return env
