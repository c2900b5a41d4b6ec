"""Stopping rules, profiles and users' own code between steps.

  config.hooks = {
    "early": dict(type="early_stopping", metric="val/loss", patience=3),
    "mine": dict(type="my_project.hooks.Printer", every=10),
  }

A hook is a class with any of these methods; it sees steps and rows and never
the state:

  before_train(step)           before_step(step)
  after_step(step, row) -> None | reason to stop
  after_train(step)
  state() -> JSON              restore(state)

`after_step` gets every row that is written, of training and of evaluations,
with the names of metrics.jsonl. A run that a hook stops has finished well,
unless the hook has `failure = True`. Process 0 decides for all.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from bigtrain import settings
from bigtrain.settings import ConfigError


class StopOnNan:
  """Stops the run, as a failure, when a metric is not finite.

  The loss and the gradients of every step are guarded without this hook (see
  config.nonfinite); it is for other metrics, such as those of evaluations.

  Args:
    metrics: names as in metrics.jsonl; all unless given.
  """

  failure = True

  def __init__(self, metrics: str | list[str] | None = None):
    names = [metrics] if isinstance(metrics, str) else metrics or []
    self._watch = [_Watched(name) for name in names]

  def after_step(self, step: int, row: Mapping[str, Any]) -> str | None:
    """Returns the first metric of the row that is not finite."""
    values: list[tuple[str, float | None]]
    if self._watch:
      values = [(w.name, w.value(row)) for w in self._watch]
    else:
      values = [(k, v) for k, v in row.items() if isinstance(v, float)]
    for name, value in values:
      if value is not None and not math.isfinite(value):
        return f"{name} is {value} at step {step}"
    return None


class EarlyStopping:
  """Stops when a metric no longer improves.

  With v the values so far, in order, it stops as soon as none of the last
  `patience` of them improved on the value before it by more than
  atol + rtol * |value before|.

  Args:
    metric: name as in metrics.jsonl, such as "val/loss".
    mode: "min" if smaller is better, "max" if larger is.
    patience: number of values.
    atol: absolute tolerance, in the metric's unit.
    rtol: tolerance relative to the value before.
  """

  def __init__(
    self,
    metric: str,
    mode: str = "min",
    patience: int = 3,
    atol: float = 0.0,
    rtol: float = 0.0,
  ):
    if mode not in ("min", "max"):
      hint = settings.did_you_mean(mode, ("min", "max"))
      raise ConfigError(f"early_stopping.mode: no mode {mode!r}.{hint}")
    if not isinstance(patience, int) or patience < 1:
      raise ConfigError(
        f"early_stopping.patience: expected at least 1, got {patience!r}."
      )
    self._watched = _Watched(metric)
    self._sign = 1.0 if mode == "min" else -1.0
    self._patience = patience
    self._atol = atol
    self._rtol = rtol
    # The newest patience + 1 values are all that the rule looks at.
    self._values: list[float] = []

  def after_step(self, step: int, row: Mapping[str, Any]) -> str | None:
    """Takes the row's value, if it has one, and applies the rule."""
    value = self._watched.value(row)
    if value is None:
      return None
    self._values = [*self._values, value][-self._patience - 1 :]
    if len(self._values) <= self._patience:
      return None
    for before, after in zip(self._values[:-1], self._values[1:]):
      gain = self._sign * (before - after)
      if gain > self._atol + self._rtol * abs(before):
        return None
    return (
      f"{self._watched.name} has not improved in its last {self._patience} "
      f"values up to step {step}"
    )

  def state(self) -> dict[str, Any]:
    """The values that the rule still needs."""
    return {"values": self._values}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes up where `state` was taken."""
    self._values = list(state["values"])


class Profile:
  """Traces some steps with jax.profiler, for xprof or TensorBoard.

  Args:
    start: number of the first step of the trace, counted from 1.
    steps: how many steps.
    workdir: given by the program; the trace goes to <workdir>/profile.
  """

  def __init__(self, start: int = 10, steps: int = 5, *, workdir: str):
    self._start = start
    self._stop = start + steps
    self._folder = os.path.join(workdir, "profile")
    self._on = False

  def before_step(self, step: int) -> None:
    """Starts or ends the trace when its step has come."""
    if step == self._start:
      jax.profiler.start_trace(self._folder)
      self._on = True
    elif step >= self._stop:
      self.after_train(step)

  def after_train(self, step: int) -> None:
    """Ends the trace if the run ends inside of it."""
    if self._on:
      jax.profiler.stop_trace()
      self._on = False
      logging.info("A profile is in %s.", self._folder)


class Call:
  """Calls a user's function with every row.

  Args:
    function: dotted path of fn(step, row, **kwargs) -> None | reason to stop.
    kwargs: passed on.
  """

  def __init__(self, function: str, **kwargs: Any):
    self._function = settings.find_attribute(function, "config.hooks")
    self._kwargs = kwargs

  def after_step(self, step: int, row: Mapping[str, Any]) -> str | None:
    """Returns what the function returns."""
    return self._function(step, row, **self._kwargs)


# A reason is a line; a broadcast needs one size on all processes.
_MAX_REASON = 4096

_TYPES: dict[str, Callable[..., Any]] = {
  "stop_on_nan": StopOnNan,
  "early_stopping": EarlyStopping,
  "profile": Profile,
  "call": Call,
}


class _Watched:
  """A metric by name, with one warning where it is not a number."""

  def __init__(self, name: str):
    self.name = name
    self._warned = False
    self._seen: set[str] = set()

  def value(self, row: Mapping[str, Any]) -> float | None:
    """The row's value of the metric, if it has one."""
    self._seen |= set(row)
    value = row.get(self.name)
    if isinstance(value, int | float):
      return float(value)
    # Rows of training and of each evaluation hold different metrics, so only
    # a row of the same prefix should have had this one.
    prefix = self.name.rpartition("/")[0]
    same = [k for k in row if k != "step" and k.rpartition("/")[0] == prefix]
    if (value is not None or same) and not self._warned:
      self._warned = True
      what = "is not a number" if value is not None else "is not in the rows"
      hint = settings.did_you_mean(self.name, self._seen - {"step"})
      logging.warning("config.hooks: metric %r %s.%s", self.name, what, hint)
    return None


