"""Rows of embedding and head for tokens that the file of model_init lacks.

objective/new_rows.py decides which rows are new and records that in
config.model_init. warm_start.py loads the file's rows and appends the new ones.
The values of new rows are computed on the host, in float64 and in a fixed
order, so they do not depend on the devices.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import trees

# How new rows begin, see docs/config.md.
INITS = ("mean", "normal", "pieces")
# Rows that are summed at a time, so that mapped files stay mapped.
_CHUNK = 4096


class AddedRows(NamedTuple):
  """Rows that a model has in addition to the rows of a file."""

  old_size: int  # Rows in the file.
  new_size: int  # Rows in the model.
  # The tokens [first, stop) are new. Rows of the file below old_size may be
  # theirs, because files often have more rows than their tokenizer has tokens.
  first: int
  stop: int
  axes: Mapping[str, int]  # {regex of arrays: their axis of rows, from the end}
  init: str = "mean"
  pieces: Sequence[Sequence[int]] = ()  # Of "pieces": old ids by new token.

  def axis(self, name: str) -> int | None:
    """The axis of an array's rows, from the end; None if it has none."""
    matches = (x for regex, x in self.axes.items() if re.fullmatch(regex, name))
    return next(matches, None)

  def in_file(self, specs: Mapping[str, Any]) -> dict[str, Any]:
    """The specs {name: spec} with the sizes of the file."""
    result = {}
    for name, spec in specs.items():
      axis = self.axis(name)
      if axis is not None and spec.shape[axis] == self.new_size:
        shape = [*spec.shape]
        shape[axis] = self.old_size
        spec = jax.ShapeDtypeStruct(tuple(shape), spec.dtype)
      result[name] = spec
    return result

  def is_new(self, row: int) -> bool:
    return row >= self.old_size or self.first <= row < self.stop

  def new_tokens(self) -> list[int]:
    """Ids of the new tokens; without a tokenizer, of all new rows."""
    if self.stop > self.first:
      return [*range(self.first, self.stop)]
    return [*range(self.old_size, self.new_size)]

  def describe(self) -> str:
    count = sum(map(self.is_new, range(self.first, self.new_size)))
    what = dict(
      mean="the mean of the others",
      normal="drawn with mean and deviation of the others",
      pieces="means of their pieces",
    )
    return f"{count} new rows: {what[self.init]}"


def extended(params: Any, rows: AddedRows, mesh: Mesh) -> Any:
  """Adds the new rows to the parameters of a model with fewer tokens."""
  flat = dict(trees.flatten_with_names(params))
  new = {}
  for name, x in flat.items():
    axis = rows.axis(name)
    if axis is not None and x.shape[axis] == rows.old_size:
      array = WithAddedRows(np.asarray(x), name, rows)
      new[name] = array[(slice(None),) * len(array.shape)].astype(x.dtype)
  places, _ = sharding.state_shardings(new, mesh)
  return trees.from_flat({**flat, **jax.device_put(new, places)})


class WithAddedRows:
  """A file's array with the new rows appended, computed as it is indexed."""

  def __init__(self, array: Any, name: str, rows: AddedRows):
    self._array, self._rows = array, rows
    axis = rows.axis(name)
    assert axis is not None
    self._axis = axis % array.ndim
    shape = [*array.shape]
    shape[self._axis] = rows.new_size
    self.shape = tuple(shape)
    # The mean of bfloat16 rows is not a bfloat16 number.
    is_wide = array.dtype.itemsize >= 4
    self.dtype = array.dtype if is_wide else np.dtype(np.float32)
    self._make_row = _row_maker(array, name, self._axis, rows)

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    whole = [slice(*x.indices(n)) for x, n in zip(index, self.shape)]
    start, stop = whole[self._axis].start, whole[self._axis].stop
    old = [*whole]
    last = min(stop, self._rows.old_size)
    old[self._axis] = slice(min(start, last), last)
    parts = [np.asarray(self._array[tuple(old)]).astype(self.dtype)]
    if stop > last:
      sizes = [x.stop - x.start for x in whole]
      sizes[self._axis] = stop - max(start, last)
      parts.append(np.zeros(sizes, self.dtype))
    result = np.concatenate(parts, self._axis)
    rows = np.moveaxis(result, self._axis, 0)  # A view.
    others = [x for i, x in enumerate(whole) if i != self._axis]
    for row in range(max(start, self._rows.first), stop):
      if self._rows.is_new(row):
        rows[row - start] = self._make_row(row)[tuple(others)]
    return result


def _row_maker(array: Any, name: str, axis: int, rows: AddedRows) -> Any:
  """Returns the function (number of a row) -> the values of a new row."""
  mean, square = _moments(array, axis, rows)
  if rows.init == "normal":
    deviation = np.sqrt(np.maximum(square - np.square(mean), 0))
    seed = zlib.crc32(name.encode())

    def drawn(row: int) -> np.ndarray:
      draw = np.random.default_rng([seed, row]).standard_normal(mean.shape)
      return mean + deviation * draw

    return drawn

  def of_pieces(row: int) -> np.ndarray:
    number = row - rows.first
    ids = rows.pieces[number] if number < len(rows.pieces) else ()
    if not len(ids):
      return mean
    chosen = np.take(array, np.asarray(ids), axis).astype(np.float64)
    return np.asarray(np.mean(chosen, axis))

  return of_pieces


def _moments(
  array: Any, axis: int, rows: AddedRows
) -> tuple[np.ndarray, np.ndarray]:
  """Means of the old rows and of their squares, in float64."""
  count = rows.old_size
  total, squares = np.zeros(()), np.zeros(())
  for start in range(0, count, _CHUNK):
    index = [slice(None)] * array.ndim
    index[axis] = slice(start, min(start + _CHUNK, count))
    chunk = np.asarray(array[tuple(index)]).astype(np.float64)
    total = total + chunk.sum(axis)
    squares = squares + np.square(chunk).sum(axis)
  return np.asarray(total / count), np.asarray(squares / count)
