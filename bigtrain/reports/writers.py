"""Writes rows of metrics to metrics.jsonl, TensorBoard, W&B and the console.

Every writer receives the same rows. The files are written in order by one
background thread. metrics.jsonl is the run's record (see rows.py): if it fails,
the run fails. The other writers may fail.
"""

import functools
import hashlib
import math
import operator
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from bigtrain import settings
from bigtrain.files import disk, paths
from bigtrain.reports.console import Console
from bigtrain.reports.rows import FILE_NAME, Row, RowFile, WriteError, read_rows

__all__ = ["Console", "WriteError", "Writers", "read_rows"]

# Minimum time between two flushes of the files.
_SYNC_SECS = 2.0


def read_options(config: settings.Config) -> dict[str, Any]:
  """Reads config.tensorboard and config.wandb, options of `Writers`."""
  return {
    "tensorboard": config.get("tensorboard", True),
    "wandb": config.kwargs("wandb") if config.get("wandb") else None,
  }


class Writers:
  """Writes rows in order, on one background thread.

  Only process 0 writes; on other processes all methods return at once. The next
  call of any method raises an error of metrics.jsonl. If TensorBoard, W&B or
  the console fails, the error is logged once and that writer is dropped.

  Attributes:
    last_alive: Unix time in seconds of the last write by an earlier process,
      or None (see `Chrono.restore`).
  """

  def __init__(
    self,
    workdir: str,
    *,
    restored_step: int | None = None,
    process_index: int = 0,
    tensorboard: bool = True,
    wandb: Mapping[str, Any] | None = None,
    console: Console | None = None,
  ):
    """Opens metrics.jsonl and removes rows that the run will write again.

    Args:
      workdir: folder of the run; created if missing.
      restored_step: step of the restored state; rows up to it are kept. None
        if the run starts from scratch.
      process_index: index of this process.
      tensorboard: whether to write events to workdir/tensorboard.
      wandb: keyword arguments of `wandb.init`; None for no W&B.
      console: shows the rows; closed by `close`.

    Raises:
      ConfigError: W&B is configured but not installed, or has unknown keys.
      WriteError: the file cannot be written.
    """
    self.last_alive: float | None = None
    self._thread: threading.Thread | None = None
    self._error: WriteError | None = None
    self._console = console
    self._shows = console is not None
    if process_index:
      return
    if wandb is not None:
      _check_wandb(wandb)
    self._file = RowFile(os.path.join(workdir, FILE_NAME), restored_step)
    self.last_alive = self._file.last_alive
    self._sinks: dict[str, _Sink] = {}
    if tensorboard:
      folder = os.path.join(workdir, "tensorboard")
      purge = 0 if restored_step is None else restored_step + 1
      self._sinks["TensorBoard"] = _Sink(lambda: _TensorBoard(folder, purge))
    if wandb is not None:
      self._sinks["W&B"] = _Sink(lambda: _Wandb(workdir, wandb))
    self._queue: queue.SimpleQueue[Row | threading.Event | None] = (
      queue.SimpleQueue()
    )
    self._thread = threading.Thread(
      target=self._run, name="writers", daemon=True
    )
    self._thread.start()

  def write(self, row: Mapping[str, Any]) -> None:
    """Queues a row for writing.

    Args:
      row: "step", an int, and values by name: numbers (of Python, numpy, or
        jax scalars already on the host), strings, bools or None.

    Raises:
      TypeError: a value has another type.
      WriteError: metrics.jsonl could not be written.
    """
    if self._thread:
      self.check()
      plain = {name: _scalar(name, value) for name, value in row.items()}
      if not isinstance(plain.get("step"), int):
        raise TypeError(f"a row needs an integer 'step'; got {plain}")
      self._queue.put(plain)
      self._show(plain)

  def check(self) -> None:
    """Raises WriteError if metrics.jsonl could not be written."""
    if self._error:
      raise self._error

  def flush(self) -> None:
    """Waits until all rows so far are on disk.

    Call this before saving a checkpoint: a restart keeps the rows up to the
    checkpoint's step and cannot compute them again.
    """
    if self._thread:
      flushed = threading.Event()
      self._queue.put(flushed)
      while not flushed.wait(timeout=1.0):
        if not self._thread.is_alive():
          raise WriteError(f"cannot write {self._file.path}: its thread died")
    self.check()

  def close(self) -> None:
    """Writes all queued rows and closes the files; can be called again."""
    if self._thread:
      self._queue.put(None)
      self._thread.join()
      self._thread = None
    if self._console:
      self._console.close()
    self.check()

  def _run(self) -> None:
    """Writes queued rows until None arrives; runs in the thread."""
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
      if isinstance(item, dict):
        self._on_file(functools.partial(self._file.add, item))
        self._each(operator.methodcaller("write", item))
        sync_at = min(sync_at, time.monotonic() + _SYNC_SECS)
        continue
      self._on_file(self._file.sync)
      self._each(operator.methodcaller("flush"))
      if item is None:
        self._each(operator.methodcaller("close"))
        self._on_file(self._file.close)
        return
      item.set()

  def _on_file(self, call: Callable[[], None]) -> None:
    """Calls a method of RowFile, unless an earlier call failed.

    Keeps the error for the caller.
    """
    if self._error:
      return
    try:
      call()
    except Exception as e:
      reason = getattr(e, "strerror", None) or e
      room = disk.room(e, self._file.path)
      message = f"cannot write {self._file.path}: {reason}{room}"
      self._error = WriteError(message)
      self._error.__cause__ = e

  def _show(self, row: Row) -> None:
    """Shows a row in the caller's thread, in order with log messages."""
    if self._shows:
      try:
        self._console.row(row)
      except Exception as e:
        _log_failure("console", e)
        self._shows = False

  def _each(self, call: Callable[[Any], None]) -> None:
    """Calls all secondary writers; logs and drops those that fail."""
    for name, sink in list(self._sinks.items()):
      try:
        call(sink)
      except Exception as e:
        _log_failure(name, e)
        del self._sinks[name]


