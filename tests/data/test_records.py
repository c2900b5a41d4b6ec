"""ArrayRecord and TFRecord files without tensorflow-datasets."""

import sys

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import records


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def example(i):
  import tensorflow as tf

  def of(kind, values):
    lists = {"bytes": tf.train.BytesList, "int64": tf.train.Int64List}
    make = lists.get(kind, tf.train.FloatList)
    return tf.train.Feature(**{f"{kind}_list": make(value=values)})

  features = {
    "image": of("bytes", [b"image %d\0" % i]),
    "label": of("int64", [i]),
    "box": of("float", [i, i + 0.5]),
    "captions": of("bytes", [b"c%d" % i] * (1 + i % 2)),
  }
  message = tf.train.Example(features=tf.train.Features(feature=features))
  return message.SerializeToString()


def write(path, items):
  import tensorflow as tf
  from array_record.python import array_record_module

  if path.name.endswith(".tfrecord"):
    writer = tf.io.TFRecordWriter(str(path))
  else:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for item in items:
    writer.write(item)
  writer.close()


@pytest.mark.parametrize("suffix", ["array_record", "tfrecord"])
def test_examples_in_any_order(suffix, tmp_path):
  write(tmp_path / f"x-0.{suffix}", map(example, range(4)))
  write(tmp_path / f"x-1.{suffix}", map(example, range(4, 7)))
  source = records.Source(str(tmp_path / f"x-{{0..1}}.{suffix}"))
  assert source.spec == {
    "image": (bytes, ()),
    "label": (np.int64, ()),
    "box": (np.float32, (2,)),
    "captions": (bytes, (None,)),
  }
  order = [6, 0, 5, 3]
  batch = source.read(np.asarray(order))
  assert batch["label"].tolist() == order
  assert batch["image"].tolist() == [b"image %d\0" % i for i in order]
  assert batch["box"].tolist() == [[i, i + 0.5] for i in order]
  assert [len(x) for x in batch["captions"]] == [1 + i % 2 for i in order]
  assert f"x-1.{suffix}" in source.where(5)
  write(tmp_path / f"x-1.{suffix}", map(example, range(14, 20)))
  with pytest.raises(DataError, match=f"x-1.{suffix}"):
    source.read(np.asarray([5]))


def test_other_formats_are_bytes_and_mistakes_are_named(tmp_path, monkeypatch):
  path = tmp_path / "x.array_record"
  write(path, [b"\xffone", b"\xfftwo"])
  raw = records.Source(str(path), features=("record",))
  assert raw.read(np.asarray([1]))["record"].tolist() == [b"\xfftwo"]
  with pytest.raises(DataError, match="record 0: not a tf.train.Example"):
    records.Source(str(path))
  write(path, [example(0)])
  with pytest.raises(ConfigError, match="no field 'labl'. Did you mean"):
    records.Source(str(path), features=("labl",))
  monkeypatch.setitem(sys.modules, "array_record.python", None)
  module = "array_record.python.array_record_module"
  monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(ConfigError, match=r"pip install 'bigtrain\[tfds\]'"):
    records.Source(str(path))
