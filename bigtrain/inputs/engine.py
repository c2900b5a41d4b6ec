"""What makes the batches of one host: numpy alone, or tf.data.

Both run the same ops on the same examples with the same random numbers, and
neither keeps a state: a batch is made from the number of its step. So when a
batch fails, its examples are made again, one by one, to find out which; and
where a config allows it, that one is replaced and the engine starts again
behind it.
"""

import ast
import concurrent.futures
import os
import re
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from bigtrain import hashing
from bigtrain.inputs import order
from bigtrain.pp.registry import Op
from bigtrain.settings import ConfigError, DataError

Batch = dict[str, np.ndarray]
# (step, start, stop) -> the order of rows [start, stop) of this host's part of
# the step's batch.
Plan = Callable[[int, int, int], order.Order]

# Replacements of one example that are tried before giving up.
_MAX_ATTEMPTS = 100


class Part(NamedTuple):
  """One source of a mixture.

  Attributes:
    key: where it stands in the config.
    source: what is read from.
    ops: what is done with an example.
    op: their composition.
    seed: of the random numbers that the ops get.
  """

  key: str
  source: Any
  ops: tuple[Op, ...]
  op: Op
  seed: int

  def uniforms(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
    """The random numbers of examples [B]: float32 [B, draws]."""
    return hashing.uniforms(self.seed, epoch, index, self.op.draws)


class Skipped:
  """The examples that were left out because they could not be made.

  Args:
    cap: how many different ones may be, before it is an error.
  """

  def __init__(self, cap: int):
    self.cap = cap
    self._seen: set[tuple[str, int]] = set()
    self._lock = threading.Lock()

  def __len__(self) -> int:
    return len(self._seen)

  def add(self, key: str, index: int, error: DataError) -> None:
    """Counts and logs an example, or raises `error` if that is too many."""
    with self._lock:
      new = (key, index) not in self._seen
      if new and len(self._seen) >= self.cap:
        if not self.cap:
          raise error
        raise DataError(
          f"{error} (More than skip_errors={self.cap} examples cannot be used.)"
        ) from error
      self._seen.add((key, index))
    if new:
      logging.warning("Skipped %d: %s", len(self), error)


def default_num_threads() -> int:
  """The cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Engine:
  """Makes this host's part of any batch. See input_numpy and input_tf.

  Args:
    parts: the sources and what is done with them.
    plan: says which examples a step takes.
    num_rows: rows of a batch that are this host's.
    num_threads: that make examples.
    skipped: collects examples that cannot be made, if any may.

  Attributes:
    spec: {name: (dtype, shape)} of one example of a batch, as jax sees it.
  """

  def __init__(
    self,
    parts: Sequence[Part],
    plan: Plan,
    *,
    num_rows: int,
    num_threads: int,
    skipped: Skipped,
  ):
    self.parts = parts
    self._plan = plan
    self.num_rows = num_rows
    self.num_threads = num_threads
    self.skipped = skipped
    # {step: {row: index}}: examples that stand in for those that fail.
    self._replacements: dict[int, dict[int, int]] = {}
    self.spec = self._find_spec()

  def batches(
    self, first_step: int, last_step: int
  ) -> Generator[Batch, None, None]:
    """The batches of steps [first_step, last_step), in order.

    Raises:
      DataError: an example cannot be made; names its file and position.
    """
    step = first_step
    while step < last_step:
      try:
        for batch in self._stream(step, last_step):
          yield self._checked(batch, step)
          step += 1
      except Exception as e:
        if isinstance(e, ConfigError) and not isinstance(e, DataError):
          raise
        self._replace(step, e)  # Or raises what is wrong, and where.
        continue
      if step < last_step:
        raise DataError(f"the input ended at step {step} of {last_step}.")

  def row_order(self, step: int, start: int, stop: int) -> order.Order:
    """What rows [start, stop) of this host are made of."""
    found = self._plan(step, start, stop)
    for row, index in self._replacements.get(step, {}).items():
      if start <= row < stop:
        found.index[row - start] = index
    return found

  def _stream(self, first_step: int, last_step: int) -> Iterator[Batch]:
    raise NotImplementedError

  def _find_spec(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    raise NotImplementedError

  def _run(self, part: Part, raw: Batch, u: np.ndarray) -> Batch:
    """Runs all ops on one example; `raw` and `u` are batches of one."""
    raise NotImplementedError

  def _run_op(self, op: Op, features: Any, u: np.ndarray) -> Any:
    """Runs a single op on one example."""
    return op.fn(features, u)

  def _parse(self, part: Part, raw: Batch) -> Any:
    """What the first op gets of one example, from a batch of one."""
    raise NotImplementedError

  def example(self, part: Part, index: int, epoch: int) -> Batch:
    """One example of a part.

    Raises:
      DataError: it cannot be read or preprocessed; names its position and,
        where it was one, the op.
    """
    try:
      raw = part.source.read(np.asarray([index]))
    except ConfigError:
      raise
    except Exception as e:
      raise DataError(
        f"{part.source.where(index)}: cannot be read: {_told(e)}"
      ) from e
    u = part.uniforms(np.asarray([index]), np.asarray([epoch]))
    try:
      found = public(self._run(part, raw, u))
    except Exception as e:
      if isinstance(e, ConfigError) and not isinstance(e, DataError):
        raise ConfigError(f"{part.key}.pp: {e}") from e
      raise DataError(
        f"{part.source.where(index)}: {self._culprit(part, raw, u, e)}"
      ) from e
    for name, (_, shape) in getattr(self, "spec", {}).items():
      if name not in found or np.shape(found[name]) != shape:
        got = np.shape(found[name]) if name in found else "nothing"
        raise DataError(
          f"{part.source.where(index)}: feature {name!r} has shape {got} after "
          f"preprocessing, but in the first example {shape}."
        )
    return found

  def _culprit(
    self, part: Part, raw: Batch, u: np.ndarray, error: Exception
  ) -> str:
    """Which op fails on an example, and how, for messages."""
    try:
      features = self._parse(part, raw)
    except Exception as e:
      return f"not an example of this data set: {_told(e)}"
    used = 0
    for op in part.ops:
      try:
        features = self._run_op(op, features, u[0, used : used + op.draws])
      except Exception as e:
        return f"op {op.name!r}: {_told(e)}"
      used += op.draws
    return _told(error)

  def usable(self, k: int, index: int, epoch: int) -> int:
    """`index`, or the first replacement that can be made, of part k.

    Raises:
      DataError: too many examples cannot be made.
    """
    part = self.parts[k]
    candidate = index
    for attempt in range(1, _MAX_ATTEMPTS + 1):
      try:
        self.example(part, candidate, epoch)
        return candidate
      except DataError as e:
        self.skipped.add(part.key, candidate, e)
      candidate = hashing.replacement(
        part.seed, epoch, index, attempt, len(part.source)
      )
    raise DataError(
      f"{part.key}: none of {_MAX_ATTEMPTS} replacements of "
      f"{part.source.where(index)} can be used either."
    )

  def _replace(self, step: int, error: Exception) -> None:
    """Finds out why a batch failed; the next try does without what failed.

    Raises:
      DataError: about the first example that can be neither made nor
        replaced; if all can be made, about `error`.
    """
    planned = self._plan(step, 0, self.num_rows)
    rows = list(zip(*(field.tolist() for field in planned)))
    pool = concurrent.futures.ThreadPoolExecutor(self.num_threads)
    try:
      found = list(pool.map(lambda row: self.usable(*row), rows))
    finally:
      pool.shutdown(cancel_futures=True)
    changed = {
      i: index for i, index in enumerate(found) if index != planned.index[i]
    }
    if changed == self._replacements.get(step, {}):
      raise DataError(
        f"the batch of step {step} failed, though each of its examples can be "
        f"made: {_told(error)}"
      ) from error
    self._replacements = {step: changed}

  def _checked(self, batch: Batch, step: int) -> Batch:
    """The batch as it will be on the device, if it is what `spec` says."""
    result = {}
    for name, (dtype, shape) in self.spec.items():
      array = batch.get(name)
      if array is None or array.shape != (self.num_rows, *shape):
        got = "missing" if array is None else f"{array.shape}"
        raise DataError(
          f"step {step}: feature {name!r} is {got}, expected "
          f"{(self.num_rows, *shape)}."
        )
      if array.dtype != dtype:
        array = _narrowed(array, dtype, name, step)
      result[name] = array
    return result


def _narrowed(
  array: np.ndarray, dtype: np.dtype, name: str, step: int
) -> np.ndarray:
  """Casts to the type that jax uses; numbers that do not fit are an error."""
  if array.dtype.kind in "iu" and dtype.kind in "iu" and array.size:
    limits = np.iinfo(dtype)
    for value in (array.min(), array.max()):
      if not limits.min <= value <= limits.max:
        raise DataError(
          f"step {step}: feature {name!r} holds {value}, which does not fit "
          f"into jax's {dtype}; drop it, or keep it as a float."
        )
  return array.astype(dtype)


def public(features: Mapping[str, Any]) -> dict[str, Any]:
  """The features that belong into a batch."""
  return {k: v for k, v in features.items() if not k.startswith("_")}


def check_spec(
  found: Mapping[str, tuple[Any, Sequence[int | None] | None]], key: str
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  """Types and shapes of an example as jax will have them.

  Args:
    found: {name: (dtype, shape)}; dtype `bytes` for strings, None for what is
      no array; a shape, or sizes in it, may be None if unknown.
    key: where the preprocessing stands in the config.

  Raises:
    ConfigError: a feature that cannot be batched, and what to do about it.
  """
  if not found:
    raise ConfigError(f"{key}.pp: no feature is left for the batch.")
  result = {}
  for name, (dtype, shape) in sorted(found.items()):
    if dtype is bytes or dtype is None:
      what = "holds strings" if dtype is bytes else "is no array"
      raise ConfigError(
        f"{key}.pp: feature {name!r} {what}, which cannot be on a device; "
        f"name what the model gets by keep(...), or end with drop({name!r})."
      )
    if shape is None or None in shape:
      told = "unknown" if shape is None else tuple(shape)
      raise ConfigError(
        f"{key}.pp: feature {name!r} has no fixed shape (it is {told}); an op "
        f"such as resize(224) or inception_crop(224) gives an image one, "
        f"drop({name!r}) leaves the feature out."
      )
    result[name] = (
      np.dtype(jax.dtypes.canonicalize_dtype(dtype)),
      tuple(int(size) for size in shape),
    )
  return result


def same_spec(
  specs: Sequence[dict[str, Any]], parts: Sequence[Part]
) -> dict[str, Any]:
  """The one spec of all parts, or ConfigError with where they differ."""
  for spec, part in zip(specs, parts):
    for name in sorted({*spec, *specs[0]}):
      if spec.get(name) != specs[0].get(name):
        told = [
          f"{n[0]} {n[1]}" if n else "missing"
          for n in (specs[0].get(name), spec.get(name))
        ]
        raise ConfigError(
          f"{part.key}.pp: feature {name!r} is {told[1]}, but {told[0]} in "
          f"{parts[0].key}; the sources of a mixture must give the same."
        )
  return specs[0]


def _unquoted(line: str) -> str:
  try:
    return ast.literal_eval(line).decode("utf-8", "backslashreplace")
  except (ValueError, SyntaxError, AttributeError):
    return line


def _told(error: Exception) -> str:
  """The error in one line, without tensorflow's notes on where it was."""
  text = getattr(error, "message", None) or str(error)
  _, asserted, shown = text.partition("to be true. Summarized data: ")
  if asserted:  # An Assert outside of a graph shows the repr of strings.
    text = " ".join(map(_unquoted, shown.splitlines()))
  text = re.sub(r"\{\{[^}]*\}\}|\[Op:[^\]]*\].*|\[\[[^\]]*\]\]", "", text)
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if lines and lines[0].startswith("Graph execution error"):
    lines = lines[-1:]  # What is between is where in the graph it was.
  text = " ".join(lines) or type(error).__name__
  if isinstance(error, KeyError | IndexError | TypeError | AttributeError):
    text = f"{type(error).__name__}: {text}"
  return text[:300].rstrip(". ") + "."
