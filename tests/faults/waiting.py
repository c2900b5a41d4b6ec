"""A user's hooks and evaluator that stop where a test wants them to.

A test and the program speak through files: the program makes `flag` when it
has come to the place, and goes on when there is a file `flag`.go.
"""

import os
import pathlib
import signal
import time

_LIMIT_SECS = 120.0
_POLL_SECS = 0.02


def wait_here(flag, meanwhile=lambda: None):
  """Makes the flag and waits for the word to go on."""
  pathlib.Path(flag).touch()
  _wait_for(f"{flag}.go", meanwhile)


def _wait_for(file, meanwhile=lambda: None):
  deadline = time.monotonic() + _LIMIT_SECS
  while not os.path.exists(file):
    meanwhile()
    if time.monotonic() > deadline:
      raise TimeoutError(f"{file} never came")
    time.sleep(_POLL_SECS)


class Gate:
  """A hook that waits before a step, the first time only."""

  def __init__(self, step, flag):
    self._step = step
    self._flag = flag

  def before_step(self, step):
    """Waits."""
    if step == self._step and not os.path.exists(self._flag):
      wait_here(self._flag)


class Kill:
  """A hook that kills its process before a step, when a file is there."""

  def __init__(self, step, file):
    self._step = step
    self._file = file

  def before_step(self, step):
    """Sends SIGKILL."""
    if step == self._step:
      _wait_for(self._file)
      os.kill(os.getpid(), signal.SIGKILL)


class Pace:
  """A hook that makes steps last."""

  def __init__(self, secs):
    self._secs = secs

  def before_step(self, step):
    """Sleeps."""
    time.sleep(self._secs)


class Hang:
  """A hook that never returns from a step."""

  def __init__(self, step):
    self._step = step

  def before_step(self, step):
    """Sleeps."""
    while step == self._step:
      time.sleep(1)


class Evaluator:
  """Waits the first time; its one metric is the step.

  Args:
    flag: the file.
    hang: whether it tells nobody that it is still alive while it waits.
  """

  def __init__(self, predict_fn, context, flag, hang=False):
    del predict_fn
    self._context = context
    self._flag = flag
    self._hang = hang

  def run(self, variables, step):
    """Evaluates nothing."""
    del variables
    if not os.path.exists(self._flag):
      tell = self._context.progress
      wait_here(
        self._flag, (lambda: None) if self._hang else lambda: tell(0, 1)
      )
    return {"step": float(step)}
