"""First-fit decreasing, compared with a loop over items."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from bigtrain.data.formats import packing


def reference(sizes, capacity):
  """Returns the items of each bin, placed one by one as in the definition."""
  rooms, bins = [], []
  for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
    fits = [b for b, room in enumerate(rooms) if room >= sizes[item]]
    b = fits[0] if fits else len(rooms)
    if not fits:
      rooms.append(capacity)
      bins.append([])
    rooms[b] -= sizes[item]
    bins[b].append(item)
  return [sorted(items) for items in bins]


@hypothesis.given(
  st.lists(st.integers(1, 20), min_size=1, max_size=200), st.integers(20, 31)
)
@hypothesis.example([20] * 3 + [7] * 10 + [3] * 9 + [1] * 50, 20)
def test_bins_match_the_reference(sizes, capacity):
  items, first = packing.first_fit(np.asarray(sizes), capacity)
  bins = [items[a:b].tolist() for a, b in zip(first[:-1], first[1:])]
  assert bins == reference(sizes, capacity)


def test_a_million_documents_fill_their_windows():
  rng = np.random.default_rng(0)
  sizes = np.clip(rng.lognormal(6, 1, 1_000_000), 1, 2048).astype(np.int64)
  items, first = packing.first_fit(sizes, 2048)
  assert np.array_equal(np.sort(items), np.arange(len(sizes)))
  filled = np.add.reduceat(sizes[items], first[:-1])
  assert filled.max() <= 2048
  assert filled.mean() > 0.999 * 2048


def test_invalid_sizes_and_no_sizes():
  for sizes in ([0], [5]):
    with pytest.raises(ValueError):
      packing.first_fit(np.asarray(sizes), 4)
  items, first = packing.first_fit(np.zeros(0, np.int64), 4)
  assert not items.size and first.tolist() == [0]
