"""Prepared folders of tensorflow-datasets, in both of its file formats."""

import os

import jax
import numpy as np
import pytest

from bigtrain import settings, sharding
from bigtrain.data import tfds
from bigtrain.inputs import pipeline
from bigtrain.settings import ConfigError, DataError

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
COUNTS = (4, 7, 5)  # Of the files of the train split.


@pytest.fixture(scope="module")
def examples():
  """What is in the folders: image, label and name of each example."""
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
  """data_dir with my_set/1.0.0, whose images are PNG."""
  return make_folder(
    tmp_path_factory.mktemp(request.param), request.param, examples
  )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_folder(data_dir, kind, examples):
  import tensorflow as tf
  import tensorflow_datasets as lib
  from array_record.python import array_record_module

  features = lib.features.FeaturesDict(
    {
      "image": lib.features.Image(shape=(None, None, 3), encoding_format="png"),
      "label": lib.features.ClassLabel(names=["a", "b", "c"]),
      "file_name": lib.features.Text(),
    }
  )
  folder = data_dir / "my_set" / "1.0.0"
  folder.mkdir(parents=True)
  rest = iter(examples)
  for shard, count in enumerate(COUNTS):
    path = str(folder / f"my_set-train.{kind}-{shard:05d}-of-{len(COUNTS):05d}")
    if kind == "tfrecord":
      writer = tf.io.TFRecordWriter(path)
    else:
      writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for _ in range(count):
      encoded = features.encode_example(next(rest))
      writer.write(features.serialize_example(encoded))
    writer.close()
  lib.folder_dataset.write_metadata(
    data_dir=str(folder),
    features=features,
    split_infos=[
      lib.core.SplitInfo(
        name="train",
        shard_lengths=list(COUNTS),
        num_bytes=0,
        filename_template=lib.core.ShardedFileTemplate(
          dataset_name="my_set",
          data_dir=folder,
          split="train",
          filetype_suffix=kind,
        ),
      )
    ],
    filename_template=lib.core.ShardedFileTemplate(
      dataset_name="my_set", data_dir=folder, filetype_suffix=kind
    ),
    check_data=False,
  )
  return str(data_dir)


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
def test_reads_what_was_written(folder, examples, split, rows):
  import tensorflow as tf

  source = tfds.Source("my_set", split=split, data_dir=folder)
  assert len(source) == len(rows)
  batch = source.read(np.arange(len(source))[::-1])
  for record, row in zip(batch["record"], list(rows)[::-1]):
    features = source.parse({"record": tf.constant(record)})
    assert features["label"].numpy() == examples[row]["label"]
    assert features["file_name"].numpy() == b"file %d" % row
    # Still a PNG: ops decode it, or only a part of it.
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


def test_trains_from_it(folder, examples):
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


def test_builder_dir(folder):
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
    ({"name": "my_set", "split": "train[5:5]"}, "no example"),
    ({}, "either name or builder_dir"),
  ],
)
def test_mistakes(folder, options, message):
  with pytest.raises(ConfigError, match=message):
    tfds.Source(**options, data_dir=folder)


def test_a_shorter_file_is_an_error(tmp_path, examples):
  folder = make_folder(tmp_path, "tfrecord", examples)
  shards = sorted((tmp_path / "my_set" / "1.0.0").glob("*tfrecord*"))
  source = tfds.Source("my_set", data_dir=folder)
  end = int(source.where(3).rsplit(" ", 1)[1])
  shards[0].write_bytes(shards[0].read_bytes()[:end])
  message = "00000-of-00003: has 3 records, but dataset_info.json says 4"
  with pytest.raises(DataError, match=message):
    tfds.Source("my_set", data_dir=folder)
  shards[0].unlink()
  with pytest.raises(DataError, match="00000-of-00003 is missing"):
    tfds.Source("my_set", data_dir=folder)


def test_a_record_that_is_no_example_is_named(tmp_path, examples):
  """The record's checksum is right, its content is not what the set says."""
  import tensorflow as tf

  folder = make_folder(tmp_path, "tfrecord", examples)
  path = sorted((tmp_path / "my_set" / "1.0.0").glob("*tfrecord*"))[1]
  good = [r.numpy() for r in tf.data.TFRecordDataset(str(path))]
  with tf.io.TFRecordWriter(str(path)) as writer:
    for i, record in enumerate(good):
      writer.write(b"nothing" if i == 2 else record)
  config = {
    "data": {"type": "tfds", "name": "my_set", "data_dir": folder},
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
