"""Traces some steps with jax.profiler."""

import os
import tempfile

import jax
from absl import logging

from bigtrain.files import paths
from bigtrain.runtime import hooks


class Hook:
  """Writes a trace to <workdir>/profile, for xprof or TensorBoard.

  Args:
    start: first step of the trace, counted from 1.
    steps: number of steps in the trace.
    context: given by the program.
  """

  def __init__(
    self, start: int = 10, steps: int = 5, *, context: hooks.Context
  ):
    self._start = start
    self._stop = start + steps
    self._folder = os.path.join(context.workdir, "profile")
    # The profiler writes to local folders only.
    self._local_folder: tempfile.TemporaryDirectory[str] | None = None
    self._tracing = False

  def before_step(self, step: int) -> None:
    """Starts or stops the trace if its first or last step is due."""
    if step == self._start:
      if paths.is_remote(self._folder):
        self._local_folder = tempfile.TemporaryDirectory(prefix="bigtrain-")
      jax.profiler.start_trace(
        self._local_folder.name if self._local_folder else self._folder
      )
      self._tracing = True
    elif step >= self._stop:
      self.after_train(step)

  def after_train(self, step: int) -> None:
    """Stops the trace if it is still running."""
    if self._tracing:
      jax.profiler.stop_trace()
      self._tracing = False
      if self._local_folder:
        paths.push_folder(self._local_folder.name, self._folder)
        self._local_folder.cleanup()
      logging.info("The profile is in %s.", self._folder)
