"""The state with which a run starts, from the first source that exists:

1. The newest valid checkpoint of this run, on the hosts (local_checkpoints.py)
   or in the workdir.
2. config.resume: the full state of another run, also one of T5X, Mesh TF or
   big_vision.
3. config.model_init: parameters only.
4. The seed.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.arrays import trees
from bigtrain.checkpoints import (
  averages,
  changes,
  folders,
  foreign_state,
  local_checkpoints,
  restore,
  warm_start,
)
from bigtrain.checkpoints.manifest import DamagedError, HostState
from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.optim import ema
from bigtrain.step import frozen, keys


class StartOptions(NamedTuple):
  """Keys of the config that concern the start."""

  resume: Any
  model_init: Any
  allow_changes: Any
  fallback: bool

  def check(self, workdir: str, module: Any, model: Any) -> "StartOptions":
    """If a run starts with published weights, compares them with the model."""
    if self.model_init and not self.resume and folders.newest(workdir) is None:
      warm_start.check_published(self.model_init, module, model)
    return self


def read(config: settings.Config) -> StartOptions:
  def path_or_dict(key: str) -> Any:
    value = config.get(key)
    return config.kwargs(key) if isinstance(value, settings.Config) else value

  return StartOptions(
    resume=path_or_dict("resume"),
    model_init=path_or_dict("model_init"),
    allow_changes=config.get("allow_changes", ()),
    fallback=config.get("ckpt_fallback", False),
  )


class Start(NamedTuple):
  """The state that a run starts with, after `step` finished steps."""

  state: Any
  host: HostState
  step: int
  how: str  # A line for the log.
  resumed: bool  # Whether the state is from a checkpoint of this run.
  saved_step: int | None = None  # Step of the workdir's newest checkpoint.

  @property
  def restored_step(self) -> int | None:
    """The step, if the state is from a checkpoint of this run."""
    return self.step if self.resumed else None


def start(
  options: StartOptions,
  workdir: str,
  config: Mapping[str, Any],
  *,
  state_spec: Any,
  init_state: Callable[[Any], Any],
  model_module: Any,
  seed: int,
  fingerprints: Mapping[str, str],
  lower: Callable[..., Callable[[], Any]],
  local: local_checkpoints.LocalCheckpoints | None = None,
  from_local: bool = True,
  base: Mapping[str, Any] | None = None,
  begin: Callable[[Any], None] | None = None,
  init_tasks: Callable[[Any], Mapping[str, Any]] | None = None,
) -> Start:
  """Loads or makes the state to start with; see the module for the order.

  Args:
    state_spec: specs of the state, with shardings.
    init_state: makes the state of step 0 from an int32 seed; it is jitted.
    model_module: the model's module, whose rules convert other names.
    fingerprints: {input file: fingerprint of its content}.
    lower: lowers a function, and returns a function that compiles it.
    local: the hosts' checkpoints, if config.local_ckpt_* is set.
    from_local: whether the run may start from them. A rollback may not, because
      the batches that it skips must not depend on local checkpoints.
    base: digest of the adapters' base, which must be the one in the checkpoint.
    begin: changes a new state of adapters, in place of loading model_init.
    init_tasks: parameters -> {"tasks": states of tasks}, such as teachers,
      which begin as the parameters that were loaded.
  """

  def check_origin(host: HostState) -> None:
    if host.config is not None:
      changes.check_config(host.config, config, options.allow_changes)
    changes.check_files(host.fingerprints, fingerprints, options.allow_changes)
    changes.check_base(host.base, base or {})

  # 1: a checkpoint of this run.
  hosts = local if from_local else None
  result = _resume(workdir, state_spec, hosts, check_origin, options.fallback)
  # 2: the state of another run. One of another program is put into a new state.
  foreign = options.resume and foreign_state.find(options.resume)
  if result is None and options.resume and not foreign:
    result = _continue(options.resume, state_spec, check_origin)

  # 3 and 4: a new state.
  if result is None:
    state = _new_state(state_spec, init_state, seed, lower)
    step, how = 0, "from scratch"
    if foreign:
      _load_model(state, foreign, state_spec, model_module, "config.resume")
      optimizer = config.get("optimizer", {})
      step = foreign_state.load(
        state, foreign, state_spec, model_module, optimizer
      )
      how = f"continued from step {step} of {options.resume}"
    elif options.model_init:
      how = f"parameters from {options.model_init}"
    if base and begin:
      begin(state)
      if "ema" in state:
        state["ema"] = ema.init(state["params"])
    elif options.model_init and not foreign:
      key = "config.model_init"
      _load_model(state, options.model_init, state_spec, model_module, key)
    if options.model_init and not foreign:
      _copy_into_optimizer(state)
    if init_tasks and "tasks" in state:
      state |= _new_tasks(state, state_spec, init_tasks)
    result = Start(state, HostState(), step, how, resumed=False)

  if local is not None:
    local.begin(result.step, result.saved_step)
  elif jax.process_index() == 0:
    local_checkpoints.forget(workdir)
  return result


def _new_tasks(
  state: Any, state_spec: Any, init_tasks: Callable[[Any], Mapping[str, Any]]
) -> Mapping[str, Any]:
  """The initial states of tasks, which may be copies of the parameters."""
  shardings = jax.tree.map(lambda x: x.sharding, state_spec["tasks"])
  make = jax.jit(init_tasks, out_shardings={"tasks": shardings})
  return make(state["params"])


def _new_state(
  state_spec: Any,
  init_state: Callable[[Any], Any],
  seed: int,
  lower: Callable[..., Callable[[], Any]],
) -> Any:
  """Makes the state of step 0 on the devices."""
  shardings = jax.tree.map(lambda x: x.sharding, state_spec)
  word = keys.seed_word(seed)
  # Traced in this thread, because the ambient mesh belongs to it; compiled and
  # run in another, so that signals reach this one.
  compiled = lower("init", init_state, word, out_shardings=shardings)
  return process.Background(lambda: compiled()(word), "init").result()


def _resume(
  workdir: str,
  state_spec: Any,
  local: local_checkpoints.LocalCheckpoints | None,
  check_origin: Callable[[HostState], None],
  fallback: bool,
) -> Start | None:
  """Restores the newest checkpoint of this run, if it has one."""
  newest = folders.newest(workdir)
  if newest is not None:
    # The config is compared before the arrays: its changes explain why arrays
    # do not fit. `restore.resume` reports damage.
    with contextlib.suppress(DamagedError):
      manifest = folders.read_manifest(folders.find(workdir, newest))
      check_origin(manifest.host_state)
  checkpoint = local.restore(newest, state_spec) if local else None
  if checkpoint:
    state, manifest = checkpoint
    check_origin(manifest.host_state)
    restore.clean(workdir)
    step = manifest.step
    return Start(
      state,
      manifest.host_state,
      step,
      how=f"resumed from step {step} of this workdir, on the hosts",
      resumed=True,
      saved_step=newest,
    )
  checkpoint = restore.resume(workdir, state_spec, fallback=fallback)
  if checkpoint:
    state, manifest = checkpoint
    step = manifest.step
    return Start(
      state,
      manifest.host_state,
      step,
      how=f"resumed from step {step} of this workdir",
      resumed=True,
      saved_step=step,
    )
  return None


def _continue(
  source: Any, state_spec: Any, check_origin: Callable[[HostState], None]
) -> Start:
  """Continues the state of another run of this program."""
  state, manifest = warm_start.load_state(source, state_spec)
  check_origin(manifest.host_state)
  # Time accounts and hooks start afresh: the saved ones are another run's.
  old = manifest.host_state
  return Start(
    state,
    HostState(tally=old.tally, batches_ahead=old.batches_ahead),
    manifest.step,
    how=f"continued from step {manifest.step} of {source}",
    resumed=False,
  )


def _load_model(
  state: dict[str, Any], source: Any, state_spec: Any, module: Any, key: str
) -> None:
  """Loads parameters and mutable variables into a new state."""
  loaded = warm_start.load_variables(
    source,
    evaluated(state_spec)["params"],
    init=lambda: evaluated(state)["params"],
    module=module,
    key=key,
  )
  state["params"] = loaded.pop("params")
  if loaded:
    state["mutable"] = loaded
  if "ema" in state:
    state["ema"] = ema.init(state["params"])


def _copy_into_optimizer(state: dict[str, Any]) -> None:
  """Puts loaded parameters where an optimizer keeps the initial ones.

  These are the iterates of schedule-free optimizers, and Mechanic's start.
  """
  params = dict(trees.flatten_with_names(state["params"]))

  def copied(name: str, x: jax.Array) -> jax.Array:
    # Of several optimizers, each has a name.
    match = re.fullmatch(r"(?:[^/]+/)?(?:z|x0)/(.+)", name)
    param = match[1] if match else ""
    if param not in params:
      return x
    # A separate copy, because the update donates the memory of both.
    value = jnp.array(params[param], x.dtype, copy=True)
    return jax.device_put(value, x.sharding)

  state["opt"] = trees.map_with_names(copied, state["opt"])


def evaluated(state: Mapping[str, Any]) -> dict[str, Any]:
  """The variables to evaluate of a train state.

  Returns: {"params": variables} and, if the run averages its parameters,
    {"ema": variables}. Each has the parameters under "params", the mutable
    collections, and the frozen variables of a teacher or of the adapters' base.
    If a task's state contains a teacher, there is also "teacher"
    ("NAME/teacher" if there are several tasks): the same variables, with the
    teacher's parameters in place of the model's.
  """
  opt = state.get("opt", {})
  weights = {"params": averages.evaluation_form(state["params"], opt)}
  if "ema" in state:
    weights["ema"] = state["ema"]
  weights |= _teachers(state)
  others = {**state.get("mutable", {}), **frozen.variables(state)}
  return {
    name: {"params": params, **others} for name, params in weights.items()
  }


def _teachers(state: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters of the model, and of teachers in the states of tasks."""
  params = dict(trees.flatten_with_names(state["params"]))
  tasks = state.get("tasks", {})
  # One task has its state here; several have theirs by name.
  states = {"teacher": tasks}
  states |= {f"{name}/teacher": tasks[name] for name in tasks}
  result = {}
  for name, task in states.items():
    if isinstance(task, Mapping) and "teacher" in task:
      own = dict(trees.flatten_with_names(task["teacher"]))
      if own.keys() <= params.keys():
        result[name] = trees.from_flat({**params, **own})
  return result
