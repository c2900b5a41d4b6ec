"""The order is a closed form with laws; they are what is tested here."""

import itertools

import numpy as np
import pytest

from bigtrain import hashing
from bigtrain.inputs import order
from bigtrain.settings import ConfigError, DataError

PERMUTED = [707, 334, 428, 634, 845, 437, 675, 231]
PERMUTED_LARGE = [708612, 610823, 704699, 603576, 139145, 579185, 50141, 382172]
UNIFORM_BITS = [[12490, 6140052], [11255652, 11604885]]
SCHEDULED = [
  [1, 0, 1, 1, 1, 0],
  [14, 3, 3, 16, 4, 5],
  [121, 50, 125, 40, 106, 27],
]

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 255, 256, 257, 1000, 4095, 4097]


@pytest.mark.parametrize("n", [*SIZES, 65535, 65536, 65537, 100003])
def test_permute_is_a_bijection(n):
  for seed, epoch in [(0, 0), (0, 1), (-7, 3), (2**70, 10**12)]:
    result = hashing.permute(np.arange(n), n, seed, epoch)
    assert result.dtype == np.int64
    np.testing.assert_array_equal(np.sort(result), np.arange(n))


def test_permute_of_huge_sets_stays_inside_and_distinct():
  for n in (2**32 + 1, 2**53 - 1, 2**62):
    index = np.concatenate([np.arange(5000), n - 1 - np.arange(5000)])
    result = hashing.permute(index, n, seed=1)
    assert result.min() >= 0
    assert result.max() < n
    assert len(np.unique(result)) == len(index)


def test_permute_differs_by_seed_and_epoch_and_repeats():
  base = hashing.permute(np.arange(1000), 1000, 0, 0)
  np.testing.assert_array_equal(
    base, hashing.permute(np.arange(1000), 1000, 0, 0)
  )
  for seed, epoch in [(0, 1), (1, 0), (1, 1), (0, 2**40)]:
    other = hashing.permute(np.arange(1000), 1000, seed, epoch)
    # Of random permutations, about one value stays where it is.
    assert (base == other).sum() < 10


def test_permute_takes_an_epoch_for_each_index():
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
    # 64 runs of the order x 64 ranges of the result: each cell expects 16.
    cells = np.histogram2d(np.arange(n), p, bins=64)[0]
    chi_square = ((cells - 16) ** 2 / 16).sum()
    degrees = 63 * 63
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees), epoch


def test_all_permutations_of_few_are_equally_likely():
  draws = 24 * 500
  epoch = np.arange(draws)
  columns = [hashing.permute(np.full(draws, i), 4, 0, epoch) for i in range(4)]
  found, counts = np.unique(np.stack(columns, 1), axis=0, return_counts=True)
  assert len(found) == 24
  chi_square = ((counts - 500) ** 2 / 500).sum()
  assert chi_square < 23 + 5 * np.sqrt(2 * 23)


def test_permute_refuses_what_is_outside():
  for bad in ([5], [-1]):
    with pytest.raises(ValueError, match=r"\[0, 5\)"):
      hashing.permute(np.asarray(bad), 5, 0)


def test_the_order_of_saved_runs_does_not_change():
  """If this fails, resumed runs see other data: raise the manifest version."""
  assert hashing.permute(np.arange(8), 1000, 42, 3).tolist() == PERMUTED
  assert hashing.permute(np.arange(8), 10**6, 42, 3).tolist() == PERMUTED_LARGE
  bits = hashing.uniforms(42, 3, np.asarray([0, 17]), 2) * 2**24
  assert bits.astype(int).tolist() == UNIFORM_BITS
  schedule = order.Schedule((10, 20), (1, 3), seed=42)
  found = schedule.rows(np.arange(6))
  assert [f.tolist() for f in found] == SCHEDULED


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


def test_uniforms_do_not_depend_on_how_many_or_which_rows():
  index, epoch = np.asarray([5, 7, 11]), np.asarray([0, 1, 2])
  all_of_it = hashing.uniforms(9, epoch, index, 6)
  np.testing.assert_array_equal(
    hashing.uniforms(9, epoch, index, 2), all_of_it[:, :2]
  )
  np.testing.assert_array_equal(
    hashing.uniforms(9, 1, index[1:2], 6), all_of_it[1:2]
  )
  assert hashing.uniforms(9, epoch, index, 0).shape == (3, 0)


