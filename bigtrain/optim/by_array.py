"""Applies an optimizer of arrays to each layer, or to each matrix.

LAMB and LARS divide an array's update by its norm. For stacked layers that norm
has to be each layer's, so the optimizer is mapped over the stacks.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.optim.views import View


def by_array(
  tx: optax.GradientTransformation,
  views: Mapping[str, View],
  shapes: Any,
  key: str,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer that treats each array of the views by itself.

  Its state has the names of the optimizer's own state, with the stack's
  dimensions in front, and matrices for arrays whose views have rows.
  """
  tx = optax.with_extra_args_support(tx)
  # Parameters by the shape of their stacks. Those without a stack have ().
  groups: dict[tuple[int, ...], list[str]] = {}
  specs = dict(trees.flatten_with_names(shapes))
  for name, spec in specs.items():
    stack = tuple(spec.shape[d] for d in views[name].stack)
    groups.setdefault(stack, []).append(name)

  arrays = {name: _one(spec, views[name]) for name, spec in specs.items()}
  whole = jax.eval_shape(tx.init, trees.from_flat(arrays))
  own = lambda names: trees.from_flat({name: arrays[name] for name in names})
  init_of = functools.partial(jax.eval_shape, tx.init)
  states = {stack: init_of(own(names)) for stack, names in groups.items()}
  shared = _shared(tx, whole, key)

  def folded(tree: Any, names: list[str]) -> Any:
    flat = dict(trees.flatten_with_names(tree))
    return trees.from_flat({n: _fold(flat[n], views[n]) for n in names})

  def axes(state: Any) -> Any:
    """0 for the state of arrays, None for what they share."""
    return trees.map_with_names(lambda n, _: None if n in shared else 0, state)

  def joined(parts: list[Any]) -> Any:
    flat: dict[str, Any] = {}
    for part in parts:
      flat |= trees.flatten_with_names(part)
    return trees.map_with_names(lambda name, _: flat[name], whole)

  def init(params: Any) -> Any:
    parts = []
    for stack, names in groups.items():
      fn: Callable[..., Any] = tx.init
      for _ in stack:
        fn = jax.vmap(fn, out_axes=axes(states[stack]))
      parts.append(fn(folded(params, names)))
    return joined(parts)

  def update(
    grads: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, Any]:
    flat = dict(trees.flatten_with_names(state))
    updates: dict[str, Any] = {}
    parts = []
    for stack, names in groups.items():
      fn: Callable[..., Any] = lambda grads, state, params: tx.update(
        grads, state, params, **extra
      )
      for _ in stack:
        in_out = axes(states[stack])
        fn = jax.vmap(fn, in_axes=(0, in_out, 0), out_axes=(0, in_out))
      part = trees.map_with_names(lambda n, _: flat[n], states[stack])
      new, part = fn(folded(grads, names), part, folded(params, names))
      parts.append(part)
      updates |= trees.flatten_with_names(new)
    return trees.map_with_names(
      lambda name, g: _unfold(updates[name], views[name], g.shape), grads
    ), joined(parts)

  return optax.GradientTransformationExtraArgs(init, update)


def _one(spec: Any, view: View) -> jax.ShapeDtypeStruct:
  folded = jax.eval_shape(functools.partial(_fold, view=view), spec)
  shape = folded.shape[len(view.stack) :]
  return jax.ShapeDtypeStruct(shape, spec.dtype)


def _shared(tx: optax.GradientTransformation, state: Any, key: str) -> set[str]:
  """Names of state that belongs to no parameter, such as counts."""
  shared = dict(trees.flatten_with_names(jax.eval_shape(tx.init, {})))
  for name, spec in shared.items():
    if jnp.issubdtype(spec.dtype, jnp.floating):
      raise ConfigError(
        f"{key}.view: expected 'parameters', as {name!r} of this optimizer's "
        "state belongs to all parameters together."
      )
  return set(shared) & set(trees.names(state))


def _order(view: View) -> tuple[int, ...]:
  if view.rows is None:
    return (*view.stack, *view.array_dims())
  return (*view.stack, *view.rows, *view.columns)


def _fold(x: jax.Array, view: View) -> jax.Array:
  x = x.transpose(_order(view))
  stack = x.shape[: len(view.stack)]
  if view.rows is None:
    return x
  if not view.rows:
    return x.reshape(*stack, -1)
  middle = len(view.stack) + len(view.rows)
  return x.reshape(*stack, math.prod(x.shape[len(stack) : middle]), -1)


def _unfold(x: jax.Array, view: View, shape: tuple[int, ...]) -> jax.Array:
  order = _order(view)
  x = x.reshape([shape[d] for d in order])
  return x.transpose([order.index(d) for d in range(len(order))])
