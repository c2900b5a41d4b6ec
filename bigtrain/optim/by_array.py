"""Maps an optimizer over stacked layers, or over the matrices of arrays.

LAMB and LARS divide an array's update by its norm. In a stack of layers, this
has to be the norm of each layer. So parameters are grouped by the shape of
their stacks, each group is "folded" to [stack, array], and the optimizer is
vmapped over the dimensions of the stack.
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
  """Makes an optimizer that treats each array of the views on its own.

  Its state has the names of `tx`'s state. The arrays in it have the stack's
  dimensions in front, and are matrices where the views have rows.

  Args:
    tx: the optimizer.
    views: views of the parameters, by name.
    shapes: specs of the parameters.
    key: key of the optimizer in the config, for messages.
  """
  tx = optax.with_extra_args_support(tx)
  # {shape of the stack: names}; () is that of parameters without a stack.
  groups: dict[tuple[int, ...], list[str]] = {}
  specs = dict(trees.flatten_with_names(shapes))
  for name, spec in specs.items():
    stack = tuple(spec.shape[d] for d in views[name].stack)
    groups.setdefault(stack, []).append(name)

  # Specs of one array of each stack, and of the optimizer's state for them: for
  # all parameters, and for each group.
  arrays = {name: _one(spec, views[name]) for name, spec in specs.items()}
  whole_state = jax.eval_shape(tx.init, trees.from_flat(arrays))
  group_states = {}
  for stack, names in groups.items():
    members = trees.from_flat({name: arrays[name] for name in names})
    group_states[stack] = jax.eval_shape(tx.init, members)
  shared = _shared(tx, whole_state, key)

  def axes(state: Any) -> Any:
    """For vmap: 0 for the state of arrays, None for what they share."""
    return trees.map_with_names(lambda n, _: None if n in shared else 0, state)

  def init(params: Any) -> Any:
    new_states = []
    for stack, names in groups.items():
      fn: Callable[..., Any] = tx.init
      for _ in stack:
        fn = jax.vmap(fn, out_axes=axes(group_states[stack]))
      new_states.append(fn(_folded(params, names, views)))
    return _joined(new_states, whole_state)

  def update(
    grads: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, Any]:
    flat = dict(trees.flatten_with_names(state))
    flat_updates: dict[str, Any] = {}
    new_states = []

    def update_one(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
      return tx.update(grads, state, params, **extra)

    for stack, names in groups.items():
      state_axes = axes(group_states[stack])
      fn: Callable[..., Any] = update_one
      for _ in stack:
        fn = jax.vmap(fn, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))
      old_state = trees.map_with_names(
        lambda name, _: flat[name], group_states[stack]
      )
      group_updates, new_state = fn(
        _folded(grads, names, views), old_state, _folded(params, names, views)
      )
      new_states.append(new_state)
      flat_updates |= trees.flatten_with_names(group_updates)

    def unfold(name: str, g: jax.Array) -> jax.Array:
      return _unfold(flat_updates[name], views[name], g.shape)

    updates = trees.map_with_names(unfold, grads)
    return updates, _joined(new_states, whole_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _folded(tree: Any, names: list[str], views: Mapping[str, View]) -> Any:
  """The folded parameters of a group, or gradients of them."""
  flat = dict(trees.flatten_with_names(tree))
  return trees.from_flat(
    {name: _fold(flat[name], views[name]) for name in names}
  )


def _joined(group_states: list[Any], like: Any) -> Any:
  """The state of all parameters, joined from the groups' states."""
  flat: dict[str, Any] = {}
  for state in group_states:
    flat |= trees.flatten_with_names(state)
  return trees.map_with_names(lambda name, _: flat[name], like)


def _one(spec: Any, view: View) -> jax.ShapeDtypeStruct:
  """Spec of one array of a parameter's stack."""
  folded = jax.eval_shape(functools.partial(_fold, view=view), spec)
  shape = folded.shape[len(view.stack) :]
  return jax.ShapeDtypeStruct(shape, spec.dtype)


def _shared(tx: optax.GradientTransformation, state: Any, key: str) -> set[str]:
  """Names of state that does not belong to a parameter, such as counts."""
  shared = dict(trees.flatten_with_names(jax.eval_shape(tx.init, {})))
  for name, spec in shared.items():
    if jnp.issubdtype(spec.dtype, jnp.floating):
      raise ConfigError(
        f"{key}.view: expected 'parameters', as {name!r} of this optimizer's "
        "state belongs to all parameters together."
      )
  return set(shared) & set(trees.names(state))


def _order(view: View) -> tuple[int, ...]:
  """Order of the dimensions in a folded array, before it is a matrix."""
  if view.rows is None:
    return (*view.stack, *view.array_dims())
  return (*view.stack, *view.rows, *view.columns)


def _fold(x: jax.Array, view: View) -> jax.Array:
  """Folds a parameter to [*stack, rows, columns], or [*stack, vector].

  Where the view does not split rows and columns, the array keeps its
  dimensions.
  """
  x = x.transpose(_order(view))
  if view.rows is None:
    return x
  num_stacked = len(view.stack)
  stack = x.shape[:num_stacked]
  if not view.rows:
    return x.reshape(*stack, -1)
  rows = x.shape[num_stacked : num_stacked + len(view.rows)]
  return x.reshape(*stack, math.prod(rows), -1)


def _unfold(x: jax.Array, view: View, shape: tuple[int, ...]) -> jax.Array:
  """The inverse of `_fold`."""
  order = _order(view)
  x = x.reshape([shape[d] for d in order])
  return x.transpose([order.index(d) for d in range(len(order))])
