"""Arrays of parameter files: dtypes, names and position embeddings.

Axes: P patches, D model width.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def normalise(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Restores bfloat16 and removes prefixes of train states from the names.

  numpy's file format saves bfloat16 as two untyped bytes ("V2").

  Args:
    flat: arrays of a file, by "/"-joined name.
  """
  values = {
    name: value.view(ml_dtypes.bfloat16) if value.dtype == "V2" else value
    for name, value in flat.items()
  }
  for prefix in ("opt/target/", "params/"):
    if any(name.startswith(prefix) for name in values):
      return {name.removeprefix(prefix): v for name, v in values.items()}
  return values


def resample_posemb(
  posemb_1PD: np.ndarray, old: tuple[int, int], new: tuple[int, int]
) -> np.ndarray:
  """Resamples position embeddings bilinearly to another grid of patches.

  Patch centres are aligned and smaller grids are antialiased, so an embedding
  keeps its place in the image.

  Args:
    posemb_1PD: embeddings of a grid, row by row.
    old: rows and columns of that grid; their product is P.
    new: rows and columns of the result.

  Returns:
    (1, rows * columns, D) in the dtype of `posemb_1PD`; the same array if the
    grids are equal.
  """
  if tuple(old) == tuple(new):
    return posemb_1PD
  D = posemb_1PD.shape[-1]
  grid = jnp.asarray(posemb_1PD, jnp.float32).reshape(*old, D)
  grid = jax.image.resize(grid, (*new, D), "bilinear", antialias=True)
  return np.asarray(grid).reshape(1, -1, D).astype(posemb_1PD.dtype)


def square_grid(num_patches: int) -> tuple[int, int] | None:
  """Returns the square grid of `num_patches` patches, or None."""
  side = math.isqrt(num_patches)
  return (side, side) if side * side == num_patches else None
