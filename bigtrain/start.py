"""Where a run starts: resumed, continued from elsewhere, warm, or new.

In this order: the newest good checkpoint of the workdir; config.resume, the
whole state of another run; config.model_init, parameters alone; the seed.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from absl import logging

from bigtrain import checkpoint, settings, warm_start
from bigtrain.settings import ConfigError

# What may change between two starts of a run without changing what it learns.
# Everything else (seed, input, batch size, model, optimizer, schedule, length)
# changes the trajectory.
_HARMLESS = (
  "allow_changes",
  "ckpt_*",
  "compile_cache",
  "evals",
  "expect_*",
  "hooks",
  "input.cache",
  "input.num_threads",
  "input.prefetch",
  "keep_*",
  "log_*",
  "mesh",
  "model_init",
  "peak_flops_per_device",
  "resume",
  "sharding",
  "stop_at_steps",
  "tensorboard",
  "wandb",
  "watchdog",
)


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
  leaves = {}
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
    allowed: config.allow_changes: True for all, or a list of dotted keys.

  Raises:
    ConfigError: naming every change that is neither harmless nor allowed.
  """
  allowed = allowed if allowed is True else list(allowed or ())
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


def begin(
  config: settings.Config,
  workdir: str,
  state_spec: Any,
  init_state: Callable[[], Any],
  from_published: Callable[..., Any] | None,
) -> Start:
  """Finds the state to begin with.

  Args:
    config: reads resume, model_init, allow_changes, on_damaged.
    workdir: folder of the run.
    state_spec: tree of ShapeDtypeStructs with shardings.
    init_state: makes the state of step 0; it is compiled here.
    from_published: the model's conversion of published parameters.

  Raises:
    ConfigError: a changed config, or a state that does not fit the model.
    checkpoint.Damaged: there are checkpoints, but they cannot be trusted.
  """
  allowed = config.get("allow_changes", ())
  on_damaged = config.get("on_damaged", "refuse")
  if on_damaged not in ("refuse", "fallback"):
    raise ConfigError(
      f"config.on_damaged: expected 'refuse' or 'fallback', got {on_damaged!r}."
    )
  resume = config.get("resume")
  model_init = (
    config.kwargs("model_init")
    if isinstance(config.get("model_init"), settings.Config)
    else config.get("model_init")
  )
  return Start({}, {}, 0, "", False)
