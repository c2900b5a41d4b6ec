"""Adafactor, and its variant for large vision transformers.

Adam keeps a second moment for each element of a matrix. Adafactor (Shazeer and
Stern 2018, arxiv.org/abs/1804.04235) keeps only the mean of each row and of
each column, and estimates an element as their product. views.py says which
matrices an array holds; optax.adafactor would take the two largest dimensions,
which in a stack of layers or in an attention are not a matrix.
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

# Dimensions of a matrix's rows and of its columns; None if the second moment is
# not factored.
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
    views: views of the parameters, by name. Where the rows of a view are None,
      the two largest dimensions of each array are its rows and columns.
    min_dim_size_to_factor: matrices with fewer rows or columns keep a full
      second moment.
    decay_rate: the second moment of update t (from 1) decays by
      1 - t ** -decay_rate.
    decay_offset: start of the count t, for fine-tuning with a restored state.
    multiply_by_parameter_scale: whether updates are multiplied by the
      parameter's root mean square, at least 0.001.
    clipping_threshold: largest root mean square of an update before these
      factors; None for no clipping.
    momentum: decay of the average of updates, without debiasing; None for no
      average.
    dtype_momentum: dtype of the stored average.
    eps: added to squared gradients.
    factored: whether second moments are factored at all.
  """

  def decay(t: jax.Array) -> jax.Array:
    return 1.0 - t**-decay_rate

  least = min_dim_size_to_factor if factored else math.inf
  stages = [_scale_by_factored_rms(views, least, decay, decay_offset, eps)]
  if clipping_threshold is not None:
    stages.append(_clip_by_rms(views, clipping_threshold))
  stages.append(optax.scale_by_learning_rate(learning_rate, flip_sign=False))
  if multiply_by_parameter_scale:
    stages.append(_scale_by_param_rms(views, 1e-3))
  if momentum is not None:
    average = optax.ema(
      momentum, debias=False, accumulator_dtype=dtype_momentum
    )
    stages.append(average)
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

  def decay(t: jax.Array) -> jax.Array:
    return jnp.minimum(beta2_cap, 1.0 - t**-decay_rate)

  scale = _scale_by_factored_rms(
    views, min_dim_size_to_factor, decay, decay_offset, eps
  )
  # Stages that are off are identities, so that the others keep their names in
  # the state, such as "2/ema".
  clip = ema = optax.identity()
  if clipping_threshold:
    clip = _clip_by_rms(views, clipping_threshold)
  if momentum:
    ema = optax.ema(momentum, debias=False, accumulator_dtype=dtype_momentum)
  return optax.chain(
    scale, clip, ema, optax.scale_by_learning_rate(learning_rate)
  )