class Stop(NamedTuple):
  """A decision to end the run.

  Attributes:
    reason: for the log.
    failure: whether the run then counts as failed.
  """

  reason: str
  failure: bool


class Hooks:
  """All hooks of a config, called in its order."""

  def __init__(self, hooks: Mapping[str, Any]):
    self._hooks = dict(hooks)

  def call(self, method: str, step: int) -> None:
    """Calls before_train, before_step or after_train where it is defined."""
    for hook in self._hooks.values():
      if hasattr(hook, method):
        getattr(hook, method)(step)

  def after_step(self, step: int, row: Mapping[str, Any]) -> Stop | None:
    """Shows a row to all hooks; the same answer on every process."""
    stop = None
    for name, hook in self._hooks.items():
      if hasattr(hook, "after_step") and jax.process_index() == 0:
        reason = hook.after_step(step, row)
        failure = getattr(hook, "failure", False)
        # A failure must not pass for a success because of the hooks' order.
        if reason and (stop is None or failure):
          stop = Stop(f"hook {name!r}: {reason}", failure)
    return _agree(stop) if self._hooks else None

  def state(self) -> dict[str, Any]:
    """What each hook wants to find again after a restart."""
    return {
      name: hook.state()
      for name, hook in self._hooks.items()
      if hasattr(hook, "state")
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Gives each hook its own part of what `state` returned."""
    for name, hook in self._hooks.items():
      if name in state and hasattr(hook, "restore"):
        hook.restore(state[name])

  def __len__(self) -> int:
    return len(self._hooks)


def from_config(config: settings.Config, workdir: str) -> Hooks:
  """Builds config.hooks.

  Raises:
    ConfigError: an unknown type or option.
  """
  hooks = {}
  for name in config.get("hooks", {}):
    options = config.hooks.kwargs(name)
    path = f"config.hooks.{name}"
    kind = options.pop("type", None)
    if kind in _TYPES:
      make = _TYPES[kind]
    elif isinstance(kind, str) and "." in kind:
      make = settings.find_attribute(kind, f"{path}.type")
    else:
      hint = settings.did_you_mean(str(kind), _TYPES)
      raise ConfigError(f"{path}.type: no hook {kind!r}.{hint}")
    given = {"workdir": workdir} if kind == "profile" else {}
    settings.check_kwargs(make, options, path, given=given)
    hooks[name] = make(**options, **given)
  return Hooks(hooks)


def _agree(stop: Stop | None) -> Stop | None:
  """What process 0 decided, on every process."""
  if jax.process_count() == 1:
    return stop
  from jax.experimental import multihost_utils

  if stop:
    stop = stop._replace(reason=stop.reason[: _MAX_REASON // 8])
  text = json.dumps(stop).encode()
  buffer = np.zeros(_MAX_REASON, np.uint8)
  buffer[: len(text)] = np.frombuffer(text, np.uint8)
  buffer = multihost_utils.broadcast_one_to_all(buffer)
  decided = json.loads(bytes(buffer).rstrip(b"\0").decode())
  return Stop(*decided) if decided else None
