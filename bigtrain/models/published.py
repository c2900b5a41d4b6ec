"""What published parameter files have in common, whatever the model.

The models' `from_published` use it: they take arrays by "/"-joined name, and
return them under the names and in the shapes that the model has.

Axes: P patches, D model width.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def read(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Arrays as they were saved, without a train state's or optimizer's prefix.

  numpy's file format has no bfloat16 and forgets what the bytes were.
  """
  values = {
    name: value.view(ml_dtypes.bfloat16) if value.dtype == "V2" else value
    for name, value in flat.items()
  }
  for prefix in ("opt/target/", "params/"):
    if any(name.startswith(prefix) for name in values):
      return {name.removeprefix(prefix): v for name, v in values.items()}
  return values


def restack_blocks(
  flat: Mapping[str, np.ndarray],
  like: Mapping[str, Any],
  *,
  block: str = "encoderblock",
  separator: str = "_",
) -> dict[str, np.ndarray]:
  """Stacks or unstacks blocks in the way `like` has them.

  Args:
    flat: parameters by name, from a model with `scan` or without.
    like: the names wanted.
    block: what a block is called.
    separator: stands between that and its number.

  Returns:
    `flat` with each ".../{block}{separator}{i}/x" gathered to
    ".../{block}/x" or the reverse, where `like` has names of the other kind.
  """
  stacked = re.compile(rf"(.*\b{block})(/.+)")
  single = re.compile(rf"(.*\b{block}){separator}(\d+)(/.+)")
  to_stack = {m[1] for m in map(stacked.fullmatch, like) if m}
  to_unstack = {m[1] for m in map(single.fullmatch, like) if m}
  result: dict[str, Any] = {}
  layers: dict[str, dict[int, np.ndarray]] = {}
  for name, value in flat.items():
    if (m := single.fullmatch(name)) and m[1] in to_stack:
      layers.setdefault(m[1] + m[3], {})[int(m[2])] = value
    elif (m := stacked.fullmatch(name)) and m[1] in to_unstack:
      for i, value_i in enumerate(value):
        result[f"{m[1]}{separator}{i}{m[2]}"] = value_i
    else:
      result[name] = value
  for name, by_layer in layers.items():
    result[name] = np.stack([by_layer[i] for i in sorted(by_layer)])
  return result


def resample_posemb(
  posemb_1PD: np.ndarray, old: tuple[int, int], new: tuple[int, int]
) -> np.ndarray:
  """Resamples the position embeddings of one grid to another, bilinearly.

  Patch centres are matched to patch centres, and smaller grids average
  (antialiasing), so that an embedding keeps its place in the image.

  Args:
    posemb_1PD: embeddings of a grid, row by row.
    old: its rows and columns; P is their product.
    new: the rows and columns wanted.

  Returns:
    (1, rows * columns, D) in the dtype given; the same array for equal grids.
  """
  if tuple(old) == tuple(new):
    return posemb_1PD
  D = posemb_1PD.shape[-1]
  grid = jnp.asarray(posemb_1PD, jnp.float32).reshape(*old, D)
  grid = jax.image.resize(grid, (*new, D), "bilinear", antialias=True)
  return np.asarray(grid).reshape(1, -1, D).astype(posemb_1PD.dtype)


def square_grid(num_patches: int) -> tuple[int, int] | None:
  """The square grid of that many patches, or None where there is none."""
  side = math.isqrt(num_patches)
  return (side, side) if side * side == num_patches else None
