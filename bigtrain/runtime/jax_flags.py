"""Flags of jax and of absl's logging on a command line.

  --jax_debug_nans --jax_log_compiles --verbosity=-1 --log_dir=logs

Every option of `jax.config` is a flag with the same name, and so are the flags
of absl's logging. The values are passed to jax and absl. For options that this
program also sets itself (`default`), the command line wins.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags, logging

from bigtrain.config.errors import ConfigError
from bigtrain.files import paths

# The module of absl whose flags are used. Those of absl.app are for its run().
_LOGGING = "absl.logging"
# Options that this program needs as they are, and why.
_FIXED = {"jax_enable_preemption_service": "bigtrain itself saves on a signal"}

_given: set[str] = set()  # Options that the command line has set.


@functools.cache
def _jax_names() -> frozenset[str]:
  """Defines jax's flags in `flags.FLAGS`; returns their names."""
  before = set(flags.FLAGS)
  jax.config.config_with_absl()
  jax_names = set(flags.FLAGS) - before
  return frozenset(name for name in jax_names if name.startswith("jax_"))


def define(values: flags.FlagValues) -> None:
  """Adds the flags of jax and absl."""
  by_module = flags.FLAGS.flags_by_module_dict()
  jax_flags = [flags.FLAGS[name] for name in _jax_names()]
  for flag in [*by_module.get(_LOGGING, ()), *jax_flags]:
    flag.present = 0  # An earlier command line of this process may have set it.
    values[flag.name] = flag


def apply(values: flags.FlagValues) -> None:
  """Passes parsed values on to jax and absl."""
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
  folder = values["log_dir"].value
  if folder:
    folder = os.path.abspath(os.path.expanduser(folder))
    os.makedirs(folder, exist_ok=True)
    logging.get_absl_handler().use_absl_log_file("bigtrain", folder)


def take(words: Sequence[str]) -> list[str]:
  """Applies the flags among the words of a command line; returns the others."""
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
  """All flags, such as "--jax_debug_nans"."""
  values = flags.FlagValues()
  define(values)
  return [f"--{name}" for name in values]


def default(name: str, value: Any) -> None:
  """Sets an option of jax.config unless the command line has set it."""
  if name not in _given:
    jax.config.update(name, value)


def use_compile_cache(folder: str | bool | None) -> str:
  """Enables jax's compilation cache, except on several CPU devices.

  XLA reads a CPU program from the cache without the order of its collectives:
  those in a loop and those outside may run in any order. Devices that disagree
  wait for each other until XLA ends the process, which happened within seconds
  with jax 0.10 and 0.12.

  Call this after the process has joined its job: it looks at the devices.

  Args:
    folder: its folder; True for the user's cache folder, False for none. Flags
      of the command line override it.

  Returns: the folder, or "".
  """
  if folder is False or folder is None:
    return ""
  if jax.default_backend() == "cpu" and jax.device_count() > 1:
    return ""
  if folder is True:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.join(home, "bigtrain", "xla")
  folder = paths.absolute(folder)
  default("jax_compilation_cache_dir", folder)
  # Small programs are cached, too, because a start compiles dozens of them.
  default("jax_persistent_cache_min_compile_time_secs", 0.0)
  default("jax_persistent_cache_min_entry_size_bytes", -1)
  return str(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
