"""Which example is row g of the run: a closed form, so any g costs the same.

The order has no state. Row g of a run (row r of step s is g = s * batch_size
+ r) is found by arithmetic alone, in constant memory: a mixture's schedule
says which source the row is drawn from and the how-manieth draw from that
source it is, and a keyed permutation says which example that draw is. Whoever
computes only some rows of a batch gets what the others would have got.

All randomness is hashing of 64-bit words; numpy's generators, whose streams
depend on how much was drawn before, have no part in it.
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
  """Rows of each source in a block, proportional to the weights.

  Shares are rounded by largest remainder. The block is 4096 rows, or as many
  as it takes for every share to be within 1% of its weight.

  Args:
    weights: positive; any sum.

  Returns:
    int64 [sources]; the sum is the size of a block, a power of two.

  Raises:
    ConfigError: a source would have to wait for more than 2**24 rows.
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
  """What rows of a batch are made of.

  Attributes:
    source: int32 [B], which source of the mixture.
    index: int64 [B], which example of that source.
    epoch: int64 [B], how many times that source had been read through.
  """

  source: np.ndarray
  index: np.ndarray  # type: ignore[assignment]  # Not tuple.index.
  epoch: np.ndarray


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The endless order of a mixture of sources.

  Attributes:
    lengths: examples of each source.
    weights: relative number of rows drawn from each source, which is kept
      exactly in every block of rows.
    seed: of permutations and of the order within blocks.
    shuffle: False leaves each source's epochs in the source's order (of a
      mixture, up to the shuffled order within a block).
  """

  lengths: tuple[int, ...]
  weights: tuple[float, ...] = (1.0,)
  seed: int = 0
  shuffle: bool = True
  _counts: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)
  _starts: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    if len(self.lengths) != len(self.weights):
      raise ValueError("Schedule: one weight for each source.")
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
    """(source int32 [B], position int64 [B]) of global rows int64 [B].

    The position counts the rows drawn from that source before this one.
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
    """The order of global rows int64 [B]; only these are computed."""
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
    """The order of the batch of a step, or of some of its rows only."""
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    return self.rows(np.int64(step) * batch_size + rows)
