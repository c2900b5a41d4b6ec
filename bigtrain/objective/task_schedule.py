"""Which tasks a step has, and the numbers of a task that follow a schedule.

Each task of a sum has a weight, and may begin at a later step (`from_steps`,
`from_percent` and so on). A step's hparams hold the weights of exactly those
tasks that it has. So each set of tasks has its own program, and before a task
begins, the steps run the very program of a run without it: the task costs
neither time nor activations, and no bit of the state depends on it. A branch
inside one program (jax.lax.cond) would let XLA fuse the other tasks otherwise.

Options of a loss may follow a schedule too, such as a teacher's momentum:
config.loss.momentum = dict(at_percent=[0, 100], values=[0.99, 1.0]).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config import lengths, piecewise
from bigtrain.config.errors import ConfigError
from bigtrain.config.piecewise import Piecewise
from bigtrain.config.settings import Config
from bigtrain.objective.task_sum import Entry

# Entries of a step's hparams, and of the state that gradients get.
WEIGHTS = "task_weights"
OPTIONS = "task_options"


@dataclasses.dataclass(frozen=True)
class TaskSchedule:
  """The weights, options and first step of one task."""

  name: str
  weight: Piecewise | None  # None for the only task.
  options: Mapping[str, Piecewise]  # Those of its loss that change.
  first_step: int = 0  # Number of updates before its first one.


class Schedule:
  """The tasks of each step. Steps are numbers of earlier updates."""

  def __init__(self, tasks: Sequence[TaskSchedule], total_steps: int | None):
    self._tasks = tasks
    self._total = total_steps
    self._is_sum = any(task.weight for task in tasks)

  def names(self, step: int) -> list[str]:
    """Names of the tasks of a step."""
    return [task.name for task in self._tasks if self._has(task, step)]

  def _has(self, task: TaskSchedule, step: int) -> bool:
    return step >= task.first_step

  def first_step(self, name: str) -> int:
    (task,) = [task for task in self._tasks if task.name == name]
    return task.first_step

  def is_late(self, name: str) -> bool:
    """Whether there are steps without the task."""
    return self.first_step(name) > 0

  def share(self, name: str) -> float:
    """Share of the run's steps that have the task."""
    return 1.0 - self.first_step(name) / (self._total or 1)

  @property
  def kinds(self) -> list[int]:
    """A step with each set of tasks; the last one has the most tasks."""
    return sorted({task.first_step for task in self._tasks})

  def hparams(self, step: int) -> dict[str, Any]:
    """The scalars of a step; {} for a task without any."""
    result: dict[str, Any] = {}
    present = [task for task in self._tasks if self._has(task, step)]
    if self._is_sum:
      result[WEIGHTS] = {
        task.name: np.float32(task.weight.at(step))
        for task in present
        if task.weight
      }
    options = {
      task.name: {
        name: np.float32(value.at(step)) for name, value in task.options.items()
      }
      for task in present
      if task.options
    }
    if options:
      result[OPTIONS] = options
    return result


def from_config(entries: Sequence[Entry], units: lengths.Units) -> Schedule:
  schedules = []
  for entry in entries:
    weight, first_step = None, 0
    if entry.name:
      given = entry.part["weight"]
      if isinstance(given, Config):
        given = entry.part.kwargs("weight")
      key = f"{entry.part.path}.weight"
      weight = piecewise.read(given, units, key, above=0)
      first_step = lengths.steps(entry.part, "from", units) or 0
      total = units.total_steps
      if total is not None and first_step >= total:
        raise ConfigError(
          f"{entry.part.path}: begins at step {first_step}, but the run has "
          f"{total} steps; expected from_steps below {total}."
        )
    options = {
      name: piecewise.read(value, units, f"{entry.loss_key}.{name}", least=0)
      for name, value in entry.part.kwargs("loss").items()
      if piecewise.is_schedule(value)
    }
    schedules.append(TaskSchedule(entry.name, weight, options, first_step))
  if all(task.first_step for task in schedules):
    raise ConfigError(
      "config.task: no task begins at step 0; expected one without from_steps, "
      "from_percent and the like."
    )
  return Schedule(schedules, units.total_steps)
