"""A user's hooks that interrupt runs."""

import os
import pathlib
import signal


class Signals:
  """Sends signals to its own process before a step, once.

  Args:
    step: the step.
    names: names of the signals, such as ["SIGTERM"].
    flag: path of a file that is created first; if it exists, nothing is sent.
  """

  def __init__(self, step, names, flag):
    self._step = step
    self._signals = [getattr(signal, name) for name in names]
    self._flag = pathlib.Path(flag)

  def before_step(self, step):
    if step == self._step and not self._flag.exists():
      self._flag.touch()
      for number in self._signals:
        os.kill(os.getpid(), number)


class Fails:
  """Raises an error before a step."""

  def __init__(self, step):
    self._step = step

  def before_step(self, step):
    if step == self._step:
      raise RuntimeError(f"the hook fails before step {step}")


def note(step, row, *, path):
  """A user's function: adds the step to a file."""
  with open(path, "a") as file:
    file.write(f"{step}\n")
