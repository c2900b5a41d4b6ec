"""Metrics that hooks read from the rows."""

from collections.abc import Mapping
from typing import Any

from absl import logging

from bigtrain import settings

_MODES = ("min", "max")


class WatchedMetric:
  """Reads a metric from rows; warns once if it is missing or not a number."""

  def __init__(self, name: str):
    self.name = name
    self._warned = False
    self._seen: set[str] = set()

  def value(self, row: Mapping[str, Any]) -> float | None:
    """Returns the row's value of the metric, or None."""
    self._seen |= set(row)
    value = row.get(self.name)
    if isinstance(value, int | float):
      return float(value)
    # Rows of training and of each evaluation have different metrics, so only
    # rows with the same prefix should have this one.
    prefix = self.name.rpartition("/")[0]
    related = [k for k in row if k != "step" and k.rpartition("/")[0] == prefix]
    if (value is not None or related) and not self._warned:
      self._warned = True
      problem = "is not a number" if value is not None else "is not in the rows"
      hint = settings.did_you_mean(self.name, self._seen - {"step"})
      logging.warning("config.hooks: metric %r %s.%s", self.name, problem, hint)
    return None


def sign(mode: str, path: str) -> float:
  """Returns 1 for mode "min" and -1 for "max": sign * decrease is the gain.

  Args:
    mode: "min" if smaller is better, "max" if larger is better.

  Raises:
    ConfigError: unknown mode.
  """
  if mode not in _MODES:
    hint = settings.did_you_mean(mode, _MODES)
    raise settings.ConfigError(f"{path}: no mode {mode!r}.{hint}")
  return 1.0 if mode == "min" else -1.0
