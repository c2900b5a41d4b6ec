"""Columns of Arrow tables as features of examples."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.data.formats import files
from bigtrain.settings import (
  ConfigError,
  DataError,
  did_you_mean,
  import_package,
)

_TEXT = (
  "string large_string string_view binary large_binary binary_view".split()
)
_TEXT += ["fixed_size_binary"]


class Feature(NamedTuple):
  """A feature that a column holds."""

  kind: Any  # bytes or a numpy dtype.
  shape: tuple[int | None, ...]  # Of one example; None for sizes that vary.
  path: tuple[str, ...]  # Names from the column down to the field.
  image: bool = False  # Whether it is a struct of `bytes` and `path`.


def import_pyarrow() -> Any:
  by, install = "parquet: reading it", "'bigtrain[parquet]'"
  for name in (".compute", ".ipc", ".parquet", ""):
    pa = import_package(f"pyarrow{name}", by, install)
  return pa


@contextlib.contextmanager
def errors(what: str, error: type[Exception] = DataError) -> Iterator[Any]:
  """Yields pyarrow; its errors and the system's become `error`."""
  pa = import_pyarrow()
  try:
    yield pa
  except (pa.ArrowException, OSError) as e:
    raise error(f"{what}: {files.one_line(e)}.") from e


def find_features(
  schema: Any, columns: Sequence[str] | None, path: str
) -> dict[str, Feature]:
  features: dict[str, Feature] = {}
  for name in schema.names if columns is None else columns:
    if name not in schema.names:
      hint = did_you_mean(name, schema.names)
      raise ConfigError(f"parquet: {path} has no column {name!r}.{hint}")
    features |= _features(schema.field(name).type, (name,))
  if not features:
    raise ConfigError(f"parquet: columns={columns!r}: expected at least one.")
  return features


def _features(kind: Any, path: tuple[str, ...]) -> dict[str, Feature]:
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
      f"parquet: column {name!r} has the unsupported type {kind}; expected "
      "numbers, strings, bytes, images or lists (columns= selects columns)."
    )
  return {name: Feature(dtype, shape, path)}


def feature_array(table: Any, feature: Feature) -> Any:
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
  """Returns {column: names by number}, from the note of library `datasets`."""
  text = (schema.metadata or {}).get(b"huggingface")
  try:
    features = json.loads(text)["info"]["features"] if text else {}
    return {
      column: [str(name) for name in feature["names"]]
      for column, feature in features.items()
      if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }
  except (ValueError, KeyError, TypeError, AttributeError):
    return {}  # A note of another version of the library.
