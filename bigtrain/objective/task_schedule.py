"""Which tasks a step has, and the numbers of a task that follow a schedule.

Each task of a sum has a weight, and may begin at a later step (`from_steps`,
`from_percent` and so on), or belong to one of several optimizers that take
turns. A step's hparams hold the weights of exactly the tasks that the step has.
So each set of tasks has its own program, and until a task begins, steps run
exactly the program of a run without it: the task costs neither time nor memory,
and no bit of the state depends on it. With a branch in one program
(jax.lax.cond), XLA might fuse the other tasks differently.

Options of a loss may follow a schedule too, such as a teacher's momentum:
config.loss.momentum = dict(at_percent=[0, 100], values=[0.99, 1.0]).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config import lengths, piecewise
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.config.piecewise import Piecewise
from bigtrain.config.settings import Config
from bigtrain.objective.task_sum import Entry
from bigtrain.optim.several import Turns

# Entries of a step's hparams, and of the state that gradients get.
WEIGHTS = "task_weights"
OPTIONS = "task_options"


@dataclasses.dataclass(frozen=True)
class TaskSchedule:
  """The weights, options and first step of one task."""

  name: str
  weight: Piecewise | None  # None for the only task.
  options: Mapping[str, Piecewise]  # Options of its loss with a schedule.
  first_step: int = 0  # Number of updates before its first one.
  # Steps of each cycle that have it, see optim/several.py.
  places: tuple[int, ...] = (0,)
  cycle: int = 1


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
    return step >= task.first_step and step % task.cycle in task.places

  def _task(self, name: str) -> TaskSchedule:
    (task,) = [task for task in self._tasks if task.name == name]
    return task

  def first_step(self, name: str) -> int:
    return self._task(name).first_step

  def is_occasional(self, name: str) -> bool:
    """Whether some steps do not have the task."""
    task = self._task(name)
    return task.first_step > 0 or len(task.places) < task.cycle

  def share(self, name: str) -> float:
    """Share of the run's steps that have the task."""
    task = self._task(name)
    later = 1.0 - task.first_step / (self._total or 1)
    return later * len(task.places) / task.cycle

  @property
  def kinds(self) -> list[int]:
    """A step with each set of tasks; the last one has the most tasks."""
    found: dict[tuple[str, ...], int] = {}
    for first in sorted({task.first_step for task in self._tasks}):
      for step in range(first, first + max(x.cycle for x in self._tasks)):
        found.setdefault(tuple(self.names(step)), step)
    return sorted(found.values(), key=lambda step: len(self.names(step)))

  def options(self, name: str) -> dict[str, Any]:
    """The options of a task that follow a schedule, at its first step."""
    task = self._task(name)
    return {
      option: np.float32(value.at(task.first_step))
      for option, value in task.options.items()
    }

  def hparams(self, step: int) -> dict[str, Any]:
    """The scalars of a step; {} if there are none."""
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


def from_config(
  entries: Sequence[Entry], units: lengths.Units, turns: Turns
) -> Schedule:
  """Reads weights and first steps; `turns` say which optimizer steps when."""
  schedules = []
  for entry in entries:
    weight = None
    first_step = 0
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
    places = turns.places(entry.optimizer)
    while first_step and first_step % turns.length not in places:
      first_step += 1
    schedules.append(
      TaskSchedule(
        entry.name,
        weight,
        _options(entry, units),
        first_step,
        places,
        turns.length,
      )
    )
  if all(task.first_step for task in schedules):
    raise ConfigError(
      "config.task: no task begins at step 0; expected one without from_steps, "
      "from_percent and the like."
    )
  result = Schedule(schedules, units.total_steps)
  for step in result.kinds:
    if not result.names(step):
      raise ConfigError(
        f"config.task: no task trains the optimizer {turns.cycle[step]!r} in "
        "its steps; expected one with this `optimizer`, or without any."
      )
  return result


def _options(entry: Entry, units: lengths.Units) -> dict[str, Piecewise]:
  """The options of a loss that follow a schedule; checks the task's LIMITS."""
  limits = getattr(entry.module, "LIMITS", {})
  result = {}
  for name, value in entry.part.kwargs("loss").items():
    key = f"{entry.loss_key}.{name}"
    if piecewise.is_schedule(value):
      of_values = limits.get(name, {"least": 0})
      result[name] = piecewise.read(value, units, key, of_values=of_values)
    elif name in limits and value is not None:
      check_number(key, value, **limits[name])
  return result
