"""Sends tokens to their experts and back, without or with a capacity.

Axes: B batch, L length, D model width, F hidden width, E experts, J experts of
a token, C capacity, R choices of a device, N blocks of T rows, S = N T slots.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
  real_BL: jax.Array,
) -> jax.Array:
  """Sorts each device's tokens into blocks of one expert each.

  Args:
    x_BLD: tokens.
    routing: experts of the tokens.
    weights: kernels by name.
    experts: the experts' MLPs.
    real_BL: bool, False for padding, whose result is 0.

  Returns:
    [B, L, D].
  """
  keep_BLJF = experts.keep(*routing.expert_BLJ.shape)
  args = (x_BLD, routing, keep_BLJF, real_BL, weights)
  run = functools.partial(_in_blocks, experts._replace(key=None))
  mesh = sharding.ambient(x_BLD.shape[0])
  if mesh is None:
    return run(*args)

  def on_device(
    x_BLD: jax.Array,
    routing: Routing,
    keep_BLJF: jax.Array | None,
    real_BL: jax.Array,
    weights: dict[str, jax.Array],
  ) -> jax.Array:
    # Each device uses a copy of its own from here on; the transpose sums the
    # copies' gradients over the devices, once.
    copies = jax.lax.pcast(weights, (*sharding.BATCH_AXES, *own), to="varying")
    if not in_parts:
      return run(x_BLD, routing, keep_BLJF, real_BL, copies)
    routing, real_BL = jax.lax.pcast((routing, real_BL), "tensor", to="varying")
    x_BLD = sharding.gathered(x_BLD, stream)
    return sharding.scattered(
      run(x_BLD, routing, keep_BLJF, real_BL, copies), stream
    )

  # Each device of a `tensor` group has a part of every expert's hidden units.
  in_parts = experts.dim % mesh.shape.get("tensor", 1) == 0
  in_parts = in_parts and mesh.shape.get("tensor", 1) > 1
  stream = sharding.stream_spec(mesh, x_BLD)
  rows = masks = stream
  own = sharding.axes_of_length(stream)
  by_name = {name: PartitionSpec() for name in weights}
  if in_parts:
    own = tuple(a for a in own if a != "tensor")
    rows = PartitionSpec(sharding.BATCH_AXES, own or None)
    masks = PartitionSpec(sharding.BATCH_AXES, own or None, None, "tensor")
    by_name = {
      name: PartitionSpec(None, None, "tensor")
      if name != "down"
      else PartitionSpec(None, "tensor")
      for name in weights
    }
  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(stream, rows, masks, rows, by_name),
    out_specs=stream,
  )(*args)


def block_size(choices: int, num_experts: int) -> int:
  """Returns T, the rows of a block.

  Small blocks are less efficient, and large ones have more empty rows: up to T
  for each expert. From 32 choices per expert on, that is at most a quarter.

  >>> block_size(16_384, 8), block_size(100, 8)
  (512, 8)

  Args:
    choices: B * L * J.
    num_experts: E.
  """
  most = max(choices // (4 * num_experts), 8)
  return min(512, 2 ** (most.bit_length() - 1))


def _in_blocks(
  experts: Experts,
  x_BLD: jax.Array,
  routing: Routing,
  keep_BLJF: jax.Array | None,
  real_BL: jax.Array,
  weights: Mapping[str, jax.Array],
) -> jax.Array:
  B, L, D = x_BLD.shape
  J = routing.expert_BLJ.shape[-1]
  E = weights["up"].shape[0]
  R = B * L * J
  T = block_size(R, E)
  N = R // T + E  # As many blocks as R rows need at most.
  # Padding comes last, so that it does not move the real tokens.
  expert_R = jnp.where(real_BL[..., None], routing.expert_BLJ, E).reshape(R)
  order_R = jnp.argsort(expert_R, stable=True)
  sizes_E = jnp.sum(jax.nn.one_hot(expert_R, E, dtype=jnp.int32), axis=0)
  blocks_E = -(-sizes_E // T)
  ends_E = jnp.cumsum(blocks_E)
  # Of the sorted rows: the place in the blocks, or beyond them for padding.
  first_E = (ends_E - blocks_E) * T - (jnp.cumsum(sizes_E) - sizes_E)
  sorted_R = jnp.take(expert_R, order_R)
  first_R = jnp.take(first_E, sorted_R, mode="fill", fill_value=N * T)
  place_R = jnp.arange(R) + first_R
  # The expert of each block; blocks at the end may be empty.
  expert_N = jnp.sum(jnp.arange(N)[:, None] >= ends_E, axis=1)
  expert_N = jnp.minimum(expert_N, E - 1)
  choice_S = jnp.full(N * T, R).at[place_R].set(order_R, mode="drop")
  take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
  x_NTD = take(x_BLD.reshape(-1, D), choice_S // J).reshape(N, T, D)
  keep = None
  if keep_BLJF is not None:
    keep = take(keep_BLJF.reshape(R, -1), choice_S).reshape(N, T, -1)
  times = lambda x, kernel: _times(R, x, kernel, expert_N)
  y_NTD = experts.run(x_NTD, weights, times, keep)
  back_R = jnp.zeros_like(place_R).at[order_R].set(place_R)
  y = take(y_NTD.reshape(N * T, D), back_R).reshape(B, L, J, D)
  return jnp.einsum("bljd,blj->bld", y, routing.weight_BLJ.astype(y.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _times(
  rows: int, x_NTD: jax.Array, kernel_EDF: jax.Array, expert_N: jax.Array
) -> jax.Array:
  """Multiplies each block with the kernel of its expert.

  jax.lax.ragged_dot needs no blocks, but on CPUs and GPUs it multiplies every
  row with all experts, and on TPUs its gradient does so for the kernel.

  Args:
    rows: number of rows that the mathematics needs.
    x_NTD: blocks.
    kernel_EDF: kernels of the experts.
    expert_N: int, expert of each block.

  Returns:
    [N, T, F].
  """
  one = lambda block: block[0] @ kernel_EDF[block[1]]
  with model_flops.share(rows, x_NTD.shape[0] * x_NTD.shape[1]):
    return jax.lax.map(one, (x_NTD, expert_N))


def _times_forward(rows: int, *args: jax.Array) -> tuple[jax.Array, Any]:
  return _times(rows, *args), args


def _times_backward(rows: int, args: Any, grad_NTF: jax.Array) -> Any:
  x_NTD, kernel_EDF, expert_N = args

  # One expert's sum is float32; the array of all sums has the kernel's dtype.
  def add_block(sums: Any, block: Any) -> Any:
    sum_DF, sums_EDF = sums
    x_TD, grad_TF, e, first = block
    product_DF = jnp.matmul(x_TD.T, grad_TF, preferred_element_type=jnp.float32)
    sum_DF = jnp.where(first, 0.0, sum_DF) + product_DF
    sums_EDF = sums_EDF.at[e].set(sum_DF.astype(sums_EDF.dtype))
    return (sum_DF, sums_EDF), grad_TF @ kernel_EDF[e].T

  first_N = jnp.diff(expert_N, prepend=-1) != 0
  zeros = jnp.zeros_like(kernel_EDF[0], jnp.float32), jnp.zeros_like(kernel_EDF)
  with model_flops.share(rows, x_NTD.shape[0] * x_NTD.shape[1]):
    (_, kernel_grad_EDF), x_grad_NTD = jax.lax.scan(
      add_block, zeros, (x_NTD, grad_NTF, expert_N, first_N)
    )
  return x_grad_NTD, kernel_grad_EDF, None


_times.defvjp(_times_forward, _times_backward)


def with_capacity(
  x_BLD: jax.Array,
  routing: Routing,
  weights: Mapping[str, jax.Array],
  experts: Experts,
  real_BL: jax.Array,
  factor: float,
  serve: str | None,
) -> tuple[jax.Array, jax.Array]:
  """Gives each expert at most C tokens of a row, and drops the rest.

  Args:
    x_BLD: tokens.
    routing: experts of the tokens.
    weights: kernels by name.
    experts: the experts' MLPs.
    real_BL: bool, False for padding.
    factor: C is this times L * J / E, rounded up.
    serve: order of the choices, see moe.Options; by position if None.

  Returns:
    ([B, L, D], share of the real tokens' choices that were dropped).
  """
  B, L, D = x_BLD.shape
  J = routing.expert_BLJ.shape[-1]
  E = weights["up"].shape[0]
  C = min(L, math.ceil(factor * L * J / E))
  # Choices as [B, J * L]: the first ones of all tokens, the second ones, ...
  by_choice = lambda x: jnp.swapaxes(x, 1, 2).reshape(B, J * L)
  real = jnp.tile(real_BL, (1, J))
  expert = by_choice(routing.expert_BLJ)
  wants_BQE = jax.nn.one_hot(expert, E, dtype=jnp.int32) * real[..., None]
  if serve == "choice":
    before_BQE = jnp.cumsum(wants_BQE, axis=1) - wants_BQE
  else:
    # The choices of one token are different experts, which do not compete.
    wants_BLE = jnp.sum(wants_BQE.reshape(B, J, L, E), axis=1)
    before_BLE = jnp.cumsum(wants_BLE, axis=1) - wants_BLE
    before_BQE = jnp.tile(before_BLE, (1, J, 1))
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

  # Devices that share an example share the slots of an expert.
  split = sharding.length_ways(B, C) > 1
  slots = (None, "sequence") if split else ()
  by_batch, by_expert = (
    PartitionSpec(sharding.BATCH_AXES, *slots),
    PartitionSpec(*sharding.BATCH_AXES, *slots[1:]),
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
  mesh = sharding.ambient(x_BECD.shape[0])
  if mesh is None or x_BECD.shape[1] % mesh.shape["fsdp"]:
    return x_BECD
  return jax.lax.with_sharding_constraint(x_BECD, spec)
