"""Stops a run when a metric is not finite."""

import math
from collections.abc import Mapping
from typing import Any

from bigtrain.runtime.hook_context import Context, WatchedMetric


class Hook:
  """Stops the run, as a failure, when a metric is not finite.

  Args:
    metrics: names as in metrics.jsonl; all metrics by default.
  """

  def __init__(
    self, metrics: str | list[str] | None = None, *, context: Context
  ):
    self._context = context
    self.watches = [metrics] if isinstance(metrics, str) else metrics or []
    self._metrics = [WatchedMetric(name) for name in self.watches]

  def after_row(self, step: int, entry: Mapping[str, Any]) -> None:
    if self._metrics:
      values = {metric.name: metric.value(entry) for metric in self._metrics}
    else:
      values = dict(entry)
    for name, value in values.items():
      if isinstance(value, float) and not math.isfinite(value):
        self._context.stop(f"{name} is {value} at step {step}", failure=True)
