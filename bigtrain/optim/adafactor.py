"""Adafactor, and the variant of large vision transformers.

Adafactor (Shazeer and Stern 2018, arxiv.org/abs/1804.04235) keeps the means of
a matrix's squared gradients over its rows and over its columns in place of the
second moment of each element. views.py says which matrices an array holds.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bigtrain.arrays import trees
from bigtrain.optim.views import View

# Dimensions of the rows and of the columns of a matrix; None without factors.
_Factors = tuple[tuple[int, ...], tuple[int, ...]] | None


def adafactor(
  learning_rate: optax.ScalarOrSchedule,
  views: Mapping[str, View],
  min_dim_size_to_factor: int = 128,
  decay_rate: float = 0.8,
  decay_offset: int = 0,
  multiply_by_parameter_scale: bool = True,
  clipping_threshold: float | None = 1.0,
  momentum: float | None = None,
  dtype_momentum: Any = jnp.float32,
  eps: float = 1e-30,
  factored: bool = True,
) -> optax.GradientTransformation:
  """Builds Adafactor as in T5X; without matrices in the views, as in optax.

  Args:
    views: by name of the parameters. Where the rows of a view are None, the
      two largest dimensions of each array are its rows and columns.
    min_dim_size_to_factor: matrices with fewer rows or columns keep a full
      second moment.
    decay_rate: the second moment of update t (from 1) decays by
      1 - t ** -decay_rate.
    decay_offset: start of the count t, for fine-tuning with a restored state.
    multiply_by_parameter_scale: whether updates are multiplied by the
      parameter's root mean square, at least 0.001.
    clipping_threshold: largest root mean square of an update before these
      factors; None for no clipping.
    momentum: decay of the average of updates, not debiased; None for none.
    dtype_momentum: dtype of the stored average.
    eps: added to squared gradients.
    factored: whether second moments are factored at all.
  """
  decay = lambda t: 1.0 - t**-decay_rate
  least = min_dim_size_to_factor if factored else math.inf
  stages = [_scale_by_factored_rms(views, least, decay, decay_offset, eps)]
  if clipping_threshold is not None:
    stages.append(_clip_by_rms(views, clipping_threshold))
  stages.append(optax.scale_by_learning_rate(learning_rate, flip_sign=False))
  if multiply_by_parameter_scale:
    stages.append(_scale_by_param_rms(views, 1e-3))
  if momentum is not None:
    stored = dtype_momentum
    stages.append(optax.ema(momentum, debias=False, accumulator_dtype=stored))
  return optax.chain(*stages, optax.scale(-1))


def big_vision_adafactor(
  learning_rate: optax.ScalarOrSchedule,
  views: Mapping[str, View],
  min_dim_size_to_factor: int = 32,
  decay_rate: float = 0.8,
  decay_offset: int = 0,
  beta2_cap: float = 0.999,
  clipping_threshold: float | None = None,
  momentum: float | None = 0.9,
  dtype_momentum: Any = jnp.bfloat16,
  eps: float = 1e-30,
) -> optax.GradientTransformation:
  """Builds the Adafactor variant used for large vision transformers.

  Momentum is on and kept in bfloat16, the decay of the second moment is capped,
  and updates are not scaled by the parameter's size (Zhai et al. 2021,
  arxiv.org/abs/2106.04560, section 3.4).

  Args:
    views, min_dim_size_to_factor, decay_offset, eps: see `adafactor`.
    decay_rate, beta2_cap: the second moment of update t (from 1) decays by
      min(beta2_cap, 1 - t ** -decay_rate).
    clipping_threshold: largest root mean square of an array's update, before
      momentum.
    momentum, dtype_momentum: see `adafactor`.
  """
  decay = lambda t: jnp.minimum(beta2_cap, 1.0 - t**-decay_rate)
  # Each stage keeps its place in the state, even where it does nothing.
  clip = ema = optax.identity()
  if clipping_threshold:
    clip = _clip_by_rms(views, clipping_threshold)
  if momentum:
    ema = optax.ema(momentum, debias=False, accumulator_dtype=dtype_momentum)
  least = min_dim_size_to_factor
  scaled = _scale_by_factored_rms(views, least, decay, decay_offset, eps)
  by_rate = optax.scale_by_learning_rate(learning_rate)
  return optax.chain(scaled, clip, ema, by_rate)


def _factors(view: View, shape: tuple[int, ...], least: float) -> _Factors:
  rows, columns = view.rows, view.columns
  if rows is None:
    if len(columns) < 2:
      return None
    order = np.argsort([shape[d] for d in columns])
    rows, columns = (columns[order[-2]],), (columns[order[-1]],)
  if not rows:
    return None
  sizes = [math.prod(shape[d] for d in dims) for dims in (rows, columns)]
  if min(sizes) < least:
    return None
  return (rows, columns) if sizes[0] <= sizes[1] else (columns, rows)


def _scale_by_factored_rms(
  views: Mapping[str, View],
  least: float,
  decay: Callable[[jax.Array], jax.Array],
  offset: int,
  eps: float,
) -> optax.GradientTransformation:
  """Divides gradients by the roots of their second moments.

  The state is laid out as in optax.scale_by_factored_rms: a factored
  matrix does not use `v`, and others do not use `v_row` and `v_col`.
  """

  def init_leaf(name: str, p: jax.Array) -> tuple[jax.Array, ...]:
    unused = jnp.zeros((1,), p.dtype)
    factors = _factors(views[name], p.shape, least)
    if factors is None:
      return unused, unused, jnp.zeros_like(p)

    def without(dims: tuple[int, ...]) -> jax.Array:
      sizes = [n for d, n in enumerate(p.shape) if d not in dims]
      return jnp.zeros(sizes, p.dtype)

    rows, columns = factors
    return without(columns), without(rows), unused

  def update_leaf(
    name: str, g: jax.Array, moments: list[jax.Array], keep: jax.Array
  ) -> tuple[jax.Array, ...]:
    v_row, v_col, v = moments
    squares = jnp.square(g) + eps
    factors = _factors(views[name], g.shape, least)
    if factors is None:
      v = (keep * v + (1.0 - keep) * squares).astype(v.dtype)
      return g * v**-0.5, v_row, v_col, v
    rows, columns = factors

    def average(old: jax.Array, dims: tuple[int, ...]) -> jax.Array:
      new = keep * old + (1.0 - keep) * jnp.mean(squares, axis=dims)
      return new.astype(old.dtype)

    v_row, v_col = average(v_row, columns), average(v_col, rows)
    # Places of the rows among the dimensions of v_row.
    places = tuple(d - sum(c < d for c in columns) for d in rows)
    mean = jnp.mean(v_row, axis=places, keepdims=True)
    row_factor = jnp.expand_dims((v_row / mean) ** -0.5, columns)
    return g * row_factor * jnp.expand_dims(v_col**-0.5, rows), v_row, v_col, v

  def init(params: Any) -> optax.FactoredState:
    named = trees.flatten_with_names(params)
    leaves = [init_leaf(name, p) for name, p in named]
    state = _unzip(leaves, params, 3)
    return optax.FactoredState(jnp.zeros([], jnp.int32), *state)

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    t = jnp.maximum(state.count - offset, 0).astype(jnp.float32) + 1.0
    keep = decay(t)
    moments = [jax.tree.leaves(tree) for tree in state[1:]]
    named = trees.flatten_with_names(grads)
    rows = zip(named, *moments)
    leaves = [update_leaf(name, g, v, keep) for (name, g), *v in rows]
    updates, *moments = _unzip(leaves, grads, 4)
    count = optax.safe_increment(state.count)
    return updates, optax.FactoredState(count, *moments)

  return optax.GradientTransformation(init, update)


def _unzip(leaves: list[tuple[Any, ...]], like: Any, number: int) -> list[Any]:
  structure = jax.tree.structure(like)
  return [
    jax.tree.unflatten(structure, [leaf[i] for leaf in leaves])
    for i in range(number)
  ]


def _rms(x: jax.Array, view: View) -> jax.Array:
  dims = view.array_dims()
  return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _clip_by_rms(
  views: Mapping[str, View], limit: float
) -> optax.GradientTransformation:
  clip = lambda name, u: u / jnp.maximum(1.0, _rms(u, views[name]) / limit)
  return optax.stateless(lambda u, params: trees.map_with_names(clip, u))


def _scale_by_param_rms(
  views: Mapping[str, View], least: float
) -> optax.GradientTransformation:
  scale = lambda name, u, p: u * jnp.maximum(_rms(p, views[name]), least)
  by_name = trees.map_with_names
  return optax.stateless(lambda u, params: by_name(scale, u, params))
