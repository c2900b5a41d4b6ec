"""What a hook sees of the run, and what it can ask for.

Each hook gets a `Context`. All contexts share one `Run`, which has the current
state and collects the requests; hooks.py carries them out.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from absl import logging
from jax.sharding import Mesh

from bigtrain.arrays.types import PredictFn, TrainState, Variables
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_number,
  did_you_mean,
)
from bigtrain.step import frozen, guard

# Rollbacks of one run because of a hook. A state that is wrong again after
# three of them will be wrong a fourth time.
_MAX_ROLLBACKS = 3


class Corrupt(RuntimeError):
  """A hook found a wrong state: the hardware made a mistake."""


class End(NamedTuple):
  """The end of training: the argument of a hook's `after_train`.

  The values of `how` are:
    finished     all steps are done
    stopped      a hook ended the run, as a success
    preempted    a signal ended it
    rolled_back  the run starts again from a checkpoint
    failed       with `error`
  """

  how: str
  reason: str = ""
  error: BaseException | None = None


class Stop(NamedTuple):
  """A decision to end the run."""

  reason: str
  failure: bool


@dataclasses.dataclass
class Run:
  """The run that all hooks share, and their requests."""

  workdir: str
  config: Mapping[str, Any]
  mesh: Mesh | None = None
  predict_fns: Mapping[str, PredictFn] = dataclasses.field(default_factory=dict)
  evaluations: Sequence[str] = ()
  step: int = 0
  state: TrainState = dataclasses.field(default_factory=dict)
  frozen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  saved_step: int | None = None  # Step of the newest checkpoint.
  values: dict[str, float] | None = None
  scalars: dict[str, Any] = dataclasses.field(default_factory=dict)
  in_row: bool = False  # Whether `after_row` is running.
  # Requests of hooks.
  stop: Stop | None = None
  save: bool = False
  asked_evaluations: set[str] = dataclasses.field(default_factory=set)

  def take_asked(self) -> list[Any]:
    """Returns the requests [stop, save, evaluations], and forgets them."""
    asked = [self.stop, self.save, sorted(self.asked_evaluations)]
    self.stop, self.save, self.asked_evaluations = None, False, set()
    return asked


class Context:
  """A hook's view of the run, and its requests; docs/hooks.md has examples.

  A hook can use state and requests once the run has started, not in its
  `__init__`.

  Attributes:
    name: the hook's name in the config.
    path: its key, for error messages.
  """

  def __init__(self, name: str, run: Run):
    self.name = name
    self.path = f"config.hooks.{name}"
    self.workdir = run.workdir
    self.config = run.config
    self.mesh = run.mesh
    self.predict_fns = run.predict_fns
    self.asks = False  # Whether it may make requests outside after_row.
    self._run = run

  @property
  def step(self) -> int:
    return self._run.step

  @property
  def state(self) -> TrainState:
    """Arrays on the devices, which the next update overwrites."""
    return self._run.state

  def variables(self, weights: str = "params") -> Variables:
    """The model's variables; "ema" has averaged weights."""
    state = {**self._run.state, **self._run.frozen}
    return frozen.model_variables(state, weights)

  @property
  def values(self) -> dict[str, float]:
    """The step's metrics, for hooks that declare `needs_values`.

    They are named as in log entries: "loss_last" is the loss of this step, and
    "loss" the mean since the last log step.
    """
    if self._run.values is None:
      raise RuntimeError(
        f"{self.path}: `values` exist in after_step only, and the hook's class "
        "must declare needs_values = True."
      )
    return self._run.values

  def add_scalars(self, scalars: Mapping[str, Any]) -> None:
    """Adds `<name of the hook>/<name>` to the next log entry of training.

    A value may be an array of one number, which is fetched from the device when
    the entry is written. It must not be part of the state.
    """
    if self.name in self._run.evaluations:
      raise ConfigError(
        f"{self.path}: an evaluation has the same name, and its metrics begin "
        f"with '{self.name}/' too: rename the hook."
      )
    self._run.scalars |= {f"{self.name}/{k}": v for k, v in scalars.items()}

  def request_save(self) -> None:
    """Asks for a checkpoint of the current state."""
    self._check_asks()
    self._run.save = True

  def request_evaluation(self, *names: str) -> None:
    """Asks for evaluations of the current state, by default all of them."""
    self._check_asks()
    for name in names:
      check_choice(
        self.path, name, self._run.evaluations, "there is no evaluation"
      )
    self._run.asked_evaluations |= set(names or self._run.evaluations)

  def stop(self, reason: str, *, failure: bool = False) -> None:
    """Asks to end the run. The first failure counts, or else the first call."""
    self._check_asks()
    if self._run.stop is None or (failure and not self._run.stop.failure):
      self._run.stop = Stop(f"hook {self.name!r}: {reason}", failure)

  def check_every(self, steps: int) -> int:
    """Checks the hook's option every_steps."""
    key = f"{self.path}.every_steps"
    return check_number(key, steps, least=1, whole=True)

  def check_policy(self, policy: str) -> str:
    """Checks the hook's option policy."""
    key = f"{self.path}.policy"
    return check_choice(key, policy, ("stop", "rollback"))

  def reject_state(self, reason: str, policy: str) -> NoReturn:
    """Ends the run without saving; all processes call it at the same step.

    With the policy "rollback" the run returns to the newest checkpoint, if
    there is one, at most three times.
    """
    error = Corrupt(f"hook {self.name!r}: {reason}")
    saved = self._run.saved_step
    if policy == "rollback" and saved is not None:
      raise guard.Rollback(error, saved, saved, _MAX_ROLLBACKS)
    raise error

  def _check_asks(self) -> None:
    if not self.asks and not self._run.in_row:
      raise RuntimeError(
        f"{self.path}: to ask for something outside of after_row, the class of "
        "the hook must declare asks = True."
      )


class WatchedMetric:
  """Reads a metric from log entries.

  It warns once if the metric is missing or not a number.
  """

  def __init__(self, name: str):
    self.name = name
    self._warned = False
    self._seen: set[str] = set()

  def value(self, row: Mapping[str, Any]) -> float | None:
    """The metric in a log entry; None if the entry does not have it."""
    self._seen |= set(row)
    value = row.get(self.name)
    if isinstance(value, int | float):
      return float(value)
    # An entry has the results of one evaluation, or those of training. Only
    # entries that have names with the same prefix should have this metric.
    prefix = self.name.rpartition("/")[0]
    related = [
      name
      for name in row
      if name != "step" and name.rpartition("/")[0] == prefix
    ]
    if (value is not None or related) and not self._warned:
      self._warned = True
      problem = "is not a number" if value is not None else "is not in the rows"
      hint = did_you_mean(self.name, self._seen - {"step"})
      logging.warning("config.hooks: metric %r %s.%s", self.name, problem, hint)
    return None


def sign(mode: str, path: str) -> float:
  """Factor that turns gains into decreases: 1 for mode "min", -1 for "max"."""
  mode = check_choice(path, mode, ("min", "max"))
  return 1.0 if mode == "min" else -1.0
