"""A user's hooks and evaluator that wait at a given point.

A test and the program communicate by files: the program creates `flag` when it
reaches the point, and continues when the file `flag`.go exists.
"""

import os
import pathlib
import signal
import time

_LIMIT_SECS = 900.0
_POLL_SECS = 0.02


def wait_here(flag, meanwhile=lambda: None):
  """Creates the flag and waits for the file `flag`.go."""
  pathlib.Path(flag).touch()
  _wait_for(f"{flag}.go", meanwhile)


def _wait_for(file, meanwhile=lambda: None):
  deadline = time.monotonic() + _LIMIT_SECS
  while not os.path.exists(file):
    meanwhile()
    if time.monotonic() > deadline:
      raise TimeoutError(f"{file} was not created")
    time.sleep(_POLL_SECS)


class Gate:
  """A hook that waits before a step, only in the first process that comes."""

  def __init__(self, step, flag):
    self._step = step
    self._flag = flag

  def before_step(self, step):
    """Waits."""
    if step == self._step and not os.path.exists(self._flag):
      wait_here(self._flag)


class Kill:
  """A hook that kills its process before a step, once a file exists."""

  def __init__(self, step, file):
    self._step = step
    self._file = file

  def before_step(self, step):
    """Sends SIGKILL."""
    if step == self._step:
      _wait_for(self._file)
      os.kill(os.getpid(), signal.SIGKILL)


class Pace:
  """A hook that slows down every step."""

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
  """Waits the first time; its only metric is the step.

  Args:
    flag: path of the flag.
    hang: whether it reports no progress while it waits.
  """

  def __init__(self, predict_fn, context, flag, hang=False):
    del predict_fn
    self._context = context
    self._flag = flag
    self._hang = hang

  def run(self, variables, step):
    """Waits, unless the flag exists already."""
    del variables
    if not os.path.exists(self._flag):
      progress = self._context.progress
      wait_here(
        self._flag, (lambda: None) if self._hang else lambda: progress(0, 1)
      )
    return {"step": float(step)}
