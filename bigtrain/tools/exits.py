"""How a tool ends: with one line on standard error, and an exit code."""

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError

# A shell's exit code for a command that the signal has ended.
_EXIT_INTERRUPTED = 128 + signal.SIGINT


def in_one_line(*failures: type[Exception]) -> Callable[..., Any]:
  """Decorates a tool's `main`, which returns the exit code.

  A user's mistake ends the tool with code 2, a failure with 1, and Ctrl-C with
  130, each with one line in place of a traceback. A closed pipe, as in `|
  head`, ends the tool with 0. Other exceptions are not caught.

  Args:
    *failures: exceptions that count as failures, besides OSError and
      CheckpointError.
  """

  def decorate(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    @functools.wraps(main)
    def wrapper(argv: Sequence[str] | None = None) -> int:
      try:
        code = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
      except BrokenPipeError:
        # Python flushes again when it ends, and would report the pipe then.
        with open(os.devnull, "w") as nothing:
          os.dup2(nothing.fileno(), sys.stdout.fileno())
        return process.EXIT_OK
      except ConfigError as e:
        return _end(f"error: {e}", process.EXIT_CONFIG)
      except KeyboardInterrupt:
        return _end("interrupted", _EXIT_INTERRUPTED)
      except Exception as e:
        # Imports numpy, which --help does without.
        from bigtrain.checkpoints.manifest import CheckpointError

        if not isinstance(e, (OSError, CheckpointError, *failures)):
          raise
        return _end(f"error: {e}", process.EXIT_ERROR)

    return wrapper

  return decorate


def _end(line: str, code: int) -> int:
  print(line, file=sys.stderr)
  return code
