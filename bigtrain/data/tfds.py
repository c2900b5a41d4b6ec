"""A data set that tensorflow-datasets has prepared on this machine.

  dict(type="tfds", name="imagenet2012", split="train[:99%]", data_dir=...)
  dict(type="tfds", builder_dir="data/my_set/1.0.0", split="train")

Files are TFRecord or ArrayRecord; any record is read by its number. Nothing
is downloaded. Images stay encoded, for an op such as `decode` to decode what
is needed of them.
"""

import functools
import os
from typing import Any

import numpy as np

from bigtrain.data.formats import files, slices, tfrecord
from bigtrain.pp import host_tensorflow
from bigtrain.settings import ConfigError, DataError, did_you_mean


class Source:
  """Examples of a prepared data set, in the order of its files.

  Args:
    name: "name", "name/config" or "name:version".
    split: such as "train", "train[:99%]" or "train+validation".
    data_dir: folder of data sets; tensorflow-datasets' own default if not
      given ($TFDS_DATA_DIR or ~/tensorflow_datasets).
    builder_dir: the folder with dataset_info.json, in place of a name.

  Raises:
    ConfigError: there is no such data set or split.
    DataError: a file is missing, cut or damaged, or the split is empty.
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
      raise ConfigError("tfds: give either name or builder_dir.")
    self._builder = _builder(name, data_dir, builder_dir)
    info = self._builder.info
    self._name = f"tfds {info.full_name} split {split!r}"
    parts = _file_instructions(info.splits, split)
    paths = [os.fspath(part.filename) for part in parts]
    for path in paths:
      if not os.path.exists(path):
        raise DataError(f"{self._name}: {path} is missing.")
    file_format = self._builder.info.file_format.value
    kinds: dict[str, Any] = {
      "tfrecord": tfrecord.TFRecordFiles,
      "array_record": tfrecord.ArrayRecordFiles,
    }
    if file_format not in kinds:
      raise ConfigError(
        f"{self._name}: file format {file_format!r} cannot be read by "
        f"position; there are: {', '.join(kinds)}."
      )
    self._files = kinds[file_format](paths)
    for path, count, part in zip(paths, self._files.counts, parts):
      if count != part.examples_in_shard:
        raise DataError(
          f"{path}: has {count} records, but dataset_info.json says "
          f"{part.examples_in_shard}; the file is cut, or not of this set."
        )
    self._skip = np.asarray([part.skip for part in parts], np.int64)
    self._shards = files.Shards([part.take for part in parts])
    if not len(self):
      raise DataError(f"{self._name}: there is no example in it.")
    self._paths = paths

  def __len__(self) -> int:
    return len(self._shards)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """{"record": serialized examples}; see `parse`."""
    records = np.empty(len(indices), object)
    for i, (file, record) in enumerate(self._locate(indices)):
      records[i] = self._files.read(file, record)
    return {"record": records}

  def where(self, index: int) -> str:
    """File and byte (of an ArrayRecord, number) of an example."""
    ((file, record),) = self._locate(np.asarray([index]))
    return self._files.where(file, record)

  def fingerprint(self) -> str:
    """Changes with the files that the split is made of."""
    sizes = [os.path.getsize(path) for path in self._paths]
    names = [os.path.basename(path) for path in self._paths]
    return files.digest(self._name, len(self), *names, *sizes)

  def parse(self, features: dict[str, Any]) -> dict[str, Any]:
    """Tensors of an example from {"record": serialized}; for tf.data graphs.

    Images are not decoded. A feature inside of another is called "outer/inner",
    such as COCO's "captions/text".
    """
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


def _flat(features: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for name, value in features.items():
    nested = isinstance(value, dict)
    flat |= (
      _flat(value, f"{prefix}{name}/") if nested else {prefix + name: value}
    )
  return flat


def _import_tfds() -> Any:
  host_tensorflow.load()  # Or this import would load it unguarded.
  try:
    import tensorflow_datasets as tfds
  except ModuleNotFoundError as e:
    raise ConfigError(
      f"tfds: no module named {e.name!r}; pip install tensorflow-datasets "
      "importlib_resources."
    ) from e
  return tfds


def _builder(
  name: str | None, data_dir: str | None, builder_dir: str | None
) -> Any:
  tfds = _import_tfds()
  if builder_dir is not None:
    builder_dir = os.path.expanduser(os.fspath(builder_dir))
    if not os.path.isfile(os.path.join(builder_dir, "dataset_info.json")):
      if not os.path.isdir(builder_dir):
        raise files.missing(builder_dir, "tfds: builder_dir", "folder")
      raise ConfigError(
        f"tfds: builder_dir={builder_dir!r} has no dataset_info.json; "
        f"expected the folder of a version.{_versions(builder_dir)}"
      )
    return tfds.builder_from_directory(builder_dir)
  from tensorflow_datasets.core import read_only_builder, registered

  try:
    return read_only_builder.builder_from_files(name, data_dir=data_dir)
  except registered.DatasetNotFoundError as e:
    folder = os.path.expanduser(
      data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    )
    there = os.listdir(folder) if os.path.isdir(folder) else []
    hint = did_you_mean(name, there)
    if name in there:  # Another version or config than the library expects.
      hint = f" Name the folder of a version in {name!r} by builder_dir=."
    raise ConfigError(
      f"tfds: name={name!r} is not prepared in {folder}.{hint}"
    ) from e
  except ValueError as e:
    raise ConfigError(f"tfds: name={name!r}: {' '.join(str(e).split())}") from e


def _versions(folder: str) -> str:
  found = sorted(
    entry.name
    for entry in os.scandir(folder)
    if os.path.isfile(os.path.join(entry.path, "dataset_info.json"))
  )
  return f" There are: {', '.join(found)}." if found else ""


def _file_instructions(splits: Any, split: str) -> list[Any]:
  names = [
    slices.split_name(part, "tfds: split")[0] for part in split.split("+")
  ]
  for name in names:
    if name not in splits and name != "all":
      raise ConfigError(
        f"tfds: split={split!r}: there is no {name!r}."
        f"{did_you_mean(name, splits)}"
      )
  try:
    return splits[split].file_instructions
  except (ValueError, AssertionError) as e:
    raise ConfigError(
      f"tfds: split={split!r}: {' '.join(str(e).split())}"
    ) from e


def _keep_encoded(features: Any) -> dict[str, Any]:
  """Decoders that leave the images of a (nested) FeaturesDict as they are."""
  tfds = _import_tfds()
  decoders = {}
  for name, feature in features.items():
    if isinstance(feature, tfds.features.FeaturesDict):
      nested = _keep_encoded(feature)
      if nested:
        decoders[name] = nested
    elif isinstance(feature, tfds.features.Image):
      decoders[name] = tfds.decode.SkipDecoding()
  return decoders
