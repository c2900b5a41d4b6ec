"""Config keys and files that may change between two starts of a run.

A change of any other key would change what the run learns, so it is refused
unless config.allow_changes names the key.
"""

import fnmatch
from collections.abc import Mapping
from typing import Any

from absl import logging

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError

# Keys that do not affect what a run learns. All others do: seed, input, batch
# size, model, optimizer, schedule, length.
_HARMLESS = """
  activation_stats allow_changes ckpt_* debug_nans debug_shapes
  device_memory_bytes eager eval_at_start eval_only cluster compile_cache
  compiler_options evals expect_* hooks input.cache input.num_threads
  input.prefetch input.skip_errors keep_* local_ckpt_* log_* logical_axes
  loggers mesh max_nonfinite mlflow model_init nonfinite opt_memory opt_sharding
  peak_flops_per_device published_layout resume save_at_start sharding spikes
  stop_at_* teacher.logical_axes tensorboard trackio transfer_guard wandb
  watchdog weight_stats
""".split()


def differences(
  old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """{dotted key: (old value, new value)} as JSON; None if a key is absent."""
  old, new = _leaves(old), _leaves(new)
  return {
    key: (old.get(key), new.get(key))
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key)
  }


def _leaves(config: Mapping[str, Any]) -> dict[str, str]:
  """{dotted key: value as JSON}, in which tuples and lists are the same."""
  leaves = {}
  for key, value in settings.flatten(config).items():
    text = settings.to_json({"": value})
    leaves[key] = text.removeprefix('{"": ').removesuffix("}")
  return leaves


def is_harmless(key: str) -> bool:
  """Whether a change of a dotted key has no effect on what a run learns."""
  return any(
    fnmatch.fnmatchcase(key, pattern) or key.startswith(f"{pattern}.")
    for pattern in _HARMLESS
  )


def identity(config: Mapping[str, Any]) -> str:
  """Digest of the keys that affect what a run learns."""
  relevant = {
    key: value for key, value in _leaves(config).items() if not is_harmless(key)
  }
  return settings.digest(relevant)[:16]


def check_config(
  old: Mapping[str, Any], new: Mapping[str, Any], allowed: Any
) -> None:
  """Logs the changes of a config since a checkpoint, and refuses some.

  Args:
    old: config of the checkpoint.
    new: config of this run.
    allowed: config.allow_changes.
  """
  allowed = _as_list(allowed)
  refused = []
  for key, (before, after) in differences(old, new).items():
    harmless = is_harmless(key)
    is_allowed = allowed is True or any(
      key == a or key.startswith(a + ".") for a in allowed
    )
    kind = "harmless" if harmless else "changes the trajectory"
    logging.info("config.%s: %s -> %s (%s)", key, before, after, kind)
    if not harmless and not is_allowed:
      refused.append(f"config.{key}: {before} -> {after}")
  if refused:
    raise ConfigError(
      "the checkpoint was trained with another config: "
      f"{'; '.join(refused)}. Set config.allow_changes to a list of these keys "
      "(or True) to continue anyway, or choose a new workdir."
    )


def _as_list(allowed: Any) -> Any:
  if isinstance(allowed, str):
    return [allowed]
  return allowed if allowed is True else list(allowed or ())


def check_files(
  old: Mapping[str, str], new: Mapping[str, str], allowed: Any
) -> None:
  """Raises ConfigError for input files that have changed since the checkpoint.

  The arguments are {file: fingerprint}. A file in only one of them is a change
  of the config, which `check_config` handles.
  """
  allowed = _as_list(allowed)
  for name in sorted(old.keys() & new.keys()):
    if old[name] == new[name]:
      continue
    logging.info("%s: %s -> %s (its content)", name, old[name], new[name])
    if allowed is not True and name not in allowed:
      raise ConfigError(
        f"{name}: the content has changed since the checkpoint was trained "
        f"(its fingerprint was {old[name]} and is now {new[name]}). Restore "
        f"the old file, or set config.allow_changes to [{name!r}] to continue "
        "anyway, or choose a new workdir."
      )


def check_base(saved: Mapping[str, Any], base: Mapping[str, Any]) -> None:
  """Raises ConfigError if the adapters' base is not the one of training."""
  if saved and base and saved["digest"] != base["digest"]:
    raise ConfigError(
      "config.model_init: expected the base with which the adapters were "
      f"trained, whose arrays have the digest {saved['digest']}; these have "
      f"{base['digest']}."
    )
