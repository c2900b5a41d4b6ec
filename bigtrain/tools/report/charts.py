"""The curves of a page, as data for page.js."""

import math
from collections.abc import Sequence
from typing import Any

from bigtrain.tools.report.panels import Panel

# More points would make large pages and no better curves.
_MOST_POINTS = 2000
DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "7 3 2 3"}
FROM_ZERO = ("GiB", "% of time", "% of peak", "examples / s", "tokens / s")


def content(panels: Sequence[Panel]) -> dict[str, Any]:
  return {
    "panels": [
      {
        "title": panel.title,
        "unit": panel.unit,
        "zero": panel.unit in FROM_ZERO,
        "series": [
          {
            "run": s.run,
            "label": s.label or panel.unit,
            "color": s.color,
            "dash": DASHES[s.line],
            "x": steps,
            "y": [_rounded(value) for value in values],
          }
          for s in panel.series
          for steps, values in [thin(s.steps, s.values, _MOST_POINTS)]
        ],
      }
      for panel in panels
    ]
  }


def thin(
  steps: Sequence[int], values: Sequence[float], most: int
) -> tuple[list[int], list[float]]:
  """Returns at most about `most` points, with the extremes of all parts."""
  if len(steps) <= most:
    return [*steps], [*values]
  size = math.ceil(2 * len(steps) / most)
  kept = []
  for start in range(0, len(steps), size):
    part = range(start, min(start + size, len(steps)))
    finite = [i for i in part if math.isfinite(values[i])] or [start]
    value = values.__getitem__
    kept += sorted({min(finite, key=value), max(finite, key=value)})
  return [steps[i] for i in kept], [values[i] for i in kept]


def _rounded(value: float) -> float | None:
  """Six digits of a value; JSON has no NaN or infinity."""
  return float(f"{value:.6g}") if math.isfinite(value) else None
