"""Engines make this host's share of each batch: they read examples and run ops.

There are two: `NumpyEngine`, and `TfEngine` in tf_engine.py for ops that need
tensorflow. Both run the same ops on the same examples with the same random
numbers, so they differ only in speed.

`Engine`, their base class, checks the batches and handles unusable examples.
When a batch fails, its examples are made again, one by one, to find the one at
fault. If config.input.skip_errors allows it, that example is replaced by
another, and the engine starts again at this step.
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
# {feature: (dtype, shape)} that the ops make of one example. The dtype is
# `bytes` for strings and None for values that are not arrays; the shape, or
# some of its sizes, are None if unknown.
FeatureTypes = dict[str, tuple[Any, Sequence[int | None] | None]]
# plan(step, start, stop) -> examples of rows [start, stop) of this host's share
# of the step's batch.
Plan = Callable[[int, int, int], order.Order]

# Attempts to fill one row, replacements included. If all of them fail, the data
# or the ops are wrong, and not just single examples.
_MAX_ATTEMPTS = 100


class Part(NamedTuple):
  """One source of a mixture, with its ops."""

  key: str  # Location in the config, such as "config.input.mixture.web".
  source: Any  # As data/__init__.py describes it.
  ops: tuple[Op, ...]
  op: Op  # Composition of `ops`.
  seed: int
  # If steps draw values that the ops contain, such as an image size, there is a
  # part of each source for each value. This is the number of the value.
  drawn: int = 0

  def uniforms(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
    """Returns the random numbers of examples [B]: float32 [B, draws]."""
    return hashing.uniforms(self.seed, epoch, index, self.op.draws)


class Stopped(Exception):
  """Raised when a batch is no longer needed, because the run ends."""


class Engine:
  """Makes this host's share of the batch of any step.

  In its methods, k is the number of a part, and u holds the ops' random
  numbers, float32 [B, draws].

  Attributes:
    spec: {feature: (dtype, shape)} of an example, from the part with the
      largest examples.
    specs: the same for each part.
    skipped: (key of the part, index) of the examples that were replaced.
    id_limits: {feature: (number of ids, whether negative ids are allowed)}.
  """

  def __init__(
    self,
    parts: Sequence[Part],
    plan: Plan,
    num_rows: int,
    num_threads: int,
    skip_errors: int = 0,
  ):
    self.parts = parts
    self._plan = plan
    self.num_rows = num_rows
    self.num_threads = num_threads
    self._skip_errors = skip_errors
    self._lock = threading.Lock()  # For `skipped`.
    self.skipped: set[tuple[str, int]] = set()
    # {step: {row: index}} of examples that replace others at this step.
    self._replacements: dict[int, dict[int, int]] = {}
    self.id_limits: dict[str, tuple[int, bool]] = {}
    # Empty until it is known: `_feature_types` may already make an example.
    self.specs: list[Spec] = []
    specs = [
      _spec(self._feature_types(k), part.key) for k, part in enumerate(parts)
    ]
    _check_equal(specs, parts)
    self.specs = specs
    self.spec = max(specs, key=_num_values)

  def limit_ids(
    self, sizes: Mapping[str, int], negative: Collection[str], path: str
  ) -> None:
    """Refuses ids that the model does not know, from now on.

    Args:
      sizes: {feature: number of ids that the model knows}.
      negative: features in which a negative number means that there is no
        label.
      path: location of the input in the config.
    """
    checks.check_parts(self.parts, self.spec, sizes, negative, path)
    for name, size in sizes.items():
      if name not in self.spec:
        continue
      dtype, shape = self.spec[name]
      # Classes may also be given as a vector, such as soft labels.
      is_class_vector = isinstance(size, ClassCount) and len(shape) > 0
      if dtype.kind in "iu" and not is_class_vector:
        allow_negative = isinstance(size, PaddedIds) or name in negative
        self.id_limits[name] = size, allow_negative

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
        # Replaces what fails, or raises. The stream starts again at `step`.
        self._replace(step, e)
        continue
      if step < last_step:
        raise DataError(f"the input ended at step {step} of {last_step}.")

  def row_order(self, step: int, start: int, stop: int) -> order.Order:
    """Returns the examples of rows [start, stop), with their replacements."""
    planned = self._plan(step, start, stop)
    for row, index in self._replacements.get(step, {}).items():
      if start <= row < stop:
        planned.index[row - start] = index
    return planned

  # Methods that every engine defines.

  def _stream(self, steps: range, stopping: threading.Event) -> Batches:
    """Yields the batches of these steps, in order."""
    raise NotImplementedError

  def _feature_types(self, k: int) -> FeatureTypes:
    """Returns the features that the ops of a part make."""
    raise NotImplementedError

  # Methods that an engine may override, to run a single example.

  def _run(self, k: int, raw: Batch, u: np.ndarray) -> Batch:
    """Runs all ops on one example; `raw` and `u` are batches of size one."""
    return self._run_op(self.parts[k].op, self._parse(k, raw), u[0])

  def _run_op(self, op: Op, features: Any, u: np.ndarray) -> Any:
    return op.fn(features, u)

  def _parse(self, k: int, raw: Batch) -> Any:
    """Returns the first op's input for one example, from a batch of one."""
    return _example_of(raw, 0)

  # Single examples, and the replacement of those that fail.

  def example(self, k: int, index: int, epoch: int) -> Batch:
    """Returns an example after the ops; a DataError names its place and op."""
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
    expected = self.specs[k] if self.specs else {}
    for name, (_, shape) in expected.items():
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
    """Runs the ops one after the other, to name the one that fails."""
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
    """Returns `index` if its example is usable, else that of a replacement."""
    part = self.parts[k]
    candidate = index
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
    """Records an unusable example; raises if there are too many."""
    with self._lock:
      is_new = (key, index) not in self.skipped
      if is_new and len(self.skipped) >= self._skip_errors:
        if not self._skip_errors:
          raise error
        raise DataError(
          f"{error} (More than skip_errors={self._skip_errors} examples are "
          "unusable.)"
        ) from error
      self.skipped.add((key, index))
    if is_new:
      logging.warning("Skipped %d: %s", len(self.skipped), error)

  def _replace(self, step: int, error: Exception) -> None:
    """Finds and replaces the examples of a batch that fail.

    Raises `error` again if each example can be made on its own.
    """
    planned = self._plan(step, 0, self.num_rows)
    pool = concurrent.futures.ThreadPoolExecutor(self.num_threads)
    try:
      indices = list(
        pool.map(
          self.usable_index,
          planned.source.tolist(),
          planned.index.tolist(),
          planned.epoch.tolist(),
        )
      )
    finally:
      pool.shutdown(cancel_futures=True)
    replaced = np.flatnonzero(np.asarray(indices) != planned.index)
    replacements = {int(row): indices[row] for row in replaced}
    # Nothing new to replace: the failure is not one of single examples.
    if replacements == self._replacements.get(step, {}):
      raise DataError(
        f"the batch of step {step} failed, although each of its examples can "
        f"be made on its own: {one_line(error)}"
      ) from error
    self._replacements = {step: replacements}

  def _checked(self, batch: Batch, step: int) -> Batch:
    """Checks shapes and ids of a batch; returns it with the spec's dtypes."""
    result = {}
    k = int(self._plan(step, 0, 1).source[0])  # They have equal specs.
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
  """Converts to the dtype that jax uses, such as int32 for int64."""
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
  """Leaves out names that begin with "_", which ops use for later ops."""
  return {k: v for k, v in features.items() if not k.startswith("_")}


