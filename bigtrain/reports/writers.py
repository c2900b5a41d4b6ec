"""Writes rows of metrics to metrics.jsonl, TensorBoard, W&B and the console.

All are fed from one row, the files in order on one background thread.
metrics.jsonl is the run's record (see rows.py) and must not fail; the others
may.
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
from bigtrain.files import paths
from bigtrain.reports.console import Console
from bigtrain.reports.rows import FILE_NAME, Row, RowFile, WriteError, read_rows

__all__ = ["Console", "WriteError", "Writers", "read_rows"]

# Files of TensorBoard are synced to disk at most this often.
_SYNC_SECS = 2.0


class Writers:
  """Takes rows and writes them in order, on one background thread.

  Only process 0 writes; all methods of the others return at once. An error in
  metrics.jsonl is raised by the next call of any method. TensorBoard, W&B and
  the console are told about once when they fail and left out from then on.

  Attributes:
    last_alive: Unix seconds of the newest write of the processes before, or
      None (see `Chrono.restore`).
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
    """Opens metrics.jsonl, without the rows that will be made again.

    Args:
      workdir: folder of the run; made if missing.
      restored_step: step of the state the run goes on with, whose rows are
        kept; None if it starts from scratch.
      process_index: of this process.
      tensorboard: whether to write events to workdir/tensorboard.
      wandb: keyword arguments of `wandb.init`; None for no W&B.
      console: where to show rows; closed by `close`.

    Raises:
      ConfigError: W&B is asked for and not installed, or given unknown keys.
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
    """Puts a row on its way.

    Args:
      row: "step", an int, and names with numbers (Python's, numpy's or jax
        scalars that are on the host already), strings, bools or None.

    Raises:
      TypeError: a value is none of these.
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
    """Returns when all rows so far are on disk.

    A checkpoint is complete after this only: a restart keeps the rows up to
    its step and cannot make them again.
    """
    if self._thread:
      done = threading.Event()
      self._queue.put(done)
      while not done.wait(timeout=1.0):
        if not self._thread.is_alive():
          raise WriteError(f"cannot write {self._file.path}: its thread died")
    self.check()

  def close(self) -> None:
    """Writes what is left and ends; more calls do nothing."""
    if self._thread:
      self._queue.put(None)
      self._thread.join()
      self._thread = None
    if self._console:
      self._console.close()
    self.check()

  def _run(self) -> None:
    """The thread: rows in, lines out, until None."""
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
    """Calls RowFile; keeps its first error for the caller, then stops."""
    if self._error:
      return
    try:
      call()
    except Exception as e:
      reason = getattr(e, "strerror", None) or e
      self._error = WriteError(f"cannot write {self._file.path}: {reason}")
      self._error.__cause__ = e

  def _show(self, row: Row) -> None:
    """Shows a row here and now, so that log messages keep their order."""
    if self._shows:
      try:
        self._console.row(row)
      except Exception as e:
        _tell("console", e)
        self._shows = False

  def _each(self, call: Callable[[Any], None]) -> None:
    """Calls all secondary writers; one that fails is told and left out."""
    for name, sink in list(self._sinks.items()):
      try:
        call(sink)
      except Exception as e:
        _tell(name, e)
        del self._sinks[name]


def _tell(name: str, error: Exception) -> None:
  logging.error(
    "%s cannot write and is left out from now on; metrics.jsonl goes on. "
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
  """A secondary writer, made on the thread when the first row comes.

  Its libraries take seconds to load, and its first error is one of writing.
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
  """Every number of a row as a scalar of the same name.

  tensorboardX's own SummaryWriter has a second thread, which dies silently
  when the disk is full, and then a queue that blocks for ever; this uses the
  layer below it.
  """

  def __init__(self, folder: str, purge_step: int):
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2, summary_pb2

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    paths.make_folder(folder)
    self._beside: tempfile.TemporaryDirectory[str] | None = None
    local = folder
    if paths.is_remote(folder):
      self._beside = tempfile.TemporaryDirectory(prefix="bigtrain-")
      local = self._beside.name
    # Restarts within a second must not write over the file before.
    suffix = f".{time.time_ns() % 10**9:09}.{os.getpid()}"
    self._writer = event_file_writer.EventsWriter(
      os.path.join(local, "events"), suffix
    )
    self._mirror: paths.Mirror | None = None
    if self._beside is not None:
      (name,) = os.listdir(local)
      self._mirror = paths.Mirror(
        os.path.join(folder, name), os.path.join(local, name)
      )
    # TensorBoard forgets what a killed process wrote from this step on.
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
    if self._beside is not None:
      self._beside.cleanup()


class _Wandb:
  """A W&B run, which a restart of the same workdir goes on with."""

  def __init__(self, workdir: str, options: Mapping[str, Any]):
    import wandb

    # W&B's own files are a folder's; beside a bucket, where the program runs.
    place = {} if paths.is_remote(workdir) else {"dir": workdir}
    options = {**place, "resume": "allow", **options}
    if "id" not in options:
      options["id"] = _wandb_id(workdir)
    has_key = wandb.api.api_key or os.environ.get("WANDB_MODE")
    if "mode" not in options and not has_key:
      # Else W&B would ask for a key, and nobody might be there to answer.
      options["mode"] = "offline"
      logging.info(
        "W&B: not logged in; writing to %s, for `wandb sync`.", workdir
      )
    self._run = wandb.init(**options)

  def write(self, row: Row) -> None:
    self._run.log(_numbers(row), step=row["step"])

  def flush(self) -> None:
    """W&B's own process writes on its own terms."""

  def close(self) -> None:
    self._run.finish()


def _wandb_id(workdir: str) -> str:
  """A name for the run, the same after every restart; kept in the workdir."""
  path = os.path.join(workdir, "wandb", "run_id")
  try:
    return paths.read_bytes(path).decode()
  except FileNotFoundError:
    paths.make_folder(os.path.dirname(path))
    where = f"{socket.gethostname()}:{os.path.abspath(workdir)}:{time.time()}"
    name = hashlib.sha256(where.encode()).hexdigest()[:16]
    with paths.replacing(path) as file:
      file.write(name)
    return name


def _check_wandb(options: Mapping[str, Any]) -> None:
  try:
    import wandb
  except ImportError as e:
    raise settings.ConfigError(
      "config.wandb: W&B is not installed; pip install 'bigtrain[wandb]'."
    ) from e
  settings.check_kwargs(wandb.init, options, "config.wandb")
