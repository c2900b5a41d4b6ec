"""An iterator that runs in a background thread, a few items ahead."""

import collections
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

_JOIN_SECS = 10.0


class _Shared:
  """State shared by thread and consumer, which do not reference each other."""

  def __init__(self, depth: int, stopping: threading.Event):
    self.depth = depth
    self.stopping = stopping
    self.changed = threading.Condition()
    self.items: collections.deque[Any] = collections.deque()
    self.error: BaseException | None = None
    self.ended = False
    self.stopped = False


class Prefetch:
  """Iterates over `make()` in a background thread, up to `depth` items ahead.

  An error in the thread is raised by `next`, after the items made before it.
  The thread ends with `close`, with the last reference to this object, or with
  the program, whichever comes first.

  Args:
    make: function that returns the iterator; called in the thread.
    stopping: set when the thread must end. A slow iterator can look at it while
      it makes an item; its errors are then dropped.
  """

  def __init__(
    self,
    make: Callable[[], Iterator[Any]],
    depth: int,
    name: str = "prefetch",
    stopping: threading.Event | None = None,
  ):
    self._shared = _Shared(max(1, depth), stopping or threading.Event())
    # A daemon thread: at exit the interpreter joins other threads before it
    # runs the finalizer that would stop them.
    self._thread = threading.Thread(
      target=_work, args=(make, self._shared), name=name, daemon=True
    )
    self._stop = weakref.finalize(self, _stop, self._shared, self._thread)
    self._thread.start()

  def __iter__(self) -> "Prefetch":
    return self

  def __next__(self) -> Any:
    shared = self._shared
    with shared.changed:
      while not (shared.items or shared.ended or shared.stopped):
        shared.changed.wait()
      if shared.items and not shared.stopped:
        item = shared.items.popleft()
        shared.changed.notify_all()
        return item
      error, shared.error = shared.error, None
    self.close()
    if error is not None:
      raise error
    raise StopIteration

  def close(self) -> None:
    """Ends the thread and drops its finished items. Idempotent."""
    self._stop()


def _work(make: Callable[[], Iterator[Any]], shared: _Shared) -> None:
  error: BaseException | None = None
  try:
    iterator = make()
    try:
      for item in iterator:
        with shared.changed:
          while len(shared.items) >= shared.depth and not shared.stopped:
            shared.changed.wait()
          if shared.stopped:
            break
          shared.items.append(item)
          shared.changed.notify_all()
        del item  # Otherwise this thread keeps one more batch alive.
    finally:
      close = getattr(iterator, "close", None)
      if close:
        close()
  except BaseException as e:  # Re-raised by __next__.
    error = e
  with shared.changed:
    shared.error, shared.ended = error, True
    shared.changed.notify_all()


def _stop(shared: _Shared, thread: threading.Thread) -> None:
  with shared.changed:
    shared.stopped = True
    shared.stopping.set()
    shared.items.clear()
    shared.changed.notify_all()
  if thread is threading.current_thread():
    return  # Garbage collection ran in the thread itself.
  thread.join(_JOIN_SECS)
  if thread.is_alive():
    # It waits for a read or an op, and ends then or with the program.
    logging.info("Thread %s still reads data that is not needed.", thread.name)
