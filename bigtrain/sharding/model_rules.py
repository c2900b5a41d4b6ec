"""Which dimension of a model's parameters goes over which axis.

It follows from the model's description of its parameters (dims.py). `tensor`
splits attention by heads, MLPs and experts by hidden units, embeddings and
output layers by tokens or classes. Experts may have another axis.
"""

import math
from collections.abc import Mapping, Sequence

from absl import logging

from bigtrain import dims
from bigtrain.settings import ConfigError
from bigtrain.sharding.rules import Placed

# Arrays that a message lists by name.
_MOST_NAMES = 4

# {dimension that `tensor` splits: whether a size that does not divide is an
# error}. Otherwise every device of a group has the whole array, which is a
# warning: for heads of keys and values see sharding.columns.
_OVER_TENSOR = {"H": True, "F": True, "G": False, "V": False}


def place(
  table: dims.Table,
  shapes: Mapping[str, tuple[int, ...]],
  sizes: Mapping[str, int],
) -> dict[str, tuple[tuple[int, ...], Placed]]:
  """Returns `of_model` of rules.Rules."""
  splits = {name: _splits(table, name) for name in shapes}
  placed: dict[str, dict[int, tuple[str, ...]]] = {}
  for axis, ways in sizes.items():
    own = {name: split[axis] for name, split in splits.items() if axis in split}
    if ways > 1:
      for name, dim in _dims(own, shapes, axis, ways).items():
        placed.setdefault(name, {})[dim] = (axis,)
  return {name: (shapes[name], dims) for name, dims in placed.items()}


def _splits(table: dims.Table, name: str) -> dict[str, tuple[int, bool]]:
  """Returns {axis: (negative dimension, whether it must divide)}."""
  found = dims.find(table, name)
  if found is None:
    return {}
  letters = [*found.stack, *found.inputs, *found.outputs]
  result: dict[str, tuple[int, bool]] = {}
  for dim, letter in enumerate(letters, -len(letters)):
    if dim in found.axes:
      result.setdefault(found.axes[dim], (dim, True))
    elif letter in _OVER_TENSOR:
      result.setdefault("tensor", (dim, _OVER_TENSOR[letter]))
  return result


def _dims(
  splits: Mapping[str, tuple[int, bool]],
  shapes: Mapping[str, tuple[int, ...]],
  axis: str,
  ways: int,
) -> dict[str, int]:
  result: dict[str, int] = {}
  wrong: list[str] = []
  whole: list[str] = []
  sizes: list[int] = []
  for name, (negative, needed) in splits.items():
    shape = shapes[name]
    dim = negative % len(shape)
    if needed:
      sizes.append(shape[dim])
    if shape[dim] % ways == 0:
      result[name] = dim
    else:
      text = f"{name} (dimension {dim} of {shape} is {shape[dim]})"
      (wrong if needed else whole).append(text)
  key = f"config.mesh.{axis}={ways}"
  if wrong:
    common = math.gcd(*sizes)
    works = [n for n in range(1, common + 1) if common % n == 0]
    near = sorted(sorted(works, key=lambda n: abs(n - ways))[:2])
    raise ConfigError(
      f"{key} does not divide {_listed(wrong)}; the nearest sizes that work "
      f"for all: {' and '.join(map(str, near))}."
    )
  if whole:
    logging.warning(
      "%s does not divide %s: each device has all of it.", key, _listed(whole)
    )
  return result


def _listed(names: Sequence[str]) -> str:
  more = len(names) - _MOST_NAMES
  rest = f", and {more} more" if more > 0 else ""
  return ", ".join(names[:_MOST_NAMES]) + rest
