"""Masks of blocks: rectangles, contexts without targets, drawn by example."""

import jax
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.losses import block_masks

PAPER = dict(
  num_targets=4,
  target_area=(0.15, 0.2),
  target_aspect=(0.75, 1.5),
  context_area=(0.85, 1.0),
  max_context=0.5,
  min_context=10,
)


def keys(number):
  return jax.vmap(jax.random.key)(np.arange(number))


def draw_fn(grid=(16, 16), **changes):
  """Compiled function of keys."""
  return jax.jit(lambda keys: block_masks.draw(keys, grid, **PAPER | changes))


def draw(number, *args, **changes):
  return jax.device_get(draw_fn(*args, **changes)(keys(number)))


def rectangle(patches, columns):
  """(rows, columns) of a set of patches if it is a rectangle."""
  y, x = np.divmod(np.sort(patches), columns)
  height, width = np.ptp(y) + 1, np.ptp(x) + 1
  inside = {
    (i, j)
    for i in range(y.min(), y.max() + 1)
    for j in range(x.min(), x.max() + 1)
  }
  assert inside == set(zip(y.tolist(), x.tolist())) and len(y) == len(inside)
  return height, width


@pytest.mark.parametrize("grid", [(16, 16), (12, 20)])
def test_targets_are_rectangles_and_no_context_has_their_patches(grid):
  masks = draw(300, grid)
  P = grid[0] * grid[1]
  assert masks.context_BK.shape == (300, P // 2)
  assert masks.target_BNT.shape[:2] == (300, 4)
  sizes, firsts, numbers = set(), set(), []
  for i in range(300):
    blocks = [
      masks.target_BNT[i, n][masks.target_real_BNT[i, n]] for n in range(4)
    ]
    (size,) = {rectangle(block, grid[1]) for block in blocks}
    sizes.add(size)
    firsts |= {int(block[0]) for block in blocks}
    context = masks.context_BK[i][masks.context_real_BK[i]]
    assert len(set(context.tolist())) == len(context) >= 10
    assert not set(context.tolist()) & set(np.concatenate(blocks).tolist())
    numbers.append(len(context))
  areas = [h * w for h, w in sizes]
  assert min(areas) > 0.1 * P and max(areas) <= masks.target_BNT.shape[-1]
  assert max(areas) < 0.26 * P and len(sizes) > 5
  assert len(firsts) > 60
  # Some contexts are as large as allowed; the smaller ones are padded.
  assert max(numbers) == P // 2 and len(set(numbers)) > 10
  assert all(0.6 < h / w < 1.8 for h, w in sizes)
  assert any(h > w for h, w in sizes) and any(h < w for h, w in sizes)


def test_examples_are_drawn_by_their_keys_alone():
  fn = draw_fn()
  whole = jax.device_get(fn(keys(8)))
  parts = [fn(keys(8)[i : i + 1]) for i in range(8)]
  for name in whole._fields:
    joined = np.concatenate([getattr(part, name) for part in parts])
    np.testing.assert_array_equal(joined, getattr(whole, name))
  assert (whole.context_BK[0] != whole.context_BK[1]).any()


def test_a_context_with_too_few_patches_keeps_those_of_the_last_targets():
  masks = draw(200, (4, 4), min_context=5, target_area=(0.2, 0.3))
  overlaps = 0
  for i in range(200):
    context = set(masks.context_BK[i][masks.context_real_BK[i]].tolist())
    assert len(context) >= 5
    blocks = [
      set(masks.target_BNT[i, n][masks.target_real_BNT[i, n]].tolist())
      for n in range(4)
    ]
    common = [bool(context & block) for block in blocks]
    overlaps += any(common)
    assert not common[0] or common[-1]
  assert 0 < overlaps < 200


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(num_targets=0), "config.loss.num_targets: expected a whole number"),
    (dict(target_area=(0.2, 0.1)), "target_area: expected two ascending"),
    (dict(context_area=(0.5, 1.5)), "context_area: expected two ascending"),
    (dict(target_area=(0.001, 0.1)), "has none of 256 patches"),
    (dict(min_context=250), "min_context=250: a context block may have 217"),
    (dict(max_context=0.0), "config.loss.max_context: expected a number"),
  ],
)
def test_mistakes_have_their_line(changes, message):
  with pytest.raises(ConfigError, match=message):
    draw(1, **changes)
