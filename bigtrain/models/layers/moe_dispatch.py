"""Sends tokens to their experts and back, without or with a capacity.

Axes: B batch, L length, D model width, F hidden width, E experts, J experts of
a token, C capacity.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain import model_flops, sharding
from bigtrain.models.layers import mlp


class Routing(NamedTuple):
  """The experts of each token.

  Attributes:
    expert_BLJ: int32 numbers of the experts, best first.
    weight_BLJ: float32 weights of their outputs.
  """

  expert_BLJ: jax.Array
  weight_BLJ: jax.Array


class Experts(NamedTuple):
  """The experts' MLPs.

  Attributes:
    kind: a name in mlp.KINDS.
    dim: F.
    rate: rate of dropout.
    key: key of dropout; None for none.
  """

  kind: str
  dim: int
  rate: float
  key: jax.Array | None

  def keep(self, *shape: int) -> jax.Array | None:
    """Returns dropout's bool mask (*shape, F); None for no dropout."""
    if self.key is None:
      return None
    return jax.random.bernoulli(self.key, 1 - self.rate, (*shape, self.dim))

  def run(
    self,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    times: Callable[[jax.Array, jax.Array], jax.Array],
    keep: jax.Array | None,
  ) -> jax.Array:
    """Applies the experts to their tokens.

    Args:
      x: tokens (..., D).
      weights: kernels by name.
      times: multiplies tokens with the kernels of their experts.
      keep: mask from `keep`.

    Returns:
      (..., D).
    """
    activation, gated = mlp.KINDS[self.kind]
    h = times(x, weights["up"])
    if gated:
      h = activation(times(x, weights["gate"])) * h
    else:
      h = activation(h)
    if keep is not None:
      h = jnp.where(keep, h / (1 - self.rate), 0)
    return times(h, weights["down"])


def dropless(
  x_BLD: jax.Array,
  routing: Routing,
  weights: dict[str, jax.Array],
  experts: Experts,
) -> jax.Array:
  """Sorts each device's tokens by expert and multiplies in groups.

  Args:
    x_BLD: tokens.
    routing: experts of the tokens.
    weights: kernels by name.
    experts: the experts' MLPs.

  Returns:
    [B, L, D].
  """
  args = (x_BLD, routing, experts.keep(*routing.expert_BLJ.shape), weights)
  run = functools.partial(_sorted, experts._replace(key=None))
  mesh = sharding.ambient(len(x_BLD))
  if mesh is None:
    return run(*args)
  by_batch = PartitionSpec(sharding.AXES)
  return jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(by_batch, by_batch, by_batch, PartitionSpec()),
    out_specs=by_batch,
  )(*args)


def _sorted(
  experts: Experts,
  x_BLD: jax.Array,
  routing: Routing,
  keep_BLJF: jax.Array | None,
  weights: Mapping[str, jax.Array],
) -> jax.Array:
  B, L, D = x_BLD.shape
  J = routing.expert_BLJ.shape[-1]
  E = weights["up"].shape[0]
  expert = routing.expert_BLJ.reshape(-1)
  order = jnp.argsort(expert, stable=True)
  sizes_E = jnp.sum(jax.nn.one_hot(expert, E, dtype=jnp.int32), axis=0)
  x = jnp.take(x_BLD.reshape(-1, D), order // J, axis=0)
  if keep_BLJF is not None:
    keep_BLJF = jnp.take(keep_BLJF.reshape(len(order), -1), order, axis=0)
  times = functools.partial(jax.lax.ragged_dot, group_sizes=sizes_E)
  y = experts.run(x, weights, times, keep_BLJF)
  y = jnp.take(y, jnp.argsort(order), axis=0).reshape(B, L, J, D)
  return jnp.einsum("bljd,blj->bld", y, routing.weight_BLJ.astype(y.dtype))


def with_capacity(
  x_BLD: jax.Array,
  routing: Routing,
  weights: Mapping[str, jax.Array],
  experts: Experts,
  real_BL: jax.Array,
  factor: float,
) -> tuple[jax.Array, jax.Array]:
  """Gives each expert at most C tokens of a row, and drops the rest.

  All first choices are served before all second choices, and among those
  earlier tokens before later ones.

  Args:
    x_BLD: tokens.
    routing: experts of the tokens.
    weights: kernels by name.
    experts: the experts' MLPs.
    real_BL: bool, False for padding.
    factor: C is this times L * J / E, rounded up.

  Returns:
    ([B, L, D], share of the real tokens' choices that were dropped).
  """
  B, L, D = x_BLD.shape
  J = routing.expert_BLJ.shape[-1]
  E = weights["up"].shape[0]
  C = min(L, math.ceil(factor * L * J / E))
  # Choices in the order in which they are served: [B, J * L].
  serve = lambda x: jnp.swapaxes(x, 1, 2).reshape(B, J * L)
  real = jnp.tile(real_BL, (1, J))
  expert = serve(routing.expert_BLJ)
  wants_BQE = jax.nn.one_hot(expert, E, dtype=jnp.int32) * real[..., None]
  before_BQE = jnp.cumsum(wants_BQE, axis=1) - wants_BQE
  rank = jnp.sum(before_BQE * wants_BQE, axis=-1)
  served = real & (rank < C)
  # Slot E * C stands for choices without a slot.
  slot = jnp.where(served, expert * C + rank, E * C)
  token = jnp.broadcast_to(jnp.tile(jnp.arange(L), J), slot.shape)
  put = jax.vmap(lambda s, t: jnp.full(E * C + 1, L).at[s].set(t))
  token_of_slot = put(slot, token)[:, : E * C]
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
  take = jax.vmap(lambda x, i: jnp.take(x, i, axis=0))
  x_BECD = take(pad(x_BLD), token_of_slot).reshape(B, E, C, D)

  by_batch, by_expert = (
    PartitionSpec(sharding.AXES),
    PartitionSpec(*sharding.AXES),
  )
  # All to all, to the experts' devices and back.
  x_BECD = _constrained(_constrained(x_BECD, by_batch), by_expert)
  times = functools.partial(jnp.einsum, "becd,edf->becf")
  with model_flops.share(L * J, E * C):  # Empty slots are not model FLOPs.
    y_BECD = experts.run(x_BECD, weights, times, experts.keep(B, E, C))
  y_BECD = _constrained(_constrained(y_BECD, by_expert), by_batch)
  y = take(pad(y_BECD.reshape(B, E * C, D)), slot).reshape(B, J, L, D)
  weight_BJL = jnp.swapaxes(routing.weight_BLJ, 1, 2).astype(y.dtype)
  y_BLD = jnp.einsum("bjld,bjl->bld", y, weight_BJL)
  dropped = jnp.sum(real & ~served) / jnp.maximum(jnp.sum(real), 1)
  return y_BLD, dropped


def _constrained(x_BECD: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Constrains the sharding, if there is a mesh and the array divides."""
  mesh = sharding.ambient(len(x_BECD))
  if mesh is None or x_BECD.shape[1] % mesh.shape["fsdp"]:
    return x_BECD
  return jax.lax.with_sharding_constraint(x_BECD, spec)
