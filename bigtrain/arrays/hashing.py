"""Permutations and random numbers without state, by hashing.

Each result depends only on the arguments. Draws from numpy's generators would
also depend on the draws before them.
"""

import math

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: splitmix64's increment.
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

# Rounds of the Feistel network; each changes one half of the state. Four are
# enough for large n. If the halves have only two or three values, it takes
# sixteen rounds until all permutations are equally likely (measured for n = 5
# and 6: after eight rounds, counts vary by 15%).
_NUM_ROUNDS = 8
_NUM_ROUNDS_SMALL = 16
_SMALL = 4096

# Streams of one seed that must not be correlated.
_PERMUTE, _UNIFORM, SCHEDULE, _REPLACE = range(4)


def _words(x: np.ndarray | int) -> np.ndarray:
  """Converts integers to 64-bit words, negative ones to two's complement."""
  if isinstance(x, int):
    return np.asarray(x & _MASK, np.uint64)
  return np.asarray(x).astype(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
  """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
  x = (x ^ (x >> np.uint64(30))) * _MIX_1
  x = (x ^ (x >> np.uint64(27))) * _MIX_2
  return x ^ (x >> np.uint64(31))


def fold(key: np.ndarray | int, data: np.ndarray | int) -> np.ndarray:
  """Returns a new 64-bit key for each pair of key and data; both broadcast."""
  with np.errstate(over="ignore"):  # Hashing relies on wrap-around.
    return _mix(_words(key) ^ _mix(_words(data) + np.uint64(_GOLDEN)))


def permute(
  index: np.ndarray, n: int, seed: int, epoch: np.ndarray | int = 0
) -> np.ndarray:
  """Applies a pseudo-random permutation of [0, n) to `index`, int64 [B].

  Each (seed, epoch) has a different permutation; n is at most 2**62. It is a
  Feistel network over mixed-radix pairs (l, r), with index l * b + r and a * b
  just above n. Results of n or more are permuted again until they fall below n
  (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
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
    # The key is already a hash, so adding the round's constant to it is enough
    # and two multiplications per round suffice.
    h = key + np.uint64((i + 1) * _GOLDEN & _MASK)
    h += halves[other]
    h ^= h >> half_word
    h *= _MIX_1
    h ^= h >> half_word
    h *= _MIX_2
    h >>= half_word
    # Maps the high 32 bits to [0, size) by multiplying and shifting.
    h *= sizes[to]
    h >>= half_word
    h += halves[to]
    h -= (h >= sizes[to]) * sizes[to]
    halves[to] = h
  return halves[0] * sizes[1] + halves[1]


def uniforms(
  seed: int, epoch: np.ndarray | int, index: np.ndarray, draws: int
) -> np.ndarray:
  """Returns uniform numbers in [0, 1), float32 [B, draws], multiples of 2**-24.

  Number j of example `index`, int64 [B], does not depend on `draws`.
  """
  index = np.asarray(index, np.int64)
  key = fold(fold(fold(seed, _UNIFORM), epoch), index)
  steps = np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
  bits = _mix(np.broadcast_to(key, index.shape)[:, None] + steps)
  # A float32 holds 24 bits exactly, so no value rounds up to 1.0.
  return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def replacement(seed: int, epoch: int, index: int, attempt: int, n: int) -> int:
  """Returns the example in [0, n) that replaces an unusable one."""
  key = fold(fold(fold(seed, _REPLACE), epoch), index)
  return int(fold(key, attempt)) % n


def stream(seed: int, source: int) -> int:
  """Returns the seed of one source, so that sources differ in their order."""
  return int(fold(seed, source))
