"""Builds and runs the hooks of a config; bigtrain.hooks describes a hook.

Every process has all hooks and calls them at the same steps. Process 0 alone
shows them the rows and broadcasts their decisions. Their state is saved with
each checkpoint.
"""

import inspect
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from bigtrain import parts, settings
from bigtrain.settings import ConfigError

# Size of the broadcast decision, which all processes must know in advance.
_MAX_BYTES = 4096


class Context(NamedTuple):
  """What the program passes to a hook that has a parameter `context`.

  Attributes:
    name: name of the hook in config.hooks.
    workdir: folder of the run.
  """

  name: str
  workdir: str

  @property
  def path(self) -> str:
    """Location of the hook in the config, for error messages."""
    return f"config.hooks.{self.name}"


class Stop(NamedTuple):
  """A decision to end the run.

  Attributes:
    reason: reason for the log.
    failure: whether the run has failed.
  """

  reason: str
  failure: bool


class Hooks:
  """All hooks of a config, called in the config's order.

  Args:
    hooks: hooks by name.
    digest: digest of config.hooks.

  Attributes:
    stopped: the decision that ended the run, by this process or an earlier
      one; None while the run goes on.
  """

  def __init__(self, hooks: Mapping[str, Any], digest: str = ""):
    self._hooks = dict(hooks)
    self._digest = digest
    self._save_step: int | None = None
    # Newest step, and the names in its rows. A resumed run shows the rows of
    # its checkpoint's evaluations again, and the hooks must see them once.
    self._seen: tuple[int, list[str]] = (-1, [])
    self.stopped: Stop | None = None

  def call(self, method: str, step: int) -> None:
    """Calls before_train, before_step, before_save or after_train."""
    for hook in self._hooks.values():
      if hasattr(hook, method):
        getattr(hook, method)(step)

  def after_step(self, step: int, row: Mapping[str, Any]) -> Stop | None:
    """Shows a row to all hooks; returns the same decision on every process."""
    seen_step, seen_names = self._seen
    same_step = step == seen_step
    if not self._hooks or (same_step and set(row) <= {"step", *seen_names}):
      return None
    names = {*seen_names, *row} if same_step else {*row}
    self._seen = step, sorted(names - {"step"})
    stop = None
    save = False
    if jax.process_index() == 0:
      for name, hook in self._hooks.items():
        if hasattr(hook, "after_step"):
          reason = hook.after_step(step, row)
          failure = getattr(hook, "failure", False)
          # A failure wins over a success, whatever the order of the hooks.
          if reason and (stop is None or failure):
            stop = Stop(f"hook {name!r}: {reason}", failure)
        if hasattr(hook, "wants_save") and hook.wants_save(step):
          save = True
    stop, save = _broadcast(stop, save)
    self._save_step = step if save else self._save_step
    # The first decision stands, but a failure wins over a success.
    if self.stopped is None or (stop and stop.failure):
      self.stopped = stop
    return stop

  def wants_save(self, step: int) -> bool:
    """Returns whether a hook asks for a checkpoint of `step`.

    The result is the same on every process. Call this after all rows of `step`
    have been shown.
    """
    return self._save_step == step

  @property
  def stop_reason(self) -> str:
    """Why a hook stopped the run; "" if none did."""
    return self.stopped.reason if self.stopped else ""

  def raise_failure(self) -> None:
    """Raises RuntimeError if the hook that stopped the run is a failure."""
    if self.stopped and self.stopped.failure:
      raise RuntimeError(self.stopped.reason)

  def keep_steps(self) -> set[int]:
    """Returns the steps whose checkpoints must stay; valid on process 0."""
    return {
      step
      for hook in self._hooks.values()
      if hasattr(hook, "keep_steps")
      for step in hook.keep_steps()
    }

  def state(self) -> dict[str, Any]:
    """Returns the state to save with a checkpoint, as JSON."""
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
    """Restores the result of `state`; hooks without a saved state start new."""
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

  Args:
    config: the whole config.
    workdir: folder of the run.

  Raises:
    ConfigError: an unknown type or option.
  """
  hooks = {}
  entries = config.kwargs("hooks", {})
  for name, entry in entries.items():
    context = Context(name, workdir)
    if not isinstance(entry, Mapping):
      raise ConfigError(f"{context.path}: expected a dict, got {entry!r}.")
    options = dict(entry)
    make = _find(options.pop("type", None), f"{context.path}.type")
    given: dict[str, Any] = {}
    if "context" in inspect.signature(make).parameters:
      given["context"] = context
    settings.check_kwargs(make, options, context.path, given=given)
    hooks[name] = make(**options, **given)
    _check_evaluations(hooks[name], config, context.path)
  return Hooks(hooks, settings.digest(entries))


def _find(kind: Any, path: str) -> Any:
  """Returns the class of a hook type: a module's name or a dotted path."""
  if isinstance(kind, str) and "." in kind:
    return parts.find_attribute(kind, path)
  return parts.find_module("hooks", kind, path).Hook


def _check_evaluations(hook: Any, config: settings.Config, path: str) -> None:
  """Warns if a hook watches a metric of an evaluation that does not exist.

  Rows cannot reveal this mistake: none of them has the metric's prefix.
  """
  evals = list(config.get("evals", {}))
  for metric in getattr(hook, "watches", ()):
    prefix, slash, _ = str(metric).partition("/")
    if slash and prefix not in (*evals, *_TRAINING_PREFIXES):
      hint = settings.did_you_mean(prefix, evals)
      logging.warning(
        "%s: metric %r: there is no evaluation %r.%s",
        path,
        metric,
        prefix,
        hint,
      )


# Prefixes of names in rows of training.
_TRAINING_PREFIXES = (
  "account",
  "grad_norm",
  "grad_rms",
  "lr",
  "update_rms",
  "weight_max",
  "weight_rms",
)


def _broadcast(stop: Stop | None, save: bool) -> tuple[Stop | None, bool]:
  """Returns the decisions of process 0, on every process."""
  if jax.process_count() == 1:
    return stop, save
  from jax.experimental import multihost_utils

  if stop:
    # JSON takes up to six bytes per character.
    stop = stop._replace(reason=stop.reason[: _MAX_BYTES // 8])
  text = json.dumps([stop, save]).encode()
  buffer = np.zeros(_MAX_BYTES, np.uint8)
  buffer[: len(text)] = np.frombuffer(text, np.uint8)
  buffer = multihost_utils.broadcast_one_to_all(buffer)
  stop, save = json.loads(bytes(buffer).rstrip(b"\0").decode())
  return Stop(*stop) if stop else None, save