@pytest.mark.parametrize(
  "weights, block",
  [((1, 1), 4096), ((0.7, 0.2, 0.1), 4096), ((1, 1e-4), None)],
)
def test_block_counts_are_proportional(weights, block):
  counts = order.block_counts(weights)
  share = np.asarray(weights) / np.sum(weights)
  assert block is None or counts.sum() == block
  assert counts.sum() & (counts.sum() - 1) == 0
  np.testing.assert_allclose(counts / counts.sum(), share, rtol=0.01)
  if len(weights) > 2:  # No count is off by a row or more.
    assert abs(counts - share * counts.sum()).max() < 1


def test_weight_too_small_to_be_scheduled():
  with pytest.raises(ConfigError, match=r"1e-09.*too small"):
    order.block_counts((1, 1e-9))


def test_every_block_of_a_mixture_has_its_exact_share():
  schedule = order.Schedule((50, 70, 90), (0.5, 0.3, 0.2), seed=1)
  counts = order.block_counts((0.5, 0.3, 0.2))
  for block in (0, 1, 10**9):
    rows = block * 4096 + np.arange(4096)
    source, position = schedule.locate(rows)
    np.testing.assert_array_equal(np.bincount(source), counts)
    for k, count in enumerate(counts):
      # A source's draws are numbered without a gap, from block to block.
      np.testing.assert_array_equal(
        np.sort(position[source == k]), block * count + np.arange(count)
      )
  first = schedule.locate(np.arange(4096))[0]
  second = schedule.locate(4096 + np.arange(4096))[0]
  assert (first != second).any()


def test_each_epoch_of_each_source_has_each_example_once():
  schedule = order.Schedule((30, 41), (1, 2), seed=3)
  found = schedule.rows(np.arange(3 * 4096))
  for k, length in enumerate(schedule.lengths):
    own = found.source == k
    index, epoch = found.index[own], found.epoch[own]
    for e in range(epoch.max() - 5):  # The last few are cut by the range.
      seen = np.sort(index[epoch == e])
      np.testing.assert_array_equal(seen, np.arange(length))


@pytest.mark.parametrize("lengths, weights", [((37,), (1,)), ((9, 8), (1, 3))])
def test_any_row_alone_is_as_in_the_whole(lengths, weights):
  schedule = order.Schedule(lengths, weights, seed=4)
  whole = schedule.rows(np.arange(8 * 16))
  for step in (0, 3, 7):
    batch = schedule.batch(step, 16)
    for got, want in zip(batch, whole):
      np.testing.assert_array_equal(got, want[step * 16 : step * 16 + 16])
    some = np.asarray([2, 3, 11])
    for got, want in zip(schedule.batch(step, 16, some), batch):
      np.testing.assert_array_equal(got, want[some])


def test_order_without_shuffling():
  found = order.Schedule((5,), shuffle=False).batch(1, 4)
  assert found.index.tolist() == [4, 0, 1, 2]
  assert found.epoch.tolist() == [0, 1, 1, 1]
  assert [f.dtype for f in found] == [np.int32, np.int64, np.int64]


def test_sources_of_one_length_are_shuffled_apart():
  schedule = order.Schedule((64, 64), (1, 1), seed=0)
  found = schedule.rows(np.arange(4096))
  orders = []
  for k in range(2):
    own = (found.source == k) & (found.epoch == 0)
    _, position = schedule.locate(np.arange(4096))
    orders.append(found.index[own][np.argsort(position[own])])
  assert (orders[0] == orders[1]).sum() < 10


def test_mistakes_in_mixtures():
  with pytest.raises(DataError, match="source 1 of the mixture is empty"):
    order.Schedule((5, 0), (1, 1))
  for weight in (0, -1, float("inf"), float("nan")):
    with pytest.raises(ConfigError, match="positive weight"):
      order.Schedule((5, 5), (1, weight))


def test_replacements_differ_and_are_in_range():
  found = [
    hashing.replacement(0, epoch, index, attempt, 1000)
    for epoch, index, attempt in itertools.product(range(4), range(5), range(5))
  ]
  assert 0 <= min(found) <= max(found) < 1000
  assert len(set(found)) > 90
