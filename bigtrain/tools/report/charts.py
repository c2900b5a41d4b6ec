"""The curves of a page, as data for page.js."""

import math
from collections.abc import Sequence
from typing import Any

from bigtrain.tools.report.panels import Panel, Series

# Number of points of a curve. More would make large pages and no better curves.
_MAX_POINTS = 2000
# {matplotlib's line style: stroke-dasharray of SVG}
DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "7 3 2 3"}
# Units whose axes begin at zero.
FROM_ZERO = ("GiB", "% of time", "% of peak", "examples / s", "tokens / s")


def content(panels: Sequence[Panel]) -> dict[str, Any]:
  """The object that page.js draws, as values of JSON."""
  return {
    "panels": [
      {
        "title": panel.title,
        "unit": panel.unit,
        "zero": panel.unit in FROM_ZERO,
        "series": [_series(one, panel) for one in panel.series],
      }
      for panel in panels
    ]
  }


def _series(series: Series, panel: Panel) -> dict[str, Any]:
  steps, values = thin(series.steps, series.values, _MAX_POINTS)
  return {
    "run": series.run,
    "label": series.label or panel.unit,
    "color": series.color,
    "dash": DASHES[series.line],
    "x": steps,
    "y": [_rounded(value) for value in values],
  }


def thin(
  steps: Sequence[int], values: Sequence[float], max_points: int
) -> tuple[list[int], list[float]]:
  """Returns about `max_points` points at most.

  Of each part of the curve it keeps the smallest and the largest value, so a
  spike of one step stays visible.
  """
  if len(steps) <= max_points:
    return [*steps], [*values]
  part_size = math.ceil(2 * len(steps) / max_points)
  kept = []
  for start in range(0, len(steps), part_size):
    part = range(start, min(start + part_size, len(steps)))
    finite = [i for i in part if math.isfinite(values[i])] or [start]
    lowest = min(finite, key=values.__getitem__)
    highest = max(finite, key=values.__getitem__)
    kept += sorted({lowest, highest})
  return [steps[i] for i in kept], [values[i] for i in kept]


def _rounded(value: float) -> float | None:
  """Six digits of a value; JSON has no NaN or infinity."""
  return float(f"{value:.6g}") if math.isfinite(value) else None
