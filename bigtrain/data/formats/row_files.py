"""Base of the sources whose files have rows, such as JSON lines and Parquet.

The values of a row are those of JSON. The first rows determine the type and
shape of each feature, and later rows must match them.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  did_you_mean,
)
from bigtrain.data.formats import files, splits
from bigtrain.files import paths

# Number of rows that determine types and shapes.
_NUM_SAMPLED = 64

# Python types of values that need no conversion.
_PLAIN = {bytes: bytes, np.dtype(np.int64): int}

# (dtype or bytes, shape), as in the `spec` of a source.
Type = tuple[Any, tuple[int | None, ...]]


class Rows:
  """Base class of sources that read rows of files.

  A subclass sets `_paths` and `spec`, calls `_open`, and defines `where`, the
  place of an example, and `_rows`, which returns the values of examples by
  feature.
  """

  _paths: list[str]
  spec: dict[str, Type]
  where: Callable[[int], str]
  _rows: Callable[[np.ndarray], Sequence[Mapping[str, Any]]]

  def _open(
    self,
    kind: str,
    path: Any,
    counts: Sequence[int],
    sizes: Iterable[Any],
    slice: str,
  ) -> None:
    """Notes the files of `_paths`, and the slice of their rows.

    Args:
      kind: name of the source, for messages.
      path: argument of the source.
      counts: number of rows of each file.
      sizes: size or checksum of each file.
    """
    self._kind = kind
    self._sizes = list(sizes)
    self._stamps = files.in_threads(files.stamp, self._paths)
    self._name = ", ".join(map(os.fspath, files.as_list(path, kind)))
    self._shards = files.Shards(counts)
    if not len(self._shards):
      raise DataError(f"{kind}: {path}: contains no examples.")
    length = len(self._shards)
    self._start, stop = splits.bounds(slice, length, f"{kind}: slice")
    self._length = stop - self._start

  def _infer(
    self, rows: Sequence[Mapping[str, Any]], names: Iterable[str], key: str
  ) -> dict[str, Type]:
    """Returns the types of features; `key` is the argument that has names."""
    spec = {}
    for name in names:
      check_choice(self.where(0), name, rows[0], "no field")
      arrays = [self._at(i, _array, row, name) for i, row in enumerate(rows)]
      kind = _type(arrays)
      if kind is None:
        raise ConfigError(
          f"{self._kind}: field {name!r} of {self._name} has different types "
          f"in different rows, or is always empty; leave it out of {key}=."
        )
      spec[name] = kind
    return spec

  def _first(self) -> np.ndarray:
    return np.arange(min(_NUM_SAMPLED, self._length))

  def _sample(self) -> list[Mapping[str, Any]]:
    """Returns the first rows, leaving out damaged ones."""

    def load(index: int) -> Any:
      try:
        return self._rows(np.asarray([index]))[0]
      except DataError as e:
        return e

    loaded = files.in_threads(load, self._first().tolist())
    rows = [row for row in loaded if not isinstance(row, DataError)]
    if not rows:
      raise loaded[0]
    return rows

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    rows = self._rows(indices)
    batch = {}
    self._check(indices)  # After the reading, so that no change goes unnoticed.
    for name, (kind, shape) in self.spec.items():
      values: list[Any] = [row.get(name) for row in rows]
      if shape or {*map(type, values)} != {_PLAIN.get(kind)}:
        values = [
          self._at(i, _value, row, name, kind, shape)
          for i, row in zip(indices, rows)
        ]
      if kind is not bytes and None not in shape:
        batch[name] = np.asarray(values, kind)
        continue
      sizes: Any = () if None in shape else shape
      batch[name] = np.empty((len(values), *sizes), object)
      for i, value in enumerate(values):
        is_text = isinstance(value, np.ndarray) and not value.shape
        batch[name][i] = value.item() if is_text else value
    return batch

  def _check(self, indices: np.ndarray) -> None:
    """Checks that the files of these examples have not changed."""
    places = self._places(indices)
    index_of_file = {file: i for i, (file, _) in zip(indices, places)}
    for file, index in index_of_file.items():
      # The reader of remote files returns their stamps with the content.
      if not paths.is_remote(self._paths[file]):
        self._check_stamp(index, file, files.stamp(self._paths[file]))

  def _check_stamp(self, index: int, file: int, stamp: str) -> None:
    if stamp != self._stamps[file]:
      where = self.where(index)
      raise DataError(
        f"{where}: the file has changed since this run opened it."
      )

  @property
  def fingerprints(self) -> dict[str, str]:
    return {self._name: self.fingerprint()}

  def fingerprint(self) -> str:
    names = [os.path.basename(path) for path in self._paths]
    options = self._start, self._length, sorted(self.spec)
    return files.digest(self._kind, *names, *self._sizes, *options)

  def _places(self, indices: Any) -> list[tuple[int, int]]:
    """Returns (file, row in it) of examples."""
    file, row = self._shards.locate(np.asarray(indices) + self._start)
    return list(zip(file.tolist(), row.tolist()))

  def _image(self, index: int, name: str) -> bytes:
    """Returns an image whose path is relative to the file of an example."""
    folder = os.path.dirname(self._paths[self._places([index])[0][0]])
    try:
      with open(os.path.join(folder, name), "rb", buffering=0) as f:
        return f.read()
    except (OSError, ValueError) as e:
      raise DataError(f"image {name!r}: {e}.") from e

  def _at(self, index: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls fn(*args), and adds the place of the example to a DataError."""
    try:
      return fn(*args)
    except DataError as e:
      raise DataError(f"{self.where(int(index))}: {e}") from e


