"""Rectangles of patches to predict, and the context to predict them from.

I-JEPA's masks (https://arxiv.org/abs/2301.08243): some target blocks, and a
large context block without the targets' patches. They are drawn from the key of
each example, so they depend only on the step and the example.

Legend: B batch, P patches of a grid, N target blocks, T patches of the largest
target, K patches of the largest context.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.config.errors import ConfigError, check_number


class Masks(NamedTuple):
  """Numbers of patches, row by row. Where "real" is False, they are padding.

  The padding of a target repeats its first patch.
  """

  context_BK: jax.Array  # int
  context_real_BK: jax.Array  # bool
  target_BNT: jax.Array  # int
  target_real_BNT: jax.Array  # bool


def draw(
  keys_B: jax.Array,
  grid: tuple[int, int],
  *,
  num_targets: int,
  target_area: Sequence[float],
  target_aspect: Sequence[float],
  context_area: Sequence[float],
  max_context: float,
  min_context: int,
) -> Masks:
  """Draws the masks of each example.

  Args:
    keys_B: key of each example.
    grid: rows and columns of patches.
    num_targets: N. The targets of an image have the same size.
    target_area: smallest and largest share of the patches in a target.
    target_aspect: smallest and largest ratio of a target's height and width.
    context_area: the same for the context block, a square, before the targets'
      patches are removed from it.
    max_context: largest share of the patches in a context. Random patches are
      removed from a larger one.
    min_context: smallest number of patches in a context. If fewer would remain,
      it keeps the patches of the last target, or of the last few.
  """
  P = math.prod(grid)
  _check(num_targets, target_area, context_area, max_context, min_context, P)
  if len(target_aspect) != 2 or not 0 < target_aspect[0] <= target_aspect[1]:
    raise ConfigError(
      "config.loss.target_aspect: expected two ascending numbers above 0, got "
      f"{target_aspect!r}."
    )
  K = max(int(max_context * P), min_context)
  T = _largest(grid, target_area, target_aspect)

  def draw_one(key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, 5)
    size = _size(keys[0], grid, target_area, target_aspect)
    corners_N2 = _corners(keys[1], grid, size, num_targets)
    context_size = _size(keys[2], grid, context_area, (1.0, 1.0))
    (context_corner_2,) = _corners(keys[3], grid, context_size, 1)
    in_context_P = _inside(grid, context_corner_2, context_size)

    # Without the patches of all targets, of all but the last, and so on.
    in_target_NP = jax.vmap(lambda c: _inside(grid, c, size))(corners_N2)
    in_first_NP = jnp.cumsum(in_target_NP, axis=0) > 0
    taken_out = [in_first_NP[n] for n in reversed(range(num_targets))]
    choices_CP = in_context_P & ~jnp.stack([*taken_out, jnp.zeros(P, bool)])
    enough_C = jnp.sum(choices_CP, axis=1) >= min_context
    allowed_P = choices_CP[jnp.argmax(enough_C)]

    # In random order, so that leaving out the last ones is fair.
    random_P = jax.random.uniform(keys[4], (P,))
    order_P = jnp.argsort(jnp.where(allowed_P, random_P, 2.0))
    context_real_K = jnp.arange(K) < jnp.sum(allowed_P)

    height, width = size
    real_T = jnp.arange(T) < height * width
    number_T = jnp.where(real_T, jnp.arange(T), 0)
    rows_NT = corners_N2[:, :1] + number_T // width
    columns_NT = corners_N2[:, 1:] + number_T % width
    target_NT = rows_NT * grid[1] + columns_NT
    real_NT = jnp.broadcast_to(real_T, target_NT.shape)
    return order_P[:K], context_real_K, target_NT, real_NT

  return Masks(*jax.vmap(draw_one)(keys_B))


def _check(
  num_targets: int,
  target_area: Sequence[float],
  context_area: Sequence[float],
  max_context: float,
  min_context: int,
  num_patches: int,
) -> None:
  check_number("config.loss.num_targets", num_targets, least=1, whole=True)
  check_number("config.loss.min_context", min_context, least=1, whole=True)
  check_number("config.loss.max_context", max_context, above=0, most=1)
  for name, area in (("target", target_area), ("context", context_area)):
    if len(area) != 2 or not 0 < area[0] <= area[1] <= 1:
      raise ConfigError(
        f"config.loss.{name}_area: expected two ascending shares of an image, "
        f"up to 1, got {area!r}."
      )
  least = int(num_patches * context_area[0])
  if int(num_patches * target_area[0]) < 1:
    raise ConfigError(
      f"config.loss.target_area={target_area!r}: has none of {num_patches} "
      "patches."
    )
  if least < min_context:
    raise ConfigError(
      f"config.loss.min_context={min_context}: a context block may have "
      f"{least} of {num_patches} patches; expected at most this number."
    )


def _size(
  key: jax.Array,
  grid: tuple[int, int],
  area: Sequence[float],
  aspect: Sequence[float],
) -> tuple[jax.Array, jax.Array]:
  """Height and width of a block, in patches."""
  keys = jax.random.split(key)
  share = jax.random.uniform(keys[0], minval=area[0], maxval=area[1])
  ratio = jax.random.uniform(keys[1], minval=aspect[0], maxval=aspect[1])
  number = jnp.floor(math.prod(grid) * share)
  sides = jnp.sqrt(number * ratio), jnp.sqrt(number / ratio)
  height, width = (
    jnp.clip(jnp.round(side).astype(jnp.int32), 1, most)
    for side, most in zip(sides, grid)
  )
  return height, width


def _largest(
  grid: tuple[int, int], area: Sequence[float], aspect: Sequence[float]
) -> int:
  """Largest number of patches that `_size` may draw: T."""
  most = int(math.prod(grid) * area[1])
  result = 1
  for height in range(1, most + 2):
    for width in range(1, most + 2):
      # Sides that round to these have at least this area, and such a ratio.
      if (height - 0.5) * (width - 0.5) > most:
        break
      low, high = (height - 0.5) / (width + 0.5), (height + 0.5) / (width - 0.5)
      if low <= aspect[1] and high >= aspect[0]:
        size = min(height, grid[0]) * min(width, grid[1])
        result = max(result, size)
  return result


def _corners(
  key: jax.Array,
  grid: tuple[int, int],
  size: tuple[jax.Array, jax.Array],
  number: int,
) -> jax.Array:
  """First row and column of blocks of a size, at random: int [number, 2]."""
  places_2 = jnp.stack([grid[0] - size[0], grid[1] - size[1]]) + 1
  return jax.random.randint(key, (number, 2), 0, places_2)


def _inside(
  grid: tuple[int, int],
  corner_2: jax.Array,
  size: tuple[jax.Array, jax.Array],
) -> jax.Array:
  """Mask of the patches inside a block, bool [P]."""
  row_P, column_P = (i.reshape(-1) for i in jnp.mgrid[: grid[0], : grid[1]])
  row_P, column_P = row_P - corner_2[0], column_P - corner_2[1]
  inside_P = (row_P >= 0) & (row_P < size[0])
  return inside_P & (column_P >= 0) & (column_P < size[1])
