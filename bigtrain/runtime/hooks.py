"""Builds and calls the hooks of a config; bigtrain.hooks describes a hook.

Every process has all hooks and calls them at the same steps. Process 0 decides:
only its hooks see the log entries, and its hooks' requests are broadcast. No
method here waits for the device, unless a hook `needs_values`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from bigtrain.arrays.types import PredictFn, TrainState, Variables
from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_kwargs, did_you_mean
from bigtrain.config.modules import find_attribute, find_module
from bigtrain.reports import console
from bigtrain.runtime import task_checks
from bigtrain.runtime.hook_context import Context, End, Run, Stop
from bigtrain.step import guard, running_metrics
from bigtrain.step.running_metrics import RunningMetrics

_METHODS = (
  "before_train",
  "before_step",
  "around_update",
  "after_step",
  "after_row",
  "before_save",
  "keep_steps",
  "after_train",
)


class Hooks:
  """All hooks of a config, called in the config's order.

  Attributes:
    stopped: the decision that ended the run, now or before it was resumed.
    evaluations: evaluations that hooks have asked for and that have no results
      yet.
  """

  def __init__(self, hooks: Mapping[str, Any], run: Run, digest: str = ""):
    self._hooks = dict(hooks)
    self._run = run
    self._digest = digest
    all_hooks = self._hooks.values()
    # {method: that of each hook that has it}.
    self._calls = {
      method: [
        getattr(hook, method) for hook in all_hooks if hasattr(hook, method)
      ]
      for method in _METHODS
    }
    self._asks = any(getattr(hook, "asks", False) for hook in all_hooks)
    self._needs_values = any(
      getattr(hook, "needs_values", False) for hook in all_hooks
    )
    self._save_step: int | None = None  # A hook has asked to save this step.
    # The newest step, and the names in its log entries. A resumed run reads the
    # results of its checkpoint's evaluations again; hooks see them only once.
    self._seen: tuple[int, list[str]] = (-1, [])
    self.stopped: Stop | None = None
    self.evaluations: set[str] = set()

  def before_train(self) -> None:
    """Calls before_train of the hooks."""
    self._call("before_train", self._run.step)
    self._agree()

  def before_step(self, step: int) -> None:
    self._call("before_step", step)

  def update(self, step: int, update: Callable[..., Any], *args: Any) -> Any:
    """Runs the update, inside around_update of the hooks."""
    for call in reversed(self._calls["around_update"]):
      update = functools.partial(call, step, update)
    return update(*args)

  def after_step(
    self, step: int, state: TrainState, running: RunningMetrics
  ) -> None:
    self._run.step, self._run.state = step, state
    if self._needs_values:
      self._run.values = running_metrics.step_values(jax.device_get(running))
    self._call("after_step", step)
    self._run.values = None
    if self._asks:
      self._agree()

  def after_row(self, row: Mapping[str, Any]) -> None:
    """Shows a log entry to the hooks of process 0."""
    step = row["step"]
    names = row.keys() - {"step"}
    self.evaluations -= {name.partition("/")[0] for name in names}
    seen = {*self._seen[1]} if step == self._seen[0] else set()
    repeated = step == self._seen[0] and names <= seen
    if not self._calls["after_row"] or self.stopped or repeated:
      return
    self._seen = step, sorted(seen | names)
    if jax.process_index() == 0:
      self._run.in_row = True
      self._call("after_row", step, row)
      self._run.in_row = False
    self._agree()

  def before_save(self, step: int) -> None:
    self._call("before_save", step)
    self._run.saved_step = step

  def _call(self, method: str, *args: Any) -> None:
    for call in self._calls[method]:
      call(*args)

  def _agree(self) -> None:
    """Makes the requests of process 0's hooks the decision of all processes."""
    stop, save, evaluations = process.broadcast(self._run.take_asked())
    if save:
      self._save_step = self._run.step
    self.evaluations |= set(evaluations)
    # The first decision counts, but a failure replaces a success.
    if stop:
      decision = Stop(*stop)
      if self.stopped is None or decision.failure:
        self.stopped = decision

  def wants_save(self, step: int) -> bool:
    """Whether a hook has asked to save this step."""
    return self._save_step == step

  @property
  def stop_reason(self) -> str:
    return self.stopped.reason if self.stopped else ""

  def raise_failure(self) -> None:
    """Raises an error if a hook has ended the run as a failure."""
    if self.stopped and self.stopped.failure:
      raise RuntimeError(self.stopped.reason)

  def take_scalars(self) -> dict[str, Any]:
    """Returns the scalars that hooks have added for the next log entry."""
    scalars, self._run.scalars = self._run.scalars, {}
    return scalars

  def keep_steps(self) -> set[int]:
    """Steps whose checkpoints hooks want to keep; valid on process 0."""
    return {step for call in self._calls["keep_steps"] for step in call()}

  def after_train(
    self, kind: Any, error: BaseException | None, traceback: Any
  ) -> None:
    """Tells the hooks how training ended; the arguments are `__exit__`'s."""
    if error is None:
      end = End("stopped" if self.stopped else "finished", self.stop_reason)
    else:
      how = "failed"
      if isinstance(error, process.Preempted):
        how = "preempted"
      elif isinstance(error, guard.Rollback):
        how = "rolled_back"
      end = End(how, f"{type(error).__name__}: {error}", error)
    failures = []
    for call in self._calls["after_train"]:
      try:
        call(self._run.step, end)
      except Exception as e:
        logging.exception("A hook's after_train failed.")
        failures.append(e)
    if failures and error is None:
      raise failures[0]

  def state(self) -> dict[str, Any]:
    """State of the hooks, which checkpoints save as JSON."""
    scalars = jax.device_get(self._run.scalars)
    hooks = self._hooks.items()
    return {
      "hooks": {
        name: hook.state() for name, hook in hooks if hasattr(hook, "state")
      },
      "seen": self._seen,
      "scalars": {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in scalars.items()
      },
      "evaluations": sorted(self.evaluations),
      "stopped": self.stopped,
      "config": self._digest,
    }

  def restore(
    self,
    saved: Mapping[str, Any],
    step: int,
    state: TrainState,
    frozen: Mapping[str, Variables] | None = None,
  ) -> None:
    """Restores a result of `state`, which had fewer keys in older versions.

    Args:
      saved: the result of `state`; {} for a new run.
      step, state: the step and the train state with which the run starts.
      frozen: variables outside the state: a teacher's, or the adapters' base.
    """
    self._run.step, self._run.state = step, state
    self._run.frozen = frozen or {}
    if not saved:
      return
    self._run.saved_step = step
    for name, hook in self._hooks.items():
      if name in saved["hooks"] and hasattr(hook, "restore"):
        hook.restore(saved["hooks"][name])
    seen_step, names = saved["seen"]
    self._seen = seen_step, list(names)
    self._run.scalars = dict(saved.get("scalars", {}))
    if saved["config"] == self._digest:
      self.evaluations = {*saved.get("evaluations", ())}
      self.stopped = Stop(*saved["stopped"]) if saved["stopped"] else None


