"""The engine that runs ops on numpy arrays, without tensorflow."""

import collections
import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from bigtrain.inputs.engine import (
  Batch,
  Engine,
  Features,
  Part,
  Stopped,
  public_features,
)


class NumpyEngine(Engine):
  """Runs ops on numpy arrays: on whole batches if every op supports it."""

  def _features(self, k: int) -> Features:
    features: Features = {}
    for name, value in self.example(k, self.usable_index(k, 0, 0), 0).items():
      array = np.asarray(value)
      strings = isinstance(value, bytes | str) or array.dtype.kind in "SU"
      dtype = None if array.dtype.kind == "O" else array.dtype
      features[name] = (bytes if strings else dtype, array.shape)
    return features

  def _stream(
    self, first_step: int, last_step: int, stopping: threading.Event
  ) -> Iterator[Batch]:
    if self.num_threads == 1:
      for step in range(first_step, last_step):
        yield self._batch(step, stopping)
      return
    pool = concurrent.futures.ThreadPoolExecutor(
      self.num_threads, thread_name_prefix="input"
    )
    pending: collections.deque[Any] = collections.deque()
    try:
      for step in range(first_step, last_step):
        pending.append(pool.submit(self._batch, step, stopping))
        if len(pending) > self.num_threads:
          yield pending.popleft().result()
      while pending:
        yield pending.popleft().result()
    finally:
      pool.shutdown(cancel_futures=True)

  def _batch(self, step: int, stopping: threading.Event) -> Batch:
    rows = self.row_order(step, 0, self.num_rows)
    if len(self.parts) == 1:
      return self._examples(self.parts[0], rows.index, rows.epoch, stopping)
    batch = {
      name: np.empty((self.num_rows, *shape), dtype)
      for name, (dtype, shape) in self.spec.items()
    }
    for k, part in enumerate(self.parts):
      at = np.flatnonzero(rows.source == k)
      if at.size:
        examples = self._examples(
          part, rows.index[at], rows.epoch[at], stopping
        )
        for name in self.spec:
          batch[name][at] = examples[name]
    return batch

  def _examples(
    self,
    part: Part,
    index: np.ndarray,
    epoch: np.ndarray,
    stopping: threading.Event,
  ) -> Batch:
    if stopping.is_set():
      raise Stopped
    raw = part.source.read(index)
    u = part.uniforms(index, epoch)
    if part.op.batched:
      return public_features(part.op.fn(raw, u))
    rows = []
    for i in range(len(index)):
      if stopping.is_set():
        raise Stopped
      rows.append(part.op.fn(_row(raw, i), u[i]))
    return {name: np.stack([row[name] for row in rows]) for name in self.spec}

  def _run(self, k: int, raw: Batch, u: np.ndarray) -> Batch:
    return self.parts[k].op.fn(_row(raw, 0), u[0])

  def _parse(self, k: int, raw: Batch) -> Any:
    return _row(raw, 0)


def _row(batch: Batch, i: int) -> dict[str, Any]:
  return {name: array[i] for name, array in batch.items()}
