"""Traces some steps with jax.profiler."""

import os
import tempfile
import time

import jax
from absl import logging

from bigtrain.cluster import process
from bigtrain.files import paths
from bigtrain.runtime import device_memory
from bigtrain.runtime.hook_context import Context, End

REQUEST = "profile.request"
# Time between two looks for the file. In an object store each look is a request
# that is billed.
_LOCAL_POLL_SECS = 1.0
_REMOTE_POLL_SECS = 60.0


class Hook:
  """Writes a trace of some steps to <workdir>/profile, for xprof and the like.

  Create the file <workdir>/profile.request, or send the signal SIGUSR2 to one
  process, to trace the next steps of a running job. Every run has such a hook.
  At the end of a trace, and when a device runs out of memory, the hook writes
  memory-<process>.prof for pprof. It lists the arrays on the devices, with
  their sizes and the code that made them.

  Args:
    start: first step of the trace, counted from 1; None: on request only.
    steps: number of steps in a trace.
  """

  def __init__(
    self, start: int | None = 10, steps: int = 5, *, context: Context
  ):
    self._start, self._num_steps = start, steps
    self._stop = 0  # The step before which the trace ends.
    self._folder = os.path.join(context.workdir, "profile")
    self._request = os.path.join(context.workdir, REQUEST)
    self._is_remote = paths.is_remote(self._folder)
    self._poll_time = time.monotonic()
    # The profiler writes to local folders only.
    self._local_folder: tempfile.TemporaryDirectory[str] | None = None
    self._tracing = False

  def before_step(self, step: int) -> None:
    if self._tracing and step >= self._stop:
      self._stop_trace()
    if not self._tracing and (step == self._start or self._requested()):
      if self._is_remote:
        self._local_folder = tempfile.TemporaryDirectory(prefix="bigtrain-")
      jax.profiler.start_trace(
        self._local_folder.name if self._local_folder else self._folder
      )
      self._tracing = True
      self._stop = step + self._num_steps

  def after_train(self, step: int, end: End) -> None:
    if self._tracing:
      self._stop_trace()
    elif end and device_memory.is_exhausted(end.error):
      self._save_memory()

  def _save_memory(self) -> None:
    name = f"memory-{jax.process_index()}.prof"
    path = os.path.join(self._folder, name)
    paths.make_folder(self._folder)
    with paths.replacing(path, "wb") as file:
      file.write(jax.profiler.device_memory_profile())
    logging.info("Arrays on the devices: pprof -top %s", path)

  def _requested(self) -> bool:
    if process.profile_requested():
      return True
    now = time.monotonic()
    poll_secs = _REMOTE_POLL_SECS if self._is_remote else _LOCAL_POLL_SECS
    if jax.process_index() or now - self._poll_time < poll_secs:
      return False
    self._poll_time = now
    is_requested = paths.exists(self._request)
    if is_requested:
      paths.remove(self._request)
    return is_requested

  def _stop_trace(self) -> None:
    jax.profiler.stop_trace()
    self._tracing = False
    self._save_memory()
    if self._local_folder:
      paths.push_folder(self._local_folder.name, self._folder)
      self._local_folder.cleanup()
      self._local_folder = None
    logging.info("The profile is in %s.", self._folder)
