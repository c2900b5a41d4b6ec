"""Sends tokens to their experts and back, without or with a capacity.

Axes: B batch, L length, D model width, F hidden width, E experts, J experts of
a token, C capacity. On a device: b examples, l positions, t tokens, K choices,
S slots; n devices of the experts' axis, Q rows from one device to another.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain import model_flops, sharding
from bigtrain.models.layers import moe_blocks, moe_exchange
from bigtrain.models.layers.moe_experts import Experts, Routing


def dropless(
  x_BLD: jax.Array,
  routing: Routing,
  weights: dict[str, jax.Array],
  experts: Experts,
  real_BL: jax.Array,
  axis: str | None,
) -> jax.Array:
  """Serves all choices, whatever their number for an expert.

  Args:
    real_BL: bool, False for padding, whose result is 0.
    axis: axis of the mesh that whole experts are split over, if any.

  Returns:
    [B, L, D].
  """
  keep_BLJF = experts.keep(*routing.expert_BLJ.shape)
  args = (x_BLD, routing, keep_BLJF, real_BL)
  E = weights["up"].shape[0]
  serve = functools.partial(_serve_all, experts._replace(key=None), E)
  split = moe_exchange.split_of(x_BLD, experts.dim, E, axis)
  if split is None:
    return serve(None, weights, *args)
  how = moe_exchange.weights_of(split, weights)

  def on_device(
    weights: dict[str, jax.Array],
    x_BLD: jax.Array,
    routing: Routing,
    keep_BLJF: jax.Array | None,
    real_BL: jax.Array,
  ) -> jax.Array:
    weights = moe_exchange.gather(split, how, weights)
    if not split.hidden:
      return serve(split, weights, x_BLD, routing, keep_BLJF, real_BL)
    routing, real_BL = jax.lax.pcast((routing, real_BL), "tensor", to="varying")
    x_BLD = sharding.gathered(x_BLD, split.stream)
    return sharding.scattered(
      serve(split, weights, x_BLD, routing, keep_BLJF, real_BL), split.stream
    )

  masks = PartitionSpec(*split.rows, None, split.units)
  return jax.shard_map(
    on_device,
    mesh=split.mesh,
    in_specs=(how.specs, split.stream, split.rows, masks, split.rows),
    out_specs=split.stream,
  )(weights, *args)


def _serve_all(
  experts: Experts,
  E: int,
  split: moe_exchange.Split | None,
  weights: Mapping[str, jax.Array],
  x_blD: jax.Array,
  routing: Routing,
  keep_blJF: jax.Array | None,
  real_bl: jax.Array,
) -> jax.Array:
  """Serves a device's tokens."""
  b, l, D = x_blD.shape
  J = routing.expert_BLJ.shape[-1]
  x_tD = x_blD.reshape(b * l, D)
  # Padding comes last, so that it does not move the real tokens.
  expert_tJ = jnp.where(real_bl[..., None], routing.expert_BLJ, E)
  expert_tJ = expert_tJ.reshape(b * l, J)
  keep_tJF = None
  if keep_blJF is not None:
    keep_tJF = keep_blJF.reshape(b * l, J, -1)
  args = experts, x_tD, expert_tJ, keep_tJF, weights
  if split is None or split.axis is None:
    y_tJD = moe_blocks.run(*args)
  else:
    y_tJD = _through_exchange(split.axis, split.ways, E, *args)
  y = y_tJD.reshape(b, l, J, D)
  return jnp.einsum("bljd,blj->bld", y, routing.weight_BLJ.astype(y.dtype))


