"""Gradients of a task's loss over the whole batch, in one or more microbatches.

The loss is the mean over the global batch: sum of all microbatches' sums over
sum of all their weights. So padding that is spread unevenly, and the number of
microbatches and devices, change the result by rounding only.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain import metrics as metrics_lib
from bigtrain import sharding, trees
from bigtrain.settings import ConfigError

LossFn = Callable[..., tuple[metrics_lib.Pairs, Any]]


def check_microbatches(batch_size: int, number: int, mesh: Mesh) -> None:
  """Raises ConfigError unless every device gets equal whole microbatches."""
  if not isinstance(number, int) or number < 1:
    raise ConfigError(
      f"config.microbatches: expected a positive whole number, got {number!r}."
    )
  if batch_size % (number * mesh.size):
    fitting = [
      n
      for n in range(1, batch_size // mesh.size + 1)
      if batch_size % (n * mesh.size) == 0
    ]
    nearest = min(fitting, key=lambda n: abs(n - number), default=1)
    raise ConfigError(
      f"config.microbatches={number}: a batch of {batch_size} on {mesh.size} "
      f"devices does not divide into that many; the nearest number that does "
      f"is {nearest}."
    )


def split(batch: Any, number: int, mesh: Mesh) -> Any:
  """[B, ...] arrays as [number, B / number, ...], example i in i % number.

  Interleaving keeps each device's examples on that device, so splitting needs
  no communication; contiguous slices would.
  """
  layout = NamedSharding(mesh, PartitionSpec(None, sharding.AXES))

  def cut(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0] // number, number, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, layout)

  return jax.tree.map(cut, batch)


def gradients(
  loss_fn: LossFn,
  params: Any,
  mutable: Any,
  batch: Any,
  rng: jax.Array,
  *,
  trainable: Any,
  microbatches: int,
  mesh: Mesh,
) -> tuple[Any, metrics_lib.Pairs, Any]:
  """Gradients of the mean loss of a batch with respect to trainable params.

  Args:
    loss_fn: (variables, batch, rng) -> (pairs with "loss", new mutable).
    params: all parameters.
    mutable: flax's mutable collections by name, {} if there are none.
    batch: dict of [B, ...] arrays.
    rng: key of this step; each microbatch gets one of its own.
    trainable: tree of bools like `params`; the others cost no gradient.
    microbatches: into how many parts the batch is cut, one after the other.
    mesh: mesh over which the batch is split.

  Returns:
    (gradients of the trainable parameters in float32, summed pairs, mutable
    after the last microbatch).
  """
  chosen, frozen = trees.partition(params, trainable)

  def summed(chosen: Any, mutable: Any, batch: Any, rng: jax.Array) -> Any:
    variables = {"params": trees.merge(chosen, frozen), **mutable}
    pairs, mutable = loss_fn(variables, batch, rng)
    return pairs["loss"][0], (pairs, mutable)

  def one(mutable: Any, batch: Any, rng: jax.Array) -> Any:
    grads, (pairs, mutable) = jax.grad(summed, has_aux=True)(
      chosen, mutable, batch, rng
    )
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    return grads, pairs, mutable

  if microbatches == 1:
    grads, pairs, mutable = one(mutable, batch, rng)
  else:

    def step(carry: Any, i_and_part: Any) -> Any:
      grads, pairs, mutable = carry
      i, part = i_and_part
      g, p, mutable = one(mutable, part, jax.random.fold_in(rng, i))
      grads = jax.tree.map(jnp.add, grads, g)
      return (grads, metrics_lib.add(pairs, p), mutable), None

    parts = split(batch, microbatches, mesh)
    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(one, mutable, first, rng)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[:2])
    carry, _ = jax.lax.scan(
      step, (*zeros, mutable), (jnp.arange(microbatches), parts)
    )
    grads, pairs, mutable = carry

  weight = pairs["loss"][1]
  return jax.tree.map(lambda g: g / weight, grads), pairs, mutable
