"""Sizes of pictures that are cut into tiles.

For LLaVA-NeXT and OneVision, a picture is resized to fit one of a few sizes,
padded to that size and cut into tiles. The patches that show only padding are
then dropped, and if too many remain, their features are interpolated to a
smaller grid. For InternVL, Aya Vision and Command A Vision, a picture is
stretched to a grid of tiles. The order of float operations is that of
transformers, because rounding decides some of the sizes.
"""

import itertools
import math
from collections.abc import Sequence

# Sizes, height and width, if no file says others.
NEXT_SIZES = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
ONEVISION_SIZES = [
  (384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)
]


def best_size(
  height: int, width: int, sizes: Sequence[tuple[int, int]]
) -> tuple[int, int]:
  """The size that keeps the most pixels; of several, the smallest."""

  def quality(size: tuple[int, int]) -> tuple[int, int]:
    scale = min(size[1] / width, size[0] / height)
    kept = int(width * scale) * int(height * scale)
    kept = min(kept, height * width)
    return kept, kept - size[0] * size[1]

  return max(sizes, key=quality)


def without_padding(
  height: int, width: int, rows: int, columns: int
) -> tuple[int, int]:
  """Rows and columns of patches that show the picture rather than padding."""
  if width / height > columns / rows:
    shown = int(round(height * (columns / width), 7))
    return rows - (rows - shown) // 2 * 2, columns
  shown = int(round(width * (rows / height), 7))
  return rows, columns - (columns - shown) // 2 * 2


def inside(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
  """The picture's size after it is resized, undistorted, to fit into `size`."""
  scale_height, scale_width = size[0] / height, size[1] / width
  if scale_width < scale_height:
    return min(math.ceil(height * scale_width), size[0]), size[1]
  return size[0], min(math.ceil(width * scale_height), size[1])


def shrunk(
  rows: int, columns: int, side: int, limit: int | None
) -> tuple[int, int]:
  """Rows and columns after interpolation.

  Args:
    side: rows of patches in a tile.
    limit: about how many tiles' worth of patches may remain.
  """
  if limit is None:
    return rows, columns
  ratio = math.sqrt(rows * columns / (limit * side**2))
  if ratio <= 1.1:
    return rows, columns
  return int(rows // ratio), int(columns // ratio)


def _grids(least: int, most: int) -> list[tuple[int, int]]:
  """Columns and rows of grids, from few tiles to many, narrow ones first."""
  sides = range(1, most + 1)
  pairs = itertools.product(sides, sides)
  grids = [(x, y) for x, y in pairs if least <= x * y <= most]
  return sorted(grids, key=math.prod)


def most_similar(
  height: int, width: int, tile: tuple[int, int], least: int, most: int
) -> tuple[int, int]:
  """Rows and columns of the grid whose proportions are the picture's.

  Of several, it is the largest whose pixels are less than twice the picture's.

  Args:
    tile: height and width of a tile in pixels.
    least, most: bounds of the number of tiles.
  """
  proportions, area = width / height, width * height
  best, smallest = (1, 1), math.inf
  for columns, rows in _grids(least, most):
    difference = abs(proportions - columns / rows)
    is_tie = difference == smallest
    fits = area > 0.5 * tile[0] * tile[1] * columns * rows
    if difference < smallest or (is_tie and fits):
      best, smallest = (rows, columns), difference
  return best


def least_enlarging(
  height: int, width: int, tile: tuple[int, int], most: int
) -> tuple[int, int]:
  """Rows and columns of the grid that enlarges a picture within it the least.

  If all shrink it, the one that shrinks it the least.
  """

  def scale(grid: tuple[int, int]) -> float:
    columns, rows = grid
    # Both by the height, since tiles are squares.
    return min(columns * tile[0] / width, rows * tile[0] / height)

  grids = _grids(1, most)
  enlarging = [grid for grid in grids if scale(grid) >= 1]
  columns, rows = (
    min(enlarging, key=scale) if enlarging else max(grids, key=scale)
  )
  return rows, columns
