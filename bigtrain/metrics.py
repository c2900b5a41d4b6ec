"""Metrics as (sum, weight) pairs, which become means only when written.

Pairs add up exactly over microbatches, devices, hosts, padded batches and
steps; means of means do not. Norms and weight statistics are here too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import trees
from bigtrain.settings import Config, ConfigError, did_you_mean

Pair = tuple[Any, Any]
Pairs = dict[str, Pair]


def pair(values: jax.Array, weights: jax.Array | None = None) -> Pair:
  """(sum, weight) of per-example values.

  Args:
    values: [B, ...] values; they are summed in float32.
    weights: broadcastable to `values`; ones unless given. A value with weight
      zero is padding and does not count, even if it is not finite.

  Returns:
    Two float32 scalars.
  """
  values = values.astype(jnp.float32)
  if weights is None:
    return jnp.sum(values), jnp.asarray(values.size, jnp.float32)
  weights = jnp.broadcast_to(weights.astype(jnp.float32), values.shape)
  return (
    jnp.sum(jnp.where(weights == 0, 0.0, values) * weights),
    jnp.sum(weights),
  )


def example_weights(batch: Mapping[str, Any], like: jax.Array) -> jax.Array:
  """[B] float32 weights: the batch's "_mask" of padding, or ones."""
  if "_mask" in batch:
    return batch["_mask"].astype(jnp.float32)
  return jnp.ones(like.shape[:1], jnp.float32)


def top_k_hits(logits_BC: jax.Array, labels: jax.Array, k: int) -> jax.Array:
  """Whether any of an example's labels is among its k largest logits.

  Args:
    logits_BC: [B, C] scores; among equal scores the lower class comes first.
    labels: class numbers [B], or one-hot or multi-hot [B, C].
    k: number of largest logits, at most C.

  Returns:
    bool [B].
  """
  _, best_Bk = jax.lax.top_k(logits_BC, k)
  if labels.ndim == 1:
    return jnp.any(best_Bk == labels[:, None], axis=-1)
  return jnp.any(jnp.take_along_axis(labels, best_Bk, axis=-1) > 0, axis=-1)


def add(first: Pairs, second: Pairs) -> Pairs:
  """Adds pairs by name; both have the same names."""
  return jax.tree.map(jnp.add, first, second)


def means(pairs: Mapping[str, Pair]) -> dict[str, Any]:
  """sum / weight of each pair; NaN if the weight is zero."""
  return {name: total / weight for name, (total, weight) in pairs.items()}


def host_means(batches: Iterable[Mapping[str, Pair]]) -> dict[str, float]:
  """Means over batches of fetched pairs, summed exactly on the host.

  The division of the examples into batches changes the result only by the
  rounding within each batch.
  """
  sums: dict[str, list[float]] = {}
  weights: dict[str, list[float]] = {}
  for pairs in batches:
    for name, (total, weight) in pairs.items():
      sums.setdefault(name, []).append(float(total))
      weights.setdefault(name, []).append(float(weight))
  result = {}
  for name, parts in sums.items():
    weight = math.fsum(weights[name])
    result[name] = math.fsum(parts) / weight if weight else math.nan
  return result


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


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("values",),
  meta_fields=("names",),
)
@dataclasses.dataclass(frozen=True)
class Named:
  """Scalars by name, in one array.

  A compiled step takes microseconds for each output array, which adds up for
  hundreds of scalars.

  Attributes:
    names: names of the scalars.
    values: float32 [number of names].
  """

  names: tuple[str, ...]
  values: Any

  def items(self) -> Iterable[tuple[str, Any]]:
    """(name, scalar) pairs of a fetched array."""
    return zip(self.names, self.values)


