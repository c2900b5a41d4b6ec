"""Moves this host's rows of a batch onto its devices, a few steps ahead.

`Placement` knows which rows of the global batch are on this host's devices.
`Prefetch` is a thread that makes the next batches while the devices work.
"""

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

# How long `Prefetch.close` waits for its thread, which may be in a slow read.
_JOIN_SECS = 10.0


class Placement:
  """The placement of a global batch's rows on hosts and devices.

  Attributes:
    rows: this host's rows of the global batch, int64 [local rows], ascending.
    sharding: of every feature of the batch.
  """

  def __init__(self, mesh: Mesh, batch_size: int):
    self.batch_size = batch_size
    self.sharding = sharding.batch(mesh)
    # {device: (first row, row after the last)}; devices of one replica share.
    slices_of_devices = self.sharding.addressable_devices_indices_map(
      (batch_size,)
    )
    spans_of_devices = {
      device: slices[0].indices(batch_size)[:2]
      for device, slices in slices_of_devices.items()
      if slices is not None
    }
    spans = sorted(set(spans_of_devices.values()))
    self.rows = np.concatenate([np.arange(*span) for span in spans])
    # Where the rows of each device are in `rows`.
    self._devices = list(spans_of_devices)
    self._cuts = []
    for start, stop in spans_of_devices.values():
      first = int(np.searchsorted(self.rows, start))
      self._cuts.append(slice(first, first + stop - start))

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
    """Puts each batch onto the devices; finally closes the generator."""
    with contextlib.closing(batches):
      yield from map(self.put, batches)

  def spec(self, example: Spec) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns specs of the global arrays of a batch of such examples."""
    return {
      name: jax.ShapeDtypeStruct((self.batch_size, *shape), dtype)
      for name, (dtype, shape) in example.items()
    }


class _Shared:
  """State that the thread and the `Prefetch` share.

  The thread has no reference to the `Prefetch`, because the `Prefetch` could
  then not be garbage-collected while the thread runs.
  """

  def __init__(self, depth: int, stopping: threading.Event):
    self.depth = depth
    self.stopping = stopping  # For the iterator: its items are not needed.
    self.changed = threading.Condition()  # Of the fields below.
    self.items: collections.deque[Any] = collections.deque()
    self.error: BaseException | None = None
    self.ended = False  # The iterator has ended.
    self.stopped = False  # The consumer wants no more items.


class Prefetch:
  """Iterates over `make()` in a background thread, up to `depth` items ahead.

  If the thread fails, `next` first returns the items that were made before and
  then raises the error. The thread ends with `close`, with the last reference
  to this object, or with the program. `stopping` is set then, so that a slow
  iterator can end early.
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


class JoinedBatches:
  """Batches of a run, joined with batches of tasks that have their own input.

  Args:
    batches: the run's batches.
    others: {prefix of the features: (first step, batches from that step on)}.
    first_step: number of the first batch of the run.
  """

  def __init__(
    self,
    batches: Prefetch,
    others: Mapping[str, tuple[int, "Prefetch | JoinedBatches"]],
    first_step: int,
  ):
    self._batches = batches
    self._others = others
    self._step = first_step

  def __iter__(self) -> "JoinedBatches":
    return self

  def __next__(self) -> dict[str, Any]:
    result = dict(next(self._batches))
    for prefix, (first, batches) in self._others.items():
      if self._step >= first:
        own = next(batches)
        result |= {f"{prefix}{name}": x for name, x in own.items()}
    self._step += 1
    return result

  def close(self) -> None:
    self._batches.close()
    for _, batches in self._others.values():
      batches.close()


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
    logging.info(
      "Thread %s is still reading data that is no longer needed.", thread.name
    )
