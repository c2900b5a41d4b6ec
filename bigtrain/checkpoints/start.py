"""Where a run starts: the first source in this order that exists.

1. The newest valid checkpoint of the run: on the hosts (local_checkpoints.py)
   or in the workdir.
2. config.resume: the full state of another run, also of T5X, Mesh TF or
   big_vision.
3. config.model_init: parameters only.
4. The seed.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

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
    if self.model_init and not self.resume and folders.newest(workdir) is None:
      warm_start.check_published(self.model_init, module, model)
    return self


def read(config: settings.Config) -> StartOptions:
  def path_or_dict(key: str) -> Any:
    value = config.get(key)
    return config.kwargs(key) if isinstance(value, settings.Config) else value

  return StartOptions(
    path_or_dict("resume"),
    path_or_dict("model_init"),
    config.get("allow_changes", ()),
    config.get("ckpt_fallback", False),
  )


class Start(NamedTuple):
  """The state that a run starts with, after `step` finished steps."""

  state: Any
  host: HostState
  step: int
  how: str  # A line for the log.
  resumed: bool  # Whether the state is from a checkpoint of this run.
  saved_step: int | None = None  # Of the workdir's newest checkpoint.

  @property
  def restored_step(self) -> int | None:
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
) -> Start:
  """Loads or makes the state to start with; see the module for the order.

  Args:
    init_state: makes the state of step 0 from an int32 seed; traceable.
    from_local: whether the run may start from the hosts' checkpoints. A
      rollback may not: what it skips must not depend on them.
    base: digest of the base of adapters, which a checkpoint's must equal.
    begin: changes a new state of adapters, in place of loading model_init.
  """

  def check_origin(host: HostState) -> None:
    if host.config is not None:
      changes.check_config(host.config, config, options.allow_changes)
    changes.check_files(host.fingerprints, fingerprints, options.allow_changes)
    changes.check_base(host.base, base or {})

  hosts = local if from_local else None
  result = _resume(workdir, state_spec, hosts, check_origin, options.fallback)
  foreign = options.resume and foreign_state.find(options.resume)
  if result is None and options.resume and not foreign:
    result = _continue(options.resume, state_spec, check_origin)
  if result is None:
    shardings = jax.tree.map(lambda x: x.sharding, state_spec)
    # Traced here, because the ambient mesh belongs to this thread; compiled and
    # run in another.
    word = keys.seed_word(seed)
    compiled = lower("init", init_state, word, out_shardings=shardings)
    state = process.Background(lambda: compiled()(word), "init").result()
    result = Start(state, HostState(), 0, "from scratch", False)
    if foreign:
      _load_model(state, foreign, state_spec, model_module, "config.resume")
      opt = config.get("optimizer", {})
      step = foreign_state.load(state, foreign, state_spec, model_module, opt)
      how = f"continued from step {step} of {options.resume}"
      result = result._replace(step=step, how=how)
    elif options.model_init:
      how = f"parameters from {options.model_init}"
      result = result._replace(how=how)
    if base and begin:
      begin(state)
      state |= {"ema": ema.init(state["params"])} if "ema" in state else {}
    elif options.model_init and not foreign:
      key = "config.model_init"
      _load_model(state, options.model_init, state_spec, model_module, key)
  if local is not None:
    local.begin(result.step, result.saved_step)
  elif jax.process_index() == 0:
    local_checkpoints.forget(workdir)
  return result


def _resume(
  workdir: str,
  state_spec: Any,
  local: local_checkpoints.LocalCheckpoints | None,
  check_origin: Callable[[HostState], None],
  fallback: bool,
) -> Start | None:
  newest = folders.newest(workdir)
  if newest is not None:
    # Before the arrays are read: a changed config explains more than arrays
    # that do not fit. `restore.resume` reports damage.
    with contextlib.suppress(DamagedError):
      manifest = folders.read_manifest(folders.find(workdir, newest))
      check_origin(manifest.host_state)
  if local and (checkpoint := local.restore(newest, state_spec)):
    state, manifest = checkpoint
    check_origin(manifest.host_state)
    restore.clean(workdir)
    how = f"resumed from step {manifest.step} of this workdir, on the hosts"
    host = manifest.host_state
    return Start(state, host, manifest.step, how, True, newest)
  if checkpoint := restore.resume(workdir, state_spec, fallback=fallback):
    state, manifest = checkpoint
    step = manifest.step
    how = f"resumed from step {step} of this workdir"
    return Start(state, manifest.host_state, step, how, True, step)
  return None


def _continue(
  source: Any, state_spec: Any, check_origin: Callable[[HostState], None]
) -> Start:
  state, manifest = warm_start.load_state(source, state_spec)
  check_origin(manifest.host_state)
  # Time accounts and hooks start anew: they belong to the other run.
  old = manifest.host_state
  host = HostState(tally=old.tally, batches_ahead=old.batches_ahead)
  how = f"continued from step {manifest.step} of {source}"
  return Start(state, host, manifest.step, how, False)


def _load_model(
  state: dict[str, Any], source: Any, state_spec: Any, module: Any, key: str
) -> None:
  like = evaluated(state_spec)["params"]
  init = lambda: evaluated(state)["params"]
  loaded = warm_start.load_variables(
    source, like, init=init, module=module, key=key
  )
  state["params"] = loaded.pop("params")
  if loaded:
    state["mutable"] = loaded
  if "ema" in state:
    state["ema"] = ema.init(state["params"])


def evaluated(state: Mapping[str, Any]) -> dict[str, Any]:
  """{name: model variables} for each set of weights in a train state.

  The names are "params" and, if there are averaged parameters, "ema". Each has
  what is frozen in the state, a teacher or the base of adapters.
  """
  opt = state.get("opt", {})
  weights = {"params": averages.evaluation_form(state["params"], opt)}
  if "ema" in state:
    weights["ema"] = state["ema"]
  rest = frozen.variables(state)
  return {
    name: {"params": params, **state.get("mutable", {}), **rest}
    for name, params in weights.items()
  }
