"""Engines make the batches of one host.

`NumpyEngine` and that of tf.data (tf_engine.py) run the same ops on the same
examples with the same random numbers. When a batch fails, its examples are made
again, one by one, to find the one that fails. If the config allows it, that
example is replaced and the engine restarts at this step.
"""

import collections
import concurrent.futures
import math
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from bigtrain.arrays import hashing
from bigtrain.arrays.types import ClassCount, PaddedIds
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.inputs import checks, order
from bigtrain.inputs.checks import Spec
from bigtrain.pp.host_tensorflow import one_line
from bigtrain.pp.registry import Op

Batch = dict[str, np.ndarray]
Batches = Generator[Batch, None, None]
# {name: (dtype, shape)} of one example. The dtype is `bytes` for strings and
# None for values that are not arrays; sizes are None if unknown.
Features = dict[str, tuple[Any, Sequence[int | None] | None]]
# (step, start, stop) -> the order of rows [start, stop) of this host's share of
# the step's batch.
Plan = Callable[[int, int, int], order.Order]

# Examples to try for one row, replacements included, before giving up.
_MAX_ATTEMPTS = 100


class Part(NamedTuple):
  """One source of a mixture."""

  key: str  # Location in the config, such as "config.input.mixture.web".
  source: Any
  ops: tuple[Op, ...]
  op: Op  # Composition of `ops`.
  seed: int
  drawn: int = 0  # Number among the ops that steps draw from.

  def uniforms(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
    """Returns the random numbers of examples [B]: float32 [B, draws]."""
    return hashing.uniforms(self.seed, epoch, index, self.op.draws)


class Stopped(Exception):
  """The batch is no longer needed."""


class Engine:
  """Makes this host's share of the batch of any step."""

  def __init__(
    self,
    parts: Sequence[Part],
    plan: Plan,
    num_rows: int,
    num_threads: int,
    skip_errors: int = 0,
  ):
    self.parts, self._plan = parts, plan
    self.num_rows, self.num_threads = num_rows, num_threads
    self._skip_errors, self._lock = skip_errors, threading.Lock()
    # (key, index) of the examples left out; at most `skip_errors`.
    self.skipped: set[tuple[str, int]] = set()
    # {step: {row: index}}: replacements of examples that fail.
    self._replacements: dict[int, dict[int, int]] = {}
    # {feature: (number of ids, whether negative ones are allowed)}.
    self.id_limits: dict[str, tuple[int, bool]] = {}
    self.specs: list[Spec] = []  # Of the parts.
    specs = [_spec(self._features(k), part.key) for k, part in enumerate(parts)]
    _check_equal(specs, parts)
    self.specs = specs
    self.spec = max(specs, key=_num_values)

  def limit_ids(
    self, sizes: Mapping[str, int], negative: Collection[str], path: str
  ) -> None:
    """Refuses ids that the model cannot take; < 0 is allowed in `negative`."""
    checks.check_parts(self.parts, self.spec, sizes, negative, path)
    for name, size in sizes.items():
      if name in self.spec:
        dtype, shape = self.spec[name]
        vector = isinstance(size, ClassCount) and shape
        if dtype.kind in "iu" and not vector:
          padded = isinstance(size, PaddedIds)
          self.id_limits[name] = size, padded or name in negative

  def batches(
    self,
    first_step: int,
    last_step: int,
    stopping: threading.Event | None = None,
  ) -> Batches:
    """Yields the batches of steps [first_step, last_step), until `stopping`."""
    stopping = stopping or threading.Event()
    step = first_step
    while step < last_step:
      try:
        for batch in self._stream(range(step, last_step), stopping):
          yield self._checked(batch, step)
          step += 1
      except Exception as e:
        if stopping.is_set():
          return
        if isinstance(e, ConfigError) and not isinstance(e, DataError):
          raise
        self._replace(step, e)  # Raises if there is no replacement.
        continue
      if step < last_step:
        raise DataError(f"the input ended at step {step} of {last_step}.")

  def row_order(self, step: int, start: int, stop: int) -> order.Order:
    rows = self._plan(step, start, stop)
    for row, index in self._replacements.get(step, {}).items():
      if start <= row < stop:
        rows.index[row - start] = index
    return rows

  def _stream(self, steps: range, stopping: threading.Event) -> Batches:
    raise NotImplementedError

  def _features(self, k: int) -> Features:
    raise NotImplementedError

  def _run(self, k: int, raw: Batch, u: np.ndarray) -> Batch:
    """Runs all ops on one example; `raw` and `u` are batches of size one."""
    return self._run_op(self.parts[k].op, self._parse(k, raw), u[0])

  def _run_op(self, op: Op, features: Any, u: np.ndarray) -> Any:
    return op.fn(features, u)

  def _parse(self, k: int, raw: Batch) -> Any:
    """Returns the first op's input for one example, from a batch of one."""
    return _row(raw, 0)

  def example(self, k: int, index: int, epoch: int) -> Batch:
    """Returns an example of part k; a DataError names its position and op."""
    part = self.parts[k]

    def error(message: str) -> DataError:
      return DataError(f"{part.source.where(index)}: {message}")

    try:
      raw = part.source.read(np.asarray([index]))
    except ConfigError:
      raise
    except Exception as e:
      raise error(f"cannot be read: {one_line(e)}") from e
    u = part.uniforms(np.asarray([index]), np.asarray([epoch]))
    try:
      features = public_features(self._run(k, raw, u))
    except Exception as e:
      if isinstance(e, ConfigError) and not isinstance(e, DataError):
        raise ConfigError(f"{part.key}.pp: {e}") from e
      raise error(self._diagnose(k, raw, u, e)) from e
    for name, (_, shape) in (self.specs[k] if self.specs else {}).items():
      actual = np.shape(features[name]) if name in features else None
      if actual != shape:
        problem = "is missing" if actual is None else f"has shape {actual}"
        raise error(
          f"feature {name!r} {problem} after preprocessing; its shape in the "
          f"first example is {shape}."
        )
    for name, (size, negative) in self.id_limits.items():
      ids = np.asarray(features[name])[None]
      if checks.find_invalid(ids, size, negative) is not None:
        where = f"{part.key}: {part.source.where(index)}"
        raise checks.invalid(where, name, ids, size, negative)
    return features

  def _diagnose(
    self, k: int, raw: Batch, u: np.ndarray, error: Exception
  ) -> str:
    try:
      features = self._parse(k, raw)
    except Exception as e:
      return f"not an example of this data set: {one_line(e)}"
    rest = u[0]
    for op in self.parts[k].ops:
      try:
        features = self._run_op(op, features, rest[: op.draws])
      except Exception as e:
        return f"op {op.name!r}: {one_line(e)}"
      rest = rest[op.draws :]
    return one_line(error)

  def usable_index(self, k: int, index: int, epoch: int) -> int:
    """Returns `index` of part k if usable, else its first usable substitute."""
    part, candidate = self.parts[k], index
    for attempt in range(1, _MAX_ATTEMPTS + 1):
      try:
        self.example(k, candidate, epoch)
        return candidate
      except DataError as e:
        self._skip(part.key, candidate, e)
      candidate = hashing.replacement(
        part.seed, epoch, index, attempt, len(part.source)
      )
    raise DataError(
      f"{part.key}: {part.source.where(index)} is unusable, and so are "
      f"{_MAX_ATTEMPTS - 1} replacements."
    )

  def _skip(self, key: str, index: int, error: DataError) -> None:
    with self._lock:
      new = (key, index) not in self.skipped
      if new and len(self.skipped) >= self._skip_errors:
        if not self._skip_errors:
          raise error
        limit = f"skip_errors={self._skip_errors}"
        message = f"{error} (More than {limit} examples are unusable.)"
        raise DataError(message) from error
      self.skipped.add((key, index))
    if new:
      logging.warning("Skipped %d: %s", len(self.skipped), error)

  def _replace(self, step: int, error: Exception) -> None:
    """Replaces failing examples; an error if each one alone can be made."""
    planned = self._plan(step, 0, self.num_rows)
    rows = list(zip(*(field.tolist() for field in planned)))
    pool = concurrent.futures.ThreadPoolExecutor(self.num_threads)
    try:
      indices = list(pool.map(lambda row: self.usable_index(*row), rows))
    finally:
      pool.shutdown(cancel_futures=True)
    replaced = np.flatnonzero(np.asarray(indices) != planned.index)
    replacements = {int(i): indices[i] for i in replaced}
    if replacements == self._replacements.get(step, {}):
      raise DataError(
        f"the batch of step {step} failed, but each of its examples alone can "
        f"be made: {one_line(error)}"
      ) from error
    self._replacements = {step: replacements}

  def _checked(self, batch: Batch, step: int) -> Batch:
    result = {}
    k = int(self._plan(step, 0, 1).source[0])
    for name, (dtype, shape) in self.specs[k].items():
      array = batch.get(name)
      if array is None or array.shape != (self.num_rows, *shape):
        problem = "is missing" if array is None else f"has shape {array.shape}"
        raise DataError(
          f"step {step}: feature {name!r} {problem}, expected shape "
          f"{(self.num_rows, *shape)}."
        )
      if array.dtype != dtype:
        array = _narrowed(array, dtype, name, step)
      limit = self.id_limits.get(name)
      if limit and checks.find_invalid(array, *limit) is not None:
        raise DataError(
          f"step {step}: feature {name!r} has ids that the model cannot take."
        )
      result[name] = array
    return result


def _narrowed(
  array: np.ndarray, dtype: np.dtype, name: str, step: int
) -> np.ndarray:
  if array.dtype.kind in "iu" and dtype.kind in "iu" and array.size:
    limits = np.iinfo(dtype)
    for value in (array.min(), array.max()):
      if not limits.min <= value <= limits.max:
        raise DataError(
          f"step {step}: feature {name!r} contains {value}, which does not fit "
          f"into jax's {dtype}; drop the feature, or cast it to float."
        )
  return array.astype(dtype)


def public_features(features: Mapping[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in features.items() if not k.startswith("_")}


def _spec(features: Features, key: str) -> Spec:
  if not features:
    raise ConfigError(f"{key}.pp: no feature is left for the batch.")
  result = {}
  for name, (dtype, shape) in sorted(features.items()):
    if dtype is bytes or dtype is None:
      problem = "holds strings" if dtype is bytes else "is not an array"
      raise ConfigError(
        f"{key}.pp: feature {name!r} {problem} and cannot go onto a device; "
        f"list the model's features with keep(...), or end with drop({name!r})."
      )
    if shape is None or None in shape:
      known = "unknown" if shape is None else tuple(shape)
      raise ConfigError(
        f"{key}.pp: feature {name!r} has no fixed shape (it is {known}); "
        "an op such as resize(224) or inception_crop(224) gives an image one, "
        f"and drop({name!r}) removes the feature."
      )
    sizes = tuple(int(size) for size in shape if size is not None)
    result[name] = np.dtype(jax.dtypes.canonicalize_dtype(dtype)), sizes
  return result


def _num_values(spec: Spec) -> int:
  return sum(math.prod(shape) for _, shape in spec.values())


def _check_equal(specs: Sequence[Spec], parts: Sequence[Part]) -> None:
  for spec, part in zip(specs, parts):
    equal = specs[part.drawn]
    for name in sorted({*spec, *equal}):
      if spec.get(name) != equal.get(name):
        first, other = (
          "{} {}".format(*s[name]) if name in s else "missing"
          for s in (equal, spec)
        )
        raise ConfigError(
          f"{part.key}.pp: feature {name!r} is {other}, but {first} in "
          f"{parts[0].key}; the sources of a mixture must have the same "
          "features."
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

  def _stream(self, steps: range, stopping: threading.Event) -> Batches:
    pool = concurrent.futures.ThreadPoolExecutor(
      self.num_threads, thread_name_prefix="input"
    )
    pending: collections.deque[Any] = collections.deque()
    try:
      for step in steps:
        pending.append(pool.submit(self._batch, step, stopping))
        if len(pending) > self.num_threads:
          yield pending.popleft().result()
      while pending:
        yield pending.popleft().result()
    finally:
      pool.shutdown(cancel_futures=True)

  def _batch(self, step: int, stopping: threading.Event) -> Batch:
    rows = self.row_order(step, 0, self.num_rows)
    first = rows.source[0]
    if (rows.source == first).all():
      part = self.parts[first]
      return self._examples(part, rows.index, rows.epoch, stopping)
    batch = {
      name: np.empty((self.num_rows, *shape), dtype)
      for name, (dtype, shape) in self.specs[first].items()
    }
    for k, part in enumerate(self.parts):
      at = np.flatnonzero(rows.source == k)
      if at.size:
        index, epoch = rows.index[at], rows.epoch[at]
        examples = self._examples(part, index, epoch, stopping)
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
    raw, u = part.source.read(index), part.uniforms(index, epoch)
    if part.op.batched:
      return public_features(part.op.fn(raw, u))
    rows = []
    for i in range(len(index)):
      if stopping.is_set():
        raise Stopped
      rows.append(part.op.fn(_row(raw, i), u[i]))
    return {name: np.stack([row[name] for row in rows]) for name in self.spec}


def _row(batch: Batch, i: int) -> dict[str, Any]:
  return {name: array[i] for name, array in batch.items()}