def from_config(
  config: settings.Config,
  workdir: str,
  mesh: Mesh | None = None,
  predict_fns: Mapping[str, PredictFn] | None = None,
  evaluations: Iterable[Any] = (),
  checks: task_checks.Checks | None = None,
) -> Hooks:
  """Builds the hooks of config.hooks, and a hook for the checks of tasks."""
  names = [evaluation.name for evaluation in evaluations]
  run = Run(workdir, config.to_dict(), mesh, predict_fns or {}, names)
  hooks = {}
  entries = config.kwargs("hooks", {})
  digest = settings.digest(entries)
  # A running job can be asked for a profile.
  types = [e.get("type") for e in entries.values() if isinstance(e, Mapping)]
  if "profile" not in types:
    entries["profile_on_request"] = {"type": "profile", "start": None}
  for name, entry in entries.items():
    context = Context(name, run)
    if not isinstance(entry, Mapping):
      raise ConfigError(f"{context.path}: expected a dict, got {entry!r}.")
    options = dict(entry)
    kind = options.pop("type", None)
    key = f"{context.path}.type"
    if isinstance(kind, str) and "." in kind:
      make = find_attribute(kind, key)
    else:
      make = find_module("hooks", kind, key).Hook
    takes_context = "context" in inspect.signature(make).parameters
    given = {"context": context} if takes_context else {}
    check_kwargs(make, options, context.path, given=given)
    hooks[name] = make(**options, **given)
    if hasattr(hooks[name], "keep_steps") and config.get("keep_ckpts") == 0:
      raise ConfigError(
        f"{context.path}: keeps checkpoints, but this run saves none: without "
        "--workdir, or with config.keep_ckpts=0, nothing is saved."
      )
    context.asks = getattr(hooks[name], "asks", False)
    _check_evaluations(hooks[name], config, context.path, entries)
  if checks:
    name = task_checks.NAME
    if name in hooks:
      raise ConfigError(f"config.hooks.{name}: the name of a hook of tasks.")
    hooks[name] = task_checks.TaskChecks(checks, Context(name, run))
  return Hooks(hooks, run, digest)


def _check_evaluations(
  hook: Any, config: settings.Config, path: str, hook_names: Iterable[str]
) -> None:
  """Warns if a hook watches a metric of an evaluation that does not exist."""
  evals = list(config.get("evals") or {})
  for metric in getattr(hook, "watches", ()):
    prefix, slash, _ = str(metric).partition("/")
    if slash and prefix not in (*evals, *hook_names, *console.PREFIXES):
      hint = did_you_mean(prefix, evals)
      logging.warning(
        f"{path}: metric {metric!r}: there is no evaluation {prefix!r}.{hint}"
      )
