"""The hooks that a config names by type; hooks.py says what a hook is."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from bigtrain import parts, settings
from bigtrain.checkpoints import folders
from bigtrain.files import paths
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
    self._watch = [Watched(name) for name in names]

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
    if not isinstance(patience, int) or patience < 1:
      raise ConfigError(
        f"early_stopping.patience: expected at least 1, got {patience!r}."
      )
    self._sign = _sign(mode, "early_stopping")
    self._watched = Watched(metric)
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


class CheckpointBest:
  """Keeps the checkpoint of the step at which a metric was best.

  The rules of config.keep_ckpts leave it alone until a better one is there.
  Where the metric is of an evaluation, the state that was evaluated is saved
  if no checkpoint was due at that step. A row of training is written when its
  state has changed already, so there only steps that are saved anyway count.
  Of equal values the earlier stays; NaN is never best.

  <workdir>/best_<name of the hook>.json says which it is.

  Args:
    metric: name as in metrics.jsonl, such as "val/acc".
    mode: "min" if smaller is better, "max" if larger is.
    workdir: given by the program.
    name: of this hook; given by the program.
  """

  def __init__(
    self, metric: str, mode: str = "min", *, workdir: str, name: str
  ):
    self._sign = _sign(mode, "checkpoint_best")
    self._watched = Watched(metric)
    self._workdir = workdir
    self._path = os.path.join(workdir, f"best_{name}.json")
    self._best: tuple[int, float] | None = None
    self._candidate: tuple[int, float] | None = None  # It may yet be saved.
    self._saved: int | None = None  # The newest step that was.

  def after_step(self, step: int, row: Mapping[str, Any]) -> None:
    """Takes the row's value, if it has one."""
    value = self._watched.value(row)
    if value is None or math.isnan(value):
      return
    if self._best is None or self._sign * (self._best[1] - value) > 0:
      self._candidate = step, value
      if step == self._saved:
        self._take()

  def wants_save(self, step: int) -> bool:
    """Whether the state of `step`, which is not saved yet, should be."""
    return self._candidate is not None and self._candidate[0] == step

  def before_save(self, step: int) -> None:
    """The state of `step` is about to be saved."""
    self._saved = step
    if self.wants_save(step):
      self._take()

  def keep_steps(self) -> list[int]:
    """Steps whose checkpoints have to stay."""
    return [self._best[0]] if self._best else []

  def state(self) -> dict[str, Any]:
    """The best step with its value, and the newest step that was saved."""
    return {"best": self._best, "saved": self._saved}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes up where `state` was taken, if that checkpoint is still there."""
    self._saved = state["saved"]
    self._best = tuple(state["best"]) if state["best"] else None
    # That of `saved` is the one which this comes from.
    there = {*folders.listing(self._workdir).checkpoints, self._saved}
    if self._best and self._best[0] not in there:
      logging.warning(
        "config.hooks: the best checkpoint so far, of step %d with %s %g, is "
        "no longer there; the next best one is looked for.",
        self._best[0],
        self._watched.name,
        self._best[1],
      )
      self._best = None
    self._write()

  def _take(self) -> None:
    self._best, self._candidate = self._candidate, None
    self._write()

  def _write(self) -> None:
    if self._best is None or jax.process_index():
      return
    step, value = self._best
    record = {"step": step, "metric": self._watched.name, "value": value}
    with paths.replacing(self._path) as file:
      json.dump(record, file)


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
    self._beside: tempfile.TemporaryDirectory[str] | None = None
    self._on = False

  def before_step(self, step: int) -> None:
    """Starts or ends the trace when its step has come."""
    if step == self._start:
      if paths.is_remote(self._folder):
        self._beside = tempfile.TemporaryDirectory(prefix="bigtrain-")
      jax.profiler.start_trace(
        self._beside.name if self._beside else self._folder
      )
      self._on = True
    elif step >= self._stop:
      self.after_train(step)

  def after_train(self, step: int) -> None:
    """Ends the trace if the run ends inside of it."""
    if self._on:
      jax.profiler.stop_trace()
      self._on = False
      if self._beside:
        paths.push_folder(self._beside.name, self._folder)
        self._beside.cleanup()
      logging.info("A profile is in %s.", self._folder)


class Call:
  """Calls a user's function with every row.

  Args:
    function: dotted path of fn(step, row, **kwargs) -> None | reason to stop.
    kwargs: passed on.
  """

  def __init__(self, function: str, **kwargs: Any):
    self._function = parts.find_attribute(function, "config.hooks")
    self._kwargs = kwargs

  def after_step(self, step: int, row: Mapping[str, Any]) -> str | None:
    """Returns what the function returns."""
    return self._function(step, row, **self._kwargs)


TYPES: dict[str, Callable[..., Any]] = {
  "stop_on_nan": StopOnNan,
  "early_stopping": EarlyStopping,
  "checkpoint_best": CheckpointBest,
  "profile": Profile,
  "call": Call,
}


def _sign(mode: str, hook: str) -> float:
  """What an improvement is multiplied by to be positive."""
  if mode not in ("min", "max"):
    hint = settings.did_you_mean(mode, ("min", "max"))
    raise ConfigError(f"{hook}.mode: no mode {mode!r}.{hint}")
  return 1.0 if mode == "min" else -1.0


class Watched:
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
