"""Training batches as a function of config and step, on the numpy engine."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import processes
from support.array_inputs import (
  assert_equal,
  config,
  fetch,
  make_eval,
  make_train,
  rows_of,
)

from bigtrain import sharding
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import arrays
from bigtrain.inputs import order, pipeline


def test_a_batch_applies_ops_to_the_records_of_the_order():
  train = make_train("value_range(-1, 1, 0, 16)|keep('image', 'label')")
  source = arrays.Source(name="digits")
  for step, batch in enumerate(fetch(train.start(0, 3))):
    index = train.order(step).index
    records = source.read(index)
    np.testing.assert_array_equal(batch["label"], records["label"])
    np.testing.assert_allclose(batch["image"], records["image"] / 8.0 - 1)
    rows = np.arange(16 * step, 16 * step + 16)
    schedule = order.Schedule((1438,), seed=0)
    np.testing.assert_array_equal(index, schedule.rows(rows).index)


def test_spec_and_sharding_match_the_batches():
  for replica, fsdp in ((1, 8), (2, 4)):
    mesh = sharding.make_mesh(replica, fsdp)
    train = make_train(mesh=mesh)
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
  one_device = sharding.make_mesh(devices=jax.devices()[:1])
  expected = fetch(make_train(mesh=one_device).start(3, 6))
  for a, b in zip(fetch(make_train().start(3, 6)), expected, strict=True):
    assert_equal(a, b)
  for hosts in (2, 4):
    per_host = []
    for host in range(hosts):
      rows = np.split(np.arange(16), hosts)[host]
      engine, _ = pipeline.train_engine(config().input, seed=0, rows=rows)
      per_host.append(list(engine.batches(3, 6)))
    for step, batch in enumerate(expected):
      parts = [batches[step] for batches in per_host]
      joined = {
        name: np.concatenate([part[name] for part in parts]) for name in batch
      }
      assert_equal(joined, batch)


def test_threads_prefetch_and_restarts_do_not_change_a_batch():
  expected = fetch(make_train().start(0, 8))
  for options in ({"num_threads": 1}, {"num_threads": 5, "prefetch": 0}):
    train = make_train(**options)
    batches = fetch(train.start(0, 3)) + fetch(train.start(3, 8))
    for a, b in zip(batches, expected, strict=True):
      assert_equal(a, b)


def test_epochs_and_seeds_change_order_and_augmentation():
  data = rows_of(
    16,
    image=np.random.default_rng(0)
    .integers(0, 16, (16, 8, 8, 1))
    .astype(np.uint8),
  )
  train = make_train(data=data)
  first, second = fetch(train.start(0, 2))
  assert sorted(first["label"]) == sorted(second["label"]) == list(range(16))
  assert first["label"].tolist() != second["label"].tolist()
  images = [b["image"][np.argsort(b["label"])] for b in (first, second)]
  same = (images[0] == images[1]).all(axis=(1, 2, 3))
  assert same.sum() < 6  # 9 positions of the crop, 2 of the flip.
  (other,) = fetch(make_train(data=data, seed=1).start(0, 1))
  assert other["label"].tolist() != first["label"].tolist()


def test_a_late_step_costs_what_an_early_one_costs(reads):
  train = make_train(num_threads=1)
  del reads[:]
  for step in (100, 10**6, 10**12):
    fetch(train.start(step, step + 1))
    assert [len(call) for call in reads] == [16]
    assert reads.pop() == train.order(step).index.tolist()


def test_small_sources_repeat_within_a_batch():
  train = make_train("keep('label')", data=rows_of(3))
  (batch,) = fetch(train.start(0, 1))
  counts = np.bincount(batch["label"])
  assert sorted(counts) == [5, 5, 6]
  assert train.order(0).epoch.tolist() == [i // 3 for i in range(16)]


def test_without_shuffling_the_source_is_read_in_order():
  train = make_train(
    "keep('label')", data=rows_of(10), shuffle=False, batch_size=8
  )
  labels = [batch["label"].tolist() for batch in fetch(train.start(0, 2))]
  assert labels == [list(range(8)), [8, 9, 0, 1, 2, 3, 4, 5]]


# Mixtures.


def test_mixtures_have_exact_shares_and_their_own_ops():
  mixture = {
    "digits": {"data": {"type": "arrays", "name": "digits"}, "weight": 3},
    "ones": {
      "data": rows_of(5, image=np.ones((5, 8, 8, 1), np.uint8)),
      "weight": 1,
      "pp": "value_range(0, 2, 0, 1)|keep('image', 'label')",
    },
  }
  train = make_train("value_range(-1, 1, 0, 16)", mixture=mixture)
  assert train.num_examples == 1443
  digits = arrays.Source(name="digits")
  from_ones = 0
  for step, batch in enumerate(fetch(train.start(0, 256))):
    rows = train.order(step)
    ones = rows.source == 1
    from_ones += ones.sum()
    assert (batch["image"][ones] == 2).all()
    np.testing.assert_array_equal(batch["label"][ones], rows.index[ones])
    records = digits.read(rows.index[~ones])
    np.testing.assert_array_equal(batch["label"][~ones], records["label"])
    assert (batch["image"][~ones] <= 1).all()
  assert from_ones == 1024  # A block of 4096 rows has the exact share.


def changing_mixture(small=20):
  """Digits first; from step 2 to 6 a small source takes over linearly."""
  return {
    "digits": {
      "data": {"type": "arrays", "name": "digits"},
      "weight": {"at_steps": [2, 6], "values": [1, 0]},
    },
    "small": {
      "data": rows_of(small, image=np.ones((small, 8, 8, 1), np.uint8)),
      "weight": {"at_steps": [2, 6], "values": [0, 1]},
    },
  }


def test_changing_weights_keep_batches_a_function_of_the_step():
  train = make_train(mixture=changing_mixture())
  expected = fetch(train.start(0, 9))
  of_small = [(train.order(step).source == 1).sum() for step in range(9)]
  assert of_small == [0, 0, 0, 4, 8, 12, 16, 16, 16]
  for step, count in enumerate(np.cumsum(of_small), 1):
    assert train.sources_at(step) == {
      "examples_seen/digits": 16 * step - count,
      "examples_seen/small": count,
      "epoch/digits": (16 * step - count) / 1438,
      "epoch/small": count / 20,
    }
  # Pairs of rows with one example change at the same steps.
  repeated = make_train(mixture=changing_mixture(), repeats=2)
  of_small = [(repeated.order(step).source == 1).sum() for step in range(9)]
  assert of_small == [0, 0, 0, 4, 8, 12, 16, 16, 16]
  # Resumed at any step, and on two hosts.
  resumed = make_train(mixture=changing_mixture())
  for step in (3, 5, 8):
    (batch,) = fetch(resumed.start(step, step + 1))
    assert_equal(batch, expected[step])
  cfg = config(mixture=changing_mixture()).input
  halves = [
    list(pipeline.train_engine(cfg, seed=0, rows=rows)[0].batches(3, 6))
    for rows in np.split(np.arange(16), 2)
  ]
  for step, (left, right) in enumerate(zip(*halves), 3):
    joined = {k: np.concatenate([left[k], right[k]]) for k in left}
    assert_equal(joined, expected[step])


@pytest.mark.parametrize(
  "change, message",
  [
    ({"weight": None}, "mixture.b.weight: expected a number"),
    ({"weight": -1}, "mixture.b.weight: expected a number above 0, got -1"),
    (
      {"weight": {"at_percent": [0, 9], "values": [1, 2]}},
      "weight.at_percent: this unit needs the length of the run",
    ),
    ({"wieght": 1}, "mixture.b.wieght: unknown key. Did you mean 'weight'"),
    ({"pp": "keep('image')"}, r"mixture.b.pp: feature 'label' is missing"),
    (
      {"pp": "keep('image', 'label')|cast('float32', key='label')"},
      r"'label' is float32 \(\), but int32 \(\) in config.input.mixture.a",
    ),
    ({"data": {"type": "arrays", "name": "digitz"}}, "mixture.b.data: "),
  ],
)
def test_errors_in_mixtures_name_the_key(change, message):
  digits = {"type": "arrays", "name": "digits"}
  mixture = {
    "a": {"data": digits, "weight": 1},
    "b": {"data": digits, "weight": 1, **change},
  }
  with pytest.raises(ConfigError, match=message):
    make_train("keep('image', 'label')", mixture=mixture)


# Errors, raised before any data flows.


@pytest.mark.parametrize(
  "change, message",
  [
    ({"batch_size": 12}, "batch_size=12 does not divide among 8 devices"),
    ({"batch_size": 0}, "whole number at least 1"),
    ({"data": {"type": "array"}}, "unknown data source 'array'.*'arrays'"),
    ({"data": {"name": "digits"}}, "input.data.type: missing"),
    ({"data": {"type": "bigtrain.arrays.hashing"}}, "the module has no Source"),
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
    ({"repeats": 3}, "repeats=3: expected a divisor of .*batch_size=16"),
    ({"shuffle": "no"}, r"^config.input.shuffle: expected True or False"),
    (
      {"pp": "crop({size})", "flexi": {"sizes": {"values": [2]}}},
      "input.flexi: unknown 'sizes'. Did you mean 'size'",
    ),
    ({"pp": "valu_range(-1, 1)"}, "input.pp: .*Did you mean 'value_range'"),
    ({"pp": "onehot(10, key='lable')"}, "input.pp: .*needs .*'lable'"),
    ({"pp": "drop('image', 'label')"}, "no feature is left"),
    (
      {"data": rows_of(3, name=["a", "b", "c"]), "pp": ""},
      r"'name' holds strings.*keep\(...\).*drop\('name'\)",
    ),
  ],
)
def test_errors_name_the_key(change, message):
  with pytest.raises(ConfigError, match=message):
    make_train(**change)


def test_an_empty_source_is_a_data_error():
  with pytest.raises(DataError, match=r"config\.input\.data: .*no example"):
    make_train("", data=rows_of(0))


def test_every_documented_key_is_read():
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
  tokens_of = lambda *args, **options: pipeline.tokens_per_example(
    make_train(*args, **options).engine.specs
  )
  tokens = rows_of(4, tokens=np.zeros((4, 17), np.int32))
  assert tokens_of("", data=tokens) == 17
  assert tokens_of() is None
  pairs = rows_of(
    4, inputs=np.zeros((4, 12), np.int32), targets=np.zeros((4, 5), np.int32)
  )
  assert tokens_of("", data=pairs) == 17
  # Targets without inputs, or floats, are not text.
  for features in (
    dict(targets=np.zeros((4, 5), np.int32)),
    dict(inputs=np.zeros((4, 5)), targets=np.zeros((4, 5))),
  ):
    assert tokens_of("", data=rows_of(4, **features)) is None
  # Steps that draw the length have no number.
  pp = "tokenize('bytes', {length}, key_result='tokens')|keep('tokens')"
  texts = rows_of(2, text=["a", "bc"])
  flexi = dict(length=dict(values=(8, 4)))
  assert tokens_of(pp.replace("{length}", "8"), data=texts) == 8
  assert tokens_of(pp, data=texts, flexi=flexi) is None


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_draws_the_ops_of_its_batch(mixed):
  pp = "random_crop({size}, pad=1)|value_range(-1, 1, 0, 16)"
  flexi = dict(size=dict(values=(4, 8), weights=(3, 1)))
  options = dict(flexi=flexi, batch_size=8)
  if mixed:
    digits = {"type": "arrays", "name": "digits"}
    entries = {
      "a": dict(data=digits, weight=1),
      "b": dict(data=digits, weight=3),
    }
    options["mixture"] = entries
  train = make_train(pp, **options)
  assert [(s["image"].shape, n) for s, n in train.drawn] == [
    ((8, 4, 4, 1), 0.75),
    ((8, 8, 8, 1), 0.25),
  ]
  assert train.spec["image"].shape == (8, 8, 8, 1)
  batches = fetch(train.start(0, 60))
  sizes = [batch["image"].shape[1] for batch in batches]
  assert set(sizes) == {4, 8} and 3 <= sizes.count(8) <= 27
  assert [train.order(s).source[0] % 2 for s in range(60)] == [
    size // 8 for size in sizes
  ]
  # A late start, and each of two hosts, make the same; examples stay the same.
  for a, b in zip(fetch(train.start(40, 43)), batches[40:43], strict=True):
    assert_equal(a, b)
  halves = [
    list(
      pipeline.train_engine(
        config(pp, **options).input, seed=0, rows=np.arange(4 * i, 4 * i + 4)
      )[0].batches(40, 43)
    )
    for i in range(2)
  ]
  for step, (a, b) in enumerate(zip(*halves), 40):
    joined = {name: np.concatenate([a[name], b[name]]) for name in a}
    assert_equal(joined, batches[step])
  plain = make_train(pp.replace("{size}", "8"), **options | {"flexi": {}})
  for step in (0, 7):
    np.testing.assert_array_equal(
      plain.order(step).index, train.order(step).index
    )
  drawn_8 = sizes.index(8)
  assert_equal(fetch(plain.start(drawn_8, drawn_8 + 1))[0], batches[drawn_8])
  names = [n for n in train.sources_at(5) if "seen" in n] if mixed else []
  assert names == ["examples_seen/a", "examples_seen/b"] * mixed


def test_examples_repeat_within_a_batch_with_augmentations_of_their_own():
  pp = "random_crop(8, pad=4)|value_range(-1, 1, 0, 16)"
  train, once = make_train(pp, repeats=4), make_train(pp)
  batches = fetch(train.start(0, 2))
  for step, batch in enumerate(batches):
    index = train.order(step).index.reshape(4, 4)
    assert (index == index[:, :1]).all()
    np.testing.assert_array_equal(
      index[:, 0], once.order(0).index[4 * step : 4 * step + 4]
    )
    images = batch["image"].reshape(4, 4, -1)
    assert all(len(np.unique(copies, axis=0)) > 1 for copies in images)
  # The first copy of the first epoch is the one without repeats.
  first = fetch(once.start(0, 1))[0]["image"][:4]
  np.testing.assert_array_equal(batches[0]["image"][::4], first)
  # After an epoch of examples with all their copies, there are new ones.
  late = train.order(1438 * 4 // 16)
  assert set(late.epoch) <= {0, 1, 2, 3, 4, 5, 6, 7} and late.epoch.max() > 3


# Processes.


def test_array_inputs_never_import_tensorflow_and_do_not_hang_at_exit():
  code = """
import sys
from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.inputs import pipeline
cfg = settings.Config({"data": {"type": "arrays", "name": "digits"},
  "pp": "random_crop(8, pad=1)|value_range(-1, 1, 0, 16)", "batch_size": 32})
train = pipeline.make_train(cfg, seed=0, mesh=sharding.make_mesh())
batches = train.start(0, 10**9)
next(batches)
print(sorted({"tensorflow", "sklearn", "tensorflow_datasets"} & {*sys.modules}))
"""
  result = processes.run([sys.executable, "-c", code])
  assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


def test_two_processes_make_the_same_global_batches(two_processes):
  results = two_processes("inputs.global_batches.make").results
  data = {"type": "arrays", "name": "digits", "split": "test[:37]"}
  labels = [b["label"] for b in fetch(make_train("", data=data).start(5, 7))]
  masks = [b["_mask"] for b in fetch(make_eval(data, pp="").batches())]
  for kind, batches in enumerate((labels, masks)):
    for step, batch in enumerate(batches):
      spans = [span for result in results for span in result[kind][step]]
      assert len(spans) == 8
      joined = np.zeros_like(batch)
      for (start, stop), values in spans:
        joined[start:stop] = values
      np.testing.assert_array_equal(joined, batch)
