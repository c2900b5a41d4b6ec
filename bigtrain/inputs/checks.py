"""Checks of ids: token ids and class numbers that a model can take.

A device does not refuse an id beyond a table: the result is NaN, or the
embedding of another token.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from bigtrain.arrays.types import ClassCount
from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.pp.registry import Op

# {feature: (dtype, shape)} of one example, with jax's dtypes.
Spec = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def sizes(op: Op, source: Any) -> dict[str, int]:
  """Returns {feature: largest id + 1}, as far as ops or the source know it."""
  of_source = getattr(source, "vocab_sizes", {})
  known = {name: of_source[x] for name, x in _unchanged(op, of_source)}
  return {**known, **op.vocab_sizes}


def check_sizes(
  input_sizes: Mapping[str, int], model_sizes: Mapping[str, int], path: str
) -> None:
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
  for name, size in model_sizes.items():
    if name not in spec:
      continue
    dtype, shape = spec[name]
    if dtype.kind not in "iu" and not (isinstance(size, ClassCount) and shape):
      kind = "class numbers" if isinstance(size, ClassCount) else "ids"
      raise ConfigError(
        f"{path}.pp: feature {name!r} is {dtype}, but {kind} are integers; "
        f"cast('int32', key={name!r}) converts them."
      )
  for part in parts:
    ids = getattr(part.source, "ids", {})
    for name, feature in _unchanged(part.op, ids):
      if name in spec and name in model_sizes and not spec[name][1]:
        limit = model_sizes[name], name in negative
        row = find_invalid(ids[feature], *limit)
        if row is not None:
          where = f"{part.key}: {part.source.where(row)}"
          raise invalid(where, name, ids[feature][row], *limit)
    known = sizes(part.op, part.source)
    known = {name: size for name, size in known.items() if name in spec}
    check_sizes(known, model_sizes, path)
    of_ids = {
      name: int(ids[x].max()) + 1
      for name, x in _unchanged(part.op, ids)
      if ids[x].size
    }
    if path == "config.input":
      _warn_of_unused_classes(of_ids | known, model_sizes, part.key)


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
  """Returns the first row of integers [B, ...] with an id not in [0, size)."""
  if not values.size:
    return None
  if values.max() < int(size) and (negative or values.min() >= 0):
    return None
  wrong = (values >= size) | ((values < 0) & (not negative))
  rows = np.flatnonzero(wrong.reshape(len(values), -1).any(axis=1))
  return int(rows[0]) if rows.size else None


def invalid(
  where: str, name: str, values: Any, size: int, negative: bool = False
) -> DataError:
  flat = np.ravel(values)
  value = flat[(flat >= size) | ((flat < 0) & (not negative))][0]
  if isinstance(size, ClassCount):
    return DataError(
      f"{where}: the class number {name!r} is {value}, but "
      f"{size.key}={size} allows 0 to {size - 1}."
    )
  return DataError(
    f"{where}: {name!r} contains the id {value}, but the model's "
    f"vocabulary has {size} entries, 0 to {size - 1}."
  )


def _unchanged(op: Op, features: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns (feature after the ops, the source's feature with its ids)."""
  if op.origins is None:
    return []
  origins = {name: name for name in features} | op.origins
  return [(name, x) for name, x in origins.items() if x and x in features]


class Features(dict[str, Any]):
  """A batch for tasks and evaluators; a missing feature is a ConfigError."""

  def __init__(
    self, batch: Mapping[str, Any] | Iterable[tuple[str, Any]], path: str
  ):
    super().__init__(batch)
    self.path = path

  def __missing__(self, name: str) -> Any:
    features = [feature for feature in self if not feature.startswith("_")]
    raise ConfigError(
      f"{self.path}: after pp, the examples have no feature {name!r}."
      f"{did_you_mean(name, features)}"
    )


def _flatten_features(features: Features) -> tuple[list[tuple[Any, Any]], Any]:
  names = tuple(sorted(features))
  children = [(jax.tree_util.DictKey(name), features[name]) for name in names]
  return children, (names, features.path)


# jax takes an unregistered subclass of dict for a leaf.
jax.tree_util.register_pytree_with_keys(
  Features,
  _flatten_features,
  lambda aux, values: Features(zip(aux[0], values), aux[1]),
)
