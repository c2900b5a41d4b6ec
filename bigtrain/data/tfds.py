"""A data set prepared by tensorflow-datasets on this machine.

  dict(type="tfds", name="imagenet2012", split="train[:99%]", data_dir=...)
  dict(type="tfds", builder_dir="data/my_set/1.0.0", split="train")

Reads TFRecord and ArrayRecord files and downloads nothing. Images stay encoded.
"""

import functools
import glob
import os
from typing import Any

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  did_you_mean,
  import_package,
)
from bigtrain.data.formats import files, splits, tfrecord
from bigtrain.pp import host_tensorflow


class Source:
  """The examples of a prepared data set, in the order of its files.

  Args:
    name: "name", "name/config" or "name:version".
    split: split, such as "train", "train[:99%]" or "train+validation".
    data_dir: folder of data sets, by default tensorflow-datasets' own
      ($TFDS_DATA_DIR or ~/tensorflow_datasets).
    builder_dir: folder with dataset_info.json, instead of a name.
  """

  spec = {"record": (bytes, ())}

  def __init__(
    self,
    name: str | None = None,
    *,
    split: str = "train",
    data_dir: str | None = None,
    builder_dir: str | None = None,
  ):
    if (name is None) == (builder_dir is None):
      raise ConfigError("tfds: expected either name or builder_dir.")
    self._builder = _builder(name, data_dir, builder_dir)
    info = self._builder.info
    self._name = f"tfds {info.full_name} split {split!r}"
    parts = _file_instructions(info.splits, split)
    paths = [os.fspath(part.filename) for part in parts]
    for path in paths:
      if not os.path.exists(path):
        raise DataError(f"{self._name}: {path} is missing.")
    readers: dict[str, Any] = {
      "tfrecord": tfrecord.TFRecordFiles,
      "array_record": tfrecord.ArrayRecordFiles,
    }
    file_format = info.file_format.value
    if file_format not in readers:
      raise ConfigError(
        f"{self._name}: file format {file_format!r} has no random access; "
        f"expected one of {', '.join(readers)}."
      )
    self._files = readers[file_format](paths)
    for path, count, part in zip(paths, self._files.counts, parts):
      if count != part.examples_in_shard:
        raise DataError(
          f"{path}: {count} records; expected {part.examples_in_shard}, as in "
          "dataset_info.json. The file is truncated or from another data set."
        )
    # A slice of the split begins behind some records of a file.
    self._skip = np.asarray([part.skip for part in parts], np.int64)
    self._shards = files.Shards([part.take for part in parts])
    if not len(self):
      raise DataError(f"{self._name}: contains no examples.")
    self._paths = paths
    self.class_names = _class_names(info.features)
    classes = _classes(info.features)
    self.vocab_sizes = {name: c.num_classes for name, c in classes.items()}

  @staticmethod
  def read_class_names(
    name: str | None = None, *, split: str = "train", **folders: str | None
  ) -> dict[str, list[str]]:
    return _class_names(_builder(name, **folders).info.features)

  def __len__(self) -> int:
    return len(self._shards)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    records = [self._files.read(*at) for at in self._locate(indices)]
    return {"record": files.objects(records)}

  def where(self, index: int) -> str:
    (at,) = self._locate(np.asarray([index]))
    return self._files.where(*at)

  def fingerprint(self) -> str:
    sizes = map(os.path.getsize, self._paths)
    names = map(os.path.basename, self._paths)
    return files.digest(self._name, len(self), *names, *sizes)

  def parse(self, features: dict[str, Any]) -> dict[str, Any]:
    """Parses a record, in tensorflow's graph."""
    parser, schema, decoders = self._parser
    example = parser.parse_example(features["record"])
    return _flat(schema.decode_example(example, decoders=decoders))

  @functools.cached_property
  def _parser(self) -> tuple[Any, Any, Any]:
    from tensorflow_datasets.core import example_parser

    schema = self._builder.info.features
    parser = example_parser.ExampleParser(schema.get_serialized_info())
    return parser, schema, _keep_encoded(schema)

  def _locate(self, indices: np.ndarray) -> list[tuple[int, int]]:
    file, record = self._shards.locate(indices)
    record = record + self._skip[file]
    return list(zip(file.tolist(), record.tolist()))


def _classes(features: Any) -> dict[str, Any]:
  label = _import_tfds().features.ClassLabel
  return {
    name: feature
    for name, feature in features.items()
    if isinstance(feature, label) and feature.num_classes
  }


def _class_names(features: Any) -> dict[str, list[str]]:
  return {name: list(c.names) for name, c in _classes(features).items()}


def _flat(features: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested features; names are like "objects/label"."""
  flat: dict[str, Any] = {}
  for name, value in features.items():
    if isinstance(value, dict):
      flat |= _flat(value, f"{prefix}{name}/")
    else:
      flat[prefix + name] = value
  return flat


def _import_tfds() -> Any:
  host_tensorflow.load()  # Keeps TensorFlow off the accelerators.
  by, packages = "tfds: reading it", "tensorflow-datasets importlib_resources"
  return import_package("tensorflow_datasets", by, packages)


def _builder(
  name: str | None, data_dir: str | None = None, builder_dir: str | None = None
) -> Any:
  tfds = _import_tfds()
  if builder_dir is not None:
    builder_dir = files.local_path(builder_dir, "tfds: builder_dir")
    if not os.path.isfile(os.path.join(builder_dir, "dataset_info.json")):
      if not os.path.isdir(builder_dir):
        raise files.missing(builder_dir, "tfds: builder_dir", "folder")
      versions = glob.glob("*/dataset_info.json", root_dir=builder_dir)
      hint = did_you_mean("", map(os.path.dirname, versions))
      raise ConfigError(
        f"tfds: builder_dir={builder_dir!r}: no dataset_info.json; expected "
        f"the folder of a version.{hint}"
      )
    return tfds.builder_from_directory(builder_dir)
  from tensorflow_datasets.core import read_only_builder, registered

  if data_dir is not None:
    data_dir = files.local_path(data_dir, "tfds: data_dir")
  try:
    return read_only_builder.builder_from_files(name, data_dir=data_dir)
  except registered.DatasetNotFoundError as e:
    folder = os.path.expanduser(
      data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    )
    prepared = os.listdir(folder) if os.path.isdir(folder) else []
    hint = did_you_mean(str(name), prepared)
    if name in prepared:  # Another version or config than the library expects.
      hint = f" Set builder_dir to the folder of a version in {name!r}."
    raise ConfigError(
      f"tfds: {name!r} is not prepared in {folder}.{hint}"
    ) from e
  except ValueError as e:
    raise ConfigError(f"tfds: name={name!r}: {files.one_line(e)}.") from e


def _file_instructions(known: Any, split: str) -> list[Any]:
  for part in split.split("+"):
    splits.choose(part, {**dict(known), "all": None}, "tfds: split")
  try:
    return known[split].file_instructions
  except (ValueError, AssertionError) as e:
    raise ConfigError(f"tfds: split={split!r}: {files.one_line(e)}.") from e


def _keep_encoded(features: Any) -> dict[str, Any]:
  """Returns decoders that leave images as encoded bytes."""
  tfds = _import_tfds()
  decoders = {}
  for name, feature in features.items():
    if isinstance(feature, tfds.features.FeaturesDict):
      if nested := _keep_encoded(feature):
        decoders[name] = nested
    elif isinstance(feature, tfds.features.Image):
      decoders[name] = tfds.decode.SkipDecoding()
  return decoders
