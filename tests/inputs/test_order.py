"""The order of examples: exact shares, whole epochs, random access."""

import numpy as np
import pytest

from bigtrain.inputs import order
from bigtrain.settings import ConfigError, DataError

SCHEDULED = [
  [1, 0, 1, 1, 1, 0],
  [14, 3, 3, 16, 4, 5],
  [121, 50, 125, 40, 106, 27],
]


def test_the_order_of_saved_runs_does_not_change():
  """If this fails, resumed runs see other data: raise the manifest version."""
  schedule = order.Schedule((10, 20), (1, 3), seed=42)
  rows = schedule.rows(np.arange(6))
  assert [field.tolist() for field in rows] == SCHEDULED


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
  if len(weights) > 2:  # Every count is within one row of its share.
    assert abs(counts - share * counts.sum()).max() < 1


def test_a_weight_too_small_to_schedule_is_an_error():
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
      # The positions of a source have no gaps, also across blocks.
      np.testing.assert_array_equal(
        np.sort(position[source == k]), block * count + np.arange(count)
      )
  first = schedule.locate(np.arange(4096))[0]
  second = schedule.locate(4096 + np.arange(4096))[0]
  assert (first != second).any()


def test_each_epoch_of_each_source_has_each_example_once():
  schedule = order.Schedule((30, 41), (1, 2), seed=3)
  rows = schedule.rows(np.arange(3 * 4096))
  for k, length in enumerate(schedule.lengths):
    own = rows.source == k
    index, epoch = rows.index[own], rows.epoch[own]
    for e in range(epoch.max() - 5):  # The last epochs are incomplete.
      seen = np.sort(index[epoch == e])
      np.testing.assert_array_equal(seen, np.arange(length))


@pytest.mark.parametrize("lengths, weights", [((37,), (1,)), ((9, 8), (1, 3))])
def test_any_row_can_be_computed_alone(lengths, weights):
  schedule = order.Schedule(lengths, weights, seed=4)
  whole = schedule.rows(np.arange(8 * 16))
  for step in (0, 3, 7):
    batch = schedule.batch(step, 16)
    for got, want in zip(batch, whole):
      np.testing.assert_array_equal(got, want[step * 16 : step * 16 + 16])
    some = np.asarray([2, 3, 11])
    for got, want in zip(schedule.batch(step, 16, some), batch):
      np.testing.assert_array_equal(got, want[some])


def test_without_shuffling_sources_are_read_in_order():
  rows = order.Schedule((5,), shuffle=False).batch(1, 4)
  assert rows.index.tolist() == [4, 0, 1, 2]
  assert rows.epoch.tolist() == [0, 1, 1, 1]
  assert [field.dtype for field in rows] == [np.int32, np.int64, np.int64]


def test_sources_of_equal_length_have_different_permutations():
  schedule = order.Schedule((64, 64), (1, 1), seed=0)
  rows = schedule.rows(np.arange(4096))
  orders = []
  for k in range(2):
    own = (rows.source == k) & (rows.epoch == 0)
    _, position = schedule.locate(np.arange(4096))
    orders.append(rows.index[own][np.argsort(position[own])])
  assert (orders[0] == orders[1]).sum() < 10


def test_errors_of_schedules():
  with pytest.raises(DataError, match="source 1 of the mixture is empty"):
    order.Schedule((5, 0), (1, 1))
  for weight in (0, -1, float("inf"), float("nan")):
    with pytest.raises(ConfigError, match="positive weight"):
      order.Schedule((5, 5), (1, weight))
