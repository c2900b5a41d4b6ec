"""Writes log entries to metrics.jsonl, to loggers and to the console.

A background thread of process 0 writes metrics.jsonl (log_entries.py) and the
files that its entries name (media.py). If it fails, the run fails. Each logger
(loggers.py) has a separate thread; a logger that fails or hangs is turned off,
and the run continues.
"""

import functools
import math
import operator
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from bigtrain.files import disk
from bigtrain.reports import log_entries, media
from bigtrain.reports.console import Console
from bigtrain.reports.log_entries import (
  FILE_NAME,
  Entry,
  EntryFile,
  WriteError,
)
from bigtrain.reports.loggers import Feed, Logger

__all__ = ["Console", "WriteError", "Writers", "read_rows"]

read_rows = log_entries.read  # The name in docs/config.md, for users' scripts.

# Longest time that an entry waits to be flushed to disk, and to dashboards.
_FLUSH_SECS = 2.0
# Longest call of a logger before it counts as hanging. A login to a tracker
# takes seconds; a longer limit would delay the end of a run that much.
_MAX_CALL_SECS = 120.0


class Writers:
  """Writes log entries in order, on background threads of process 0.

  If metrics.jsonl cannot be written, the next call of any method raises the
  error. Entries of steps after `restored_step`, or all if it is None, are
  removed from the file: the run writes them again.
  """

  def __init__(
    self,
    workdir: str,
    restored_step: int | None = None,
    process_index: int = 0,
    console: Console | None = None,
    loggers: Sequence[Logger] = (),
  ):
    # Unix time of the last write by an earlier process, if known.
    self.last_alive: float | None = None
    self._thread: threading.Thread | None = None
    self._error: WriteError | None = None
    self._console = console
    self._working_console = console  # None once it has failed.
    if process_index:
      return
    self._workdir = workdir
    self._file = EntryFile(os.path.join(workdir, FILE_NAME), restored_step)
    self.last_alive = self._file.last_alive
    first_step = 0 if restored_step is None else restored_step + 1
    self._logger_threads = [
      _LoggerThread(
        logger.name, functools.partial(Feed, logger, workdir, first_step)
      )
      for logger in loggers
    ]
    # A tuple of an entry and its media, an event to set once everything before
    # it is on disk, or None at the end.
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._thread = threading.Thread(
      target=self._run, name="writers", daemon=True
    )
    self._thread.start()

  def write(
    self, entry: Mapping[str, Any], shown: Mapping[str, Any] | None = None
  ) -> None:
    """Queues an entry: "step", and numbers, strings, bools or None by name.

    `shown` are the media whose paths the entry contains (`media.split`).
    """
    if self._thread:
      self.check()
      plain = {name: _scalar(name, value) for name, value in entry.items()}
      if not isinstance(plain.get("step"), int):
        raise TypeError(f"a log entry needs an integer 'step'; got {plain}")
      self._queue.put((plain, dict(shown or {})))
      self._show(plain)

  def check(self) -> None:
    if self._error:
      raise self._error

  def flush(self) -> None:
    """Waits until all entries so far are on disk."""
    if self._thread:
      flushed = threading.Event()
      self._queue.put(flushed)
      while not flushed.wait(timeout=1.0):
        if not self._thread.is_alive():
          raise WriteError(f"cannot write {self._file.path}: its thread died")
    self.check()

  def close(self) -> None:
    if self._thread:
      self._queue.put(None)
      self._thread.join()
      self._thread = None
      for thread in self._logger_threads:
        thread.close()
    if self._console:
      self._console.close()
    self.check()

  def _run(self) -> None:
    flush_at = math.inf
    while True:
      if time.monotonic() >= flush_at:
        self._on_file(self._file.publish)
        self._call_loggers(operator.methodcaller("flush"))
        flush_at = math.inf
      wait_secs = max(0.0, flush_at - time.monotonic())
      try:
        item = self._queue.get(
          timeout=wait_secs if wait_secs < math.inf else None
        )
      except queue.Empty:
        continue
      if isinstance(item, tuple):
        self._write(*item)
        flush_at = min(flush_at, time.monotonic() + _FLUSH_SECS)
        continue
      self._on_file(self._file.sync)
      self._call_loggers(operator.methodcaller("flush"))
      if item is None:
        self._on_file(self._file.close)
        return
      item.set()

  def _write(self, entry: Entry, shown: Mapping[str, Any]) -> None:
    # An entry must not name a file that does not exist yet.
    save = functools.partial(media.save, self._workdir, entry["step"], shown)
    self._on_file(save, path="media")
    self._on_file(functools.partial(self._file.add, entry))
    self._call_loggers(operator.methodcaller("write", entry, shown))

  def _on_file(self, call: Callable[[], None], path: str = FILE_NAME) -> None:
    """Makes a call that writes files; its error is raised to the caller later.

    Nothing is written after an error.
    """
    if self._error:
      return
    try:
      call()
    except Exception as e:
      reason = getattr(e, "strerror", None) or e
      path = os.path.join(self._workdir, path)
      room = disk.room(e, path)
      self._error = WriteError(f"cannot write {path}: {reason}{room}")
      self._error.__cause__ = e

  def _show(self, entry: Entry) -> None:
    # In the caller's thread, so that it is in order with log messages.
    try:
      if self._working_console:
        self._working_console.entry(entry)
    except Exception as e:
      _log_failure("The console", "failed", f"{type(e).__name__}: {e}")
      self._working_console = None

  def _call_loggers(self, method: Callable[[Feed], None]) -> None:
    for thread in self._logger_threads:
      thread.call(method)


