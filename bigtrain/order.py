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

from bigtrain.settings import ConfigError, DataError

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: splitmix64's increment.
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
# One half of the state changes in each round. Four are enough for large n;
# with halves of two or three values, all permutations are equally likely only
# after sixteen (measured for n = 5 and 6: the counts of eight vary by 15%).
_NUM_ROUNDS = 8
_NUM_ROUNDS_SMALL = 16
_SMALL = 4096
# Streams of one seed that must not be correlated.
_PERMUTE, _UNIFORM, _SCHEDULE, _REPLACE = range(4)

_MIN_BLOCK = 4096
_MAX_BLOCK = 1 << 24


def _words(x: np.ndarray | int) -> np.ndarray:
  """Any integers as 64-bit words, negative ones in two's complement."""
  if isinstance(x, int):
    return np.asarray(x & _MASK, np.uint64)
  return np.asarray(x).astype(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
  """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
  x = (x ^ (x >> np.uint64(30))) * _MIX_1
  x = (x ^ (x >> np.uint64(27))) * _MIX_2
  return x ^ (x >> np.uint64(31))


def fold(key: np.ndarray | int, data: np.ndarray | int) -> np.ndarray:
  """A new 64-bit key for each pair of key and data; both broadcast."""
  with np.errstate(over="ignore"):  # Wrapping around is what hashing does.
    return _mix(_words(key) ^ _mix(_words(data) + np.uint64(_GOLDEN)))


def permute(
  index: np.ndarray, n: int, seed: int, epoch: np.ndarray | int = 0
) -> np.ndarray:
  """Applies a pseudo-random permutation of [0, n) to `index`.

  A Feistel network over pairs (l, r) of mixed radix, l * b + r with a * b just
  above n, whose rare results of n and more are permuted again until they are
  below n (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

  Args:
    index: int64 [B], values in [0, n).
    n: size of the set, up to 2**62.
    seed: any integer.
    epoch: each (seed, epoch) has a permutation of its own; int or int64 [B].

  Returns:
    int64 [B], values in [0, n).

  Raises:
    ValueError: `index` has values outside of [0, n).
  """
  index = np.asarray(index, np.int64)
  if index.size and (index.min() < 0 or index.max() >= n):
    raise ValueError(f"permute: expected indices in [0, {n}).")
  key = np.broadcast_to(fold(fold(seed, _PERMUTE), epoch), index.shape)
  return _walk(index.astype(np.uint64), n, key).astype(np.int64)


def _walk(x: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
  a = math.isqrt(n - 1) + 1 if n else 1
  b = max(1, -(-n // a))
  x = _feistel(x, a, b, key)
  outside = np.flatnonzero(x >= np.uint64(n))
  while outside.size:
    x[outside] = _feistel(x[outside], a, b, key[outside])
    outside = outside[x[outside] >= np.uint64(n)]
  return x


def _feistel(x: np.ndarray, a: int, b: int, key: np.ndarray) -> np.ndarray:
  sizes = (np.uint64(a), np.uint64(b))
  halves = list(np.divmod(x, sizes[1]))
  half_word = np.uint64(32)
  for i in range(_NUM_ROUNDS_SMALL if a * b < _SMALL else _NUM_ROUNDS):
    to, other = i % 2, 1 - i % 2
    # The round's constant is added to the row's key instead of hashed with
    # it: two multiplications a round do, since the key is a hash already.
    h = key + np.uint64((i + 1) * _GOLDEN & _MASK)
    h += halves[other]
    h ^= h >> half_word
    h *= _MIX_1
    h ^= h >> half_word
    h *= _MIX_2
    h >>= half_word
    # The high half times the size, shifted back: a number below the size.
    h *= sizes[to]
    h >>= half_word
    h += halves[to]
    h -= (h >= sizes[to]) * sizes[to]
    halves[to] = h
  return halves[0] * sizes[1] + halves[1]


def uniforms(
  seed: int, epoch: np.ndarray | int, index: np.ndarray, draws: int
) -> np.ndarray:
  """Uniform random numbers that depend on nothing but the arguments.

  Args:
    seed: any integer.
    epoch: int or int64 [B].
    index: int64 [B], the example.
    draws: how many numbers each example gets.

  Returns:
    float32 [B, draws] in [0, 1), multiples of 2**-24; number j is the same
    whatever `draws` is.
  """
  index = np.asarray(index, np.int64)
  key = fold(fold(fold(seed, _UNIFORM), epoch), index)
  steps = np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
  bits = _mix(np.broadcast_to(key, index.shape)[:, None] + steps)
  # 24 bits are what a float32 holds exactly: 1.0 is never reached.
  return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def replacement(seed: int, epoch: int, index: int, attempt: int, n: int) -> int:
  """The example to take, on this attempt, for one that cannot be read."""
  key = fold(fold(fold(seed, _REPLACE), epoch), index)
  return int(fold(key, attempt)) % n


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


def stream(seed: int, source: int) -> int:
  """The seed of one source of a mixture, so that no two are shuffled alike."""
  return int(fold(seed, source))


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
    seed = int(fold(self.seed, _SCHEDULE))
    slot = permute(slot, int(counts.sum()), seed, block)
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
        index[at] = permute(
          index[at], self.lengths[k], stream(self.seed, int(k)), epoch[at]
        )
    return Order(source, index, epoch)

  def batch(
    self, step: int, batch_size: int, rows: np.ndarray | None = None
  ) -> Order:
    """The order of the batch of a step, or of some of its rows only."""
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    return self.rows(np.int64(step) * batch_size + rows)
