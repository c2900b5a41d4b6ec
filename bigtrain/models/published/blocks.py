"""What published parameter files have in common, whatever the model.

The models' `from_published` use it: they take arrays by "/"-joined name, and
return them under the names and in the shapes that the model has.

Axes: P patches, D model width.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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


class Block(NamedTuple):
  """Where a parameter of a stack's blocks is, by its name.

  Attributes:
    stack: what comes before the number, such as "encoder/blocks".
    layer: the block's number; None if it is stacked with others.
    place: in a period, if it is stacked; see stack.py.
    rest: what comes after, with its "/".
  """

  stack: str
  layer: int | None
  place: int
  rest: str


def block_of(name: str, block: str, separator: str = "_") -> Block | None:
  """Reads a parameter's name; None if it is of no block.

  >>> block_of("encoder/blocks_3/norm/scale", "blocks")
  Block(stack='encoder/blocks', layer=3, place=0, rest='/norm/scale')
  >>> block_of("blocks/1/norm/scale", "blocks")
  Block(stack='blocks', layer=None, place=1, rest='/norm/scale')

  Args:
    name: of the parameter.
    block: what a block is called.
    separator: stands between that and its number.
  """
  number = rf"(?:{separator}(\d+)|/(\d+))?"
  m = re.fullmatch(rf"(.*\b{block}){number}(/.+)", name)
  if m is None:
    return None
  stack, layer, place, rest = m.groups()
  return Block(
    stack, None if layer is None else int(layer), int(place or 0), rest
  )


def periods(
  names: Iterable[str], block: str, separator: str = "_"
) -> dict[str, int]:
  """In how many kinds of blocks each stack repeats; 0: each is on its own."""
  found: dict[str, int] = {}
  for name in names:
    if it := block_of(name, block, separator):
      number = it.place + 1 if it.layer is None else 0
      found[it.stack] = max(found.get(it.stack, 0), number)
  return found


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
  old = periods(flat, block, separator)
  new = periods(like, block, separator)
  result: dict[str, Any] = {}
  layers: dict[str, dict[int, np.ndarray]] = {}
  for name, value in flat.items():
    it = block_of(name, block, separator)
    if it is None or new.get(it.stack, old[it.stack]) == old[it.stack]:
      result[name] = value
      continue
    numbered = [(it.layer, value)]
    if it.layer is None:
      numbered = [
        (it.place + old[it.stack] * i, value_i)
        for i, value_i in enumerate(value)
      ]
    for layer, value_i in numbered:
      period = new[it.stack]
      if not period:
        result[f"{it.stack}{separator}{layer}{it.rest}"] = value_i
        continue
      place = f"/{layer % period}" if period > 1 else ""
      layers.setdefault(it.stack + place + it.rest, {})[layer] = value_i
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
