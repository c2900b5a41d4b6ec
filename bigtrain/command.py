"""The command line of bigtrain.main, and the exit codes of a run.

`run` wraps main's `train`: it parses the arguments, and turns the way in which
the run ends into an exit code and a last line on standard error.
"""

import contextlib
import logging as python_logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from absl import flags, logging

from bigtrain.checkpoints import folders, manifest
from bigtrain.cluster import process
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from bigtrain.files import disk, paths
from bigtrain.reports import ending, record
from bigtrain.runtime import jax_flags

_USAGE = (
  "Usage: python -m bigtrain.main --config=FILE.py[:arguments] "
  "[--workdir=DIR] [--config.KEY=VALUE ...] [--cleanup]"
)

# Flags for processes that are started by hand, without a scheduler that sets
# these variables.
_JOB_FLAGS = {
  "coordinator": "JAX_COORDINATOR_ADDRESS",
  "num_processes": "JAX_NUM_PROCESSES",
  "process_id": "JAX_PROCESS_ID",
}


class Arguments(NamedTuple):
  """The arguments of a run."""

  config: dict[str, Any]
  workdir: str | None  # Without one, the run keeps no files.
  cleanup: bool


def parse(argv: Sequence[str]) -> Arguments:
  """Parses a command line, whose first word is the program.

  Flags for jax and for a job's processes take effect.
  """
  values = flags.FlagValues()
  try:
    words = values.read_flags_from_files(list(argv))
  except flags.Error as e:
    raise ConfigError(f"{e}. {_USAGE}") from e
  changes, words = _split_changes(words)
  for name in ("config", "workdir", *_JOB_FLAGS):
    flags.DEFINE_string(name, None, "See --help.", flag_values=values)
  flags.DEFINE_boolean("cleanup", False, "See --help.", flag_values=values)
  jax_flags.define(values)
  try:
    positional = values(words)[1:]
  except flags.Error as e:
    raise ConfigError(f"{e}. {_USAGE}") from e
  if positional:
    raise ConfigError(f"{positional[0]!r} is not a flag. {_USAGE}")
  for name, variable in _JOB_FLAGS.items():
    if values[name].value:
      os.environ[variable] = str(values[name].value)
  if not values.config:
    raise ConfigError(f"--config is missing. {_USAGE}")
  if values.workdir == "":  # An empty variable of a script, for instance.
    raise ConfigError(f"--workdir is missing. {_USAGE}")
  jax_flags.apply(values)
  config = loading.load(values.config, changes)
  if values.cleanup:
    _check_cleanup(config, values.workdir)
  if values.workdir is None:
    return Arguments(config, workdir=None, cleanup=False)
  return Arguments(config, paths.absolute(values.workdir), values.cleanup)


def _split_changes(words: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the changes of the config, as "KEY=VALUE", and the other words.

  absl cannot parse these flags, because the config's keys are not known yet. As
  in absl, a value follows an equals sign or a space.
  """
  changes, others = [], []
  remaining = iter(words)
  for word in remaining:
    if not word.startswith("--config."):
      others.append(word)
    elif "=" in word:
      changes.append(word.removeprefix("--config."))
    else:
      value = next(remaining, "--")
      # Another flag follows, so the value was forgotten.
      if re.match(r"--(config\b|workdir\b|$)", value):
        raise ConfigError(f"{word}: expected a value, as {word}=VALUE.")
      changes.append(f"{word.removeprefix('--config.')}={value}")
  return changes, others


def _check_cleanup(config: dict[str, Any], workdir: str | None) -> None:
  """Refuses --cleanup for runs that do not finish, or keep nothing."""
  for key, value in config.items():
    if value and key.startswith(("stop_at_", "eval_only")):
      raise ConfigError(
        f"--cleanup: with config.{key} the run does not finish; leave one of "
        "them out."
      )
  if workdir is None:
    raise ConfigError(
      "--cleanup: a run without --workdir keeps no checkpoints; leave it out."
    )


def _set_up_logging() -> None:
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  logging.get_absl_handler().setFormatter(
    python_logging.Formatter(
      "%(levelname).1s%(asctime)s %(message)s", "%m%d %H:%M:%S"
    )
  )
  # absl's logger waits for parsed flags.
  flags.FLAGS.mark_as_parsed()
  # At level INFO, jax lists the hardware that it has not found.
  python_logging.getLogger("jax").setLevel(python_logging.WARNING)
  # Only the innermost line of an operation's origin appears in profiles.
  jax.config.update("jax_traceback_in_locations_limit", 1)


def run(train: Callable[[Any, str | None], dict[str, Any]]) -> NoReturn:
  """Calls `train` with the command line's arguments and ends the process.

  If the exit code is not 0, the last line on standard error gives the reason.
  """
  if {"--help", "-h", "-help"} & set(sys.argv[1:]):
    print(
      f"{_USAGE}\nThe keys of a config are in docs/config.md. FILE may also be "
      "the config.json of a run. Without --workdir, a run keeps no files. With "
      "--cleanup, a run that finishes removes its checkpoints. The options of "
      "jax are flags too, such as --jax_debug_nans, and so are absl's logging "
      "options, such as --verbosity=-1."
    )
    process.exit_now(process.EXIT_OK)
  _set_up_logging()
  config: dict[str, Any] = {}
  workdir: str | None = None
  try:
    config, workdir, cleanup = parse(sys.argv)
    results = train(config, workdir)
    message = ending.message(results, workdir)
    if cleanup and workdir and jax.process_index() == 0:
      folders.remove_all(workdir)
      message += "\n  --cleanup has removed the checkpoints."
  except ConfigError as e:
    # No traceback: the mistake is in the config or the data.
    _end(process.EXIT_CONFIG, f"error: {e}", workdir)
  except process.Preempted as e:
    _end(process.EXIT_PREEMPTED, f"preempted: {e}")
  except Exception as e:
    # Not at the head of this module: it imports flax, which takes a while.
    from bigtrain.runtime import device_memory
    from bigtrain.step import guard

    # For these the last line is enough: a program that was refused before it
    # ran out of memory, values that are not finite, a checkpoint whose files
    # have changed, and a full disk.
    is_refused = isinstance(e, device_memory.OutOfMemory) and not e.__cause__
    explains_itself = isinstance(e, guard.NotFinite | manifest.DamagedError)
    if not (is_refused or explains_itself or disk.is_full(e)):
      with contextlib.suppress(OSError):  # As in _end.
        print(ending.users_frames(e, config), file=sys.stderr, end="")
        traceback.print_exc()
    room = disk.room(e, str(getattr(e, "filename", None) or os.getcwd()))
    _end(process.EXIT_ERROR, f"error: {type(e).__name__}: {e}{room}", workdir)
  print(message)
  process.exit_now(process.EXIT_OK)


def _end(code: int, last_line: str, workdir: str | None = None) -> NoReturn:
  """Ends all processes of the job; the last line goes to standard error."""
  if workdir:
    record.note_failure(workdir, last_line)
  # A thread that is still compiling must not log anything after the last line.
  python_logging.disable()
  # The log may be on a disk that is full, and the other processes must still
  # end.
  with contextlib.suppress(OSError):
    print(last_line, file=sys.stderr, flush=True)
  process.end_job(code, last_line.partition(": ")[2])
  process.exit_now(code)
