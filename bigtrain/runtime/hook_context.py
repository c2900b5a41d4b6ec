"""A hook's view of the run, and its requests; hooks.py carries them out."""

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

_MOST_ROLLBACKS = 3


class Corrupt(RuntimeError):
  """The hardware computed, moved or stored wrong bits."""


class End(NamedTuple):
  """How training ended; argument of a hook's `after_train`.

  `how` is "finished"; "stopped" by a hook, as a success; "preempted" by a
  signal; "rolled_back" to a checkpoint, to start again from it; or "failed".
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
  in_row: bool = False  # Whether hooks see a row at present.
  stop: Stop | None = None
  save: bool = False
  asked_evaluations: set[str] = dataclasses.field(default_factory=set)

  def take_asked(self) -> list[Any]:
    asked = [self.stop, self.save, sorted(self.asked_evaluations)]
    self.stop, self.save, self.asked_evaluations = None, False, set()
    return asked


class Context:
  """A hook's view of the run, and its requests; docs/hooks.md has examples.

  The state and the requests exist once the run has started, not in `__init__`.
  `path` is the hook's location in the config, for error messages.
  """

  def __init__(self, name: str, run: Run):
    self.name = name
    self.path = f"config.hooks.{name}"
    self.workdir = run.workdir
    self.config = run.config
    self.mesh = run.mesh
    self.predict_fns = run.predict_fns
    self.asks = False  # Whether it may ask outside of after_row.
    self._run = run

  @property
  def step(self) -> int:
    return self._run.step

  @property
  def state(self) -> TrainState:
    """Arrays on the devices, which the next update overwrites."""
    return self._run.state

  def variables(self, weights: str = "params") -> Variables:
    state = {**self._run.state, **self._run.frozen}
    return frozen.model_variables(state, weights)

  @property
  def values(self) -> dict[str, float]:
    """The step's metrics as in a row, for hooks that `needs_values`.

    "loss_last" is the loss of this step, "loss" the mean since the last row.
    """
    if self._run.values is None:
      raise RuntimeError(
        f"{self.path}: `values` exist in after_step only, and the hook's class "
        "must declare needs_values = True."
      )
    return self._run.values

  def add_scalars(self, scalars: Mapping[str, Any]) -> None:
    """Adds `<name of the hook>/<name>` to the next row of training.

    Arrays of one number are fetched from the device when the row is written;
    they must not be part of the state.
    """
    if self.name in self._run.evaluations:
      raise ConfigError(
        f"{self.path}: an evaluation has the same name, and its metrics begin "
        f"with '{self.name}/' too: rename the hook."
      )
    self._run.scalars |= {f"{self.name}/{k}": v for k, v in scalars.items()}

  def request_save(self) -> None:
    self._check_asks()
    self._run.save = True

  def request_evaluation(self, *names: str) -> None:
    """Asks for evaluations of the present state, by default for all."""
    self._check_asks()
    for name in names:
      known, problem = self._run.evaluations, "there is no evaluation"
      check_choice(self.path, name, known, problem)
    self._run.asked_evaluations |= set(names or self._run.evaluations)

  def stop(self, reason: str, *, failure: bool = False) -> None:
    """Asks to end the run; a failure wins, else the first call."""
    self._check_asks()
    if self._run.stop is None or (failure and not self._run.stop.failure):
      self._run.stop = Stop(f"hook {self.name!r}: {reason}", failure)

  def check_every(self, steps: int) -> int:
    key = f"{self.path}.every_steps"
    return check_number(key, steps, least=1, whole=True)

  def check_policy(self, policy: str) -> str:
    key = f"{self.path}.policy"
    return check_choice(key, policy, ("stop", "rollback"))

  def reject_state(self, reason: str, policy: str) -> NoReturn:
    """Ends the run, on all processes at the same step; nothing more is saved.

    With the policy "rollback" the run returns to the newest checkpoint, if
    there is one, at most three times.
    """
    error = Corrupt(f"hook {self.name!r}: {reason}")
    saved = self._run.saved_step
    if policy == "rollback" and saved is not None:
      raise guard.Rollback(error, saved, saved, _MOST_ROLLBACKS)
    raise error

  def _check_asks(self) -> None:
    if not self.asks and not self._run.in_row:
      raise RuntimeError(
        f"{self.path}: to ask for something outside of after_row, the class of "
        "the hook must declare asks = True."
      )


class WatchedMetric:
  """Reads a metric from rows; warns once if it is missing or not a number."""

  def __init__(self, name: str):
    self.name = name
    self._warned = False
    self._seen: set[str] = set()

  def value(self, row: Mapping[str, Any]) -> float | None:
    self._seen |= set(row)
    value = row.get(self.name)
    if isinstance(value, int | float):
      return float(value)
    # Only rows with the same prefix should have this metric.
    prefix = self.name.rpartition("/")[0]
    related = [k for k in row if k != "step" and k.rpartition("/")[0] == prefix]
    if (value is not None or related) and not self._warned:
      self._warned = True
      problem = "is not a number" if value is not None else "is not in the rows"
      hint = did_you_mean(self.name, self._seen - {"step"})
      logging.warning("config.hooks: metric %r %s.%s", self.name, problem, hint)
    return None


def sign(mode: str, path: str) -> float:
  """Factor that makes a decrease the gain: 1 for mode "min", -1 for "max"."""
  mode = check_choice(path, mode, ("min", "max"))
  return 1.0 if mode == "min" else -1.0
