"""Weights of the sources of a mixture, which may change during the run.

A weight is a number, or a dict of weights at ascending points of the run, such
as dict(at_percent=[0, 80, 100], values=[1, 1, 4]); docs/config.md has its keys.

`order.Schedule` needs weights that are constant over many rows. So a linear
change is cut into up to 256 stages of whole steps, each with its mean weight.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.config import lengths
from bigtrain.config.errors import ConfigError, check_choice, check_number

# Stages of one linear change: each is then 0.4% of the whole change.
_MAX_STAGES = 256

# (first step, weight of each source).
Stage = tuple[int, tuple[float, ...]]


class Weight(NamedTuple):
  """Weight of one source, by step."""

  steps: tuple[int, ...]  # Ascending.
  values: tuple[float, ...]  # At these steps.
  linear: bool  # Whether it changes linearly in between, or at the steps.

  def at(self, step: float) -> float:
    i = bisect.bisect_right(self.steps, step) - 1
    low = self.values[max(i, 0)]
    if i < 0 or i == len(self.steps) - 1 or not self.linear:
      return low
    begin, end = self.steps[i : i + 2]
    high = self.values[i + 1]
    if low == high:  # No rounding error: `stages` merges equal weights.
      return low
    ratio = (step - begin) / (end - begin)
    return low * (1 - ratio) + high * ratio


def read(value: Any, units: lengths.Units, key: str) -> Weight:
  """Reads a weight of the config, at location `key`."""
  if not isinstance(value, Mapping):
    return Weight((0,), (float(check_number(key, value, above=0)),), True)
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
  unit, where = names[name], f"{key}.{name}"
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
  check_choice(f"{key}.shape", shape, ("linear", "stair"))
  return Weight(steps, tuple(map(float, values)), shape == "linear")


def stages(weights: Sequence[Weight], path: str) -> list[Stage]:
  """Returns the stages of a run in which the weights are constant.

  Args:
    path: location of the mixture in the config.
  """
  points = sorted({0, *(step for weight in weights for step in weight.steps)})
  result: list[Stage] = []

  def add(step: int, middle: float) -> None:
    values = tuple(weight.at(middle) for weight in weights)
    if not any(values):
      raise ConfigError(
        f"{path}: expected a weight above 0 at each step, got 0 for all "
        f"sources at step {step}."
      )
    if not result or values != result[-1][1]:
      result.append((step, values))

  for begin, end in zip(points, points[1:]):
    changes = any(w.linear and w.at(begin) != w.at(end) for w in weights)
    number = min(_MAX_STAGES, end - begin) if changes else 1
    edges = [begin + (end - begin) * i // number for i in range(number + 1)]
    for first, after in zip(edges, edges[1:]):
      add(first, (first + after - 1) / 2)
  add(points[-1], points[-1])
  return result
