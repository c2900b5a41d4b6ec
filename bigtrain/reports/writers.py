"""Writes rows of metrics to metrics.jsonl, to loggers and to the console.

A background thread writes metrics.jsonl (rows.py) and the files that it points
to (media.py): if they fail, the run fails. Each logger (loggers.py,
trackers.py) has a thread of its own; if it fails or hangs, it is turned off.
"""

import functools
import math
import operator
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from bigtrain.config import settings
from bigtrain.files import disk
from bigtrain.reports import loggers, media, trackers
from bigtrain.reports.console import Console
from bigtrain.reports.rows import FILE_NAME, Row, RowFile, WriteError, read_rows

__all__ = ["Console", "WriteError", "Writers", "read_rows"]

_SYNC_SECS = 2.0  # Between two flushes of the files, at least.
_PATIENCE_SECS = 120.0  # With a call of a logger, such as W&B's login.


def read_options(config: settings.Config) -> dict[str, Any]:
  options: dict[str, Any] = {"tensorboard": config.get("tensorboard", True)}
  for name in ("wandb", "mlflow", "trackio"):
    given = config.get(name)
    options[name] = None if given in (None, False) else {}
    if given not in (None, False, True):
      options[name] = config.kwargs(name)
  return options


class Writers:
  """Writes rows in order, on background threads of process 0.

  The next call of any method raises an error of metrics.jsonl. Rows after
  `restored_step`, or all if it is None, are removed: the run writes them again.
  """

  def __init__(
    self,
    workdir: str,
    restored_step: int | None = None,
    process_index: int = 0,
    console: Console | None = None,
    *,
    tensorboard: bool = True,
    **others: Mapping[str, Any] | None,
  ):
    # Unix time of the last write by an earlier process, if known.
    self.last_alive: float | None = None
    self._thread: threading.Thread | None = None
    self._error: WriteError | None = None
    self._console = console
    self._shown_console = console  # None once it has failed.
    if process_index:
      return
    options = {key: value for key, value in others.items() if value is not None}
    for key, value in options.items():
      trackers.check(key, value)
    self._workdir = workdir
    self._file = RowFile(os.path.join(workdir, FILE_NAME), restored_step)
    self.last_alive = self._file.last_alive
    setup = functools.partial(loggers.Setup.read, workdir)
    purge_step = 0 if restored_step is None else restored_step + 1
    self._sinks: list[_Sink] = []
    if tensorboard:
      make_tensorboard = lambda: loggers.TensorBoard(setup(), purge_step)
      self._sinks.append(_Sink("TensorBoard", make_tensorboard))
    for key, value in options.items():
      name = {"wandb": "W&B", "mlflow": "MLflow"}.get(key, key)
      make = functools.partial(trackers.make, key, setup, value)
      self._sinks.append(_Sink(name, make))
    # A row with its media values, an event to set, or None at the end.
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    run = self._run
    self._thread = threading.Thread(target=run, name="writers", daemon=True)
    self._thread.start()

  def write(
    self, row: Mapping[str, Any], shown: Mapping[str, Any] | None = None
  ) -> None:
    """Queues a row: "step", and numbers, strings, bools or None by name.

    `shown` are the values whose paths are in the row (`media.split`).
    """
    if self._thread:
      self.check()
      plain = {name: _scalar(name, value) for name, value in row.items()}
      if not isinstance(plain.get("step"), int):
        raise TypeError(f"a row needs an integer 'step'; got {plain}")
      self._queue.put((plain, dict(shown or {})))
      self._show(plain)

  def check(self) -> None:
    if self._error:
      raise self._error

  def flush(self) -> None:
    """Waits until all rows so far are on disk."""
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
      for sink in self._sinks:
        sink.close()
    if self._console:
      self._console.close()
    self.check()

  def _run(self) -> None:
    sync_at = math.inf
    while True:
      if time.monotonic() >= sync_at:
        self._on_file(self._file.publish)
        self._each(operator.methodcaller("flush"))
        sync_at = math.inf
      wait = max(0.0, sync_at - time.monotonic())
      try:
        item = self._queue.get(timeout=wait if wait < math.inf else None)
      except queue.Empty:
        continue
      if isinstance(item, tuple):
        row, shown = item
        # A row must not point to a file that does not exist yet.
        save = functools.partial(media.save, self._workdir, row["step"], shown)
        self._on_file(save, "media")
        self._on_file(functools.partial(self._file.add, row))
        self._each(operator.methodcaller("write", row, shown))
        sync_at = min(sync_at, time.monotonic() + _SYNC_SECS)
        continue
      self._on_file(self._file.sync)
      self._each(operator.methodcaller("flush"))
      if item is None:
        self._on_file(self._file.close)
        return
      item.set()

  def _on_file(self, call: Callable[[], None], path: str = FILE_NAME) -> None:
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

  def _show(self, row: Row) -> None:
    # In the caller's thread, in order with log messages.
    try:
      if self._shown_console:
        self._shown_console.row(row)
    except Exception as e:
      _log_failure("The console", "failed", f"{type(e).__name__}: {e}")
      self._shown_console = None

  def _each(self, method: Callable[[Any], None]) -> None:
    for sink in self._sinks:
      sink.call(method)


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


class _Sink:
  """A logger in a thread of its own, which makes it at the first row."""

  def __init__(self, name: str, make: Callable[[], Any]):
    self._name, self._make = name, make
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._call_began = math.inf
    self._is_off = False
    self._thread: threading.Thread | None = None

  def call(self, method: Callable[[Any], None]) -> None:
    self._check_answers()
    if self._is_off:
      return
    self._queue.put(method)
    if self._thread is None:
      name = f"writer {self._name}"
      self._thread = threading.Thread(target=self._run, name=name, daemon=True)
      self._thread.start()

  def close(self) -> None:
    if self._thread is None:
      return
    self.call(operator.methodcaller("close"))
    self._queue.put(None)
    while self._thread.is_alive() and not self._is_off:
      self._thread.join(0.05)
      self._check_answers()

  def _run(self) -> None:
    logger = None
    while not self._is_off:
      method = self._queue.get()
      if method is None:
        return
      self._call_began = time.monotonic()
      try:
        logger = logger or self._make()
        method(logger)
      except Exception as e:
        self._give_up("failed", f"{type(e).__name__}: {e}")
      self._call_began = math.inf

  def _check_answers(self) -> None:
    if time.monotonic() - self._call_began > _PATIENCE_SECS:
      reason = f"It did not answer for {_PATIENCE_SECS:g} seconds."
      self._give_up("hangs", reason)

  def _give_up(self, verb: str, reason: str) -> None:
    if not self._is_off:
      _log_failure(self._name, verb, reason)
      self._is_off = True  # From then on, close() does not wait.
