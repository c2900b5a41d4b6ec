"""Checks that a model's tables have an entry for every token id and class.

A device does not refuse an id beyond the end of a table: it returns NaN, or the
embedding of another token. So the host checks ids. `check_parts` runs once, and
checks what sources and ops declare about their ids; `find_invalid` runs on the
batches.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from bigtrain.arrays.types import ClassCount
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp.registry import Op

# {feature: (dtype, shape)} of one example, with the dtypes that jax uses.
Spec = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def sizes(op: Op, source: Any) -> dict[str, int]:
  """Returns {feature: largest id + 1}, where the ops or the source know it."""
  source_sizes = getattr(source, "vocab_sizes", {})
  known = {
    name: source_sizes[original]
    for name, original in _unchanged(op, source_sizes)
  }
  return {**known, **op.vocab_sizes}


def check_sizes(
  input_sizes: Mapping[str, int], model_sizes: Mapping[str, int], path: str
) -> None:
  """Checks the sizes {feature: largest id + 1} of an input against a model."""
  for name, size in input_sizes.items():
    limit = model_sizes.get(name, size)
    if size <= limit:
      continue
    if isinstance(limit, ClassCount):
      raise ConfigError(
        f"{path}: the class numbers of {name!r} go up to {size - 1}, but "
        f"{limit.key}={limit} allows 0 to {limit - 1}: the model needs {size} "
        "classes, or the labels are wrong."
      )
    raise ConfigError(
      f"{path}: the ids of {name!r} go up to {size - 1}, but the model's "
      f"vocabulary has {limit} entries: give config.model a "
      f"vocabulary of at least {size}, or use the model's own tokenizer."
    )


def check_parts(
  parts: Sequence[Any],
  spec: Spec,
  model_sizes: Mapping[str, int],
  negative: Collection[str],
  path: str,
) -> None:
  """Checks dtypes, the ids that sources know, and the sizes of vocabularies.

  Args:
    parts: the `engine.Part`s of an input.
    spec: of an example after all ops.
    model_sizes: {feature: number of ids that the model knows}.
    negative: features in which a negative number means that there is no label.
  """
  for name, size in model_sizes.items():
    if name not in spec:
      continue
    dtype, shape = spec[name]
    # Classes may also be given as a vector, such as soft labels.
    is_class_vector = isinstance(size, ClassCount) and len(shape) > 0
    if dtype.kind not in "iu" and not is_class_vector:
      kind = "class numbers" if isinstance(size, ClassCount) else "ids"
      raise ConfigError(
        f"{path}.pp: feature {name!r} is {dtype}, but {kind} are integers; "
        f"cast('int32', key={name!r}) converts them."
      )
  for part in parts:
    # Some sources know the class numbers of all their examples.
    ids = getattr(part.source, "ids", {})
    sizes_of_ids = {}
    for name, feature in _unchanged(part.op, ids):
      values = ids[feature]
      if values.size:
        sizes_of_ids[name] = int(values.max()) + 1
      if name in spec and name in model_sizes and not spec[name][1]:
        size, allow_negative = model_sizes[name], name in negative
        index = find_invalid(values, size, allow_negative)
        if index is not None:
          where = f"{part.key}: {part.source.where(index)}"
          raise invalid(where, name, values[index], size, allow_negative)
    known = {
      name: size
      for name, size in sizes(part.op, part.source).items()
      if name in spec
    }
    check_sizes(known, model_sizes, path)
    if path == "config.input":
      _warn_of_unused_classes(sizes_of_ids | known, model_sizes, part.key)


def _warn_of_unused_classes(
  data_sizes: Mapping[str, int], model_sizes: Mapping[str, int], path: str
) -> None:
  for name, size in data_sizes.items():
    limit = model_sizes.get(name)
    if isinstance(limit, ClassCount) and size < limit:
      logging.warning(
        "%s: the data have %d classes (%r), but %s=%d: the model has outputs "
        "that are never right.",
        path,
        size,
        name,
        limit.key,
        limit,
      )


def find_invalid(
  values: np.ndarray, size: int, negative: bool = False
) -> int | None:
  """Returns the first example of ids [B, ...] with one outside [0, size).

  Args:
    negative: whether negative ids are allowed.
  """
  if not values.size:
    return None
  if values.max() < int(size) and (negative or values.min() >= 0):
    return None
  wrong = _is_invalid(values, size, negative)
  examples = np.flatnonzero(wrong.reshape(len(values), -1).any(axis=1))
  return int(examples[0]) if examples.size else None


def invalid(
  where: str, name: str, values: Any, size: int, negative: bool = False
) -> DataError:
  """Returns the error for an example at `where` that has an invalid id."""
  flat = np.ravel(values)
  value = flat[_is_invalid(flat, size, negative)][0]
  if isinstance(size, ClassCount):
    return DataError(
      f"{where}: the class number {name!r} is {value}, but "
      f"{size.key}={size} allows 0 to {size - 1}."
    )
  return DataError(
    f"{where}: {name!r} contains the id {value}, but the model's "
    f"vocabulary has {size} entries, 0 to {size - 1}."
  )


def _is_invalid(values: np.ndarray, size: int, negative: bool) -> np.ndarray:
  too_large = values >= size
  return too_large if negative else too_large | (values < 0)


def _unchanged(op: Op, features: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns (feature after the ops, feature of the source with these ids)."""
  if op.origins is None:
    return []  # An op of the user's does not say what it makes.
  origins = {name: name for name in features} | op.origins
  return [
    (name, original)
    for name, original in origins.items()
    if original and original in features
  ]