def _through_exchange(
  axis: str,
  n: int,
  E: int,
  experts: Experts,
  x_tD: jax.Array,
  expert_tJ: jax.Array,
  keep_tJF: jax.Array | None,
  weights: Mapping[str, jax.Array],
) -> jax.Array:
  """Sends the choices to the devices of their experts, and back.

  Args:
    expert_tJ: int, their experts; E for none.
    keep_tJF: mask of dropout, or None.

  Returns:
    [t, J, D].
  """
  (t, J), K, own = expert_tJ.shape, expert_tJ.size, E // n
  # A token has at most `own` experts on one device.
  Q = t * min(J, own)
  expert_K = expert_tJ.reshape(K)
  order_K = jnp.argsort(expert_K, stable=True)
  sorted_K = jnp.take(expert_K, order_K)
  sizes_E = jnp.sum(jax.nn.one_hot(expert_K, E, dtype=jnp.int32), axis=0)
  send_n = jnp.sum(sizes_E.reshape(n, own), axis=1)
  # Sorted by expert, the choices for a device are a run of its part.
  shift_n = jnp.arange(n) * Q - (jnp.cumsum(send_n) - send_n)
  shift_K = jnp.take(shift_n, sorted_K // own, mode="fill", fill_value=n * Q)
  place_K = jnp.arange(K) + shift_K
  choice_R = jnp.full(n * Q, K).at[place_K].set(order_K, mode="drop")
  back_K = jnp.zeros_like(place_K).at[order_K].set(place_K)

  # The numbers of rows from all devices, for this one's experts.
  sizes_nE = jax.lax.all_gather(sizes_E, axis)
  first = jax.lax.axis_index(axis) * own
  sizes_no = jax.lax.dynamic_slice_in_dim(sizes_nE, first, own, axis=1)
  receive_n = jnp.sum(sizes_no, axis=1)
  ends_no = jnp.cumsum(sizes_no, axis=1)
  q = jnp.arange(Q)
  received_nQ = jnp.sum(q[None, :, None] >= ends_no[:, None], axis=-1)

  send = functools.partial(moe_exchange.exchange, axis)
  x_RD = moe_blocks.rows(x_tD, choice_R // J, back_K.reshape(t, J).T)
  x_nQD = send(x_RD.reshape(n, Q, -1), send_n, receive_n)
  keep_R1F = None
  if keep_tJF is not None:
    # A bit for each hidden unit: one device alone draws them in this order.
    bits = jnp.packbits(keep_tJF.reshape(K, -1), axis=-1)
    bits = jnp.take(bits, choice_R, axis=0, mode="fill", fill_value=0)
    bits = send(bits.reshape(n, Q, -1), send_n, receive_n)
    bits = jnp.unpackbits(bits, axis=-1, count=keep_tJF.shape[-1])
    keep_R1F = bits.reshape(n * Q, 1, -1).astype(bool)
  y_R1D = moe_blocks.run(
    experts,
    x_nQD.reshape(n * Q, -1),
    received_nQ.reshape(n * Q, 1),
    keep_R1F,
    weights,
    useful=K,
  )
  y_nQD = send(y_R1D.reshape(n, Q, -1), receive_n, send_n)
  y_KD = moe_blocks.rows(y_nQD.reshape(n * Q, -1), back_K, choice_R[None])
  return y_KD.reshape(t, J, -1)


def with_capacity(
  x_BLD: jax.Array,
  routing: Routing,
  weights: dict[str, jax.Array],
  experts: Experts,
  real_BL: jax.Array,
  factor: float,
  serve: str | None,
  axis: str | None,
) -> tuple[jax.Array, jax.Array]:
  """Gives each expert at most C tokens of a row, and drops the rest.

  Args:
    real_BL: bool, False for padding.
    serve: order of the choices, see moe.Options; by position if None.
    axis: axis of the mesh that whole experts are split over, if any.

  Returns:
    ([B, L, D], share of the real tokens' choices that were dropped).
  """
  B, L, _ = x_BLD.shape
  J = routing.expert_BLJ.shape[-1]
  E = weights["up"].shape[0]
  C = min(L, math.ceil(factor * L * J / E))
  split = moe_exchange.split_of(x_BLD, experts.dim, E, axis)
  # Devices that share an example share the slots of an expert.
  own = () if split is None else split.own
  parts = math.prod(split.mesh.shape[a] for a in own) if split else 1
  padded = math.ceil(C / parts) * parts
  slot_BJL, choice_BEC, dropped = _slots(routing, real_BL, E, C, padded, serve)
  keep = _keep(experts, split, (B, E, C), padded)
  fill = functools.partial(_fill, experts._replace(key=None), (L * J, E * C))
  args = x_BLD, slot_BJL, choice_BEC, routing.weight_BLJ, keep
  if split is None:
    return fill(None, weights, *args), dropped
  how = moe_exchange.weights_of(split, weights)
  batch = PartitionSpec(sharding.BATCH_AXES)
  slots = PartitionSpec(sharding.BATCH_AXES, None, own or None)
  y_BLD = jax.shard_map(
    lambda weights, *args: fill(
      split, moe_exchange.gather(split, how, weights), *args
    ),
    mesh=split.mesh,
    in_specs=(how.specs, split.stream, batch, slots, batch, _mask_spec(split)),
    out_specs=split.stream,
  )(weights, *args)
  return y_BLD, dropped


def _slots(
  routing: Routing,
  real_BL: jax.Array,
  E: int,
  C: int,
  padded: int,
  serve: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gives the choices of each row the slots of their experts.

  Args:
    real_BL: bool, False for padding.

  Returns:
    (int [B, J, L], slot of each choice, expert x `padded` + number, and
    E x `padded` for none; int [B, E, padded], choice of each slot, j L + l, and
    J L for none; the share of dropped choices).
  """
  # Each device of a group looks at whole rows: these numbers are few.
  routing, real_BL = jax.tree.map(sharding.over_batch, (routing, real_BL))
  B, L, J = routing.expert_BLJ.shape
  # Choices as [B, J * L]: the first ones of all tokens, the second ones, ...
  real = jnp.tile(real_BL, (1, J))
  expert = jnp.swapaxes(routing.expert_BLJ, 1, 2).reshape(B, J * L)
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
  slot = jnp.where(served, expert * padded + rank, E * padded)
  put = jax.vmap(
    lambda s: (
      jnp.full(E * padded, J * L).at[s].set(jnp.arange(J * L), mode="drop")
    )
  )
  choice_BEC = put(slot).reshape(B, E, padded)
  dropped = jnp.sum(real & ~served) / jnp.maximum(jnp.sum(real), 1)
  return slot.reshape(B, J, L), choice_BEC, dropped


def _fill(
  experts: Experts,
  counts: tuple[int, int],
  split: moe_exchange.Split | None,
  weights: Mapping[str, jax.Array],
  x_blD: jax.Array,
  slot_bJL: jax.Array,
  choice_bEC: jax.Array,
  weight_bLJ: jax.Array,
  keep: jax.Array | None,
) -> jax.Array:
  """Fills a device's slots, has them served, and adds up the results.

  Args:
    split: how the layer is split, None for one device.

  Returns:
    [b, l, D].
  """
  axis = None if split is None else split.axis
  if split is not None:
    x_blD = _whole_rows(split, x_blD)
  (b, L, D), J = x_blD.shape, slot_bJL.shape[1]
  E, c = choice_bEC.shape[1:]
  own = () if split is None else split.own
  part = jax.lax.axis_index(own) if own else 0
  parts = jax.lax.axis_size(own) if own else 1
  # Of this device's slots: [E, b, c] in a row.
  row_b11 = jnp.arange(b)[:, None, None]
  expert_bJL, rank_bJL = jnp.divmod(slot_bJL, c * parts)
  mine = (expert_bJL < E) & (rank_bJL // c == part)
  slot_bJL = (expert_bJL * b + row_b11) * c + rank_bJL % c
  slot_bJL = jnp.where(mine, slot_bJL, E * b * c)
  back_Jt = jnp.swapaxes(slot_bJL, 0, 1).reshape(J, b * L)
  j_bEC, l_bEC = jnp.divmod(choice_bEC, L)
  flat = lambda x: jnp.swapaxes(x, 0, 1).reshape(-1)
  token_S = flat(jnp.where(j_bEC < J, row_b11 * L + l_bEC, b * L))
  choice_S = flat(
    jnp.where(j_bEC < J, (j_bEC * b + row_b11) * L + l_bEC, J * b * L)
  )

  x_SD = moe_blocks.rows(x_blD.reshape(b * L, D), token_S, back_Jt)
  x_ESD = moe_exchange.to_experts(axis, x_SD.reshape(E, b * c, D))
  if keep is not None:
    keep = keep.reshape(*x_ESD.shape[:2], -1)
  with model_flops.share(*counts):  # Empty slots are not model FLOPs.
    times = functools.partial(jnp.einsum, "esd,edf->esf")
    y_ESD = experts.run(x_ESD, weights, times, keep)
  y_ESD = moe_exchange.from_experts(axis, y_ESD)
  y = moe_blocks.rows(y_ESD.reshape(-1, D), back_Jt.reshape(-1), choice_S[None])
  with model_flops.share(1, parts):
    y_bLD = jnp.einsum(
      "jbld,blj->bld", y.reshape(J, b, L, D), weight_bLJ.astype(y.dtype)
    )
  return y_bLD if split is None else _summed(split, y_bLD)


def _whole_rows(split: moe_exchange.Split, x_blD: jax.Array) -> jax.Array:
  """Gathers the length of the stream."""
  if split.length:
    x_blD = jax.lax.all_gather(x_blD, split.length, axis=1, tiled=True)
  if split.hidden and "tensor" not in split.length:
    x_blD = jax.lax.pcast(x_blD, "tensor", to="varying")
  return x_blD


def _summed(split: moe_exchange.Split, y_bLD: jax.Array) -> jax.Array:
  """Sums the parts of a result, each position on its device."""
  if split.length:
    y_bLD = jax.lax.psum_scatter(
      y_bLD, split.length, scatter_dimension=1, tiled=True
    )
  if split.hidden and "tensor" not in split.length:
    y_bLD = jax.lax.psum(y_bLD, "tensor")
  return y_bLD


def _mask_spec(split: moe_exchange.Split) -> PartitionSpec:
  """Spec of `_keep`."""
  axes = dict.fromkeys(sharding.AXES)
  for name in (*sharding.BATCH_AXES, *split.own):
    axes[name] = name if name != split.axis else None
  return PartitionSpec(split.axis, *axes.values(), None, None, split.units)


def _keep(
  experts: Experts,
  split: moe_exchange.Split | None,
  shape: tuple[int, int, int],
  padded: int,
) -> jax.Array | None:
  """Returns the mask of dropout, where the tokens of each slot are served.

  Args:
    shape: (B, E, C).

  Returns:
    bool [E, replica, fsdp, sequence, tensor, b, c, F]; on a device, the
    examples and slots of all devices that share its experts, in the order in
    which they arrive. None for no dropout.
  """
  keep_BECF = experts.keep(*shape)
  if keep_BECF is None:
    return None
  B, E, C = shape
  more = padded - C
  keep_BECF = jnp.pad(keep_BECF, ((0, 0), (0, 0), (0, more), (0, 0)))
  ways = dict.fromkeys(sharding.AXES, 1)
  if split is not None:
    for name in (*sharding.BATCH_AXES, *split.own):
      ways[name] = split.mesh.shape[name]
  replica, fsdp, sequence, tensor = ways.values()
  keep = keep_BECF.reshape(
    *(replica, fsdp, B // (replica * fsdp), E),
    *(sequence, tensor, padded // (sequence * tensor), -1),
  )
  return jnp.transpose(keep, (3, 0, 1, 4, 5, 2, 6, 7))