def only_if(
  flag: jax.Array, names: Iterable[str], fn: Callable[[], Any], before: Any
) -> tuple[Named, Any]:
  """Runs `fn` on the device if the flag is set, else returns zeros.

  Args:
    flag: bool scalar.
    names: names of the float32 scalars that `fn` returns.
    fn: () -> {name: scalar}.
    before: arrays that must not be used before `fn` has run.

  Returns:
    (result of `fn`, `before`). Operations on the returned `before` run after
    `fn`.
  """
  names = tuple(names)

  if not names:
    return Named(names, jnp.zeros(0, jnp.float32)), before

  def stacked() -> tuple[jax.Array, Any]:
    values = fn()
    # jax.lax and not jax.numpy, for hundreds of values: see global_norm.
    rows = [jax.lax.reshape(values[name], (1,)) for name in names]
    # cond forwards operands that every branch returns unchanged; the barrier
    # keeps the dependency.
    return jax.lax.concatenate(rows, 0), jax.lax.optimization_barrier(before)

  def zeros() -> tuple[jax.Array, Any]:
    return jnp.zeros(len(names), jnp.float32), before

  values, after = jax.lax.cond(flag, stacked, zeros)
  return Named(names, values), after


_DETAILS = ("none", "global", "per_param")


def read_norm_detail(config: Config) -> str:
  """Reads config.weight_stats: the `detail` of `norms`, "global" by default."""
  detail = config.get("weight_stats", "global")
  if detail not in _DETAILS:
    hint = did_you_mean(detail, _DETAILS)
    raise ConfigError(f"config.weight_stats: unknown {detail!r}.{hint}")
  return detail


def norm_names(params: Any, trained: Any, detail: str) -> list[str]:
  """Names of the scalars that `norms` returns for such trees."""
  if detail == "none":
    return []
  if detail == "global":
    return ["param_norm", "update_norm"]
  return list(
    jax.eval_shape(lambda p, t: norms(p, p, t, t, detail), params, trained)
  )


def norms(
  before: Any, params: Any, grads: Any, updates: Any, detail: str
) -> dict[str, Any]:
  """Norms for a row.

  Args:
    before: all parameters before the step.
    params: all parameters after it.
    grads: gradients of the trainable parameters.
    updates: the optimizer's updates of the trainable parameters.
    detail: "none", "global" (norms over all parameters), or "per_param" (also
      statistics of every parameter).

  Returns:
    {name: float32 scalar}.
  """
  if detail == "none":
    return {}
  values = {
    "param_norm": global_norm(params),
    "update_norm": global_norm(updates),
  }
  if detail == "per_param":
    values |= weight_stats(before, params, grads, updates)
  return values


def weight_stats(
  before: Any, params: Any, grads: Any, updates: Any
) -> dict[str, Any]:
  """Statistics of every parameter, the same as in T5X.

  Args:
    before: all parameters before the step.
    params: all parameters after it.
    grads: gradients of the trainable parameters.
    updates: the optimizer's updates of the trainable parameters.

  Returns:
    {"weight_rms/<name>", "weight_max/<name>", "grad_rms/<name>",
    "grad_norm/<name>", "update_rms/<name>",
    "weight_update_divided_by_weight_rms/<name>"}: float32 scalars. The last is
    of each element's update over its value before the step, infinite where that
    is 0.
  """

  def rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))

  stats, weights = {}, dict(trees.flatten_with_names(before))
  for name, leaf in trees.flatten_with_names(params):
    stats[f"weight_rms/{name}"] = rms(leaf)
    stats[f"weight_max/{name}"] = jnp.max(jnp.abs(leaf)).astype(jnp.float32)
  for name, leaf in trees.flatten_with_names(grads):
    stats[f"grad_rms/{name}"] = rms(leaf)
    stats[f"grad_norm/{name}"] = global_norm(leaf)
  for name, leaf in trees.flatten_with_names(updates):
    stats[f"update_rms/{name}"] = rms(leaf)
    old = weights[name].astype(jnp.float32)
    ratio = jnp.where(leaf == 0, 0.0, leaf / old)
    stats[f"weight_update_divided_by_weight_rms/{name}"] = rms(ratio)
  return stats
