"""The order of examples: a closed form for any row of a run.

Row r of step s is global row g = s * batch_size + r. Two pure functions map g
to an example, in a time that does not grow with g: the schedule of the mixture
gives the source and the position (the number of earlier draws from that
source), and a keyed permutation of the epoch gives the example at that
position. So each host can compute its own rows alone.

Weights of a mixture may change at given rows. The rows with the same weights
are a stage: whole blocks with a fixed number of rows of each source, then one
smaller block. The rows before each stage are counted once, in integers.
"""

import dataclasses
import fractions
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, DataError

_MIN_BLOCK = 4096
_MAX_BLOCK = 1 << 24
_MAX_COUNTED = 1 << 20  # Rows that are counted at once.
_ROW = 1 << 40  # One row, in the units of `apportion`.


def block_counts(
  weights: Sequence[float], rows: int | None = None
) -> np.ndarray | None:
  """Returns the rows per block of each source, proportional to the weights.

  Shares are rounded by largest remainder. A block is 4096 rows, doubled until
  every share is within 1% of its weight; None if it is larger than `rows`.
  """
  share = np.asarray(weights, np.float64)
  share = share / share.sum()
  used = share > 0
  block = _MIN_BLOCK
  while rows is None or block <= rows:
    exact = share * block
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: block - counts.sum()]] += 1
    if np.all(abs(counts[used] / exact[used] - 1) <= 0.01):
      return counts
    if block >= _MAX_BLOCK:
      small = int(np.where(used, share, np.inf).argmin())
      raise ConfigError(
        f"mixture: weight {weights[small]!r} of source {small} is a share of "
        f"{share[small]:.2g}, too small to be scheduled; leave the source out "
        "or raise its weight."
      )
    block *= 2
  return None


