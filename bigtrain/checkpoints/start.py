"""Where a run starts: resumed, continued from elsewhere, warm, or new.

In this order: the newest good checkpoint of the workdir; config.resume, the
whole state of another run; config.model_init, parameters alone; the seed.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from absl import logging

from bigtrain import settings
from bigtrain.checkpoints import checkpointer, folders, restore, warm_start
from bigtrain.checkpoints.manifest import DamagedError, Manifest
from bigtrain.cluster import process
from bigtrain.optim import chain
from bigtrain.settings import ConfigError

# What may change between two starts of a run without changing what it learns.
# Everything else (seed, input, batch size, model, optimizer, schedule, length)
# changes the trajectory.
_HARMLESS = (
  "allow_changes",
  "ckpt_*",
  "debug_nans",
  "debug_shapes",
  "eager",
  "eval_at_start",
  "eval_only",
  "cluster",
  "compile_cache",
  "compile_only",
  "evals",
  "expect_*",
  "hooks",
  "input.cache",
  "input.num_threads",
  "input.prefetch",
  "input.skip_errors",
  "keep_*",
  "log_*",
  "mesh",
  "max_nonfinite",
  "model_init",
  "nonfinite",
  "peak_flops_per_device",
  "resume",
  "save_at_start",
  "sharding",
  "stop_at_*",
  "tensorboard",
  "wandb",
  "watchdog",
  "weight_stats",
)


def evaluated(state: Mapping[str, Any]) -> dict[str, Any]:
  """{name: variables of the model} of each set of weights in a train state."""
  return {
    name: {"params": state[name], **state.get("mutable", {})}
    for name in ("params", "ema")
    if name in state
  }


class Start(NamedTuple):
  """How a run begins.

  Attributes:
    state: the train state, on the devices.
    host: what the host saved beside it (tally, clock, hooks), {} when new.
    step: steps that are done.
    how: one line for the log.
    resumed: whether this workdir's own checkpoint is continued.
  """

  state: Any
  host: dict[str, Any]
  step: int
  how: str
  resumed: bool


def differences(
  old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """{key: (old value, new value)} of all leaves that differ; None if absent."""
  old, new = _leaves(old), _leaves(new)
  keys = sorted(set(old) | set(new))
  changed = {k: (old.get(k), new.get(k)) for k in keys}
  return {k: (o, n) for k, (o, n) in changed.items() if o != n}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
  """Values as JSON, so that tuples equal the lists which a file holds."""
  leaves: dict[str, str] = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      leaves |= _leaves(value, f"{prefix}{key}.")
    else:
      leaves[prefix + key] = settings.to_json({"": value})[5:-1]
  return leaves


def is_harmless(key: str) -> bool:
  """Whether a change at `key` (dotted) leaves the trajectory as it is."""
  for known in _HARMLESS:
    if known.endswith("*"):
      if key.startswith(known[:-1]):
        return True
    elif key == known or key.startswith(known + "."):
      return True
  return False


def check_changes(
  old: Mapping[str, Any], new: Mapping[str, Any], allowed: Any
) -> None:
  """Prints what changed since the checkpoint; refuses what alters the run.

  Args:
    old: the config that the checkpoint was trained with.
    new: today's.
    allowed: config.allow_changes: True for all, or a dotted key, or a list.

  Raises:
    ConfigError: naming every change that is neither harmless nor allowed.
  """
  allowed = _as_list(allowed)
  refused = []
  for key, (before, after) in differences(old, new).items():
    harmless = is_harmless(key)
    granted = allowed is True or any(
      key == a or key.startswith(a + ".") for a in allowed
    )
    kind = "harmless" if harmless else "changes the trajectory"
    logging.info("config.%s: %s -> %s (%s)", key, before, after, kind)
    if not harmless and not granted:
      refused.append(f"config.{key}: {before} -> {after}")
  if refused:
    raise ConfigError(
      "the checkpoint was trained with another config: "
      f"{'; '.join(refused)}. Set config.allow_changes to a list of these keys "
      "(or True) to go on all the same, or choose a new workdir."
    )


def _as_list(allowed: Any) -> Any:
  """config.allow_changes as True or a list."""
  if isinstance(allowed, str):
    return [allowed]
  return allowed if allowed is True else list(allowed or ())


def check_files(
  old: Mapping[str, str], new: Mapping[str, str], allowed: Any
) -> None:
  """Refuses files that say something else than when the run was saved.

  Args:
    old: {file: fingerprint} of what the checkpoint's input was made with, such
      as tokenizers.
    new: the same of today. A file that is new, or gone, is a changed config.
    allowed: config.allow_changes, which may name files as well.

  Raises:
    ConfigError: naming a file with another content.
  """
  allowed = _as_list(allowed)
  for name in sorted(old.keys() & new.keys()):
    if old[name] == new[name]:
      continue
    logging.info("%s: %s -> %s (its content)", name, old[name], new[name])
    if allowed is not True and name not in allowed:
      raise ConfigError(
        f"{name}: the file's content is not that which the checkpoint was "
        f"trained with (its fingerprint was {old[name]}, and is {new[name]}). "
        f"Put the old one back, or set config.allow_changes to [{name!r}] to "
        "go on all the same, or choose a new workdir."
      )


class StartOptions(NamedTuple):
  """What the config says about the start.

  Attributes:
    resume: where the whole state is taken over from.
    model_init: where parameters come from, as warm_start.py understands it.
    allow_changes: True, or keys that may differ from the checkpoint's config.
    fallback: whether an older checkpoint may replace a damaged one.
  """

  resume: Any
  model_init: Any
  allow_changes: Any
  fallback: bool


def read(config: settings.Config) -> StartOptions:
  """Reads resume, model_init, allow_changes and ckpt_fallback."""

  def path_or_dict(key: str) -> Any:
    value = config.get(key)
    return config.kwargs(key) if isinstance(value, settings.Config) else value

  return StartOptions(
    path_or_dict("resume"),
    path_or_dict("model_init"),
    config.get("allow_changes", ()),
    config.get("ckpt_fallback", False),
  )


def start(
  origin: StartOptions,
  workdir: str,
  config: Mapping[str, Any],
  state_spec: Any,
  init_state: Callable[[], Any],
  model_module: Any,
  fingerprints: Mapping[str, str],
) -> Start:
  """Finds the state to begin with; the order is that of this file's head.

  Args:
    origin: what the config says.
    workdir: folder of the run.
    config: plain, to compare with that of a checkpoint.
    state_spec: tree of ShapeDtypeStructs with shardings.
    init_state: makes the state of step 0.
    model_module: its `from_published`, if it has one, converts parameters.
    fingerprints: of the files that the input is made with.

  Raises:
    ConfigError: the config or one of these files changed, or a state does not
      fit the model.
    CheckpointError: there are checkpoints, but they cannot be trusted.
  """
  newest = checkpointer.newest(workdir)
  if newest is not None:
    # Before the arrays: that the config changed says more than that they do
    # not fit. What is damaged is told, and dealt with, by the restoring.
    with contextlib.suppress(DamagedError):
      manifest = folders.read_manifest(folders.find(workdir, newest))
      _check_origin(manifest, config, fingerprints, origin.allow_changes)
  found = restore.resume(workdir, state_spec, fallback=origin.fallback)
  if found:
    state, manifest = found
    how = f"resumed from step {manifest.step} of this workdir"
    return Start(state, manifest.host_state, manifest.step, how, True)
  if origin.resume:
    state, manifest = warm_start.load_state(origin.resume, state_spec)
    _check_origin(manifest, config, fingerprints, origin.allow_changes)
    # The clock and the hooks' memory are the other run's.
    kept = ("tally", "batches_ahead")
    host = {name: manifest.host_state[name] for name in kept}
    how = f"continued from step {manifest.step} of {origin.resume}"
    return Start(state, host, manifest.step, how, False)

  shardings = jax.tree.map(lambda x: x.sharding, state_spec)
  # Traced here, as the ambient mesh is this thread's; compiled elsewhere.
  lowered = jax.jit(init_state, out_shardings=shardings).lower()
  state = process.Background(lambda: lowered.compile()(), "init").result()
  if not origin.model_init:
    return Start(state, {}, 0, "from scratch", False)
  mutable = state.get("mutable", {})
  initial = {**state["params"], **mutable}
  loaded, _ = warm_start.load_params(
    origin.model_init,
    {**state_spec["params"], **state_spec.get("mutable", {})},
    init=lambda: initial,
    convert=getattr(model_module, "from_published", None),
    collections=tuple(mutable),
  )
  if mutable:
    state["mutable"] = {name: loaded.pop(name) for name in mutable}
  state["params"] = loaded
  if "ema" in state:
    state["ema"] = chain.ema_init(state["params"])
  how = f"parameters from {origin.model_init}"
  return Start(state, {}, 0, how, False)


def _check_origin(
  manifest: Manifest,
  config: Mapping[str, Any],
  fingerprints: Mapping[str, str],
  allowed: Any,
) -> None:
  saved = manifest.host_state.get("config")
  if saved is not None:
    check_changes(saved, config, allowed)
  check_files(
    manifest.host_state.get("fingerprints", {}), fingerprints, allowed
  )
