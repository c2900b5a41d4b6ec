"""A user's hooks that do something on one process of a job only."""

import os
import pathlib
import signal
import time

import jax


class Do:
  """Does `what` before a step on one process.

  Args:
    process: its index.
    step: before which.
    what: "kill", "stop", "term", "raise", "hang", or "wait": that before each
      step from this one on.
  """

  def __init__(self, process, step, what):
    self._here = process == jax.process_index()
    self._step = step
    self._what = what

  def before_step(self, step):
    """Does it."""
    if not self._here or (
      step < self._step if self._what == "wait" else step != self._step
    ):
      return
    if self._what == "raise":
      raise KeyError("of my own making")
    if self._what == "wait":
      time.sleep(0.3)
    while self._what == "hang":
      time.sleep(1)
    signals = dict(kill=signal.SIGKILL, stop=signal.SIGSTOP, term=15)
    if self._what in signals:
      os.kill(os.getpid(), signals[self._what])


class Evaluator:
  """Takes five seconds and a hundred batches; its one metric is the step."""

  def __init__(self, predict_fn, context, flag):
    del predict_fn
    self._context = context
    self._flag = pathlib.Path(flag)

  def run(self, variables, step):
    """Evaluates nothing."""
    del variables
    self._flag.touch()
    for i in range(100):
      self._context.progress(i + 1, 100)
      time.sleep(0.05)
    return {"step": float(step)}
