"""Updates many small arrays as one vector.

A model has many small parameters: biases, and scales of norms. Of the 200
arrays of a ViT-S/16, 125 have fewer than 2,000 elements. An optimizer does the
same to each element of them, but XLA makes kernels for each array, which must
be compiled, kept, loaded at the next start, and launched in every step.

Here such arrays are joined end to end before the optimizer's elementwise
operations, and split after the branch in which they run: inside it, XLA would
fuse the operations into each of the parts again. Nothing has to be known of the
optimizer. Its operations are grouped into chains, the elementwise operations
that share arrays; chains with equal operations become one. The results are the
same up to the rounding of sums.

Only arrays that each device holds in full are joined: joining others would send
them to all devices.
"""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics, trees
from bigtrain.step import chains, joined, scalars


class SmallArrays:
  """Which arrays of a train state are joined."""

  def __init__(self, state_spec: Mapping[str, Any]):
    """Chooses the small arrays that every device has in full.

    Args:
      state_spec: train state of jax.ShapeDtypeStructs with shardings.
    """
    self._joins = jax.tree.map(_may_join, dict(state_spec))
    chosen = trees.flatten_with_names(self._joins["params"])
    self._params = {name for name, joins in chosen if joins}

  def norm(self, tree: Any) -> jax.Array:
    """Euclidean norm of nested dicts, in float32.

    Args:
      tree: arrays with the names and shapes of parameters, or of some of them.
    """
    arrays: list[Any] = []
    small: dict[Any, list[Any]] = collections.defaultdict(list)
    for name, x in trees.flatten_with_names(tree):
      (small[x.dtype] if name in self._params else arrays).append(x)
    return metrics.global_norm(
      [*arrays, *map(joined.end_to_end, small.values())]
    )

  def joined(self, state: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a decorator that computes on joined arrays.

    Returns:
      A decorator of traceable functions without arguments that return (a dict
      of trees, a tree). It traces the function once, for all calls. The result
      of a call is the same with a `Joined` in place of each of the trees, and
      what needs scalars alone is computed now (scalars.py).
    """
    pairs = zip(
      *map(jax.tree.leaves, ({k: state[k] for k in self._joins}, self._joins))
    )
    return functools.partial(_decorated, {id(x): joins for x, joins in pairs})


def _may_join(spec: jax.ShapeDtypeStruct) -> bool:
  return (
    spec.ndim > 0
    and spec.size <= chains.MOST_ELEMENTS
    and spec.sharding.is_fully_replicated
    and jnp.issubdtype(spec.dtype, jnp.floating)
  )


def _decorated(joins: Mapping[int, bool], fn: Callable[[], Any]) -> Any:
  """What SmallArrays.joined returns; the keys of `joins` are ids of arrays."""
  closed, shapes = jax.make_jaxpr(fn, return_shape=True)()
  answers = {
    v: joins.get(id(x)) for v, x in zip(closed.jaxpr.constvars, closed.consts)
  }
  plan = chains.Plan(closed.jaxpr, answers)

  def call() -> Any:
    values = plan.run(closed.consts)
    outputs = iter(closed.jaxpr.outvars)

    def gather(subtree: Any) -> joined.Joined:
      leaves, structure = jax.tree.flatten(subtree)
      return values.joined([next(outputs) for _ in leaves], structure)

    first, second = shapes
    return {k: gather(first[k]) for k in sorted(first)}, gather(second)

  call.__name__ = fn.__name__  # For profiles.
  return scalars.computed_first(call)
