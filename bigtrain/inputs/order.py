"""The order of the examples: which example is in which row of the run.

Row r of step s is global row g = s * batch_size + r. Two pure functions map g
to an example, in constant time for any step:

1. `Schedule.locate` gives the source in the mixture and the position, which is
   the number of earlier rows with examples of that source.
2. `hashing.permute` gives the example at that position. The epoch is the number
   of complete passes over the source, and each epoch has a different
   permutation.

So each host computes only its own rows, and a resumed run continues at any step
without reading earlier steps.

The weights of a mixture may change at given rows. Consecutive rows with the
same weights form a stage. A stage is cut into blocks with a fixed number of
rows from each source, in random order within the block, and ends with one
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

# Rows of a block. Smaller blocks could not express weights to 1%, and in larger
# ones the shares of the sources would fluctuate for longer.
_MIN_BLOCK = 4096
_MAX_BLOCK = 1 << 24
# How far a source's share of a block may be from its weight.
_TOLERANCE = 0.01
# Rows that `Schedule.counts` looks at together, to limit its memory.
_MAX_COUNTED = 1 << 20
# One row, in the units in which `apportion` counts what it owes.
_ROW = 1 << 40


def block_counts(
  weights: Sequence[float], rows: int | None = None
) -> np.ndarray | None:
  """Returns the rows per block from each source, proportional to the weights.

  Shares are rounded by the largest-remainder method. A block has 4096 rows,
  doubled until every share is within 1% of its weight. Returns None if it would
  be larger than `rows`.
  """
  share = np.asarray(weights, np.float64)
  share = share / share.sum()
  used = share > 0
  block = _MIN_BLOCK
  while rows is None or block <= rows:
    exact = share * block
    counts = np.floor(exact).astype(np.int64)
    num_missing = block - counts.sum()
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[:num_missing]] += 1
    if np.all(abs(counts[used] / exact[used] - 1) <= _TOLERANCE):
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

  What a source loses by rounding is owed to it in the next call, in units of
  2**-40 rows, so errors do not accumulate. A source of weight 0 gets no rows.
  """
  # Exact fractions and integers, so that all hosts agree.
  total = sum(map(fractions.Fraction, weights))
  shares = [round(fractions.Fraction(w) * _ROW / total) for w in weights]
  due = [rest + rows * share for rest, share in zip(owed, shares)]
  counts = [
    max(0, due_k // _ROW) if weight else 0
    for due_k, weight in zip(due, weights)
  ]
  used = [k for k, weight in enumerate(weights) if weight]

  def still_due(k: int) -> int:
    return due[k] - counts[k] * _ROW

  while sum(counts) < rows:
    counts[max(used, key=still_due)] += 1
  while sum(counts) > rows:
    counts[min((k for k in used if counts[k]), key=still_due)] -= 1
  return counts, [still_due(k) for k in range(len(weights))]


class Order(NamedTuple):
  """The examples in some rows of a batch; arrays [B]."""

  # int32: number of the source in the mixture. If steps draw from several ops
  # (Schedule.by_step): source * number of these ops + number of the step's ops.
  source: np.ndarray
  # int64: index of the example in that source.
  index: np.ndarray  # type: ignore[assignment]  # Not tuple.index.
  # int64: complete passes over that source. If examples are repeated
  # (Schedule.repeats): passes * repeats + number of the copy, so that copies
  # have different random numbers.
  epoch: np.ndarray


class _Segment(NamedTuple):
  """Successive blocks with the same number of rows of each source."""

  row: int  # First row.
  block: int  # Number of earlier blocks.
  counts: np.ndarray  # int64 [sources], rows of each source in a block.
  before: np.ndarray  # int64 [sources], rows of each in earlier segments.


def _segments(stages: Sequence[tuple[int, Sequence[float]]]) -> list[_Segment]:
  """Cuts stages (first row, weights) into segments."""
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
  assert counts is not None  # The last stage has no end.
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
  # Successive rows with the same example, each with its own random numbers.
  repeats: int = 1
  # Random draws of the steps, such as image sizes: step s draws the number of
  # this schedule's source at row s.
  by_step: "Schedule | None" = None
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
    source = np.zeros(rows.shape, np.int32)
    position = rows.copy()
    if len(self.lengths) == 1:
      return source, position
    seed = int(hashing.fold(self.seed, hashing.SCHEDULE))
    first_rows = [segment.row for segment in self._segments]
    segment_of_row = np.searchsorted(first_rows, rows, side="right") - 1
    for s in np.unique(segment_of_row):
      segment, at = self._segments[s], segment_of_row == s
      block_size = int(segment.counts.sum())
      block, slot = np.divmod(rows[at] - segment.row, block_size)
      # The slots of a block are shuffled. Then the first counts[0] belong to
      # source 0, the next counts[1] to source 1, and so on.
      slot = hashing.permute(slot, block_size, seed, segment.block + block)
      starts = np.cumsum(segment.counts) - segment.counts
      k = np.searchsorted(starts, slot, side="right") - 1
      before_block = segment.before[k] + block * segment.counts[k]
      source[at] = k
      position[at] = before_block + slot - starts[k]
    return source, position

  def counts(self, row: int) -> np.ndarray:
    """Returns the rows of each source before a global row, int64 [sources].

    `row` is a multiple of `repeats`.
    """
    row //= self.repeats
    segment = [s for s in self._segments if s.row <= row][-1]
    num_blocks, rest = divmod(row - segment.row, int(segment.counts.sum()))
    counts = segment.before + num_blocks * segment.counts
    # The block that contains the row is counted one by one.
    for begin in range(row - rest, row, _MAX_COUNTED):
      rows = np.arange(begin, min(begin + _MAX_COUNTED, row))
      counts = counts + np.bincount(self.locate(rows)[0], minlength=len(counts))
    return counts * self.repeats

  def rows(self, rows: np.ndarray) -> Order:
    """Returns the examples of global rows [B]."""
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
    """Returns the examples of a step's batch, or of some of its rows."""
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    order = self.rows(np.int64(step) * batch_size + rows)
    if self.by_step is None:
      return order
    drawn, _ = self.by_step.locate(np.asarray([step]))
    source = order.source * len(self.by_step.lengths) + drawn
    return order._replace(source=source)