def apportion(
  rows: int, weights: Sequence[float], owed: Sequence[int]
) -> tuple[list[int], list[int]]:
  """Splits rows by the weights; returns (rows, rows owed) of each source.

  What rounding takes from a source is owed to it in the next call, in units of
  2**-40 rows, so errors do not add up. A source of weight 0 gets no rows.
  """
  total = sum(map(fractions.Fraction, weights))
  shares = [round(fractions.Fraction(w) * _ROW / total) for w in weights]
  due = [rest + rows * share for rest, share in zip(owed, shares)]
  counts = [max(0, d // _ROW) if w else 0 for d, w in zip(due, weights)]
  used = [k for k, weight in enumerate(weights) if weight]

  def still_due(k: int) -> int:
    return due[k] - counts[k] * _ROW

  while sum(counts) < rows:
    counts[max(used, key=still_due)] += 1
  while sum(counts) > rows:
    counts[min((k for k in used if counts[k]), key=still_due)] -= 1
  return counts, [still_due(k) for k in range(len(weights))]


class Order(NamedTuple):
  """The examples of rows of a batch."""

  # int32 [B], index of the source in the mixture; times the number of ops that
  # steps draw from, plus the number of the step's (Schedule.by_step).
  source: np.ndarray
  # int64 [B], index of the example in that source.
  index: np.ndarray  # type: ignore[assignment]  # Not tuple.index.
  # int64 [B], complete passes over that source; times the copies of an example
  # in a batch, plus the number of the copy.
  epoch: np.ndarray


class _Segment(NamedTuple):
  """Blocks with the same number of rows of each source; arrays [sources]."""

  row: int  # First row.
  block: int  # Number of earlier blocks.
  counts: np.ndarray  # Rows of each source in a block.
  before: np.ndarray  # Rows of each source in earlier segments.


def _segments(stages: Sequence[tuple[int, Sequence[float]]]) -> list[_Segment]:
  segments: list[_Segment] = []
  num_blocks, before = 0, np.zeros(len(stages[0][1]), np.int64)
  owed = [0] * len(before)
  for (row, weights), (end, _) in zip(stages, stages[1:]):
    counts = block_counts(weights, rows=end - row)
    if counts is not None:
      segments.append(_Segment(row, num_blocks, counts, before))
      repeats = (end - row) // int(counts.sum())
      num_blocks, before = num_blocks + repeats, before + repeats * counts
      row += repeats * int(counts.sum())
    if row < end:
      split, owed = apportion(end - row, weights, owed)
      counts = np.asarray(split, np.int64)
      segments.append(_Segment(row, num_blocks, counts, before))
      num_blocks, before = num_blocks + 1, before + counts
  row, weights = stages[-1]
  counts = block_counts(weights)
  assert counts is not None  # There is no end.
  return [*segments, _Segment(row, num_blocks, counts, before)]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The endless order of a mixture of sources."""

  lengths: tuple[int, ...]  # Number of examples of each source.
  weights: tuple[float, ...] = (1.0,)  # Relative number of rows of each.
  seed: int = 0
  # Whether each epoch is permuted. If not, sources are read in order; the order
  # of rows within a block of a mixture is still random.
  shuffle: bool = True
  # (row, weights) in the order of rows: from this row on, the mixture has these
  # weights, of which some may be 0.
  changes: tuple[tuple[int, tuple[float, ...]], ...] = ()
  repeats: int = 1  # Rows in turn with one example, each a copy of its own.
  by_step: "Schedule | None" = None  # Its source of row s is what step s draws.
  _segments: list[_Segment] = dataclasses.field(
    init=False, repr=False, compare=False
  )

  def __post_init__(self) -> None:
    for k, length in enumerate(self.lengths):
      if length < 1:
        raise DataError(f"source {k} of the mixture is empty.")
    stages = ((0, self.weights), *self.changes)
    for k, values in enumerate(zip(*(weights for _, weights in stages))):
      if not any(values) or not all(0 <= w < math.inf for w in values):
        raise ConfigError(
          f"mixture: expected a positive weight, got {values[0]!r} for source "
          f"{k}."
        )
    object.__setattr__(self, "_segments", _segments(stages))

  def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (source int32 [B], position int64 [B]) of global rows int64 [B].

    The position is the number of earlier rows drawn from the same source.
    """
    rows = np.asarray(rows, np.int64)
    source, position = np.zeros(rows.shape, np.int32), rows.copy()
    if len(self.lengths) == 1:
      return source, position
    seed = int(hashing.fold(self.seed, hashing.SCHEDULE))
    first_rows = [segment.row for segment in self._segments]
    segment_of_row = np.searchsorted(first_rows, rows, side="right") - 1
    for s in np.unique(segment_of_row):
      segment, at = self._segments[s], segment_of_row == s
      size = int(segment.counts.sum())
      repeat, slot = np.divmod(rows[at] - segment.row, size)
      slot = hashing.permute(slot, size, seed, segment.block + repeat)
      starts = np.cumsum(segment.counts) - segment.counts
      k = np.searchsorted(starts, slot, side="right") - 1
      before = segment.before[k] + repeat * segment.counts[k]
      source[at], position[at] = k, before + slot - starts[k]
    return source, position

  def counts(self, row: int) -> np.ndarray:
    """Returns int64 [sources], the rows of each source before a global row.

    The row is the first with its example.
    """
    row //= self.repeats
    segment = [s for s in self._segments if s.row <= row][-1]
    repeats, slots = divmod(row - segment.row, int(segment.counts.sum()))
    counts = segment.before + repeats * segment.counts
    for begin in range(row - slots, row, _MAX_COUNTED):
      rows = np.arange(begin, min(begin + _MAX_COUNTED, row))
      counts = counts + np.bincount(self.locate(rows)[0], minlength=len(counts))
    return counts * self.repeats

  def rows(self, rows: np.ndarray) -> Order:
    rows, copy = np.divmod(np.asarray(rows, np.int64), self.repeats)
    source, position = self.locate(rows)
    length = np.asarray(self.lengths, np.int64)[source]
    epoch, index = np.divmod(position, length)
    if self.shuffle:
      for k in np.unique(source):
        at = source == k
        seed = hashing.stream(self.seed, int(k))
        index[at] = hashing.permute(index[at], self.lengths[k], seed, epoch[at])
    return Order(source, index, epoch * self.repeats + copy)

  def batch(
    self, step: int, batch_size: int, rows: np.ndarray | None = None
  ) -> Order:
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    order = self.rows(np.int64(step) * batch_size + rows)
    if self.by_step is None:
      return order
    drawn, _ = self.by_step.locate(np.asarray([step]))
    source = order.source * len(self.by_step.lengths) + drawn
    return order._replace(source=source)