def _log_failure(name: str, error: Exception) -> None:
  logging.error(
    "%s failed and is off from now on; metrics.jsonl is still written. "
    "The error was %s: %s",
    name,
    type(error).__name__,
    error,
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


def _numbers(row: Row) -> dict[str, float]:
  return {
    name: value
    for name, value in row.items()
    if name != "step" and isinstance(value, (int, float))
  }


class _Sink:
  """A secondary writer, created in the thread at the first row.

  Its libraries take seconds to load, and an error of the constructor must be
  handled like one of writing.
  """

  def __init__(self, make: Callable[[], Any]):
    self._make = make
    self._made: Any = None

  def write(self, row: Row) -> None:
    if self._made is None:
      self._made = self._make()
    self._made.write(row)

  def flush(self) -> None:
    if self._made is not None:
      self._made.flush()

  def close(self) -> None:
    if self._made is not None:
      self._made.close()


class _TensorBoard:
  """Writes every number of a row as a TensorBoard scalar of the same name.

  tensorboardX's SummaryWriter has a thread of its own, which dies silently when
  the disk is full; its queue then blocks forever. This class uses the layer
  below it.
  """

  def __init__(self, folder: str, purge_step: int):
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2, summary_pb2

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    paths.make_folder(folder)
    self._local_folder: tempfile.TemporaryDirectory[str] | None = None
    local = folder
    if paths.is_remote(folder):
      self._local_folder = tempfile.TemporaryDirectory(prefix="bigtrain-")
      local = self._local_folder.name
    # A restart within the same second must not overwrite the earlier file.
    suffix = f".{time.time_ns() % 10**9:09}.{os.getpid()}"
    self._writer = event_file_writer.EventsWriter(
      os.path.join(local, "events"), suffix
    )
    self._mirror: paths.Mirror | None = None
    if self._local_folder is not None:
      (name,) = os.listdir(local)
      self._mirror = paths.Mirror(
        os.path.join(folder, name), os.path.join(local, name)
      )
    # TensorBoard drops the events that a killed process wrote after this step.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._writer.write_event(
      self._event(wall_time=time.time(), step=purge_step, session_log=start)
    )

  def write(self, row: Row) -> None:
    values = [
      self._summary.Value(tag=name, simple_value=value)
      for name, value in _numbers(row).items()
    ]
    self._writer.write_event(
      self._event(
        wall_time=time.time(),
        step=row["step"],
        summary=self._summary(value=values),
      )
    )

  def flush(self) -> None:
    self._writer.flush()
    if self._mirror is not None:
      self._mirror.push(soon=True)

  def close(self) -> None:
    self._writer.close()
    if self._mirror is not None:
      self._mirror.push()
    if self._local_folder is not None:
      self._local_folder.cleanup()


class _Wandb:
  """A W&B run; a restart in the same workdir continues it."""

  def __init__(self, workdir: str, options: Mapping[str, Any]):
    import wandb

    # W&B needs a local folder; for a remote workdir it takes the current one.
    folder = {} if paths.is_remote(workdir) else {"dir": workdir}
    options = {**folder, "resume": "allow", **options}
    if "id" not in options:
      options["id"] = _wandb_id(workdir)
    has_key = wandb.api.api_key or os.environ.get("WANDB_MODE")
    if "mode" not in options and not has_key:
      # Otherwise W&B would prompt for a key and block a batch job.
      options["mode"] = "offline"
      logging.info(
        "W&B: not logged in; writing to %s for `wandb sync`.", workdir
      )
    self._run = wandb.init(**options)

  def write(self, row: Row) -> None:
    self._run.log(_numbers(row), step=row["step"])

  def flush(self) -> None:
    """Does nothing: W&B's own process decides when to write."""

  def close(self) -> None:
    self._run.finish()


def _wandb_id(workdir: str) -> str:
  """Returns the run's W&B id, which is stored in the workdir."""
  path = os.path.join(workdir, "wandb", "run_id")
  try:
    return paths.read_bytes(path).decode()
  except FileNotFoundError:
    paths.make_folder(os.path.dirname(path))
    start = f"{socket.gethostname()}:{os.path.abspath(workdir)}:{time.time()}"
    run_id = hashlib.sha256(start.encode()).hexdigest()[:16]
    with paths.replacing(path) as file:
      file.write(run_id)
    return run_id


def _check_wandb(options: Mapping[str, Any]) -> None:
  try:
    import wandb
  except ImportError as e:
    raise settings.ConfigError(
      "config.wandb: W&B is not installed: pip install 'bigtrain[wandb]'."
    ) from e
  settings.check_kwargs(wandb.init, options, "config.wandb")
