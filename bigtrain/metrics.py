"""Metrics that merge exactly, and become numbers only when they are written.

A metric is a mean or one of the classes below. A mean is a tuple (sum, weight),
which `pair` makes. Two metrics of the same kind merge into the metric of all
their values, whether they come from microbatches, devices, hosts, padded
batches or steps; means of means would not. A metric whose arrays are all zero
has no values, and merging it changes nothing.

Each class has `of`, which makes a metric from an array; `merge`; and `value`,
which turns several of them into a number, on the host and in float64.
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
  """Sum of values."""

  total: Any  # float32 scalar.

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
  """A number of faults: a sum that is left out of the results if it is zero."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Last:
  """The newest of several values, such as those of microbatches."""

  newest: Any  # float32 scalar.
  count: Any  # Number of values; float32 scalar.

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
  """The largest of several values; NaN if one of them is NaN.

  Here and in a Histogram, values of weight zero do not count.
  """

  largest: Any  # float32 scalar.
  count: Any  # Number of values; float32 scalar.

  @classmethod
  def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Self:
    values = values.astype(jnp.float32)
    if weights is None:
      return cls(jnp.max(values), jnp.asarray(values.size, jnp.float32))
    counts = jnp.broadcast_to(weights != 0, values.shape)
    count = jnp.sum(counts, dtype=jnp.float32)
    largest = jnp.max(jnp.where(counts, values, -jnp.inf))
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
  """The smallest of several values, kept as the largest of their negatives."""

  @classmethod
  def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Self:
    return super().of(-values.astype(jnp.float32), weights)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> float:
    return -super().value(parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Histogram:
  """Sums of the values' weights in bins of equal width.

  A bin includes its upper edge. Values beyond `low` and `high` are in the
  outermost bins; NaN is in none.
  """

  counts: Any  # float32 [bins].
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
  """Statistics of the finite values of N arrays, and the share of the others.

  Results are "mean/<name>", "rms/<name>", "max/<name>" (of absolute values) and
  "nonfinite/<name>", the share of values that are not finite.
  """

  # [N, 4]: sum of the values, sum of their squares, number of values that are
  # not finite, number of all values.
  sums: Any
  largest: Any  # [N], the largest absolute value.
  names: Sequence[str] = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(cls, x: jax.Array) -> Self:
    """Returns the statistics of one array, without the axis N."""
    finite = jnp.isfinite(x)
    x = jnp.where(finite, x.astype(jnp.float32), 0.0)
    num_others = jnp.sum(~finite, dtype=jnp.float32)
    size = jnp.float32(x.size)
    sums = jnp.stack([jnp.sum(x), jnp.sum(x * x), num_others, size])
    return cls(sums, jnp.max(jnp.abs(x)), ())

  def merge(self, other: Self) -> Self:
    largest = jnp.maximum(self.largest, other.largest)
    return type(self)(self.sums + other.sums, largest, self.names)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> dict[str, float]:
    parts = list(parts)
    sums = np.sum([np.asarray(p.sums, np.float64) for p in parts], axis=0)
    largest = np.max([p.largest for p in parts], axis=0)
    result = {}
    for i, name in enumerate(parts[0].names):
      total, squares, num_others, size = sums[i].tolist()
      if not size:
        continue
      num_finite = max(size - num_others, 1.0)
      result[f"mean/{name}"] = total / num_finite
      result[f"rms/{name}"] = math.sqrt(squares / num_finite)
      result[f"max/{name}"] = float(largest[i])
      result[f"nonfinite/{name}"] = num_others / size
    return result


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Largest:
  """The largest values of N arrays.

  Results are "max", the largest of all, and "max/<name>" of each array. An
  array whose largest value is -inf counts as empty and has no result.
  """

  largest: Any  # float32 [N]; not relevant if the count is 0.
  count: Any  # Number of values of each array; float32 scalar.
  names: Sequence[str] = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(cls, largest: jax.Array, names: Sequence[str]) -> Self:
    return cls(largest.astype(jnp.float32), jnp.ones((), jnp.float32), names)

  def merge(self, other: Self) -> Self:
    largest = jnp.maximum(self.largest, other.largest)
    largest = jnp.where(self.count > 0, largest, other.largest)
    largest = jnp.where(other.count > 0, largest, self.largest)
    return type(self)(largest, self.count + other.count, self.names)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> dict[str, float]:
    parts = [part for part in parts if part.count > 0]
    if not parts:
      return {}
    largest = np.max([np.asarray(part.largest) for part in parts], axis=0)
    by_name = dict(zip(parts[0].names, largest.tolist()))
    result = {f"max/{n}": x for n, x in by_name.items() if x != -math.inf}
    if not result:
      return {}
    return {"max": float(np.max([*result.values()])), **result}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loads:
  """Loads of E experts in each of N layers.

  Results are, by layer, the largest load as a multiple of the mean one; "max",
  the largest of these; and its "layer" and "expert", by number.
  """

  sums: Any  # float32 [N, E].
  names: Sequence[str] = dataclasses.field(metadata={"static": True})

  def merge(self, other: Self) -> Self:
    return type(self)(self.sums + other.sums, self.names)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> dict[str, float]:
    parts = list(parts)
    sums_NE = np.sum([np.asarray(p.sums, np.float64) for p in parts], axis=0)
    totals_N = np.sum(sums_NE, axis=1)
    if not totals_N.all():
      return {}
    peak_N = np.max(sums_NE, axis=1) * sums_NE.shape[1] / totals_N
    names = parts[0].names
    result = dict(zip(names, peak_N.tolist()))
    worst = int(np.argmax(peak_N))
    # A layer of a model with two stacks has a name such as "encoder_3".
    result["max"] = result[names[worst]]
    result["layer"] = float(names[worst].rpartition("_")[2])
    return result | {"expert": float(np.argmax(sums_NE[worst]))}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Occasional:
  """A metric that only some steps have; without values it has no result."""

  metric: Any
  count: Any  # Number of steps that have it; float32 scalar.

  def merge(self, other: Self) -> Self:
    merged = merge({"": self.metric}, {"": other.metric})[""]
    return type(self)(merged, self.count + other.count)

  @classmethod
  def value(cls, parts: Iterable[Self]) -> Any:
    present = [part.metric for part in parts if part.count > 0]
    return _host_value(present) if present else None


_KINDS = (
  Sum,
  Last,
  Max,
  Min,
  Histogram,
  ArrayStats,
  Largest,
  Loads,
  Occasional,
)


def checked(metrics: Mapping[str, Any], source: str) -> Metrics:
  """Checks the metrics that a loss function returned, and returns them.

  Args:
    source: the function, for messages.

  Raises:
    ConfigError: if a metric is of an unknown kind, or "loss" is not a mean.
  """
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
  """Returns the mean (sum, weight) of values [B, ...], in float32.

  The weights broadcast to the values. A value with weight zero does not count,
  even if it is not finite.
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
  """Returns 0 for padding (the batch's "_mask") and else 1, float32 [B]."""
  if "_mask" in batch:
    return batch["_mask"].astype(jnp.float32)
  return jnp.ones(like.shape[:1], jnp.float32)


def labelled_weights(batch: Batch, labels: jax.Array) -> jax.Array:
  """Like `example_weights`, but also 0 for examples without a label."""
  labelled = labels >= 0 if labels.ndim == 1 else jnp.any(labels > 0, -1)
  return example_weights(batch, labels) * labelled


def top_k_hits(logits_BC: jax.Array, labels: jax.Array, k: int) -> jax.Array:
  """Returns whether a label of an example is among its k largest logits, [B].

  Labels are class numbers [B], or multi-hot [B, C]. Of two classes with equal
  scores, the lower number comes first. Scores that are -inf, or for which
  `has_order` is False, have no hits.
  """
  score_Bk, best_Bk = jax.lax.top_k(logits_BC, k)
  if labels.ndim == 1:
    right_Bk = best_Bk == labels[:, None]
  else:
    right_Bk = jnp.take_along_axis(labels, best_Bk, axis=-1) > 0
  hits_B = jnp.any(right_Bk & (score_Bk > -jnp.inf), axis=-1)
  return hits_B & has_order(logits_BC)


def has_order(scores: Any) -> Any:
  """Returns whether scores [..., C] have a best class.

  They have none if one is NaN or inf, or all are -inf, which means impossible.
  """
  return abs(scores.max(axis=-1)) < np.inf


def nonfinite(*arrays: np.ndarray) -> dict[str, float]:
  """Returns the number of examples that are not finite, {} if there are none.

  The arrays are [N, ...]; an example counts once in each.
  """
  number = 0.0
  for array in arrays:
    is_finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    number += float(np.sum(~is_finite))
  return {"nonfinite": number} if number else {}


def top_k_accuracies(
  scores_BC: jax.Array,
  labels: jax.Array,
  weight_B: jax.Array,
  top_k: Iterable[int],
) -> Metrics:
  """Returns "acc" for k = 1, "top5_acc" for k = 5, and so on; no k > C."""
  accuracies: Metrics = {
    "acc" if k == 1 else f"top{k}_acc": pair(
      top_k_hits(scores_BC, labels, k), weight_B
    )
    for k in top_k
    if k <= scores_BC.shape[-1]
  }
  return accuracies | {"nonfinite": Faults.of(~has_order(scores_BC), weight_B)}


def merge(first: Metrics, second: Metrics) -> Metrics:
  """Merges metrics by name; the values of `second` are newer."""

  def merge_one(a: Any, b: Any) -> Any:
    if isinstance(a, _KINDS):
      return a.merge(b)
    return a[0] + b[0], a[1] + b[1]

  return {name: merge_one(first[name], second[name]) for name in first}


def means(pairs: Mapping[str, Pair]) -> dict[str, Any]:
  """Returns sum / weight of each mean."""
  return {name: total / weight for name, (total, weight) in pairs.items()}


def host_values(batches: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the values of metrics over batches; a mean of weight 0 is NaN.

  The results of a kind with several come last, as "<name>_<result>".
  """
  parts: dict[str, list[Any]] = {}
  for batch in batches:
    for name, metric in batch.items():
      parts.setdefault(name, []).append(metric)
  single: dict[str, Any] = {}
  several: dict[str, Any] = {}
  for name, metrics in parts.items():
    value = _host_value(metrics)
    if isinstance(value, dict):
      several |= {f"{name}_{key}": number for key, number in value.items()}
    elif value is None:  # An Occasional metric that no step has had.
      continue
    elif value or not isinstance(metrics[0], Faults):
      single[name] = value
  return single | several


def _host_value(parts: Sequence[Any]) -> Any:
  if isinstance(parts[0], _KINDS):
    return parts[0].value(parts)
  total, weight = (math.fsum(map(float, column)) for column in zip(*parts))
  return total / weight if weight else math.nan


def global_norm(tree: Any) -> jax.Array:
  """Euclidean norm over all leaves, accumulated in float32."""
  squares = [
    # jax.lax, because jax.numpy takes five times as long to trace.
    jax.lax.reduce_sum(
      jax.lax.square(leaf.astype(jnp.float32)), range(leaf.ndim)
    )
    for leaf in jax.tree.leaves(tree)
  ]
  return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
