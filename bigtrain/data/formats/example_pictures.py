"""The pictures of examples: their number, sizes and features.

`image` is float32 [N, height, width, 3] for pictures or tiles of one size, and
[N, P, values] for patches of pictures that roughly keep their size; `shapes`
then has the rows and columns of each picture's patches or tiles. N and P are
the largest of any example; smaller ones are filled with zeros.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import DataError
from bigtrain.data.formats import row_pictures, token_rows
from bigtrain.text import picture_layouts, tokenizers
from bigtrain.text import pictures as text_pictures

_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)
# {feature: (dtype, shape of one example)}.
Spec = dict[str, tuple[np.dtype, tuple[int, ...]]]


class ExamplePictures:
  """Prepares the pictures of rows for a model.

  Args:
    pictures: how the model sees pictures, and which tokens stand for them.
    rows: all rows; the methods get numbers of rows.
    prepare: a list of pictures, bytes or arrays -> pp.pixels.Pictures.
    fill: pp.pixels.fill.
  """

  def __init__(
    self,
    pictures: text_pictures.Pictures,
    rows: token_rows.Rows,
    prepare: Callable[[list[Any]], list[Any]],
    fill: Callable[..., None],
  ):
    self._pictures = pictures
    self._rows = rows
    self._prepare = prepare
    self._fill = fill

  def spec(
    self, kept: np.ndarray, items: np.ndarray, first: np.ndarray
  ) -> Spec:
    """Returns the dtypes and shapes of the features of one example.

    Args:
      kept: numbers of all rows in use.
      items, first: example e has the rows kept[items[first[e] : first[e + 1]]].
    """
    counts = self._rows.num_pictures(kept)
    if not counts.any():
      raise DataError("supervised: pictures: no row has any.")
    # All pictures have one shape, but for the numbers of patches and tiles.
    pixels = self._prepared(int(kept[np.flatnonzero(counts)[0]]))[0].pixels
    shape = pixels.shape
    if self._is_native():
      shape = (self._most_patches(kept), *shape[1:])
    elif pixels.ndim == 4:  # Tiles.
      counts = np.asarray([self._num_tiles(row) for row in kept.tolist()])
      shape = shape[1:]
    most = int(np.add.reduceat(counts[items], first[:-1]).max())
    result: Spec = {"image": (_FLOAT32, (most, *shape))}
    if self._is_native():
      result["shapes"] = (_INT32, (most, 2))
    elif self._has_views():
      result["shapes"] = (_INT32, (most, 4))
    return result

  def read(
    self, rows_of_examples: Sequence[Sequence[int]], spec: Spec
  ) -> dict[str, np.ndarray]:
    """Returns the features [B, ...] of B examples, given the rows of each."""
    batch = {
      name: np.zeros((len(rows_of_examples), *shape), dtype)
      for name, (dtype, shape) in spec.items()
    }
    # One request for all pictures, which may be in an object store.
    fetched = row_pictures.fetch(
      picture
      for rows in rows_of_examples
      for row in rows
      for picture in self._rows.pictures(row)
    )
    for b, rows in enumerate(rows_of_examples):
      pictures = [x for row in rows for x in self._prepared(row, fetched)]
      self._fill(pictures, **{name: x[b] for name, x in batch.items()})
    return batch

  def _prepared(
    self, row: int, fetched: Mapping[str, bytes | None] | None = None
  ) -> list[Any]:
    try:
      pictures = self._rows.pictures(row)
      if fetched is None:
        fetched = row_pictures.fetch(pictures)
      return self._prepare([row_pictures.decoded(x, fetched) for x in pictures])
    except DataError as e:
      raise DataError(f"{self._rows.where(row)}: {e}") from e

  def check_same(self, rows: Sequence[int]) -> None:
    """Refuses answers to the same prompt that have different pictures."""
    first, *others = (self._rows.pictures(row) for row in rows)
    if any(pictures != first for pictures in others):
      where = self._rows.where(rows[0])
      raise DataError(f"{where}: expected the same pictures for both answers.")

  def check_whole(
    self, row: int, ids: np.ndarray, coder: tokenizers.Tokenizer
  ) -> None:
    """Raises DataError if a row was cut and lost some of its pictures."""
    if self._pictures.layout is None:
      self._pictures.check(ids, len(self._rows.pictures(row)))
    else:
      self._pictures.check_expanded(coder, ids, self._sizes(row))

  def _is_native(self) -> bool:
    """Whether the model gets patches of pictures that keep about their size."""
    layout = self._pictures.layout
    return layout is not None and layout["kind"] in picture_layouts.OF_PATCHES

  def _has_views(self) -> bool:
    layout = self._pictures.layout
    return layout is not None and layout["kind"] == "views"

  def _layout(self) -> picture_layouts.Layout:
    assert self._pictures.layout is not None
    return picture_layouts.read(self._pictures.layout, "supervised: pictures")

  def _sizes(self, row: int) -> list[tuple[int, int]]:
    return [row_pictures.size_of(x) for x in self._rows.pictures(row)]

  def _most_patches(self, rows: np.ndarray) -> int:
    layout: Any = self._layout()
    most = max(
      math.prod(layout.grid(*size))
      for row in rows.tolist()
      for size in self._sizes(row)
    )
    # With the padding, the patches are whole squares.
    return most + -most % layout.merge**2

  def _num_tiles(self, row: int) -> int:
    """Number of tiles of a row's pictures, plus one for each whole picture."""
    layout = self._layout()
    sizes = self._sizes(row)
    if isinstance(layout, picture_layouts.Views):
      if not layout.has_tiles(len(sizes)):
        return len(sizes)
    grids = [layout.grid(*size) for size in sizes]
    return sum(rows * columns + 1 for rows, columns in grids)