def _log_failure(name: str, verb: str, reason: str) -> None:
  logging.error(
    f"{name} {verb} and is off from now on; metrics.jsonl is still written. "
    f"{reason}"
  )


def _scalar(name: str, value: Any) -> Any:
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
    return value.item()
  raise TypeError(
    f"metric {name!r}: expected a number, a string, a bool or None, got "
    f"{type(value).__name__} of shape {getattr(value, 'shape', None)}"
  )


class _LoggerThread:
  """The thread of one logger, which `open` opens at the first call.

  `call` and `close` never wait for a call that hangs, or for longer than
  _MAX_CALL_SECS.
  """

  def __init__(self, name: str, open: Callable[[], Feed]):
    self._name, self._open = name, open
    # Methods to call, and None at the end.
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._call_began = math.inf
    self._is_off = False
    self._thread: threading.Thread | None = None

  def call(self, method: Callable[[Feed], None]) -> None:
    self._check_answers()
    if self._is_off:
      return
    self._queue.put(method)
    if self._thread is None:
      self._thread = threading.Thread(
        target=self._run, name=f"writer {self._name}", daemon=True
      )
      self._thread.start()

  def close(self) -> None:
    if self._thread is None:  # Nothing was written.
      return
    self.call(operator.methodcaller("close"))
    self._queue.put(None)
    while self._thread.is_alive() and not self._is_off:
      self._thread.join(0.05)
      self._check_answers()

  def _run(self) -> None:
    feed = None
    while not self._is_off:
      method = self._queue.get()
      if method is None:
        return
      self._call_began = time.monotonic()
      try:
        feed = feed or self._open()
        method(feed)
      except Exception as e:
        self._give_up("failed", f"{type(e).__name__}: {e}")
      self._call_began = math.inf

  def _check_answers(self) -> None:
    if time.monotonic() - self._call_began > _MAX_CALL_SECS:
      reason = f"It did not answer for {_MAX_CALL_SECS:g} seconds."
      self._give_up("hangs", reason)

  def _give_up(self, verb: str, reason: str) -> None:
    if not self._is_off:
      _log_failure(self._name, verb, reason)
      self._is_off = True  # From then on, close() does not wait.
