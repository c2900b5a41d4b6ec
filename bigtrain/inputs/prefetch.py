"""An iterator that runs in a thread of its own, a few items ahead."""

import collections
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

_JOIN_SECS = 10.0


class _Shared:
  """What the thread and the consumer share; neither refers to the other."""

  def __init__(self, depth: int):
    self.depth = depth
    self.changed = threading.Condition()
    self.items: collections.deque[Any] = collections.deque()
    self.error: BaseException | None = None
    self.ended = False
    self.stopped = False


class Prefetch:
  """Iterates over `make()` in a background thread, up to `depth` items ahead.

  What the thread raises is raised by `next`, after the items made before. The
  thread ends with `close`, when nobody refers to this any more, or when the
  program exits, whichever comes first.

  Args:
    make: returns the iterator; called, iterated and closed by the thread.
    depth: items that may wait to be taken.
    name: of the thread, for stack dumps.
  """

  def __init__(
    self, make: Callable[[], Iterator[Any]], depth: int, name: str = "prefetch"
  ):
    self._shared = _Shared(max(1, depth))
    # A daemon, since the interpreter joins other threads before it would tell
    # them to stop.
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
    """Ends the thread and drops what it has made. May be called twice."""
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
        del item  # Or one more batch than `depth` would be kept alive.
    finally:
      close = getattr(iterator, "close", None)
      if close:
        close()
  except BaseException as e:  # Raised again by __next__.
    error = e
  with shared.changed:
    shared.error, shared.ended = error, True
    shared.changed.notify_all()


def _stop(shared: _Shared, thread: threading.Thread) -> None:
  with shared.changed:
    shared.stopped = True
    shared.items.clear()
    shared.changed.notify_all()
  if thread is threading.current_thread():
    return  # Garbage collection happened to run in the thread itself.
  thread.join(_JOIN_SECS)
  if thread.is_alive():
    logging.warning(
      "Thread %s is still busy %.0f s after it was told to stop.",
      thread.name,
      _JOIN_SECS,
    )
