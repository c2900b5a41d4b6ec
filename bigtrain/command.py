"""The command line, and the exit codes of a run."""

import contextlib
import logging as python_logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from absl import flags, logging

from bigtrain.checkpoints import folders
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

# For processes started by hand, without a scheduler to set these variables.
_JOB_FLAGS = {
  "coordinator": "JAX_COORDINATOR_ADDRESS",
  "num_processes": "JAX_NUM_PROCESSES",
  "process_id": "JAX_PROCESS_ID",
}


class Arguments(NamedTuple):
  """The arguments of a run; without a workdir it keeps nothing."""

  config: dict[str, Any]
  workdir: str | None
  cleanup: bool


def parse(argv: Sequence[str]) -> Arguments:
  # The config's keys are not known yet, so absl cannot parse these flags. A
  # value may follow an equals sign or a space.
  changes, rest = [], []
  values = flags.FlagValues()
  try:
    words = iter(values.read_flags_from_files(list(argv)))
  except flags.Error as e:
    raise ConfigError(f"{e}. {_USAGE}") from e
  for word in words:
    if not word.startswith("--config."):
      rest.append(word)
    elif "=" in word:
      changes.append(word)
    elif re.match(r"--(config\b|workdir\b|$)", given := next(words, "--")):
      raise ConfigError(f"{word}: expected a value, as {word}=VALUE.")
    else:
      changes.append(f"{word}={given}")
  for name in ("config", "workdir", *_JOB_FLAGS):
    flags.DEFINE_string(name, None, "See --help.", flag_values=values)
  flags.DEFINE_boolean("cleanup", False, "See --help.", flag_values=values)
  jax_flags.define(values)
  try:
    left = values(rest)[1:]
  except flags.Error as e:
    raise ConfigError(f"{e}. {_USAGE}") from e
  if left:
    raise ConfigError(f"{left[0]!r} is not a flag. {_USAGE}")
  for name, variable in _JOB_FLAGS.items():
    if values[name].value:
      os.environ[variable] = str(values[name].value)
  for name, optional in {"config": False, "workdir": True}.items():
    value = values[name].value
    if not value and not (optional and value is None):
      raise ConfigError(f"--{name} is missing. {_USAGE}")
  jax_flags.apply(values)
  changes = [change.removeprefix("--config.") for change in changes]
  config = loading.load(values.config, changes)
  ends_early = [
    key
    for key, value in config.items()
    if value and key.startswith(("stop_at_", "eval_only"))
  ]
  if values.cleanup and ends_early:
    raise ConfigError(
      f"--cleanup: with config.{ends_early[0]} the run does not finish; leave "
      "one of them out."
    )
  if values.workdir is not None:
    return Arguments(config, paths.absolute(values.workdir), values.cleanup)
  if values.cleanup:
    raise ConfigError(
      "--cleanup: a run without --workdir keeps no checkpoints; leave it out."
    )
  return Arguments(_without_checkpoints(config), None, False)


def _without_checkpoints(config: dict[str, Any]) -> dict[str, Any]:
  idle = [
    key
    for key, value in config.items()
    if value
    and key.startswith(("ckpt_", "keep_ckpt", "local_ckpt", "save_at_start"))
  ]
  logging.warning(
    "--workdir is missing: this run keeps no files and no checkpoints.%s",
    f" Without effect: config.{', config.'.join(idle)}." if idle else "",
  )
  config = {key: value for key, value in config.items() if key not in idle}
  return {**config, "keep_ckpts": 0}


def _folder(workdir: str | None) -> contextlib.AbstractContextManager[str]:
  if workdir is not None:
    return contextlib.nullcontext(workdir)
  return tempfile.TemporaryDirectory(
    prefix="bigtrain-", ignore_cleanup_errors=True
  )


def _prepare() -> None:
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  logging.get_absl_handler().setFormatter(
    python_logging.Formatter(
      "%(levelname).1s%(asctime)s %(message)s", "%m%d %H:%M:%S"
    )
  )
  flags.FLAGS.mark_as_parsed()  # absl's logger waits for it.
  # At level INFO, jax lists the hardware that it did not find.
  python_logging.getLogger("jax").setLevel(python_logging.WARNING)
  # Only the innermost line of an operation's origin appears in profiles.
  jax.config.update("jax_traceback_in_locations_limit", 1)


def run(train: Callable[[Any, str], dict[str, Any]]) -> NoReturn:
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
  _prepare()
  config: dict[str, Any] = {}
  workdir: str | None = None
  try:
    config, workdir, cleanup = parse(sys.argv)
    with _folder(workdir) as folder:
      results = train(config, folder)
    message = ending.message(results, workdir)
    if cleanup and jax.process_index() == 0:
      folders.remove_all(folder)
      message += "\n  --cleanup has removed the checkpoints."
  except ConfigError as e:
    # No traceback: the mistake is in the config or the data.
    _end(process.EXIT_CONFIG, f"error: {e}", workdir)
  except process.Preempted as e:
    _end(process.EXIT_PREEMPTED, f"preempted: {e}")
  except Exception as e:
    # Not at the head of the file: it imports flax, which takes a while.
    from bigtrain.runtime import device_memory
    from bigtrain.step import guard

    refused = isinstance(e, device_memory.OutOfMemory) and not e.__cause__
    explained = refused or isinstance(e, guard.NotFinite)
    if not (disk.is_full(e) or explained):  # Their last line is sufficient.
      with contextlib.suppress(OSError):  # As in _end.
        print(ending.users_frames(e, config), file=sys.stderr, end="")
        traceback.print_exc()
    room = disk.room(e, str(getattr(e, "filename", None) or os.getcwd()))
    _end(process.EXIT_ERROR, f"error: {type(e).__name__}: {e}{room}", workdir)
  print(message)
  process.exit_now(process.EXIT_OK)


def _end(code: int, last_line: str, workdir: str | None = None) -> NoReturn:
  if workdir:
    record.note_failure(workdir, last_line)
  # The log may be on the disk that is full, and the others must still end.
  with contextlib.suppress(OSError):
    print(last_line, file=sys.stderr, flush=True)
  process.end_job(code, last_line.partition(": ")[2])
  process.exit_now(code)