def _spec(features: FeatureTypes, key: str) -> Spec:
  """Returns the features with jax's dtypes, if all can go onto a device."""
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
  """Checks that for equal draws all sources have the first one's features."""
  for spec, part in zip(specs, parts):
    first_spec = specs[part.drawn]
    for name in sorted({*spec, *first_spec}):
      if spec.get(name) != first_spec.get(name):
        raise ConfigError(
          f"{part.key}.pp: feature {name!r} is {_describe(spec, name)}, but "
          f"{_describe(first_spec, name)} in {parts[0].key}; the sources of a "
          "mixture must have the same features."
        )


def _describe(spec: Spec, name: str) -> str:
  if name not in spec:
    return "missing"
  dtype, shape = spec[name]
  return f"{dtype} {shape}"


class NumpyEngine(Engine):
  """Runs ops on numpy arrays: on whole batches if every op supports it."""

  def _feature_types(self, k: int) -> FeatureTypes:
    first = self.example(k, self.usable_index(k, 0, 0), 0)
    types: FeatureTypes = {}
    for name, value in first.items():
      array = np.asarray(value)
      dtype: Any = array.dtype
      if isinstance(value, bytes | str) or dtype.kind in "SU":
        dtype = bytes
      elif dtype.kind == "O":
        dtype = None
      types[name] = dtype, array.shape
    return types

  def _stream(self, steps: range, stopping: threading.Event) -> Batches:
    pool = concurrent.futures.ThreadPoolExecutor(
      self.num_threads, thread_name_prefix="input"
    )
    # Each thread makes a whole batch; they are yielded in the order of steps.
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
    if (rows.source == first).all():  # Without a mixture: no copies.
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
    examples = []
    for i in range(len(index)):
      if stopping.is_set():
        raise Stopped
      examples.append(part.op.fn(_example_of(raw, i), u[i]))
    return {
      name: np.stack([example[name] for example in examples])
      for name in self.spec
    }


def _example_of(batch: Batch, i: int) -> dict[str, Any]:
  return {name: array[i] for name, array in batch.items()}
