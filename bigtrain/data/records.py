"""ArrayRecord and TFRecord files, without tensorflow-datasets.

  dict(type="records", path="train-*.array_record")
  dict(type="records", path="train-*.tfrecord", features=("image", "label"))

A record is a tf.train.Example. Its strings become bytes, integers int64 and
other numbers float32. A list becomes a scalar if it has one value in each of
the first records.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data.formats import files, row_files, tfrecord
from bigtrain.pp import host_tensorflow

_RAW = "record"
_DTYPES = {"int64_list": np.int64, "float_list": np.float32}


class Source(row_files.Rows):
  """The records of one or more files, in their order.

  Args:
    path: a file, a pattern such as "train-*.array_record", whose matches are
      sorted, or a list of these. Files with "tfrecord" in their names are
      TFRecord files, all others ArrayRecord files.
    features: names of the features to use; the default is all of the first
      record. ("record",) leaves records of any format as bytes.
    slice: slice of the records, such as "[:99%]".
  """

  def __init__(
    self,
    path: str | Sequence[str],
    *,
    features: Sequence[str] | None = None,
    slice: str = "",
  ):
    self._paths = files.find(path, "records: path")
    kinds = {"tfrecord" in os.path.basename(name) for name in self._paths}
    if len(kinds) > 1:
      raise ConfigError(f"records: path={path!r}: files of two formats.")
    readers: Any = tfrecord.ArrayRecordFiles, tfrecord.TFRecordFiles
    self._files = readers[kinds.pop()](self._paths)
    sizes = map(os.path.getsize, self._paths)
    self._open("records", path, self._files.counts, sizes, slice)
    self._parse = features is None or list(features) != [_RAW]
    if self._parse:
      host_tensorflow.load()  # Keeps TensorFlow off the accelerators.
    self._scalars: set[str] = set()
    # A feature is a scalar if each of the first records has one value of it.
    # The records are then read again, with scalars.
    first = self._rows(self._first())
    self._scalars = {
      name
      for name in first[0]
      if all(len(row.get(name, ())) == 1 for row in first)
    }
    first = self._rows(self._first())
    names = sorted(first[0]) if features is None else features
    self.spec = self._infer(first, names, "features")

  def where(self, index: int) -> str:
    ((file, record),) = self._places([index])
    return self._files.where(file, record)

  def _rows(self, indices: np.ndarray) -> list[dict[str, Any]]:
    records = [self._files.read(*place) for place in self._places(indices)]
    if not self._parse:
      return [{_RAW: record} for record in records]
    return [self._at(i, self._example, x) for i, x in zip(indices, records)]

  def _example(self, record: bytes) -> dict[str, Any]:
    from google.protobuf.message import DecodeError
    from tensorflow.core.example import example_pb2

    try:
      features = example_pb2.Example.FromString(record).features.feature
    except DecodeError as e:
      hint = f"features=({_RAW!r},) leaves records as they are"
      raise DataError(f"not a tf.train.Example; {hint}.") from e
    row = {}
    for name, feature in features.items():
      kind = feature.WhichOneof("kind") or "float_list"
      values = getattr(feature, kind).value
      if kind == "bytes_list":
        row[name] = files.objects(values)
      else:
        row[name] = np.asarray(values, _DTYPES[kind])
      if name in self._scalars and len(values) == 1:
        row[name] = row[name].reshape(())
    return row
