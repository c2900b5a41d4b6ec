"""Transfer: this host's rows of a batch go to its devices, steps ahead."""

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.inputs.checks import Spec

_JOIN_SECS = 10.0


class Placement:
  """This host's rows of the global batch, int64 [local rows], ascending."""

  def __init__(self, mesh: Mesh, batch_size: int):
    self.batch_size = batch_size
    self.sharding = sharding.batch(mesh)
    owned = {
      device: slices[0].indices(batch_size)[:2]
      for device, slices in self.sharding.addressable_devices_indices_map(
        (batch_size,)
      ).items()
      if slices is not None
    }
    spans = sorted(set(owned.values()))
    self.rows = np.concatenate([np.arange(*span) for span in spans])
    # The same spans as indices into `rows`.
    own = {start: np.searchsorted(self.rows, start) for start, _ in spans}
    self._devices = list(owned)
    self._cuts = [
      slice(own[start], own[start] + stop - start)
      for start, stop in owned.values()
    ]

  def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes global arrays from this host's rows, without waiting for copies."""
    shards = jax.device_put(
      [[array[cut] for cut in self._cuts] for array in batch.values()],
      [self._devices for _ in batch],
    )
    return {
      name: jax.make_array_from_single_device_arrays(
        (self.batch_size, *array.shape[1:]), self.sharding, parts
      )
      for (name, array), parts in zip(batch.items(), shards)
    }

  def get(self, x: jax.Array) -> np.ndarray:
    """Copies this host's rows of a global array."""
    result = np.empty((len(self.rows), *x.shape[1:]), x.dtype)
    for shard in x.addressable_shards:
      first = np.searchsorted(self.rows, shard.index[0].start or 0)
      data = jax.device_get(shard.data)
      result[first : first + len(data)] = data
    return result

  def put_all(
    self, batches: Generator[Mapping[str, np.ndarray], None, None]
  ) -> Iterator[dict[str, jax.Array]]:
    with contextlib.closing(batches):
      yield from map(self.put, batches)

  def spec(self, example: Spec) -> dict[str, jax.ShapeDtypeStruct]:
    return {
      name: jax.ShapeDtypeStruct((self.batch_size, *shape), dtype)
      for name, (dtype, shape) in example.items()
    }


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
  the program. `stopping` is then set, for a slow iterator to look at.
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