def _factors(view: View, shape: tuple[int, ...], least: float) -> _Factors:
  """The dimensions to factor, the smaller side first, as in optax."""
  rows, columns = view.rows, view.columns
  if rows is None:  # The view does not say: take the two largest.
    if len(columns) < 2:
      return None
    *_, second, largest = np.argsort([shape[dim] for dim in columns])
    rows, columns = (columns[second],), (columns[largest],)
  if not rows:
    return None
  num_rows = math.prod(shape[dim] for dim in rows)
  num_columns = math.prod(shape[dim] for dim in columns)
  if min(num_rows, num_columns) < least:
    return None
  return (rows, columns) if num_rows <= num_columns else (columns, rows)


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

  Args:
    views: by name of the parameters.
    least: smallest number of rows and of columns to factor.
    decay: t, from 1, -> decay of the second moment in this update.
    offset: number of earlier updates that do not count for t.
    eps: added to squared gradients.
  """

  def init_leaf(name: str, p: jax.Array) -> tuple[jax.Array, ...]:
    """Returns v_row, v_col and v."""
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
    name: str,
    g: jax.Array,
    v_row: jax.Array,
    v_col: jax.Array,
    v: jax.Array,
    keep: jax.Array,
  ) -> tuple[jax.Array, ...]:
    """Returns the update, v_row, v_col and v; `keep` is the decay."""
    squares = jnp.square(g) + eps
    factors = _factors(views[name], g.shape, least)
    if factors is None:
      v = (keep * v + (1.0 - keep) * squares).astype(v.dtype)
      return g * v**-0.5, v_row, v_col, v
    v_row, v_col = _average(squares, v_row, v_col, factors, keep)
    return _divide(g, v_row, v_col, factors), v_row, v_col, v

  def init(params: Any) -> optax.FactoredState:
    leaves = [init_leaf(n, p) for n, p in trees.flatten_with_names(params)]
    v_row, v_col, v = _unzip(leaves, params, 3)
    count = jnp.zeros([], jnp.int32)
    return optax.FactoredState(count, v_row, v_col, v)

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    t = jnp.maximum(state.count - offset, 0).astype(jnp.float32) + 1.0
    keep = decay(t)
    leaves = [
      update_leaf(name, g, v_row, v_col, v, keep)
      for (name, g), v_row, v_col, v in zip(
        trees.flatten_with_names(grads),
        jax.tree.leaves(state.v_row),
        jax.tree.leaves(state.v_col),
        jax.tree.leaves(state.v),
      )
    ]
    updates, v_row, v_col, v = _unzip(leaves, grads, 4)
    count = optax.safe_increment(state.count)
    return updates, optax.FactoredState(count, v_row, v_col, v)

  return optax.GradientTransformation(init, update)


def _average(
  squares: jax.Array,
  v_row: jax.Array,
  v_col: jax.Array,
  factors: tuple[tuple[int, ...], tuple[int, ...]],
  keep: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The new means of a matrix's rows and columns; `keep` is the decay."""
  rows, columns = factors

  def average(old: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    new = keep * old + (1.0 - keep) * jnp.mean(squares, axis=dims)
    return new.astype(old.dtype)

  return average(v_row, columns), average(v_col, rows)


def _divide(
  g: jax.Array,
  v_row: jax.Array,
  v_col: jax.Array,
  factors: tuple[tuple[int, ...], tuple[int, ...]],
) -> jax.Array:
  """Divides gradients by the roots of the factored second moment.

  The moment of an element is v_row * v_col / mean(v_row).
  """
  rows, columns = factors
  # v_row lacks the columns' dimensions, so the rows' have moved forward.
  dims = tuple(d - sum(c < d for c in columns) for d in rows)
  mean = jnp.mean(v_row, axis=dims, keepdims=True)
  row_factor = jnp.expand_dims((v_row / mean) ** -0.5, columns)
  return g * row_factor * jnp.expand_dims(v_col**-0.5, rows)


def _unzip(leaves: list[tuple[Any, ...]], like: Any, number: int) -> list[Any]:
  """Turns a list of tuples into one tree for each element of the tuples."""
  structure = jax.tree.structure(like)
  return [
    jax.tree.unflatten(structure, [leaf[i] for leaf in leaves])
    for i in range(number)
  ]


def _rms(x: jax.Array, view: View) -> jax.Array:
  """Root mean square of each array in a stack; it broadcasts against x."""
  dims = view.array_dims()
  return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _clip_by_rms(
  views: Mapping[str, View], limit: float
) -> optax.GradientTransformation:
  def clip(name: str, u: jax.Array) -> jax.Array:
    return u / jnp.maximum(1.0, _rms(u, views[name]) / limit)

  return optax.stateless(
    lambda updates, params: trees.map_with_names(clip, updates)
  )


def _scale_by_param_rms(
  views: Mapping[str, View], least: float
) -> optax.GradientTransformation:
  def scale(name: str, u: jax.Array, p: jax.Array) -> jax.Array:
    return u * jnp.maximum(_rms(p, views[name]), least)

  return optax.stateless(
    lambda updates, params: trees.map_with_names(scale, updates, params)
  )
