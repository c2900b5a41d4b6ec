"""Columns of Arrow tables as features of examples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.settings import ConfigError, did_you_mean


class Feature(NamedTuple):
  """What a column becomes.

  Attributes:
    kind: bytes or a numpy dtype.
    shape: of an example.
    path: names from the column down to the field.
    image: whether it is a struct of bytes and path.
  """

  kind: Any
  shape: tuple[int | None, ...]
  path: tuple[str, ...]
  image: bool = False


def import_pyarrow() -> Any:
  """pyarrow with its parts, or ConfigError that says how to install it."""
  try:
    import pyarrow
    import pyarrow.compute
    import pyarrow.ipc
    import pyarrow.parquet
  except ModuleNotFoundError as e:
    raise ConfigError(
      f"parquet: reading it needs pyarrow ({e}); "
      "pip install 'bigtrain[parquet]'."
    ) from e
  return pyarrow


def find_features(
  schema: Any, columns: Sequence[str] | None, path: str
) -> dict[str, Feature]:
  """The features that columns become, by name.

  Args:
    schema: of the file.
    columns: the ones wanted; None for all.
    path: of the file, for messages.

  Raises:
    ConfigError: no such column, or one that is no feature.
  """
  names = list(schema.names if columns is None else columns)
  found: dict[str, Feature] = {}
  for name in names:
    if name not in schema.names:
      raise ConfigError(
        f"parquet: {path} has no column {name!r}."
        f"{did_you_mean(name, schema.names)}"
      )
    found |= _features(schema.field(name).type, (name,))
  if not found:
    raise ConfigError("parquet: columns: expected at least one.")
  return found


def _features(kind: Any, path: tuple[str, ...]) -> dict[str, Feature]:
  """The features of a column, or of a field of a struct, of type `kind`."""
  pa = import_pyarrow()
  name = "/".join(path)
  if pa.types.is_struct(kind):
    fields = {kind.field(i).name: kind.field(i).type for i in range(len(kind))}
    if set(fields) == {"bytes", "path"}:
      return {name: Feature(bytes, (), path, image=True)}
    found: dict[str, Feature] = {}
    for field, of_field in fields.items():
      found |= _features(of_field, (*path, field))
    return found
  shape: tuple[int | None, ...] = ()
  if pa.types.is_fixed_size_list(kind):
    shape, kind = (kind.list_size,), kind.value_type
  elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
    shape, kind = (None,), kind.value_type
  dtype = _dtype(kind)
  if dtype is None:
    raise ConfigError(
      f"parquet: column {name!r} holds {kind}, which is no feature; expected "
      "numbers, strings, bytes, images or lists of them (columns= selects "
      "columns)."
    )
  return {name: Feature(dtype, shape, path)}


def _dtype(kind: Any) -> Any:
  """bytes or a numpy dtype for an Arrow type; None where there is none."""
  pa = import_pyarrow()
  if pa.types.is_dictionary(kind):
    kind = kind.value_type
  if _is_text(kind):
    return bytes
  if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
    return np.dtype(kind.to_pandas_dtype())
  # jax has no doubles by default, as for the other sources.
  return np.dtype(np.float32) if pa.types.is_floating(kind) else None


def _is_text(kind: Any) -> bool:
  pa = import_pyarrow()
  is_kind = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
  )
  return any(is_of(kind) for is_of in is_kind)


def stored(table: Any, feature: Feature) -> Any:
  """The chunked array of a feature in a decoded table; strings as bytes."""
  pa = import_pyarrow()
  column = table.column(feature.path[0])
  for field in feature.path[1:]:
    column = pa.compute.struct_field(column, field)
  if feature.image or feature.kind is not bytes:
    return column
  if pa.types.is_dictionary(column.type):
    column = column.cast(column.type.value_type)
  # Text that is no UTF-8 must reach the op that can say so.
  kind = pa.large_binary()
  if feature.shape:
    size = feature.shape[0]
    kind = pa.large_list(kind) if size is None else pa.list_(kind, size)
  return column.cast(kind, safe=False)
