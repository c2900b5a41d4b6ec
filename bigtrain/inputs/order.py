"""The order of examples: a closed form for any row of a run.

The order has no state. Row r of step s is global row g = s * batch_size + r.
Two pure functions map g to an example, in constant time and memory: the
schedule of the mixture gives the source and the position (the number of
earlier draws from that source), and a keyed permutation of the epoch gives
the example at that position. So each host can compute its own rows alone.

All randomness comes from `bigtrain.hashing`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bigtrain import hashing
from bigtrain.settings import ConfigError, DataError

_MIN_BLOCK = 4096
_MAX_BLOCK = 1 << 24


def block_counts(weights: Sequence[float]) -> np.ndarray:
  """Returns the rows per block of each source, proportional to the weights.

  Shares are rounded by largest remainder. A block is 4096 rows, doubled until
  every share is within 1% of its weight.

  Args:
    weights: positive weights with any sum.

  Returns:
    int64 [sources]; the sum is the block size, a power of two.

  Raises:
    ConfigError: a weight is so small that the block would exceed 2**24 rows.
  """
  share = np.asarray(weights, np.float64)
  share = share / share.sum()
  block = _MIN_BLOCK
  while True:
    exact = share * block
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: block - counts.sum()]] += 1
    if np.all(abs(counts / exact - 1) <= 0.01):
      return counts
    if block >= _MAX_BLOCK:
      small = int(share.argmin())
      raise ConfigError(
        f"mixture: weight {weights[small]!r} of source {small} is a share of "
        f"{share[small]:.2g}, too small to be scheduled; leave the source out "
        "or raise its weight."
      )
    block *= 2


class Order(NamedTuple):
  """The examples of rows of a batch.

  Attributes:
    source: int32 [B], index of the source in the mixture.
    index: int64 [B], index of the example in that source.
    epoch: int64 [B], number of complete passes over that source.
  """

  source: np.ndarray
  index: np.ndarray  # type: ignore[assignment]  # Not tuple.index.
  epoch: np.ndarray


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The endless order of a mixture of sources.

  Attributes:
    lengths: number of examples of each source.
    weights: relative number of rows of each source; each block has the exact
      share.
    seed: seed of the permutations and of the order within blocks.
    shuffle: whether each epoch is permuted. If False, sources are read in
      order; the order of rows within a block of a mixture is still random.
  """

  lengths: tuple[int, ...]
  weights: tuple[float, ...] = (1.0,)
  seed: int = 0
  shuffle: bool = True
  _counts: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)
  _starts: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    if len(self.lengths) != len(self.weights):
      raise ValueError("Schedule: expected one weight per source.")
    for k, length in enumerate(self.lengths):
      if length < 1:
        raise DataError(f"source {k} of the mixture is empty.")
    for k, weight in enumerate(self.weights):
      if not 0 < weight < math.inf:
        raise ConfigError(
          f"mixture: expected a positive weight, got {weight!r} for source {k}."
        )
    counts = block_counts(self.weights)
    object.__setattr__(self, "_counts", counts)
    object.__setattr__(self, "_starts", np.cumsum(counts) - counts)

  def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (source int32 [B], position int64 [B]) of rows int64 [B].

    `rows` are global. The position is the number of earlier rows drawn from
    the same source.
    """
    rows = np.asarray(rows, np.int64)
    if len(self.lengths) == 1:
      return np.zeros(rows.shape, np.int32), rows
    counts, starts = self._counts, self._starts
    block, slot = np.divmod(rows, counts.sum())
    seed = int(hashing.fold(self.seed, hashing.SCHEDULE))
    slot = hashing.permute(slot, int(counts.sum()), seed, block)
    source = np.searchsorted(starts, slot, side="right") - 1
    position = block * counts[source] + slot - starts[source]
    return source.astype(np.int32), position

  def rows(self, rows: np.ndarray) -> Order:
    """Returns the order of global rows int64 [B]."""
    source, position = self.locate(rows)
    length = np.asarray(self.lengths, np.int64)[source]
    epoch, index = np.divmod(position, length)
    if self.shuffle:
      for k in np.unique(source):
        at = source == k
        index[at] = hashing.permute(
          index[at],
          self.lengths[k],
          hashing.stream(self.seed, int(k)),
          epoch[at],
        )
    return Order(source, index, epoch)

  def batch(
    self, step: int, batch_size: int, rows: np.ndarray | None = None
  ) -> Order:
    """Returns the order of the batch of a step, or of some of its rows.

    Args:
      step: number of the step, from 0.
      batch_size: global.
      rows: int64 [local rows] of [0, batch_size); all by default.
    """
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    return self.rows(np.int64(step) * batch_size + rows)
