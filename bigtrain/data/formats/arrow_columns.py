"""Turns columns of Arrow tables into features, for Parquet and Arrow files.

A column of numbers, strings, bytes or lists of these is a feature. A struct of
`bytes` and `path` is an image; the fields of any other struct become separate
features, such as "captions/text".
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  import_package,
)
from bigtrain.data.formats import files, row_files

# Types whose values become bytes: pyarrow.types has a function is_<name> for
# each.
_TEXT = (
  "string",
  "large_string",
  "string_view",
  "binary",
  "large_binary",
  "binary_view",
  "fixed_size_binary",
)


class Feature(NamedTuple):
  """A feature that a column holds."""

  kind: Any  # bytes or a numpy dtype.
  shape: tuple[int | None, ...]  # Of one example; None for sizes that vary.
  path: tuple[str, ...]  # Names from the column down to the field.
  image: bool = False  # Whether it is a struct of `bytes` and `path`.


def import_pyarrow() -> Any:
  """Returns pyarrow, with its modules compute, ipc and parquet imported."""
  by, install = "reading Parquet and Arrow files", "'bigtrain[parquet]'"
  for module in ("compute", "ipc", "parquet"):
    import_package(f"pyarrow.{module}", by, install)
  return import_package("pyarrow", by, install)


@contextlib.contextmanager
def errors(what: str, error: type[Exception] = DataError) -> Iterator[Any]:
  """Yields pyarrow; its errors and the operating system's become `error`."""
  pa = import_pyarrow()
  try:
    yield pa
  except (pa.ArrowException, OSError) as e:
    raise error(f"{what}: {files.one_line(e)}.") from e


class Rows(row_files.Rows):
  """Base class of the sources of Parquet and Arrow files.

  A file has one or more parts, such as Parquet's row groups. A subclass defines
  `_table(file, part)`, which returns the features of a part as a table.
  """

  _table: Callable[[int, int], Any]

  def _open_tables(
    self,
    kind: str,
    path: Any,
    scan: Callable[[str], np.ndarray],
    schema: Any,
    columns: Sequence[str] | None,
    slice: str,
  ) -> None:
    """Opens the files of `_paths`.

    Args:
      kind: name of the source, for messages.
      path: argument of the source.
      scan: scan(path) returns the first row of each of N parts, the number of
        rows of the file, and its size in bytes.
      schema: of the first file.
    """
    if isinstance(columns, str):
      raise ConfigError(
        f"{kind}: columns={columns!r}: expected a list of column names."
      )
    self._starts = files.offsets(self._paths, scan)
    counts, sizes = zip(*[each[-2:].tolist() for each in self._starts])
    self._open(kind, path, counts, sizes, slice)
    self._schema = schema
    self._features = find_features(schema, columns, f"{kind}: {self._paths[0]}")
    self.spec = {n: (f.kind, f.shape) for n, f in self._features.items()}
    self.class_names = class_names(schema)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    batch = {}
    for name, (kind, shape) in self.spec.items():
      sizes: Any = () if None in shape else shape
      dtype: Any = object if None in shape or kind is bytes else kind
      batch[name] = np.empty((len(indices), *sizes), dtype)
    # Before reading: a mapped file that has shrunk would end the process.
    self._check(indices)
    # Rows of a part are read together, so that a batch in random order holds
    # only one table at a time.
    for i in np.argsort(indices):
      file, part, row = self._position(int(indices[i]))
      table = self._table(file, part)
      for name in batch:
        batch[name][i] = self._value(name, table, row, int(indices[i]))
    return batch

  def where(self, index: int) -> str:
    file, _, row = self._position(index)
    return f"{self._paths[file]}, row {row}"

  def _position(self, index: int) -> tuple[int, int, int]:
    """Returns (file, part, row in the part)."""
    ((file, row),) = self._places([index])
    starts = self._starts[file][:-2]
    part = int(np.searchsorted(starts, row, side="right")) - 1
    return file, part, row - int(starts[part])

  def _check_schema(self, schema: Any, path: str) -> None:
    for name in {feature.path[0] for feature in self._features.values()}:
      kind = schema.field(name).type if name in schema.names else "missing"
      expected = self._schema.field(name).type
      if kind != expected:
        wanted = f"expected {expected}, as in {self._paths[0]}"
        raise DataError(f"{path}: column {name!r} is {kind}; {wanted}.")

  def _value(self, name: str, table: Any, row: int, index: int) -> Any:
    feature = self._features[name]
    value = table.column(name)[row].as_py()
    if feature.image and value is not None:
      path, value = value["path"], value["bytes"]
      if value is None and path is not None:
        value = self._at(index, self._image, index, os.fsdecode(path))
    has_nulls = isinstance(value, list) and None in value
    if value is None or has_nulls:
      null = "null in part" if has_nulls else "null"
      raise DataError(f"{self.where(index)}: column {name!r} is {null}.")
    if not feature.shape:
      return value if feature.kind is bytes else feature.kind.type(value)
    if feature.kind is not bytes:
      return np.asarray(value, feature.kind)
    return files.objects(value)


