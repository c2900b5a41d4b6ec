"""Data sets prepared by tensorflow-datasets, in both file formats."""

import os

import jax
import numpy as np
import pytest
from support import prepared_sets

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import tfds
from bigtrain.inputs import pipeline

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
COUNTS = (4, 7, 5)  # Examples in each file of the train split.


@pytest.fixture(scope="module")
def examples():
  """Image, label and file name of each example."""
  rng = np.random.default_rng(0)
  return [
    {
      "image": rng.integers(0, 255, (20 + i % 3, 30, 3), np.uint8),
      "label": i % 3,
      "file_name": f"file {i}",
    }
    for i in range(sum(COUNTS))
  ]


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def folder(request, tmp_path_factory, examples):
  """A data_dir with my_set/1.0.0, whose images are PNGs."""
  data_dir = tmp_path_factory.mktemp(request.param)
  prepared_sets.write(data_dir, request.param, examples, COUNTS)
  return str(data_dir)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_names_of_the_classes_are_read_without_examples(folder):
  options = dict(name="my_set", split="train", data_dir=folder)
  names = tfds.Source.read_class_names(**options)
  assert names == {"label": ["a", "b", "c"]}
  assert tfds.Source(**options).class_names == names


@pytest.mark.parametrize(
  "split, rows",
  [
    ("train", range(16)),
    ("train[25%:]", range(4, 16)),
    ("train[:99%]", range(16)),
    ("train[3:12]", range(3, 12)),
    ("train[-1:]+train[:2]", [15, 0, 1]),
  ],
)
def test_reads_the_written_examples(folder, examples, split, rows):
  import tensorflow as tf

  source = tfds.Source("my_set", split=split, data_dir=folder)
  assert len(source) == len(rows)
  batch = source.read(np.arange(len(source))[::-1])
  for record, row in zip(batch["record"], list(rows)[::-1]):
    features = source.parse({"record": tf.constant(record)})
    assert features["label"].numpy() == examples[row]["label"]
    assert features["file_name"].numpy() == b"file %d" % row
    # Still an encoded PNG; ops decode it.
    assert features["image"].dtype == tf.string
    np.testing.assert_array_equal(
      tf.io.decode_png(features["image"]), examples[row]["image"]
    )


def test_where_names_file_and_position(folder):
  source = tfds.Source("my_set", split="train[3:]", data_dir=folder)
  kind = "tfrecord" if "tfrecord0" in folder else "array_record"
  assert f"my_set-train.{kind}-00001-of-00003, " in source.where(1)
  expected = "byte 0" if kind == "tfrecord" else "record 0"
  assert source.where(1).endswith(expected)


def test_input_pipeline_reads_it(folder, examples):
  mesh = sharding.make_mesh()
  config = {
    "data": {"type": "tfds", "name": "my_set", "data_dir": folder},
    "pp": "decode|resize(16)|value_range(-1, 1)|keep('image', 'label')",
    "batch_size": 8,
  }
  config = settings.Config({"input": config})
  made = pipeline.make_train(config.input, seed=0, mesh=mesh)
  assert config.unread() == []
  assert made.num_examples == 16
  assert made.spec["image"].shape == (8, 16, 16, 3)
  batches = [jax.device_get(batch) for batch in made.start(0, 4)]
  for step, batch in enumerate(batches):
    index = made.order(step).index
    assert batch["label"].tolist() == [examples[i]["label"] for i in index]
  seen = np.concatenate([made.order(step).index for step in (0, 1)])
  assert sorted(seen) == list(range(16))


def test_builder_dir_names_the_same_data_set(folder):
  path = os.path.join(folder, "my_set", "1.0.0")
  by_name = tfds.Source("my_set", data_dir=folder)
  source = tfds.Source(builder_dir=path)
  assert len(source) == 16
  assert source.fingerprint() == by_name.fingerprint()
  part = tfds.Source(builder_dir=path, split="train[:5]")
  assert source.fingerprint() != part.fingerprint()
  with pytest.raises(ConfigError, match=r"There are: 1\.0\.0"):
    tfds.Source(builder_dir=os.path.dirname(path))


@pytest.mark.parametrize(
  "options, message",
  [
    ({"name": "my_sett"}, "not prepared in .*Did you mean 'my_set'"),
    ({"name": "my_set:3.0.0"}, "not prepared in"),
    ({"name": "my_set", "split": "trian"}, "Did you mean 'train'"),
    ({"name": "my_set", "split": "train[:5"}, "expected a slice"),
    ({"name": "my_set", "split": "train[99:]"}, "split='train\\[99:\\]'"),
    ({"name": "my_set", "split": "train[5:5]"}, "contains no examples"),
    ({}, "either name or builder_dir"),
  ],
)
def test_mistakes(folder, options, message):
  with pytest.raises(ConfigError, match=message):
    tfds.Source(**options, data_dir=folder)


def test_truncated_and_missing_files_are_errors(tmp_path, examples):
  prepared_sets.write(tmp_path, "tfrecord", examples, COUNTS)
  shards = sorted((tmp_path / "my_set" / "1.0.0").glob("*tfrecord*"))
  source = tfds.Source("my_set", data_dir=tmp_path)
  end = int(source.where(3).rsplit(" ", 1)[1])
  shards[0].write_bytes(shards[0].read_bytes()[:end])
  message = "00000-of-00003: 3 records; expected 4, as in dataset_info.json"
  with pytest.raises(DataError, match=message):
    tfds.Source("my_set", data_dir=tmp_path)
  shards[0].unlink()
  with pytest.raises(DataError, match="00000-of-00003 is missing"):
    tfds.Source("my_set", data_dir=tmp_path)


def test_the_error_for_an_invalid_example_names_the_record(tmp_path, examples):
  """The record's checksum is correct, but its content is not an example."""
  import tensorflow as tf

  prepared_sets.write(tmp_path, "tfrecord", examples, COUNTS)
  path = sorted((tmp_path / "my_set" / "1.0.0").glob("*tfrecord*"))[1]
  good = [r.numpy() for r in tf.data.TFRecordDataset(str(path))]
  with tf.io.TFRecordWriter(str(path)) as writer:
    for i, record in enumerate(good):
      writer.write(b"nothing" if i == 2 else record)
  config = {
    "data": {"type": "tfds", "name": "my_set", "data_dir": str(tmp_path)},
    "pp": "decode|resize(16)|value_range(-1, 1)|keep('image', 'label')",
    "batch_size": 8,
  }
  made = pipeline.make_train(
    settings.Config({"input": config}).input, seed=0, mesh=sharding.make_mesh()
  )
  where = made.where(0, 6)
  assert "00001-of-00003" in where
  with pytest.raises(DataError, match="not an example of this data set") as e:
    list(made.start(0, 2))
  assert str(e.value).startswith(where)
