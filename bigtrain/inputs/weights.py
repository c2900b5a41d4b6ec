"""Weights of the sources of a mixture, which may change during the run.

A weight is a number, or a dict of weights at ascending points of the run, such
as dict(at_percent=[0, 80, 100], values=[1, 1, 4]); docs/config.md has its keys.

`order.Schedule` needs weights that are constant over many rows. So a linear
change is cut into up to 256 stages of whole steps, each with the mean weight of
its steps.
"""

from collections.abc import Sequence
from typing import Any

from bigtrain.config import lengths, piecewise
from bigtrain.config.errors import ConfigError
from bigtrain.config.piecewise import Piecewise

# Stages of one linear change: each is then 0.4% of the whole change.
_MAX_STAGES = 256

# (first step, weight of each source).
Stage = tuple[int, tuple[float, ...]]


def read(value: Any, units: lengths.Units, key: str) -> Piecewise:
  """Reads a weight of the config, at location `key`."""
  shapes = ("linear", "stair")
  return piecewise.read(value, units, key, shapes=shapes, above=0)


def stages(weights: Sequence[Piecewise], path: str) -> list[Stage]:
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
    changes = any(
      w.shape != "stair" and w.at(begin) != w.at(end) for w in weights
    )
    number = min(_MAX_STAGES, end - begin) if changes else 1
    edges = [begin + (end - begin) * i // number for i in range(number + 1)]
    for first, after in zip(edges, edges[1:]):
      add(first, (first + after - 1) / 2)
  add(points[-1], points[-1])
  return result
