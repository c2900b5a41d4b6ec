"""Flags of jax and of absl's logging on a command line.

  --jax_debug_nans --jax_log_compiles --verbosity=-1 --log_dir=logs

Every option of `jax.config` is a flag of the same name. absl contributes its
logging flags. Values go to their owners; options that this program sets
itself, by `default`, keep the value of the command line.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags, logging

from bigtrain.config.errors import ConfigError
from bigtrain.files import paths

# Module of absl whose flags are taken. Those of absl.app belong to its run().
_LOGGING = "absl.logging"
# Options that this program needs as they are, with the reason.
_FIXED = {"jax_enable_preemption_service": "bigtrain itself saves on a signal"}

_given: set[str] = set()


@functools.cache
def _jax_names() -> frozenset[str]:
  """Defines jax's flags in `flags.FLAGS`; returns their names."""
  before = set(flags.FLAGS)
  jax.config.config_with_absl()
  jax_names = set(flags.FLAGS) - before
  return frozenset(name for name in jax_names if name.startswith("jax_"))


def define(values: flags.FlagValues) -> None:
  by_module = flags.FLAGS.flags_by_module_dict()
  of_jax = [flags.FLAGS[name] for name in _jax_names()]
  for flag in [*by_module.get(_LOGGING, ()), *of_jax]:
    flag.present = 0  # Of an earlier command line in this process.
    values[flag.name] = flag


def apply(values: flags.FlagValues) -> None:
  _given.clear()
  for name in sorted(_jax_names()):
    if not values[name].present:
      continue
    if name in _FIXED:
      raise ConfigError(f"--{name}: not available, {_FIXED[name]}.")
    try:
      jax.config.update(name, values[name].value)
    except (ValueError, TypeError, RuntimeError) as e:
      raise ConfigError(f"--{name}={values[name].value}: {e}") from e
    _given.add(name)
  by_module = flags.FLAGS.flags_by_module_dict()
  if any(flag.present for flag in by_module.get(_LOGGING, ())):
    logging.use_absl_handler()
    flags.FLAGS.mark_as_parsed()
  if folder := values["log_dir"].value:
    folder = os.path.abspath(os.path.expanduser(folder))
    os.makedirs(folder, exist_ok=True)
    logging.get_absl_handler().use_absl_log_file("bigtrain", folder)


def take(words: Sequence[str]) -> list[str]:
  """Applies the flags among the words; returns the other words."""
  values = flags.FlagValues()
  values.set_gnu_getopt(True)
  define(values)
  try:
    left = values(["tool", *words], known_only=True)[1:]
  except flags.Error as e:
    raise ConfigError(str(e)) from e
  apply(values)
  return list(left)


def names() -> list[str]:
  values = flags.FlagValues()
  define(values)
  return [f"--{name}" for name in values]


def default(name: str, value: Any) -> None:
  """Sets an option of jax.config unless the command line has set it."""
  if name not in _given:
    jax.config.update(name, value)


def use_compile_cache(folder: str | bool | None) -> str:
  """Enables jax's compilation cache in a folder; returns it, "" for none.

  True stands for the user's cache folder. The command line's flags come first.
  """
  if folder is False or folder is None:
    return ""
  if folder is True:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.join(home, "bigtrain", "xla")
  folder = paths.absolute(folder)
  default("jax_compilation_cache_dir", folder)
  # Cache small programs too: a start compiles dozens of them.
  default("jax_persistent_cache_min_compile_time_secs", 0.0)
  default("jax_persistent_cache_min_entry_size_bytes", -1)
  return str(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
