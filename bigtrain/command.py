"""The command line, and the exit codes of a run."""

import gc
import logging as python_logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from absl import flags, logging

from bigtrain import settings
from bigtrain.cluster import process
from bigtrain.files import paths
from bigtrain.reports import record

_USAGE = (
  "Usage: python -m bigtrain.main --config=FILE.py[:arguments] --workdir=DIR "
  "[--config.KEY=VALUE ...]"
)

# For processes started by hand, without a scheduler to set these variables.
_JOB_FLAGS = {
  "coordinator": ("JAX_COORDINATOR_ADDRESS", "HOST:PORT of process 0."),
  "num_processes": ("JAX_NUM_PROCESSES", "Number of processes."),
  "process_id": ("JAX_PROCESS_ID", "Index of this process, from 0."),
}


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], str]:
  """Returns the config with the command line's changes, and the workdir.

  Args:
    argv: name of the program and its arguments.

  Raises:
    ConfigError: a flag is missing or unknown, or the config cannot be loaded.
  """
  # The config's keys are not known yet, so absl cannot parse these flags. A
  # value may follow an equals sign or a space.
  changes, rest = [], []
  words = iter(argv)
  for word in words:
    if not word.startswith("--config."):
      rest.append(word)
    elif "=" in word:
      changes.append(word)
    else:
      changes.append(f"{word}={next(words, '')}")
  values = flags.FlagValues()
  flags.DEFINE_string("config", None, "FILE.py[:args]", flag_values=values)
  flags.DEFINE_string("workdir", None, "The run's folder.", flag_values=values)
  for name, (_, meaning) in _JOB_FLAGS.items():
    flags.DEFINE_string(name, None, meaning, flag_values=values)
  values.append_flag_values(flags.FLAGS)
  try:
    left = values(rest)[1:]
  except flags.Error as e:
    raise settings.ConfigError(f"{e}. {_USAGE}") from e
  if left:
    raise settings.ConfigError(f"{left[0]!r} is not a flag. {_USAGE}")
  for name, (variable, _) in _JOB_FLAGS.items():
    if values[name].value:
      os.environ[variable] = values[name].value
  for name in ("config", "workdir"):
    if not values[name].value:
      raise settings.ConfigError(f"--{name} is missing. {_USAGE}")
  config = settings.load(values.config)
  for change in changes:
    settings.override(config, change.removeprefix("--config."))
  return config, paths.absolute(values.workdir)


def run(train: Callable[[Any, str], dict[str, Any]]) -> NoReturn:
  """Calls `train` with the command line's arguments and ends the process.

  If the exit code is not 0, the last line on standard error gives the reason.
  """
  if {"--help", "-h", "-help"} & set(sys.argv[1:]):
    print(_USAGE + "\nThe keys of a config are in docs/config.md.")
    process.exit_now(process.EXIT_OK)
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  flags.FLAGS.mark_as_parsed()  # absl's logger waits for it.
  # At level INFO, jax lists the hardware that it did not find.
  python_logging.getLogger("jax").setLevel(python_logging.WARNING)
  # Imports and traces leave a million objects that stay alive. Collecting
  # garbage among them would take a tenth of the time to the first step.
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)
  # Only the innermost line of an operation's origin appears in profiles.
  jax.config.update("jax_traceback_in_locations_limit", 1)
  try:
    config, workdir = parse(sys.argv)
    results = train(config, workdir)
  except settings.ConfigError as e:
    # No traceback: the mistake is in the config or the data.
    _end(process.EXIT_CONFIG, f"error: {e}")
  except process.Preempted as e:
    _end(process.EXIT_PREEMPTED, f"preempted: {e}")
  except Exception as e:
    traceback.print_exc()
    _end(process.EXIT_ERROR, f"error: {type(e).__name__}: {e}")
  print(record.ending(results, workdir))
  process.exit_now(process.EXIT_OK)


def _end(code: int, last_line: str) -> NoReturn:
  """Ends this process and the others of its job."""
  print(last_line, file=sys.stderr, flush=True)
  process.end_job(code, last_line.partition(": ")[2])
  process.exit_now(code)
