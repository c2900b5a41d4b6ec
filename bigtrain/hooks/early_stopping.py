"""Stops a run when a metric no longer improves."""

from collections.abc import Mapping
from typing import Any

from bigtrain import settings
from bigtrain.runtime import hooks, watched_metrics


class Hook:
  """Stops the run, as a success, when a metric no longer improves.

  A value improves on the previous one if it is better by more than
  atol + rtol * |previous value|. The run stops as soon as none of the last
  `patience` values has improved on the value before it.

  Args:
    metric: name as in metrics.jsonl, such as "val/loss".
    mode: "min" if smaller is better, "max" if larger is better.
    patience: number of values without improvement, at least 1.
    atol: absolute tolerance, in the metric's unit.
    rtol: tolerance relative to the previous value.
    context: given by the program.
  """

  def __init__(
    self,
    metric: str,
    mode: str = "min",
    patience: int = 3,
    atol: float = 0.0,
    rtol: float = 0.0,
    *,
    context: hooks.Context,
  ):
    settings.check_number(
      f"{context.path}.patience", patience, least=1, whole=True
    )
    self._sign = watched_metrics.sign(mode, f"{context.path}.mode")
    self._metric = watched_metrics.WatchedMetric(metric)
    self._patience = patience
    self._atol = atol
    self._rtol = rtol
    # The newest patience + 1 values; the rule needs no more.
    self._values: list[float] = []
    self.watches = [metric]

  def after_step(self, step: int, row: Mapping[str, Any]) -> str | None:
    """Applies the rule to the row's value, if the row has the metric."""
    value = self._metric.value(row)
    if value is None:
      return None
    self._values = [*self._values, value][-self._patience - 1 :]
    if len(self._values) <= self._patience:
      return None
    for previous, current in zip(self._values[:-1], self._values[1:]):
      gain = self._sign * (previous - current)
      if gain > self._atol + self._rtol * abs(previous):
        return None
    return (
      f"{self._metric.name} has not improved in its last {self._patience} "
      f"values up to step {step}"
    )

  def state(self) -> dict[str, Any]:
    """Returns the values that the rule still needs."""
    return {"values": self._values}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Restores the result of `state`."""
    self._values = list(state["values"])
