"""A user's hook that acts on one process of a job, and a slow evaluator."""

import os
import pathlib
import signal
import time

import jax


class Do:
  """A hook that performs an action before a step, on one process.

  Args:
    process: index of the process.
    step: step before which it acts.
    what: "kill", "stop", "term", "raise" or "hang"; or "wait", which sleeps
      before this step and each later one.
  """

  def __init__(self, process, step, what):
    self._here = process == jax.process_index()
    self._step = step
    self._what = what

  def before_step(self, step):
    """Performs the action."""
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


class KillWhenSaved:
  """A hook that kills one process when all have a certain local checkpoint.

  Args:
    process: index of the process.
    step: step before which it waits, and is killed.
    saved: step of the local checkpoint.
    folder: config.local_ckpt_dir.
  """

  def __init__(self, process, step, saved, folder):
    self._here = process == jax.process_index()
    self._step = step
    self._paths = pathlib.Path(folder), f"*/*/checkpoints/{saved:08d}"

  def before_step(self, step):
    """Waits, and kills."""
    if not self._here or step != self._step:
      return
    folder, pattern = self._paths
    while len([*folder.glob(pattern)]) < jax.process_count():
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


class Evaluator:
  """Takes five seconds for a hundred batches; its only metric is the step."""

  def __init__(self, predict_fn, context, flag):
    del predict_fn
    self._context = context
    self._flag = pathlib.Path(flag)

  def run(self, variables, step):
    """Reports progress for five seconds."""
    del variables
    self._flag.touch()
    for i in range(100):
      self._context.progress(i + 1, 100)
      time.sleep(0.05)
    return {"step": float(step)}
