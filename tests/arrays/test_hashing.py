"""Hashing: permutations and uniform numbers keep their laws and values."""

import itertools

import numpy as np
import pytest

from bigtrain.arrays import hashing

PERMUTED = [707, 334, 428, 634, 845, 437, 675, 231]
PERMUTED_LARGE = [708612, 610823, 704699, 603576, 139145, 579185, 50141, 382172]
UNIFORM_BITS = [[12490, 6140052], [11255652, 11604885]]

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 255, 256, 257, 1000, 4095, 4097]


@pytest.mark.parametrize("n", [*SIZES, 65535, 65536, 65537, 100003])
def test_permute_is_a_bijection(n):
  for seed, epoch in [(0, 0), (0, 1), (-7, 3), (2**70, 10**12)]:
    result = hashing.permute(np.arange(n), n, seed, epoch)
    assert result.dtype == np.int64
    np.testing.assert_array_equal(np.sort(result), np.arange(n))


def test_permute_of_huge_sets_gives_distinct_results_in_range():
  for n in (2**32 + 1, 2**53 - 1, 2**62):
    index = np.concatenate([np.arange(5000), n - 1 - np.arange(5000)])
    result = hashing.permute(index, n, seed=1)
    assert result.min() >= 0
    assert result.max() < n
    assert len(np.unique(result)) == len(index)


def test_permute_depends_on_seed_and_epoch_and_is_deterministic():
  base = hashing.permute(np.arange(1000), 1000, 0, 0)
  np.testing.assert_array_equal(
    base, hashing.permute(np.arange(1000), 1000, 0, 0)
  )
  for seed, epoch in [(0, 1), (1, 0), (1, 1), (0, 2**40)]:
    other = hashing.permute(np.arange(1000), 1000, seed, epoch)
    # A random permutation has one fixed point on average.
    assert (base == other).sum() < 10


def test_permute_takes_one_epoch_per_index():
  index, epoch = np.arange(600) % 77, np.arange(600) // 77
  together = hashing.permute(index, 77, 3, epoch)
  alone = [
    int(hashing.permute(i[None], 77, 3, int(e))[0])
    for i, e in zip(index, epoch)
  ]
  np.testing.assert_array_equal(together, alone)


def test_permute_looks_random():
  n = 1 << 16
  for epoch in range(4):
    p = hashing.permute(np.arange(n), n, 5, epoch).astype(float)
    for lag in (1, 2, 3, 16, 256, 257):
      # The standard deviation of a correlation of n pairs is 1 / sqrt(n).
      correlation = np.corrcoef(p[:-lag], p[lag:])[0, 1]
      assert abs(correlation) < 5 / np.sqrt(n), (epoch, lag)
    # 64 ranges of the index x 64 ranges of the result: 16 expected per cell.
    cells = np.histogram2d(np.arange(n), p, bins=64)[0]
    chi_square = ((cells - 16) ** 2 / 16).sum()
    degrees = 63 * 63
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees), epoch


def test_all_permutations_of_four_are_equally_likely():
  draws = 24 * 500
  epoch = np.arange(draws)
  columns = [hashing.permute(np.full(draws, i), 4, 0, epoch) for i in range(4)]
  permutations, counts = np.unique(
    np.stack(columns, 1), axis=0, return_counts=True
  )
  assert len(permutations) == 24
  chi_square = ((counts - 500) ** 2 / 500).sum()
  assert chi_square < 23 + 5 * np.sqrt(2 * 23)


def test_permute_refuses_indices_out_of_range():
  for bad in ([5], [-1]):
    with pytest.raises(ValueError, match=r"\[0, 5\)"):
      hashing.permute(np.asarray(bad), 5, 0)


def test_values_of_saved_runs_do_not_change():
  """If this fails, resumed runs see other data: raise the manifest version."""
  assert hashing.permute(np.arange(8), 1000, 42, 3).tolist() == PERMUTED
  assert hashing.permute(np.arange(8), 10**6, 42, 3).tolist() == PERMUTED_LARGE
  bits = hashing.uniforms(42, 3, np.asarray([0, 17]), 2) * 2**24
  assert bits.astype(int).tolist() == UNIFORM_BITS


def test_uniforms_are_uniform_and_independent():
  n = 20000
  index = np.arange(n)
  base = hashing.uniforms(0, 0, index, 3)
  assert base.dtype == np.float32
  assert base.shape == (n, 3)
  assert base.min() >= 0
  assert base.max() < 1
  counts = np.histogram(base[:, 0], bins=50, range=(0, 1))[0]
  chi_square = ((counts - n / 50) ** 2 / (n / 50)).sum()
  assert chi_square < 49 + 5 * np.sqrt(2 * 49)
  others = {
    "draw 1": base[:, 1],
    "draw 2": base[:, 2],
    "epoch": hashing.uniforms(0, 1, index, 1)[:, 0],
    "seed": hashing.uniforms(1, 0, index, 1)[:, 0],
    "next index": hashing.uniforms(0, 0, index + 1, 1)[:, 0],
    "swapped": hashing.uniforms(0, index, np.zeros(n, int), 1)[:, 0],
    "permutation": hashing.permute(index, n, 0, 0) / n,
  }
  for name, other in others.items():
    correlation = np.corrcoef(base[:, 0], other)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(n), name


def test_uniforms_do_not_depend_on_number_of_draws_or_rows():
  index, epoch = np.asarray([5, 7, 11]), np.asarray([0, 1, 2])
  all_draws = hashing.uniforms(9, epoch, index, 6)
  np.testing.assert_array_equal(
    hashing.uniforms(9, epoch, index, 2), all_draws[:, :2]
  )
  np.testing.assert_array_equal(
    hashing.uniforms(9, 1, index[1:2], 6), all_draws[1:2]
  )
  assert hashing.uniforms(9, epoch, index, 0).shape == (3, 0)


def test_replacements_differ_and_are_in_range():
  indices = [
    hashing.replacement(0, epoch, index, attempt, 1000)
    for epoch, index, attempt in itertools.product(range(4), range(5), range(5))
  ]
  assert 0 <= min(indices) <= max(indices) < 1000
  assert len(set(indices)) > 90
