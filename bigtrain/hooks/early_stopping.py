"""Stops a run when a metric no longer improves."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bigtrain.config.errors import check_number
from bigtrain.runtime.hook_context import Context, WatchedMetric, sign


class Hook:
  """Stops the run, as a success, when a metric no longer improves.

  The rule is that of T5X's EarlyStoppingAction. The run stops when none of the
  last `patience` values is better than the value before it by more than
  atol + rtol * |value before it|, computed in float32. A comparison with NaN or
  infinity counts as an improvement.

  Args:
    metric: name as in metrics.jsonl, such as "val/loss".
    mode: "min" if smaller is better, "max" if larger is better.
    patience: number of recent values that are compared, at least 2.
    atol: absolute tolerance, in the metric's unit, at least 0.
    rtol: tolerance relative to the previous value, at least 0.
  """

  def __init__(
    self,
    metric: str,
    mode: str = "min",
    patience: int = 3,
    atol: float = 0.0,
    rtol: float = 0.0,
    *,
    context: Context,
  ):
    path = context.path
    check_number(f"{path}.patience", patience, least=2, whole=True)
    check_number(f"{path}.atol", atol, least=0)
    check_number(f"{path}.rtol", rtol, least=0)
    self._sign = sign(mode, f"{path}.mode")
    self._metric = WatchedMetric(metric)
    self._patience, self._atol, self._rtol = patience, atol, rtol
    self._values: list[float] = []  # At most `patience`, the newest last.
    self._context = context
    self.watches = [metric]

  def after_row(self, step: int, entry: Mapping[str, Any]) -> None:
    newest = self._metric.value(entry)
    if newest is None:
      return
    self._values = [*self._values, newest][-self._patience :]
    if len(self._values) < self._patience:
      return
    values = self._sign * np.asarray(self._values, np.float64)
    previous, following = values[:-1], values[1:]
    with np.errstate(over="ignore", invalid="ignore"):
      tolerances = self._atol + self._rtol * np.abs(previous)
      bounds = np.float32(previous - tolerances)
      # A difference of exactly the tolerance does not count as an improvement.
      # NaN is neither below nor above a bound, so the run continues.
      if not np.all(np.float32(following) >= bounds):
        return
    self._context.stop(
      f"{self._metric.name} has not improved in its last {self._patience} "
      f"values up to step {step}"
    )

  def state(self) -> dict[str, Any]:
    return {"values": self._values}

  def restore(self, state: Mapping[str, Any]) -> None:
    self._values = list(state["values"])
