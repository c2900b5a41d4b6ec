"""Ends a process that hangs, and reports where it hangs.

A thread checks that no phase exceeds its time limit, and that no step takes
much longer than the steps before it. Otherwise it writes the stacks of all
threads to the workdir and ends the process with code 1. If native code holds
the interpreter's lock, a timer in C does the same a minute later.
"""

import collections
import contextlib
import faulthandler
import logging
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.config.errors import check_keys, check_number
from bigtrain.files import paths

# Limits in seconds. They are generous, because to end a healthy run is worse
# than to end a hung one late.
LIMITS = {
  "start": 3600.0,
  "compile": 7200.0,
  "step": 1800.0,
  "step_floor": 60.0,  # Least limit that is learned from earlier steps.
  "evaluation": 3600.0,  # For each batch.
  "save": 3600.0,
  "rollout": 7200.0,  # With the rewards. Several steps may share a rollout.
}
# A step also hangs if it takes this multiple of the median of the last steps,
# of which there have to be enough. Slower storage or a busy host make a step a
# few times slower, but not twenty times.
_TIMES_MEDIAN = 20.0
_MAX_STEPS = 100
_MIN_STEPS = 20
_POLL_SECS = 0.5
_NATIVE_EXTRA_SECS = 60.0  # The timer in C ends the process this much later.
# For writing the stacks. A storage that does not answer may be why it hangs.
_WRITE_SECS = 10.0


def read_limits(config: settings.Config) -> dict[str, float] | None:
  """Reads the limits config.watchdog.{phase}_secs; None if watchdog=False."""
  if config.get("watchdog", {}) is False:
    return None
  limits = {f"{phase}_secs": secs for phase, secs in LIMITS.items()}
  given = config.kwargs("watchdog")
  check_keys("config.watchdog", given, limits)
  for key, value in given.items():
    name = f"config.watchdog.{key}"
    limits[key] = check_number(name, value, above=0)
  return {phase: limits[f"{phase}_secs"] for phase in LIMITS}


class Watchdog:
  """Watches the phases of this process until `close`."""

  def __init__(self, limits: Mapping[str, float] | None, workdir: str):
    self._limits = dict(limits or {})
    name = f"stacks-{socket.gethostname()}-{os.getpid()}.txt"
    self._final_path = os.path.join(workdir, name)
    # Stacks for an object store are written to a temporary file first.
    is_remote = paths.is_remote(workdir)
    self._folder = tempfile.gettempdir() if is_remote else workdir
    self._path = os.path.join(self._folder, name)
    self._file: Any = None  # Opened in advance, for the timer in C.
    self._closed = threading.Event()
    self._writing = threading.Lock()
    self._outcome = ""  # Text about the stacks, once they are written.
    self._phase = ("start", 0, time.monotonic())  # Name, step, beginning.
    self._step_secs = collections.deque[float](maxlen=_MAX_STEPS)
    process.on_hang(self._write_stacks)
    self._thread = threading.Thread(target=self._watch, daemon=True)
    if self._limits:
      self._thread.start()

  def enter(self, phase: str, step: int) -> None:
    """Begins a phase, or the next step."""
    now = time.monotonic()
    previous, previous_step, began = self._phase
    if (previous, phase) == ("step", "step") and step != previous_step:
      self._step_secs.append(now - began)
    self._phase = (phase, step, now)
    process.report_phase(phase, step)

  def beat(self) -> None:
    """Restarts the phase's time limit, after each batch of the phase."""
    phase, step, _ = self._phase
    self._phase = (phase, step, time.monotonic())

  def close(self) -> None:
    """Stops watching, and removes the file if nothing was written."""
    if self._limits and not self._closed.is_set():
      self._closed.set()
      self._thread.join()
      faulthandler.cancel_dump_traceback_later()
      if self._file not in (None, sys.__stderr__):
        self._file.close()
        os.remove(self._path)
      with contextlib.suppress(OSError):
        self._clear()  # A short run may not have opened a file.

  def _watch(self) -> None:
    while not self._closed.wait(_POLL_SECS):
      phase, step, began = self._phase
      limit, reason = self._limit(phase)
      if time.monotonic() - began > limit:
        self._end(phase, step, limit, reason)
      if self._file is None and os.path.isdir(self._folder):
        self._file = self._open()
      if self._file is not None:
        # Every turn of this loop postpones the timer, as long as this thread
        # can run.
        secs = max(self._limits.values()) + _NATIVE_EXTRA_SECS
        faulthandler.dump_traceback_later(secs, exit=True, file=self._file)

  def _limit(self, phase: str) -> tuple[float, str]:
    """The limit of a phase, and where it comes from."""
    limit = self._limits[phase]
    known = tuple(self._step_secs)
    if phase == "step" and len(known) >= _MIN_STEPS:
      median = statistics.median(known)
      learned = max(_TIMES_MEDIAN * median, self._limits["step_floor"])
      if learned < limit:
        reason = f"the median of the last {len(known)} steps is {median:.3g} s"
        return learned, f"{reason}; see config.watchdog.step_floor_secs"
    return limit, f"config.watchdog.{phase}_secs"

  def _open(self) -> Any:
    """Opens the file for the timer in C, which cannot open one itself."""
    try:
      self._clear()
      return open(self._path, "w")
    except OSError as e:
      logging.warning("%s: stacks would go to the log: %s", self._path, e)
      return sys.__stderr__

  def _clear(self) -> None:
    """Removes empty files left by killed processes of this host."""
    prefix = f"stacks-{socket.gethostname()}-"
    for name in os.listdir(self._folder):
      pid = name.removeprefix(prefix).removesuffix(".txt")
      if name == f"{prefix}{pid}.txt" and not os.path.exists(f"/proc/{pid}"):
        path = os.path.join(self._folder, name)
        with contextlib.suppress(FileNotFoundError):
          if not os.path.getsize(path):
            os.remove(path)

  def _end(self, phase: str, step: int, limit: float, reason: str) -> None:
    """Writes the stacks, and ends this process and its job."""
    message = (
      f"the phase {phase!r} at step {step} took more than {limit:.3g} s "
      f"({reason})"
    )
    message += self._write_stacks(message)
    # In a job of several processes, all end here, with a message that names the
    # one that is behind the others.
    process.end_job(process.EXIT_ERROR, f"hang: {message}", hang=True)
    # Straight to the descriptor: a hung thread may hold the stream's lock.
    os.write(2, f"error: hang: {message}\n".encode())
    os._exit(process.EXIT_ERROR)

  def _write_stacks(self, why: str = "a process of the job hangs") -> str:
    """Writes the stacks of all threads once; returns a text about the file."""
    # Two threads may call this, if this process and another one hang. The
    # second has to wait for the file, because the process ends afterwards.
    if not self._writing.acquire(timeout=_WRITE_SECS):
      return f"; their stacks were not written within {_WRITE_SECS:g} s"
    try:
      self._outcome = self._outcome or self._write_once(why)
      return self._outcome
    finally:
      self._writing.release()

  def _write_once(self, why: str) -> str:
    try:
      os.makedirs(self._folder, exist_ok=True)  # The start may hang before.
      with open(self._path, "w") as file:
        file.write(f"{why}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
      arrived = self._path == self._final_path or paths.push_within(
        self._path, self._final_path, _WRITE_SECS
      )
      where = self._final_path if arrived else self._path
      return f"; the stacks of all threads are in {where}"
    except OSError as e:
      return f"; their stacks could not be written: {e}"