def find_features(
  schema: Any, columns: Sequence[str] | None, path: str
) -> dict[str, Feature]:
  """Returns the features of the columns, by default of all."""
  features: dict[str, Feature] = {}
  for name in schema.names if columns is None else columns:
    check_choice(path, name, schema.names, "no column")
    features |= _features(schema.field(name).type, (name,))
  if not features:
    raise ConfigError(f"{path}: columns={columns!r}: expected at least one.")
  return features


def _features(kind: Any, path: tuple[str, ...]) -> dict[str, Feature]:
  """Returns the features of a type, which is at `path` in the schema."""
  pa = import_pyarrow()
  name = "/".join(path)
  if pa.types.is_struct(kind):
    fields = {kind.field(i).name: kind.field(i).type for i in range(len(kind))}
    if set(fields) == {"bytes", "path"}:
      return {name: Feature(bytes, (), path, image=True)}
    features: dict[str, Feature] = {}
    for field, field_kind in fields.items():
      features |= _features(field_kind, (*path, field))
    return features
  shape: tuple[int | None, ...] = ()
  if pa.types.is_fixed_size_list(kind):
    shape, kind = (kind.list_size,), kind.value_type
  elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
    shape, kind = (None,), kind.value_type
  value = kind.value_type if pa.types.is_dictionary(kind) else kind
  dtype: Any
  if any(getattr(pa.types, f"is_{name}")(value) for name in _TEXT):
    dtype = bytes
  elif pa.types.is_boolean(value) or pa.types.is_integer(value):
    dtype = np.dtype(value.to_pandas_dtype())
  elif pa.types.is_floating(value):
    dtype = np.dtype(np.float32)  # As in all sources: jax disables float64.
  else:
    raise ConfigError(
      f"column {name!r} has the unsupported type {kind}; expected "
      "numbers, strings, bytes, images or lists (columns= selects columns)."
    )
  return {name: Feature(dtype, shape, path)}


def feature_table(table: Any, features: Mapping[str, Feature]) -> Any:
  """Returns a table with a column for each feature."""
  arrays = {name: _array(table, feature) for name, feature in features.items()}
  return import_pyarrow().table(arrays)


def _array(table: Any, feature: Feature) -> Any:
  """Returns the chunked array of a feature; strings become bytes."""
  pa = import_pyarrow()
  column = table.column(feature.path[0])
  for field in feature.path[1:]:
    column = pa.compute.struct_field(column, field)
  if feature.image or feature.kind is not bytes:
    return column
  if pa.types.is_dictionary(column.type):
    column = column.cast(column.type.value_type)
  # Invalid UTF-8 must reach the op that reports it.
  kind = pa.large_binary()
  if feature.shape:
    size = feature.shape[0]
    kind = pa.large_list(kind) if size is None else pa.list_(kind, size)
  return column.cast(kind, safe=False)


def class_names(schema: Any) -> dict[str, list[str]]:
  """Returns {column: names by number}, which the library `datasets` saves."""
  text = (schema.metadata or {}).get(b"huggingface")
  try:
    features = json.loads(text)["info"]["features"] if text else {}
    return {
      column: [str(name) for name in feature["names"]]
      for column, feature in features.items()
      if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }
  except (ValueError, KeyError, TypeError, AttributeError):
    return {}  # Saved by another version of the library.
