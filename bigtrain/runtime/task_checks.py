"""Ends a run whose task says that it has failed, judging by a log entry."""

from collections.abc import Callable, Mapping
from typing import Any

from bigtrain.runtime.hook_context import Context

# {task: metrics of the task in a log entry -> why the run should end, or None}.
Checks = Mapping[str, Callable[[Mapping[str, float]], str | None]]

NAME = "task_checks"  # Of the hook.

# Log entries in a row that have to have a problem: the first steps of a random
# model may look like a collapse, and a single entry may be an accident.
_PATIENCE = 3


class TaskChecks:
  """A hook that is added to runs whose task has a function `problem`."""

  def __init__(self, checks: Checks, context: Context):
    self._checks = checks
    self._context = context
    self._counts = dict.fromkeys(checks, 0)

  def after_row(self, step: int, entry: Mapping[str, Any]) -> None:
    if "loss" not in entry:  # Results of an evaluation.
      return
    for task, check in self._checks.items():
      prefix = f"{task}/" if task else ""
      values = {
        name.removeprefix(prefix): x
        for name, x in entry.items()
        if name.startswith(prefix)
      }
      reason = check(values)
      self._counts[task] = self._counts[task] + 1 if reason else 0
      if self._counts[task] == _PATIENCE:
        self._context.stop(f"step {step}: {reason}.", failure=True)

  def state(self) -> dict[str, int]:
    return dict(self._counts)

  def restore(self, state: Mapping[str, int]) -> None:
    self._counts |= {k: n for k, n in state.items() if k in self._counts}