def _type(sample: Sequence[np.ndarray]) -> Type | None:
  # An empty list fits any type.
  kinds = {array.dtype for array in sample if array.size}
  strings = np.dtype(object) in kinds
  ranks = {array.ndim for array in sample}
  if len(ranks) > 1 or (strings and len(kinds) > 1) or not kinds:
    return None
  # Mixed integers and floats become floats.
  kind = bytes if strings else np.result_type(*kinds)
  kind = np.dtype(np.float32) if kind == np.float64 else kind
  sizes = zip(*(array.shape for array in sample))
  shape = tuple(s[0] if len(set(s)) == 1 else None for s in sizes)
  # Most images have five captions, but not all.
  return kind, (None,) if strings and len(shape) == 1 else shape


def _value(
  row: Mapping[str, Any], name: str, kind: Any, shape: tuple[int | None, ...]
) -> Any:
  array = _array(row, name)
  strings = array.dtype == object
  if array.size == 0 and array.ndim:
    array = array.astype(object if kind is bytes else kind)
  elif (kind is bytes) != strings or not (
    strings or np.can_cast(array.dtype, kind, "same_kind")
  ):
    expected = "a string" if kind is bytes else np.dtype(kind).name
    problem = f"expected {expected} as in earlier lines"
    raise DataError(f"field {name!r}: {problem}, got {short(row[name])}.")
  if len(array.shape) != len(shape) or any(
    expected not in (None, size) for expected, size in zip(shape, array.shape)
  ):
    problem = f"expected shape {shape} as in earlier lines"
    raise DataError(f"field {name!r}: {problem}, got {array.shape}.")
  if kind is bytes:
    return array
  with np.errstate(over="ignore"):
    result = array.astype(kind)
  if array.dtype.kind == "f" and (np.isinf(result) & ~np.isinf(array)).any():
    raise DataError(
      f"field {name!r}: beyond {result.dtype}: {short(row[name])}."
    )
  return result


def _array(row: Mapping[str, Any], name: str) -> np.ndarray:
  if name not in row:
    raise DataError(f"no field {name!r}.{did_you_mean(name, row)}")
  value = row[name]
  if isinstance(value, bytes):  # numpy would cut zeros off its end.
    return files.objects([value]).reshape(())
  try:
    array = np.asarray(value)
  except ValueError:
    array = np.empty(0, object)  # Lists of different lengths.
  if array.dtype.kind == "U":
    # numpy cuts null characters off the ends of strings.
    texts = np.empty(array.shape, object)
    for at in np.ndindex(array.shape):
      text = functools.reduce(lambda part, i: part[i], at, value)
      texts[at] = str(text).encode("utf-8", "surrogatepass")
    return texts
  if array.dtype.kind not in "bif" and not isinstance(value, np.ndarray):
    raise DataError(
      f"field {name!r}: expected a string, a number or a list of them, got "
      f"{short(value)} (fields= selects fields)."
    )
  return array


def short(value: Any) -> str:
  """Returns a value as JSON, cut to 40 characters, for a message."""
  text = json.dumps(value, default=repr)
  return text if len(text) <= 40 else text[:40] + "..."
