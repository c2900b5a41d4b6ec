"""Stopping rules, profiles and users' own code between steps.

  config.hooks = {
    "early": dict(type="early_stopping", metric="val/loss", patience=3),
    "best": dict(type="checkpoint_best", metric="val/acc", mode="max"),
    "mine": dict(type="my_project.hooks.Printer", every=10),
  }

builtin_hooks.py has those with a short name. A hook is a class with any of
these methods; it sees steps and rows and never the state:

  before_train(step)           before_step(step)
  after_step(step, row) -> None | reason to stop
  wants_save(step) -> whether the present state should be saved
  before_save(step)            keep_steps() -> steps whose checkpoints stay
  after_train(step)
  state() -> JSON              restore(state)

`after_step` gets every row that is written, of training and of evaluations,
with the names of metrics.jsonl. A run that a hook stops has finished well,
unless the hook has `failure = True`; started again, it stays finished until
config.hooks is changed.

Process 0 shows rows to the hooks and decides for all processes. What hooks
remember is saved with the state.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from bigtrain import parts, settings
from bigtrain.hooks import builtin_hooks
from bigtrain.settings import ConfigError

# A reason is a line; a broadcast needs one size on all processes.
_MAX_BYTES = 4096


class Stop(NamedTuple):
  """A decision to end the run.

  Attributes:
    reason: for the log.
    failure: whether the run then counts as failed.
  """

  reason: str
  failure: bool


class Hooks:
  """All hooks of a config, called in its order.

  Attributes:
    stopped: the decision that ended the run, also one that was restored.
  """

  def __init__(self, hooks: Mapping[str, Any], digest: str = ""):
    """Takes the hooks by name, and the digest of what the config says."""
    self._hooks = dict(hooks)
    self._digest = digest
    self._save_at: int | None = None
    # Names in the rows of the newest step. A run that goes on after the
    # evaluations of its checkpoint sees those again, and must not count twice.
    self._seen: tuple[int, list[str]] = (-1, [])
    self.stopped: Stop | None = None

  def call(self, method: str, step: int) -> None:
    """Calls before_train, before_step, before_save or after_train."""
    for hook in self._hooks.values():
      if hasattr(hook, method):
        getattr(hook, method)(step)

  def after_step(self, step: int, row: Mapping[str, Any]) -> Stop | None:
    """Shows a row to all hooks; the same answer on every process."""
    seen_step, seen = self._seen
    again = step == seen_step
    if not self._hooks or (again and set(row) <= {"step", *seen}):
      return None
    names = {*seen, *row} if again else {*row}
    self._seen = step, sorted(names - {"step"})
    stop = None
    save = False
    if jax.process_index() == 0:
      for name, hook in self._hooks.items():
        if hasattr(hook, "after_step"):
          reason = hook.after_step(step, row)
          failure = getattr(hook, "failure", False)
          # A failure must not pass for a success because of the hooks' order.
          if reason and (stop is None or failure):
            stop = Stop(f"hook {name!r}: {reason}", failure)
        if hasattr(hook, "wants_save") and hook.wants_save(step):
          save = True
    stop, save = _agree(stop, save)
    self._save_at = step if save else self._save_at
    # The first stands, but a failure must not pass for a success.
    if self.stopped is None or (stop and stop.failure):
      self.stopped = stop
    return stop

  def wants_save(self, step: int) -> bool:
    """Whether a hook wants the state of `step` saved; known by all processes.

    Call this when the rows of `step` have been shown.
    """
    return self._save_at == step

  def keep_steps(self) -> set[int]:
    """Steps whose checkpoints have to stay; complete on process 0 only."""
    return {
      step
      for hook in self._hooks.values()
      if hasattr(hook, "keep_steps")
      for step in hook.keep_steps()
    }

  def state(self) -> dict[str, Any]:
    """What is wanted again after a restart."""
    return {
      "hooks": {
        name: hook.state()
        for name, hook in self._hooks.items()
        if hasattr(hook, "state")
      },
      "seen": self._seen,
      "stopped": self.stopped,
      "config": self._digest,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Gives each hook its own part of what `state` returned."""
    if not state:
      return
    for name, hook in self._hooks.items():
      if name in state["hooks"] and hasattr(hook, "restore"):
        hook.restore(state["hooks"][name])
    step, names = state["seen"]
    self._seen = step, list(names)
    if state["stopped"] and state["config"] == self._digest:
      self.stopped = Stop(*state["stopped"])

  def __len__(self) -> int:
    return len(self._hooks)


def from_config(config: settings.Config, workdir: str) -> Hooks:
  """Builds config.hooks.

  Raises:
    ConfigError: an unknown type or option.
  """
  hooks = {}
  entries = config.kwargs("hooks", {})
  for name, options in entries.items():
    path = f"config.hooks.{name}"
    if not isinstance(options, Mapping):
      raise ConfigError(f"{path}: expected a dict, got {options!r}.")
    options = dict(options)
    kind = options.pop("type", None)
    if kind in builtin_hooks.TYPES:
      make = builtin_hooks.TYPES[kind]
      _check_evaluation(options, config, path)
    elif isinstance(kind, str) and "." in kind:
      make = parts.find_attribute(kind, f"{path}.type")
    else:
      hint = settings.did_you_mean(str(kind), builtin_hooks.TYPES)
      raise ConfigError(f"{path}.type: no hook {kind!r}.{hint}")
    given: dict[str, Any] = {}
    if kind in ("profile", "checkpoint_best"):
      given["workdir"] = workdir
    if kind == "checkpoint_best":
      given["name"] = name
    settings.check_kwargs(make, options, path, given=given)
    hooks[name] = make(**options, **given)
  return Hooks(hooks, settings.digest(entries))


def _check_evaluation(
  options: Mapping[str, Any], config: settings.Config, path: str
) -> None:
  """Warns about a metric of an evaluation that is none of the config's.

  No row has the prefix of such a metric, so none could show that it is absent.
  """
  names = [options.get("metric"), options.get("metrics")]
  for name in [n for part in names for n in _as_list(part)]:
    prefix, slash, _ = str(name).partition("/")
    evals = list(config.get("evals", {}))
    if slash and prefix not in (*evals, *_NO_EVALUATIONS):
      hint = settings.did_you_mean(prefix, evals)
      logging.warning(
        "%s: metric %r: there is no evaluation %r.%s", path, name, prefix, hint
      )


# First words of names that rows of training have.
_NO_EVALUATIONS = (
  "account",
  "grad_norm",
  "grad_rms",
  "lr",
  "update_rms",
  "weight_max",
  "weight_rms",
)


def _as_list(names: Any) -> list[Any]:
  if names is None:
    return []
  return [names] if isinstance(names, str) else list(names)


def _agree(stop: Stop | None, save: bool) -> tuple[Stop | None, bool]:
  """What process 0 decided, on every process."""
  if jax.process_count() == 1:
    return stop, save
  from jax.experimental import multihost_utils

  if stop:
    # JSON takes up to six bytes for a character.
    stop = stop._replace(reason=stop.reason[: _MAX_BYTES // 8])
  text = json.dumps([stop, save]).encode()
  buffer = np.zeros(_MAX_BYTES, np.uint8)
  buffer[: len(text)] = np.frombuffer(text, np.uint8)
  buffer = multihost_utils.broadcast_one_to_all(buffer)
  stop, save = json.loads(bytes(buffer).rstrip(b"\0").decode())
  return Stop(*stop) if stop else None, save
