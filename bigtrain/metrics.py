"""Metrics that merge exactly, and become numbers only when written.

A mean is (sum, weight), which `pair` makes; the classes are the other kinds.
Two metrics of the same kind merge into the metric of all their values, over
microbatches, devices, hosts, padded batches and steps; means of means would
not. A metric whose arrays are all zero has no values and changes nothing.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays.types import Batch, Metrics
from bigtrain.config.errors import ConfigError

Pair = tuple[Any, Any]  # (sum, weight)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
  """Sum of values; `total` is a float32 scalar."""

  total: Any

  @classmethod
  def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Self:
    return cls(pair(values, weights)[0])

  def merge(self, other: Self) -> Self:
    return type(self)(self.total + other.total)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> float:
    return math.fsum(float(part.total) for part in parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Faults(Sum):
  """A sum that results contain only where it is not zero."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Last:
  """The newest of several values, such as microbatches'; float32 scalars."""

  newest: Any
  count: Any

  @classmethod
  def of(cls, value: jax.Array) -> Self:
    return cls(jnp.asarray(value, jnp.float32), jnp.ones((), jnp.float32))

  def merge(self, other: Self) -> Self:
    newest = jnp.where(other.count > 0, other.newest, self.newest)
    return type(self)(newest, self.count + other.count)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> float:
    values = [float(part.newest) for part in parts if part.count > 0]
    return values[-1] if values else math.nan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
  """The largest of several values; NaN if one of them is; float32 scalars.

  Here and in a Histogram, values of weight zero do not count.
  """

  largest: Any
  count: Any

  @classmethod
  def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Self:
    values = values.astype(jnp.float32)
    if weights is None:
      return cls(jnp.max(values), jnp.asarray(values.size, jnp.float32))
    real = jnp.broadcast_to(weights != 0, values.shape)
    count = jnp.sum(real, dtype=jnp.float32)
    largest = jnp.max(jnp.where(real, values, -jnp.inf))
    return cls(jnp.where(count > 0, largest, 0.0), count)

  def merge(self, other: Self) -> Self:
    largest = jnp.maximum(self.largest, other.largest)
    largest = jnp.where(self.count > 0, largest, other.largest)
    largest = jnp.where(other.count > 0, largest, self.largest)
    return type(self)(largest, self.count + other.count)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> float:
    values = [part.largest for part in parts if part.count > 0]
    return float(np.max(values)) if values else math.nan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Min(Max):
  """The smallest of several values, as the largest of their negatives."""

  @classmethod
  def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Self:
    return super().of(-values.astype(jnp.float32), weights)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> float:
    return -super().value(parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Histogram:
  """Counts of values in bins of equal width; float32 [bins], sums of weights.

  A bin includes its upper edge. Values beyond `low` and `high` are in the
  outermost bins; NaN is in none.
  """

  counts: Any
  low: float = dataclasses.field(metadata={"static": True})
  high: float = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(
    cls,
    values: jax.Array,
    weights: jax.Array | None = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
    bins: int = 20,
  ) -> Self:
    if not (low < high and bins >= 1):
      raise ValueError(f"a histogram of {bins} bins from {low} to {high}")
    values = values.astype(jnp.float32)
    weights = jnp.ones(()) if weights is None else weights
    weights = jnp.broadcast_to(weights.astype(jnp.float32), values.shape)
    weights = jnp.where(jnp.isnan(values), 0.0, weights).reshape(-1, 1)
    inner = np.linspace(low, high, bins + 1)[1:-1].astype(np.float32)
    bin_N1 = jnp.sum(values.reshape(-1, 1) > inner, -1, keepdims=True)
    in_bin = bin_N1 == jnp.arange(bins)
    counts = jnp.sum(jnp.where(in_bin, weights, 0.0), 0)
    return cls(counts, float(low), float(high))

  @property
  def edges(self) -> np.ndarray:
    return np.linspace(self.low, self.high, len(self.counts) + 1)

  def merge(self, other: Self) -> Self:
    return type(self)(self.counts + other.counts, self.low, self.high)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> Self:
    parts = list(parts)
    counts = np.sum([np.asarray(p.counts, np.float64) for p in parts], axis=0)
    return cls(counts, parts[0].low, parts[0].high)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArrayStats:
  """Statistics of N arrays: of their finite values, and the share of others."""

  sums: Any  # [N, 4]: of values, of their squares, of others, of all.
  largest: Any  # [N], of absolute values.
  names: Sequence[str] = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(cls, x: jax.Array) -> Self:
    """Of one array, without N."""
    finite = jnp.isfinite(x)
    x = jnp.where(finite, x.astype(jnp.float32), 0.0)
    others, size = jnp.sum(~finite, dtype=jnp.float32), jnp.float32(x.size)
    sums = jnp.stack([jnp.sum(x), jnp.sum(x * x), others, size])
    return cls(sums, jnp.max(jnp.abs(x)), ())

  def merge(self, other: Self) -> Self:
    largest = jnp.maximum(self.largest, other.largest)
    return type(self)(self.sums + other.sums, largest, self.names)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> dict[str, float]:
    parts, result = list(parts), {}
    sums = np.sum([np.asarray(p.sums, np.float64) for p in parts], axis=0)
    largest = np.max([p.largest for p in parts], axis=0)
    for name, row, top in zip(parts[0].names, sums.tolist(), largest.tolist()):
      total, square, others, size = row
      if size:
        count = max(size - others, 1.0)
        result[f"mean/{name}"] = total / count
        result[f"rms/{name}"] = math.sqrt(square / count)
        result[f"max/{name}"], result[f"nonfinite/{name}"] = top, others / size
    return result


_KINDS = (Sum, Last, Max, Min, Histogram, ArrayStats)


def checked(metrics: Mapping[str, Any], source: str) -> Metrics:
  """Returns the metrics; ConfigError if they are none, or "loss" is no mean."""
  if not isinstance(metrics, Mapping):
    raise ConfigError(
      f"{source}: expected a dict of metrics, got {type(metrics).__name__}."
    )
  for name, metric in metrics.items():
    is_pair = isinstance(metric, tuple) and len(metric) == 2
    if not is_pair and (name == "loss" or not isinstance(metric, _KINDS)):
      kinds = ", ".join(kind.__name__ for kind in _KINDS)
      others = "" if name == "loss" else f", or bigtrain.metrics.{{{kinds}}}"
      raise ConfigError(
        f"{source}: metric {name!r} is {type(metric).__name__}; expected a "
        f"(sum, weight) tuple{others}."
      )
  return dict(metrics)


def pair(values: jax.Array, weights: jax.Array | None = None) -> Pair:
  """(sum, weight) of values [B, ...] and weights that broadcast, in float32.

  A value with weight zero does not count, even if it is not finite.
  """
  values = values.astype(jnp.float32)
  if weights is None:
    return jnp.sum(values), jnp.asarray(values.size, jnp.float32)
  weights = jnp.broadcast_to(weights.astype(jnp.float32), values.shape)
  return (
    jnp.sum(jnp.where(weights == 0, 0.0, values) * weights),
    jnp.sum(weights),
  )


def example_weights(batch: Batch, like: jax.Array) -> jax.Array:
  """[B] float32 weights: the batch's "_mask" of padding, or ones."""
  if "_mask" in batch:
    return batch["_mask"].astype(jnp.float32)
  return jnp.ones(like.shape[:1], jnp.float32)


def labelled_weights(batch: Batch, labels: jax.Array) -> jax.Array:
  """[B] float32 weights, which are 0 also for examples without a label."""
  labelled = labels >= 0 if labels.ndim == 1 else jnp.any(labels > 0, -1)
  return example_weights(batch, labels) * labelled


def top_k_hits(logits_BC: jax.Array, labels: jax.Array, k: int) -> jax.Array:
  """Whether any of an example's labels is among its k largest logits, bool [B].

  Labels are class numbers [B], or multi-hot [B, C]. The lower of equal classes
  comes first. Scores that are -inf, or not `has_order`, have no hits.
  """
  score_Bk, best_Bk = jax.lax.top_k(logits_BC, k)
  if labels.ndim == 1:
    right_Bk = best_Bk == labels[:, None]
  else:
    right_Bk = jnp.take_along_axis(labels, best_Bk, axis=-1) > 0
  hits_B = jnp.any(right_Bk & (score_Bk > -jnp.inf), axis=-1)
  return hits_B & has_order(logits_BC)


def has_order(scores: Any) -> Any:
  """Whether no score [..., C] is NaN or inf, nor all are -inf (impossible)."""
  return abs(scores.max(axis=-1)) < np.inf


def nonfinite(*arrays: np.ndarray) -> dict[str, float]:
  """The number of rows of [N, ...] with a value that is not finite, if any."""
  rows = (np.isfinite(x.reshape(len(x), -1)).all(1) for x in arrays)
  number = sum(float(np.sum(~finite)) for finite in rows)
  return {"nonfinite": number} if number else {}


def top_k_accuracies(
  scores_BC: jax.Array,
  labels: jax.Array,
  weight_B: jax.Array,
  top_k: Iterable[int],
) -> Metrics:
  """Accuracy "acc" for k = 1, "top5_acc" for k = 5, ...; without any k > C."""
  accuracies: Metrics = {
    "acc" if k == 1 else f"top{k}_acc": pair(
      top_k_hits(scores_BC, labels, k), weight_B
    )
    for k in top_k
    if k <= scores_BC.shape[-1]
  }
  return accuracies | {"nonfinite": Faults.of(~has_order(scores_BC), weight_B)}


def merge(first: Metrics, second: Metrics) -> Metrics:
  """Metrics of all values, by name; the ones of `second` are newer."""

  def merge_one(a: Any, b: Any) -> Any:
    if isinstance(a, _KINDS):
      return a.merge(b)
    return a[0] + b[0], a[1] + b[1]

  return {name: merge_one(first[name], second[name]) for name in first}


def means(pairs: Mapping[str, Pair]) -> dict[str, Any]:
  return {name: total / weight for name, (total, weight) in pairs.items()}


def host_values(batches: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """Values of metrics over batches; a mean of weight zero is NaN."""
  parts: dict[str, list[Any]] = {}
  for batch in batches:
    for name, metric in batch.items():
      parts.setdefault(name, []).append(metric)
  values = {name: _host_value(metrics) for name, metrics in parts.items()}
  several = {name: x for name, x in values.items() if isinstance(x, dict)}
  return {
    name: value
    for name, value in values.items()
    if name not in several and (value or not isinstance(parts[name][0], Faults))
  } | {
    f"{name}_{key}": x for name in several for key, x in several[name].items()
  }


def _host_value(parts: list[Any]) -> Any:
  if isinstance(parts[0], _KINDS):
    return parts[0].value(parts)
  total, weight = (math.fsum(map(float, column)) for column in zip(*parts))
  return total / weight if weight else math.nan


def global_norm(tree: Any) -> jax.Array:
  """Euclidean norm over all leaves, accumulated in float32."""
  squares = [
    # jax.lax and not jax.numpy, which takes five times as long to trace.
    jax.lax.reduce_sum(
      jax.lax.square(leaf.astype(jnp.float32)), range(leaf.ndim)
    )
    for leaf in jax.tree.leaves(tree)
  ]
  return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
