"""Numbers that change during a run, such as weights of sources or losses.

A config gives a constant, or a dict of values at ascending points of the run:
dict(at_percent=[0, 80, 100], values=[1, 1, 4], shape="linear"). The points may
have any unit of config/lengths.py.
"""

import bisect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from bigtrain.config import lengths
from bigtrain.config.errors import ConfigError, check_choice, check_number

# Between two points: a straight line, half a cosine, or a jump at the second.
SHAPES = ("linear", "cosine", "stair")


class Piecewise(NamedTuple):
  """A number by step."""

  steps: tuple[int, ...]  # Ascending.
  values: tuple[float, ...]  # At these steps.
  shape: str = "linear"  # One of SHAPES.

  def at(self, step: float) -> float:
    i = bisect.bisect_right(self.steps, step) - 1
    low = self.values[max(i, 0)]
    if i < 0 or i == len(self.steps) - 1 or self.shape == "stair":
      return low
    begin, end = self.steps[i : i + 2]
    high = self.values[i + 1]
    if low == high:  # No rounding error, so that equal values stay equal.
      return low
    ratio = (step - begin) / (end - begin)
    if self.shape == "cosine":
      ratio = (1 - math.cos(math.pi * ratio)) / 2
    return low * (1 - ratio) + high * ratio


def is_schedule(value: Any) -> bool:
  """Whether a dict is a number by step, rather than options."""
  return isinstance(value, Mapping) and any(
    f"at_{unit}" in value for unit in lengths.UNITS
  )


def read(
  value: Any,
  units: lengths.Units,
  key: str,
  *,
  shapes: tuple[str, ...] = SHAPES,
  **limits: Any,
) -> Piecewise:
  """Reads a constant number or a dict of values, at `key` of the config.

  Args:
    shapes: allowed shapes.
    **limits: limits of a constant, as arguments of check_number; values of a
      dict must be at least 0, and not all 0.
  """
  if not isinstance(value, Mapping):
    return Piecewise((0,), (float(check_number(key, value, **limits)),))
  names = {f"at_{unit}": unit for unit in lengths.UNITS}
  for name in value:
    check_choice(f"{key}.{name}", name, (*names, "values", "shape"))
  given = [name for name in names if value.get(name) is not None]
  if len(given) != 1:
    raise ConfigError(
      f"{key}: expected the points once, in one unit, such as "
      f"at_percent=[0, 100], got {given or 'none'}."
    )
  (name,) = given
  points, values = value[name], value.get("values", ())
  for option, numbers in ((name, points), ("values", values)):
    if not isinstance(numbers, list | tuple) or not numbers:
      raise ConfigError(
        f"{key}.{option}: expected a list of numbers, got {numbers!r}."
      )
  unit = names[name]
  where = f"{key}.{name}"
  steps = tuple(units.to_steps(point, unit, where) for point in points)
  if len(steps) != len(values) or sorted(set(steps)) != list(steps):
    raise ConfigError(
      f"{where}: expected {len(values)} ascending points, one for each of "
      f"{key}.values, got {points!r}, which are the steps {list(steps)}."
    )
  for i, number in enumerate(values):
    check_number(f"{key}.values[{i}]", number, least=0)
  if not any(values):
    raise ConfigError(f"{key}.values: expected a value above 0, got {values}.")
  shape = value.get("shape", "linear")
  check_choice(f"{key}.shape", shape, shapes)
  return Piecewise(steps, tuple(map(float, values)), shape)
