"""Training in a notebook or at Python's prompt: messages and Ctrl-C.

After a run, the handlers of signals and logs are the same as before it.
"""

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from absl import logging as absl_logging

from bigtrain.cluster import process
from bigtrain.reports import console

_MAX_LINES = 10  # Longer messages are tables, and are shortened.


class Interrupted(KeyboardInterrupt):
  """Ctrl-C ended a run, after a save if there was something to save."""

  def _render_traceback_(self) -> list[str]:
    # IPython shows this in place of a traceback.
    return [f"Interrupted: {self}. Call train again to continue."]


@contextlib.contextmanager
def session() -> Iterator[None]:
  """Makes Ctrl-C save and raise Interrupted, and shows messages in a notebook.

  It does nothing under the command line, which catches signals itself.
  """
  with _interrupts() as signals, contextlib.ExitStack() as at_end:
    if console.in_notebook():
      at_end.enter_context(_messages())
    try:
      yield
    except process.Preempted as e:
      if signal.SIGINT in signals:  # It was Ctrl-C, and not another signal.
        raise Interrupted(str(e)) from None
      raise


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
  """Makes Ctrl-C ask for the end of the run; yields the signals of the run.

  It replaces only Python's default handler, which notebooks and scripts use.
  """
  is_main = threading.current_thread() is threading.main_thread()
  default = signal.default_int_handler
  if not is_main or signal.getsignal(signal.SIGINT) is not default:
    yield []
    return
  signals = process.received()

  def record(number: int, frame: FrameType | None) -> None:
    if signals:
      default(number, frame)
    signals.append(number)
    print("Interrupted: saving; a second Ctrl-C does not save.", flush=True)

  signal.signal(signal.SIGINT, record)
  try:
    yield signals
  finally:
    signal.signal(signal.SIGINT, default)
    signals.clear()


class _Messages(logging.Handler):
  """Prints messages below a notebook's cell."""

  def emit(self, record: logging.LogRecord) -> None:
    lines = record.getMessage().splitlines()
    if len(lines) > _MAX_LINES:  # It is in a file, too.
      lines = [lines[0], "...", lines[-1]]
    text = "\n".join(lines)
    is_problem = record.levelno >= logging.WARNING
    if is_problem:
      text = f"{record.levelname.lower()}: {text}"
    print(text, file=sys.stderr if is_problem else sys.stdout, flush=True)


@contextlib.contextmanager
def _messages() -> Iterator[None]:
  logger = absl_logging.get_absl_logger()
  handler = _Messages()
  propagate = logger.propagate
  verbosity = absl_logging.get_verbosity()
  logger.addHandler(handler)
  # Otherwise a handler of the notebook would repeat the messages.
  logger.propagate = False
  if verbosity == absl_logging.WARNING:  # absl's default.
    absl_logging.set_verbosity(absl_logging.INFO)
  try:
    yield
  finally:
    logger.removeHandler(handler)
    logger.propagate = propagate
    absl_logging.set_verbosity(verbosity)
