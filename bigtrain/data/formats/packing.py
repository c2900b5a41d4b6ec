"""Packs documents into windows, given only their lengths."""

import bisect
import operator
from collections.abc import Sequence

import numpy as np

# Bins that `best_fit` looks at for each item. They have room for the first of
# its K sizes, but maybe not for another. More bins take longer and help little.
_MAX_TRIED = 64


def first_fit(
  sizes: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
  """Packs items into bins: longest first, each into the first bin with room.

  First-fit decreasing (Johnson, 1973) needs at most 11/9 of the optimal number
  of bins plus a constant. All items of one size are placed at once, so ten
  million documents take seconds. Returns (items int64 [N], first int64 [bins +
  1]): bin b holds items[first[b] : first[b + 1]], in ascending order.
  """
  sizes = np.asarray(sizes, np.int64)
  if not sizes.size:
    return np.zeros(0, np.int64), np.zeros(1, np.int64)
  if sizes.min() < 1 or sizes.max() > capacity:
    raise ValueError(
      f"first_fit: expected sizes 1 to {capacity}, got {sizes.min()} to "
      f"{sizes.max()}."
    )
  by_size = np.argsort(-sizes, kind="stable")
  ordered = sizes[by_size]
  cuts = np.flatnonzero(np.diff(ordered, prepend=0, append=0))
  bins = np.empty(len(sizes), np.int64)
  open_bins = _OpenBins(len(sizes), capacity, smallest=int(ordered[-1]))
  for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist()):
    size = int(ordered[start])
    bins[by_size[start:stop]] = open_bins.place(size, stop - start)
  items = np.argsort(bins, kind="stable")
  first = np.searchsorted(bins[items], np.arange(bins.max() + 2))
  return items, first


def best_fit(
  sizes: np.ndarray, capacity: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Packs items into bins: largest first, each into the fullest bin with room.

  An item has K sizes, int [N, K], such as its inputs and its targets, and a bin
  has a capacity for each; no item is larger than a bin. The size that fills the
  bins fastest decides how full a bin is. Returns the same as `first_fit`.
  """
  fill = np.sum(sizes, axis=0) / np.asarray(capacity)
  fastest_first = np.argsort(-fill, kind="stable")
  sizes, full = sizes[:, fastest_first], np.asarray(capacity)[fastest_first]
  smallest = sizes.min(axis=0, initial=int(full.max())).tolist()
  bins = np.empty(len(sizes), np.int64)
  rooms: list[list[int]] = []
  open_bins: list[
    tuple[int, int]
  ] = []  # (room in the first size, bin), sorted.
  by_size = np.argsort(-np.max(sizes / full, axis=1), kind="stable")
  for item in by_size.tolist():
    size = sizes[item].tolist()
    at = bisect.bisect_left(open_bins, (size[0], 0))
    for place in range(at, min(at + _MAX_TRIED, len(open_bins))):
      number = open_bins[place][1]
      if all(map(operator.le, size, rooms[number])):
        del open_bins[place]
        break
    else:
      number = len(rooms)
      rooms.append(full.tolist())
    bins[item] = number
    rooms[number] = list(map(operator.sub, rooms[number], size))
    if all(map(operator.le, smallest, rooms[number])):
      bisect.insort(open_bins, (rooms[number][0], number))
  items = np.argsort(bins, kind="stable")
  first = np.searchsorted(bins[items], np.arange(len(rooms) + 1))
  return items, first


class _OpenBins:
  """Bins with room, in runs of bins with the same room.

  Bins start[i] to start[i] + count[i] - 1 have room[i] left.
  """

  def __init__(self, number: int, capacity: int, smallest: int):
    self._smallest = smallest
    self._start = np.zeros(1, np.int64)
    self._count = np.full(1, number, np.int64)
    self._room = np.full(1, capacity, np.int64)

  def place(self, size: int, number: int) -> np.ndarray:
    """Places `number` items of one size; returns their bins, ascending."""
    fits = np.flatnonzero(self._room >= size)
    each = self._room[fits] // size
    placed = np.cumsum(each * self._count[fits])
    whole = int(np.searchsorted(placed, number, side="right"))
    filled = fits[:whole]
    bins = [_ranges(self._start[filled], self._count[filled], each[:whole])]
    self._room[filled] -= each[:whole] * size
    if left := number - (int(placed[whole - 1]) if whole else 0):
      bins.append(self._split(int(fits[whole]), size, left))
    keep = self._room >= self._smallest
    self._start, self._count = self._start[keep], self._count[keep]
    self._room = self._room[keep]
    return np.concatenate(bins)

  def _split(self, i: int, size: int, number: int) -> np.ndarray:
    """Places items that fill only a part of run i, which becomes three runs.

    These are bins that are full, one bin that gets the rest, and untouched
    bins.
    """
    start, count, room = self._start[i], self._count[i], self._room[i]
    each = room // size
    full, rest = divmod(number, each)
    counts = np.asarray([full, int(rest > 0), count - full - (rest > 0)])
    rooms = np.asarray([room - each * size, room - rest * size, room])
    starts = start + np.cumsum(counts) - counts
    some = counts > 0

    def replace(old: np.ndarray, new: np.ndarray) -> np.ndarray:
      return np.concatenate([old[:i], new, old[i + 1 :]])

    self._start = replace(self._start, starts[some])
    self._count = replace(self._count, counts[some])
    self._room = replace(self._room, rooms[some])
    return _ranges(starts[:2], counts[:2], np.asarray([each, rest]))


def _ranges(
  start: np.ndarray, count: np.ndarray, each: np.ndarray
) -> np.ndarray:
  """Returns start[i] to start[i] + count[i] - 1 for each i, each[i] times."""
  numbers = np.repeat(start, count) + numbered(count)
  return np.repeat(numbers, np.repeat(each, count))


def numbered(counts: np.ndarray) -> np.ndarray:
  """Returns 0 to counts[i] - 1 for each i, concatenated."""
  return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
