"""The order of examples: exact shares, whole epochs, random access."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.inputs import order

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


# Weights that change.


@st.composite
def _mixtures(draw):
  """(weights, changes): up to five stages of up to 10,000 rows each."""
  num_sources = draw(st.integers(2, 4))
  weight = st.sampled_from([0.0, 0.02, 0.3, 1.0, 7.0])
  weights = st.tuples(*[weight] * num_sources).filter(any)
  stages, row = [], 0
  for _ in range(draw(st.integers(1, 5))):
    stages.append((row, draw(weights)))
    row += draw(st.sampled_from([1, 3, 16, 1000, 4096, 10_000]))
  used = [any(values) for values in zip(*(w for _, w in stages))]
  if not all(used):
    stages.append((row, tuple(1.0 - u for u in used)))
  return stages[0][1], tuple(stages[1:])


@hypothesis.settings(max_examples=20)
@hypothesis.given(_mixtures(), st.data())
def test_counts_and_places_equal_those_of_a_plain_simulation(mixture, data):
  weights, changes = mixture
  schedule = order.Schedule((50,) * len(weights), weights, 7, True, changes)
  stages = [(0, weights), *changes]
  last = stages[-1][0] + 6000
  source, position = schedule.locate(np.arange(last))

  # The simulation draws one row after the other.
  drawn = source[:, None] == np.arange(len(weights))
  counts = np.concatenate([0 * drawn[:1], np.cumsum(drawn, axis=0)])
  expected = np.zeros(len(weights))
  for (first, values), (end, _) in zip(stages, changes):
    share = np.asarray(values) / np.sum(values)
    expected += (end - first) * share
    assert not drawn[first:end, share == 0].any()
    # Rounding does not add up over stages; a block may be 1% off.
    assert (abs(counts[end] - expected) <= 0.01 * expected + 3).all()
    for k in range(len(values)):  # Without gaps at the end of each stage.
      own = position[:end][source[:end] == k]
      np.testing.assert_array_equal(np.sort(own), np.arange(len(own)))

  rows = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=5))
  for row in [*rows, *(first for first, _ in stages)]:
    np.testing.assert_array_equal(schedule.counts(row), counts[row])
  # Any rows, in any order, without the ones before.
  rows = np.asarray(rows) % last
  for got, want in zip(schedule.locate(rows), (source, position)):
    np.testing.assert_array_equal(got, want[rows])


def test_rounding_of_many_short_stages_does_not_add_up():
  weights = [(1, 1, 1 + i / 300) for i in range(300)]
  changes = tuple((7 * i, values) for i, values in enumerate(weights))
  schedule = order.Schedule((9, 9, 9), weights[0], changes=changes[1:])
  expected = np.zeros(3)
  for i, values in enumerate(weights):
    np.testing.assert_array_less(abs(schedule.counts(7 * i) - expected), 1.01)
    expected += 7 * np.asarray(values) / np.sum(values)


def test_late_rows_of_changed_weights_cost_no_replay():
  late = 10**12 + 5
  changes = ((10**6 + 1, (1.0, 0.0)), (late, (1.0, 3.0)))
  schedule = order.Schedule((10, 20), (0.0, 1.0), changes=changes)
  assert schedule.counts(late).tolist() == [late - 10**6 - 1, 10**6 + 1]
  rows = np.arange(late - 3, late + 4096)
  source, position = schedule.locate(rows)
  assert source[:3].tolist() == [0, 0, 0]
  assert np.bincount(source[3:]).tolist() == [1024, 3072]
  assert position[3:][source[3:] == 1].min() == 10**6 + 1
  end = schedule.counts(late + 4096) - schedule.counts(late)
  assert end.tolist() == [1024, 3072]
