"""Ends a process that hangs, and says where.

The program tells what it is doing, and the watchdog, a thread, sees to it that
no phase lasts longer than its limit: it writes the stacks of all threads to
the workdir and ends the process with code 1. It waits for nothing: not for the
device, not for other processes, not for the interpreter's exit. Should native
code keep the interpreter's lock, so that this thread cannot run either, a
timer in C does the same a minute later.
"""

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from bigtrain import settings
from bigtrain.cluster import process
from bigtrain.files import paths
from bigtrain.settings import ConfigError

# Seconds; generous, since ending a healthy run is worse than ending a hung one
# late. `evaluation` is for each batch, `step` for each step.
LIMITS = {
  "start": 3600.0,
  "compile": 7200.0,
  "step": 1800.0,
  "evaluation": 3600.0,
  "save": 3600.0,
}
_POLL_SECS = 0.5
_NATIVE_EXTRA_SECS = 60.0
_WRITE_SECS = 10.0  # For the stacks; the storage may be what hangs.


def read_limits(config: settings.Config) -> dict[str, float] | None:
  """Limits from config.watchdog: {phase}_secs; None if it is False.

  Raises:
    ConfigError: an unknown phase, or a limit that is no positive number.
  """
  if config.get("watchdog", {}) is False:
    return None
  limits = dict(LIMITS)
  for key, value in config.kwargs("watchdog").items():
    phase = key.removesuffix("_secs")
    if phase not in LIMITS or phase == key:
      known = [f"{p}_secs" for p in LIMITS]
      hint = settings.did_you_mean(key, known)
      raise ConfigError(f"config.watchdog.{key}: unknown key.{hint}")
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ConfigError(
        f"config.watchdog.{key}: expected seconds, got {value!r}."
      )
    if not value > 0:
      raise ConfigError(f"config.watchdog.{key}: must be positive.")
    limits[phase] = float(value)
  return limits


class Watchdog:
  """Watches the phases of this process until `close`."""

  def __init__(self, limits: Mapping[str, float] | None, workdir: str):
    """Starts the thread, in phase "start".

    Args:
      limits: seconds for each phase of LIMITS; None watches nothing.
      workdir: where the stacks are written; first to a file of this machine
        if it is in an object store.
    """
    self._limits = limits
    name = f"stacks-{socket.gethostname()}-{os.getpid()}.txt"
    self._told = os.path.join(workdir, name)
    is_remote = paths.is_remote(workdir)
    self._workdir = tempfile.gettempdir() if is_remote else workdir
    self._path = os.path.join(self._workdir, name)
    self._file: Any = None
    self._done = threading.Event()
    self._writing = threading.Lock()
    self._written = ""
    self._since = ("start", 0, time.monotonic())
    process.on_hang(self._write_stacks)
    if limits is None:
      return
    self._thread = threading.Thread(
      target=self._watch, name="watchdog", daemon=True
    )
    self._thread.start()

  def enter(self, phase: str, step: int) -> None:
    """A phase begins, or a new step or batch of it; the clock is at zero."""
    self._since = (phase, step, time.monotonic())
    process.at(phase, step)

  def beat(self) -> None:
    """The phase goes on, but something was done: the clock is at zero."""
    phase, step, _ = self._since
    self._since = (phase, step, time.monotonic())

  def close(self) -> None:
    """Stops watching."""
    if self._limits is not None and not self._done.is_set():
      self._done.set()
      self._thread.join()
      faulthandler.cancel_dump_traceback_later()
      if self._file not in (None, sys.__stderr__):
        self._file.close()
        os.remove(self._path)

  def _watch(self) -> None:
    while not self._done.wait(_POLL_SECS):
      phase, step, since = self._since
      limit = self._limits[phase]
      if time.monotonic() - since > limit:
        self._end(phase, step, limit)
      if self._file is None and os.path.isdir(self._workdir):
        self._file = self._open()
      if self._file is not None:
        # Pushed back at every turn of this loop, as long as it can turn.
        faulthandler.dump_traceback_later(
          max(self._limits.values()) + _NATIVE_EXTRA_SECS,
          exit=True,
          file=self._file,
        )

  def _open(self) -> Any:
    """Where the timer writes to: a file, which must be open beforehand."""
    try:
      self._clear()
      return open(self._path, "w")
    except OSError as e:
      logging.warning("%s: stacks would go to the log: %s", self._path, e)
      return sys.__stderr__

  def _clear(self) -> None:
    """Removes the files that killed processes of this host left empty."""
    prefix = f"stacks-{socket.gethostname()}-"
    for name in os.listdir(self._workdir):
      pid = name.removeprefix(prefix).removesuffix(".txt")
      if name == f"{prefix}{pid}.txt" and not os.path.exists(f"/proc/{pid}"):
        path = os.path.join(self._workdir, name)
        with contextlib.suppress(FileNotFoundError):
          if not os.path.getsize(path):
            os.remove(path)

  def _end(self, phase: str, step: int, limit: float) -> None:
    message = (
      f"the phase {phase!r} at step {step} took more than {limit:g} s "
      f"(config.watchdog.{phase}_secs)"
    )
    message += self._write_stacks(message)
    # In a job of several processes all end here, and hear who is late.
    process.fail(process.EXIT_ERROR, f"hang: {message}", hang=True)
    # Straight to the descriptor: a hung thread may hold the stream's lock.
    os.write(sys.__stderr__.fileno(), f"error: hang: {message}\n".encode())
    os._exit(process.EXIT_ERROR)

  def _write_stacks(self, why: str = "a process of the job hangs") -> str:
    """Writes the stacks of all threads; returns what there is to say of it.

    This process and another of the job may find at the same time that it
    hangs: whoever comes second must not end it before the file is written.
    """
    if not self._writing.acquire(timeout=_WRITE_SECS):
      return f"; their stacks were not written within {_WRITE_SECS:g} s"
    try:
      self._written = self._written or self._write_once(why)
      return self._written
    finally:
      self._writing.release()

  def _write_once(self, why: str) -> str:
    try:
      os.makedirs(self._workdir, exist_ok=True)  # It may hang before that.
      with open(self._path, "w") as file:
        file.write(f"{why}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
      arrived = self._path == self._told or paths.push_within(
        self._path, self._told, _WRITE_SECS
      )
      where = self._told if arrived else self._path
      return f"; the stacks of all threads are in {where}"
    except OSError as e:
      return f"; their stacks could not be written: {e}"
