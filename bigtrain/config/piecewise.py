"""Numbers that change during a run, such as weights of sources or losses.

A config gives a constant, or a dict of values at ascending points of the run:
dict(at_percent=[0, 80, 100], values=[1, 1, 4], shape="linear"). The points may
have any unit of config/lengths.py.
"""

import bisect
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from bigtrain.config import lengths
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_keys,
  check_number,
)

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
  return isinstance(value, Mapping) and (
    "values" in value or any(str(name).startswith("at_") for name in value)
  )


def read(
  value: Any,
  units: lengths.Units,
  key: str,
  *,
  shapes: tuple[str, ...] = SHAPES,
  of_values: Mapping[str, Any] = MappingProxyType({"least": 0}),
  **limits: Any,
) -> Piecewise:
  """Reads a constant number or a dict of values, at `key` of the config.

  Args:
    shapes: allowed shapes.
    of_values: limits of the values in a dict, as arguments of check_number; not
      all of them may be 0.
    **limits: limits of a constant.
  """
  if not isinstance(value, Mapping):
    return Piecewise((0,), (float(check_number(key, value, **limits)),))
  names = {f"at_{unit}": unit for unit in lengths.UNITS}
  check_keys(key, value, (*names, "values", "shape"))
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
  shape = value.get("shape", "linear")
  check_choice(f"{key}.shape", shape, shapes)
  unit = names[name]
  where = f"{key}.{name}"
  steps = tuple(units.to_steps(point, unit, where) for point in points)
  if len(steps) != len(values) or sorted(set(steps)) != list(steps):
    raise ConfigError(
      f"{where}: expected {len(values)} ascending points, one for each of "
      f"{key}.values, got {points!r}, which are the steps {list(steps)}."
    )
  _check_reached(steps, units.total_steps, where, shape)
  for i, number in enumerate(values):
    check_number(f"{key}.values[{i}]", number, **of_values)
  if not any(values):
    raise ConfigError(f"{key}.values: expected a value above 0, got {values}.")
  return Piecewise(steps, tuple(map(float, values)), shape)


def _check_reached(
  steps: tuple[int, ...], total: int | None, key: str, shape: str
) -> None:
  """Raises ConfigError for changes that begin after the end of the run."""
  if total is None:
    return
  # A run may end within the last change, unless it is a jump.
  late = [step for step in steps[:-1] if step >= total]
  if shape == "stair" and steps[-1] > total:
    late.append(steps[-1])
  if late:
    raise ConfigError(
      f"{key}: a value changes at step {late[0]}, but the run has {total} "
      f"steps; expected steps below {total}."
    )
