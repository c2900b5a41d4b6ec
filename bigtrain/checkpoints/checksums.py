"""Checksums of arrays that do not depend on how the arrays are split.

The elements of an array, in row-major order, are read as words of 32 bits
(smaller elements are one word each). The checksum consists of two sums modulo
2**32: the sum of the words, and the sum of each word times its position, from
1. So the sums of an array are the totals over its parts: each device sums its
own shard (device_checksums.py), and a reader sums the parts that it reads, in
any division. This module does not use jax.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

# (sum of words, sum of words times positions), each modulo 2**32.
Sums = tuple[int, int]
Place = tuple[slice, ...]

_MODULUS = 2**32
# Long vectors are summed as matrices with rows of this length, so that
# positions times words do not overflow 64 bits.
_ROW = 4096


def add(sums: Iterable[Sums]) -> Sums:
  """The sums of an array, added up from the sums of its parts."""
  total, weighted = 0, 0
  for one in sums:
    total += one[0]
    weighted += one[1]
  return total % _MODULUS, weighted % _MODULUS


def as_text(sums: Sums) -> str:
  """The checksum as 16 hexadecimal digits."""
  return f"{sums[0]:08x}{sums[1]:08x}"


def of_part(data: np.ndarray, place: Place, shape: Sequence[int]) -> Sums:
  """Sums of a part of an array.

  Args:
    data: the part.
    place: its index in the array.
    shape: shape of the whole array.
  """
  items = np.ascontiguousarray(data).reshape(*data.shape, 1)
  words = items.view(f"u{min(data.dtype.itemsize, 4)}")
  starts = [*(s.start for s in place), 0]
  sizes = [*shape, words.shape[-1]]
  strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
  # Position of the first word of the part, from 1.
  first = 1 + sum(start * stride for start, stride in zip(starts, strides))
  total, weighted = _weighted(words, strides) if words.size else (0, 0)
  return total, (first * total + weighted) % _MODULUS


def _weighted(words: np.ndarray, strides: Sequence[int]) -> Sums:
  """Sums of words, and of words times positions, from 0 in the part.

  A position is the sum over dimensions of index times stride. So the weighted
  sum splits into one term for the first dimension and one for the others. Each
  term needs only sums of the words over the remaining dimensions.
  """
  if words.ndim == 1:
    return _of_vector(words, strides[0])
  along = words.reshape(len(words), -1).sum(axis=1, dtype=np.uint32)
  across = words.sum(axis=0, dtype=np.uint32)
  total, weighted = _weighted(across, strides[1:])
  return total, (weighted + _of_vector(along, strides[0])[1]) % _MODULUS


def _of_vector(words: np.ndarray, stride: int) -> Sums:
  if len(words) > 2 * _ROW:
    whole = len(words) // _ROW * _ROW
    total, weighted = _weighted(words[:whole].reshape(-1, _ROW), (_ROW, 1))
    last, more = _of_vector(words[whole:], 1)
    weighted += whole * last + more
    return (total + last) % _MODULUS, weighted * stride % _MODULUS
  positions = np.arange(len(words), dtype=np.uint64)
  total = int(words.sum(dtype=np.uint64))
  weighted = int((positions * words).sum(dtype=np.uint64))
  return total % _MODULUS, weighted * stride % _MODULUS


def bounds(index: Place, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
  """(start, stop) of an index in each dimension of an array of `shape`."""
  return tuple(s.indices(n)[:2] for s, n in zip(index, shape))


def explicit(index: Place, shape: Sequence[int]) -> Place:
  """An index without None, as slices of numbers."""
  return tuple(slice(*each) for each in bounds(index, shape))
