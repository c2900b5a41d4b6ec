"""A model's own rules: which dimension of a parameter goes over which axis.

Most are for `tensor`; experts may have another axis.

The module of a model may have a function beside its Model:

  def tensor_rules(model: Model) -> list[sharding.TensorRule]: ...
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import logging

from bigtrain.settings import ConfigError
from bigtrain.sharding.layouts import Placed

# Arrays that a message lists by name.
_MOST_NAMES = 4


class TensorRule(NamedTuple):
  """Splits a dimension of some parameters over an axis.

  Attributes:
    pattern: regular expression of the parameters' names; of an axis's rules,
      the first whose pattern matches a whole name decides.
    dim: the dimension; negative ones count from the end, so that a leading axis
      of layers does not matter.
    needed: whether a dimension that does not divide is an error. Otherwise
      every device of a group has the whole array, which is a warning.
    axis: the axis of the mesh.
  """

  pattern: str
  dim: int
  needed: bool = True
  axis: str = "tensor"


def place(
  rules: Sequence[TensorRule],
  shapes: Mapping[str, tuple[int, ...]],
  sizes: Mapping[str, int],
) -> dict[str, tuple[tuple[int, ...], Placed]]:
  """Returns `of_model` of layouts.Rules.

  Args:
    shapes: shapes of the parameters, by name.

  Raises:
    ConfigError: a dimension that must be split does not divide.
  """
  placed: dict[str, dict[int, tuple[str, ...]]] = {}
  for axis, ways in sizes.items():
    own = [rule for rule in rules if rule.axis == axis]
    if ways > 1 and own:
      for name, dim in _dims(own, shapes, axis, ways).items():
        placed.setdefault(name, {})[dim] = (axis,)
  return {name: (shapes[name], dims) for name, dims in placed.items()}


def _dims(
  rules: Sequence[TensorRule],
  shapes: Mapping[str, tuple[int, ...]],
  axis: str,
  ways: int,
) -> dict[str, int]:
  """Returns the dimensions that go over one axis."""
  result: dict[str, int] = {}
  wrong: list[str] = []
  whole: list[str] = []
  sizes: list[int] = []
  for name, shape in shapes.items():
    rule = next((r for r in rules if re.fullmatch(r.pattern, name)), None)
    if rule is None:
      continue
    dim = rule.dim % len(shape)
    if rule.needed:
      sizes.append(shape[dim])
    if shape[dim] % ways == 0:
      result[name] = dim
    else:
      text = f"{name} (dimension {dim} of {shape} is {shape[dim]})"
      (wrong if rule.needed else whole).append(text)
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
