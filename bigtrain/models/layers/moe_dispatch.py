"""Sends tokens to their experts and back, without or with a capacity.

`dropless` serves every choice: it sorts tokens by expert, so that experts have
as many as they get. `with_capacity` gives each example C slots of each expert
and drops the choices beyond, so that all shapes are known. `Slots` and the
functions after it are also those of expert choice (moe_expert_choice.py).

On a mesh both run under a shard_map (Split says how). With an axis for the
experts, each of its n devices has E / n of them: tokens go to the devices of
their experts in one all-to-all, their results return in another, and gradients
go the same way back (without a capacity, see moe_exchange.py). Without an axis,
devices gather the weights of all experts.

Axes: B batch, L length, D model width, F hidden width, E experts, J experts of
a token, C capacity. On a device: b examples, l positions, t tokens, S slots.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.models.layers import moe_exchange, moe_experts
from bigtrain.models.layers.moe_experts import Experts, Routing

# Dimensions of the hidden units, in arrays whose first one is the experts.
_HIDDEN_DIMS = {"up": 2, "gate": 2, "down": 1, "up_bias": 1, "gate_bias": 1}
# Axes of the mesh that may split what belongs to an example.
_IN_EXAMPLES = ("sequence", "tensor")


class Split(NamedTuple):
  """Layout of an MoE layer on a mesh."""

  mesh: jax.sharding.AbstractMesh
  axis: str | None  # Axis of whole experts; None if each device needs all.
  stream: PartitionSpec  # Of activations [B, L, D].
  hidden: bool  # Whether the hidden units are split over `tensor`.

  @property
  def ways(self) -> int:
    return 1 if self.axis is None else int(self.mesh.shape[self.axis])

  @property
  def length(self) -> tuple[str, ...]:
    """Axes that split L between the layers."""
    return sharding.axes_of_length(self.stream)

  @property
  def own(self) -> tuple[str, ...]:
    """Axes that split L, or slots, inside the layer.

    Devices along `tensor` have the same tokens if it splits the hidden units.
    """
    if self.hidden:
      return tuple(axis for axis in self.length if axis != "tensor")
    return tuple(self.length)

  @property
  def rows(self) -> PartitionSpec:
    """Spec of [B, L, ...] inside the layer."""
    return PartitionSpec(sharding.batch_axes(self.mesh), self.own or None)

  @property
  def units(self) -> str | None:
    return "tensor" if self.hidden else None

  @property
  def varying(self) -> tuple[str, ...]:
    """Axes whose devices compute different things."""
    hidden = ("tensor",) if self.hidden else ()
    return (*sharding.batch_axes(self.mesh), *self.own, *hidden)


def _split_of(
  x_BLD: jax.Array, hidden: int, num_experts: int, axis: str | None
) -> Split | None:
  mesh = sharding.ambient(x_BLD.shape[0])
  if mesh is None:
    return None
  stream = sharding.stream_spec(mesh, x_BLD)
  tensor = mesh.shape.get("tensor", 1)
  splits_hidden = axis != "tensor" and tensor > 1 and hidden % tensor == 0
  # If all devices of the axis have the same tokens, such as the only one in
  # decoding, nothing is exchanged: each device gathers the experts.
  splits = (*sharding.batch_axes(), *sharding.axes_of_length(stream))
  ways = 1 if axis is None else mesh.shape.get(axis, 1)
  if axis not in splits or ways == 1 or num_experts % ways:
    axis = None
  return Split(mesh, axis, stream, splits_hidden)


def _weights_of(
  split: Split, weights: Mapping[str, jax.Array]
) -> tuple[dict[str, PartitionSpec], Callable[..., dict[str, jax.Array]]]:
  """Specs of the experts' weights, and a function that gathers them.

  The gradients of kernels are summed over devices once, and reduce-scattered
  over `fsdp`; XLA's own choice was an all-reduce of kernels padded with zeros.
  """
  specs = {}
  gathered = {}  # Dimension of each kernel that is gathered over `fsdp`.
  for name, kernel in weights.items():
    placed: dict[int, tuple[str, ...]] = {}
    if split.axis is not None:
      placed[0] = (split.axis,)
    if split.hidden and name in _HIDDEN_DIMS:
      placed[_HIDDEN_DIMS[name]] = ("tensor",)
    ways = split.mesh.shape["fsdp"]
    dim = None
    if split.axis != "fsdp" and ways > 1:
      if kernel.ndim == 3:  # No bias.
        placed = sharding.experts_or_rows(kernel.shape) | placed
      dim = sharding.largest_free(kernel.shape, ways, placed)
    if dim is not None:
      placed[dim] = ("fsdp",)
      gathered[name] = dim
    specs[name] = sharding.spec_of(placed)

  def gather(weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    result = {}
    for name, kernel in weights.items():
      if name in gathered:
        dim = gathered[name]
        kernel = jax.lax.all_gather(kernel, "fsdp", axis=dim, tiled=True)
      missing = tuple(axis for axis in split.varying if axis not in specs[name])
      result[name] = jax.lax.pcast(kernel, missing, to="varying")
    if split.hidden and "down_bias" in result:
      # Results are summed over `tensor`: only one of the parts adds the bias.
      first = jax.lax.axis_index("tensor") == 0
      result["down_bias"] *= first.astype(result["down_bias"].dtype)
    return result

  return specs, gather


def dropless(
  x_BLD: jax.Array,
  routing: Routing,
  weights: dict[str, jax.Array],
  experts: Experts,
  real_BL: jax.Array,
  axis: str | None,
  buffer_factor: float,
) -> tuple[jax.Array, jax.Array | None]:
  """Serves all choices; the result of padding is 0.

  Returns:
    ([B, L, D], the number of rounds of the exchange, if there is one).
  """
  # Drawn for the whole batch, so that dropout does not depend on the mesh.
  keep_BLJF = experts.keep(*routing.expert_BLJ.shape)
  E = weights["up"].shape[0]
  kernels = moe_experts.by_kernels(len(x_BLD))
  experts = experts._replace(key=None, kernels=kernels)
  split = _split_of(x_BLD, experts.dim, E, axis)
  if split is None:
    serve = functools.partial(_serve_all, experts, E, None)
    return serve(weights, x_BLD, routing, keep_BLJF, real_BL)
  specs, gather = _weights_of(split, weights)
  exchange = None
  if split.axis is not None:
    exchange = moe_exchange.Exchange(
      split.axis, split.ways, E, experts, buffer_factor, split.varying
    )
  serve = functools.partial(_serve_all, experts, E, exchange)

  def on_device(
    weights: dict[str, jax.Array],
    x_BLD: jax.Array,
    routing: Routing,
    keep_BLJF: jax.Array | None,
    real_BL: jax.Array,
  ) -> tuple[jax.Array, jax.Array | None]:
    weights = gather(weights)
    if split.hidden:
      # Each device has some hidden units, for all tokens of the others.
      routing, real_BL = jax.lax.pcast(
        (routing, real_BL), "tensor", to="varying"
      )
      x_BLD = sharding.gathered(x_BLD, split.stream)
    y_BLD, rounds = serve(weights, x_BLD, routing, keep_BLJF, real_BL)
    if split.hidden:
      y_BLD = sharding.scattered(y_BLD, split.stream)
    return y_BLD, rounds

  keep_spec = PartitionSpec(*split.rows, None, split.units)
  result: tuple[jax.Array, jax.Array | None] = jax.shard_map(
    on_device,
    mesh=split.mesh,
    in_specs=(specs, split.stream, split.rows, keep_spec, split.rows),
    out_specs=(split.stream, PartitionSpec()),
    check_vma=not kernels,
  )(weights, x_BLD, routing, keep_BLJF, real_BL)
  return result


def _serve_all(
  experts: Experts,
  E: int,
  exchange: moe_exchange.Exchange | None,
  weights: Mapping[str, jax.Array],
  x_blD: jax.Array,
  routing: Routing,
  keep_blJF: jax.Array | None,
  real_bl: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
  """Serves the tokens of one device, [b, l, D]; see `dropless`."""
  b, l, D = x_blD.shape
  J = routing.expert_BLJ.shape[-1]
  # Padding comes last, so that it does not move the real tokens.
  expert_tJ = jnp.where(real_bl[..., None], routing.expert_BLJ, E)
  expert_tJ = expert_tJ.reshape(b * l, J)
  keep_tJF = None
  if keep_blJF is not None:
    keep_tJF = keep_blJF.reshape(b * l, J, -1)
  x_tD = x_blD.reshape(b * l, D)
  rounds = None
  if exchange is None:
    y_tJD = moe_experts.run(experts, x_tD, expert_tJ, keep_tJF, weights)
  else:
    y_tJD, rounds = exchange.served(x_tD, expert_tJ, keep_tJF, weights)
  y_blJD = y_tJD.reshape(b, l, J, D)
  weight_blJ = routing.weight_BLJ.astype(y_blJD.dtype)
  return jnp.einsum("bljd,blj->bld", y_blJD, weight_blJ), rounds


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
  """Serves up to C tokens of an example per expert, and drops the others.

  Returns:
    ([B, L, D], the share of dropped choices).
  """
  L = x_BLD.shape[1]
  J = routing.expert_BLJ.shape[-1]
  E = weights["up"].shape[0]
  C = min(L, math.ceil(factor * L * J / E))
  slots = slots_of(x_BLD, experts, E, C, axis)
  slot_BJL, choice_BEC, dropped = _slots(
    routing, real_BL, E, C, slots.padded, serve
  )
  fill = functools.partial(_fill, experts._replace(key=None), (L * J, E * C))
  y_BLD = slots.served(
    fill,
    weights,
    experts,
    x_BLD,
    (slot_BJL, slots.by_example()),
    (choice_BEC, slots.by_slot()),
    (routing.weight_BLJ, slots.by_example()),
  )
  return y_BLD, dropped


class Slots(NamedTuple):
  """The C slots of each expert for each example, and who has them.

  Devices that share an example share the slots of an expert.
  """

  split: Split | None
  E: int
  C: int
  padded: int  # C, rounded up so that these devices have equally many.

  def by_example(self) -> PartitionSpec:
    """Spec of [B, ...]."""
    return PartitionSpec(sharding.batch_axes())

  def by_slot(self) -> PartitionSpec:
    """Spec of [B, E, padded]."""
    own = () if self.split is None else self.split.own
    return PartitionSpec(sharding.batch_axes(), None, own or None)

  def served(
    self,
    fill: Callable[..., jax.Array],
    weights: dict[str, jax.Array],
    experts: Experts,
    x_BLD: jax.Array,
    *args: tuple[jax.Array, PartitionSpec],
  ) -> jax.Array:
    """Calls `fill` on each device, and returns its results [B, L, D].

    Args:
      fill: called with the split, the weights, the tokens, `args` and the mask
        of dropout.
      args: further arguments of `fill`, each with its layout.
    """
    split = self.split
    keep = _keep(experts, split, (len(x_BLD), self.E, self.C), self.padded)
    values = [x_BLD, *(value for value, _ in args), keep]
    if split is None:
      return fill(None, weights, *values)
    specs, gather = _weights_of(split, weights)

    def on_device(weights: dict[str, jax.Array], *values: Any) -> jax.Array:
      return fill(split, gather(weights), *values)

    args_specs = [spec for _, spec in args]
    return jax.shard_map(
      on_device,
      mesh=split.mesh,
      in_specs=(specs, split.stream, *args_specs, _mask_spec(split)),
      out_specs=split.stream,
    )(weights, *values)


def slots_of(
  x_BLD: jax.Array, experts: Experts, E: int, C: int, axis: str | None
) -> Slots:
  split = _split_of(x_BLD, experts.dim, E, axis)
  own = () if split is None else split.own
  parts = math.prod(split.mesh.shape[a] for a in own) if split else 1
  return Slots(split, E, C, math.ceil(C / parts) * parts)


def _slots(
  routing: Routing,
  real_BL: jax.Array,
  E: int,
  C: int,
  padded: int,
  serve: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gives the choices of each example the slots of their experts.

  Returns:
    Slot of each choice, int [B, J, L]: expert x `padded` + number, or E x
    `padded` for none.
    Choice of each slot, int [B, E, padded]: j L + l, or J L for none.
    Share of the choices that are dropped.
  """
  # Each device of a group looks at whole rows: these numbers are few.
  routing, real_BL = jax.tree.map(sharding.over_batch, (routing, real_BL))
  B, L, J = routing.expert_BLJ.shape
  place_BL = None
  if serve == "priority":
    assert routing.priority_BL is not None
    # Tokens in the order of their priority, and the place of each in it.
    order_BL = jnp.argsort(-routing.priority_BL, axis=1, stable=True)
    place_BL = jnp.argsort(order_BL, axis=1)
    expert_BLJ = jnp.take_along_axis(
      routing.expert_BLJ, order_BL[..., None], axis=1
    )
    routing = routing._replace(expert_BLJ=expert_BLJ)
    real_BL = jnp.take_along_axis(real_BL, order_BL, axis=1)
  # The Q = J L choices of an example: first ones of all tokens, second ones,
  # ...
  real = jnp.tile(real_BL, (1, J))
  expert = jnp.swapaxes(routing.expert_BLJ, 1, 2).reshape(B, J * L)
  wants_BQE = jax.nn.one_hot(expert, E, dtype=jnp.int32) * real[..., None]
  if serve in ("choice", "priority"):
    before_BQE = jnp.cumsum(wants_BQE, axis=1) - wants_BQE
  else:
    # The choices of one token are different experts, which do not compete.
    wants_BLE = jnp.sum(wants_BQE.reshape(B, J, L, E), axis=1)
    before_BLE = jnp.cumsum(wants_BLE, axis=1) - wants_BLE
    before_BQE = jnp.tile(before_BLE, (1, J, 1))
  # Number of earlier choices of the same expert, which is the slot's number.
  rank = jnp.sum(before_BQE * wants_BQE, axis=-1)
  served = real & (rank < C)
  slot = jnp.where(served, expert * padded + rank, E * padded)
  if place_BL is not None:  # Back to the order of the text.
    slot_BJL = slot.reshape(B, J, L)
    slot_BJL = jnp.take_along_axis(slot_BJL, place_BL[:, None], axis=2)
    slot = slot_BJL.reshape(B, J * L)

  # The inverse: the choice that each slot got.
  number = jnp.arange(J * L)
  empty = jnp.full(E * padded, J * L)

  def choices_of(slot: jax.Array) -> jax.Array:
    return empty.at[slot].set(number, mode="drop")

  choice_BEC = jax.vmap(choices_of)(slot).reshape(B, E, padded)
  dropped = jnp.sum(real & ~served) / jnp.maximum(jnp.sum(real), 1)
  return slot.reshape(B, J, L), choice_BEC, dropped


def _fill(
  experts: Experts,
  counts: tuple[int, int],
  split: Split | None,
  weights: Mapping[str, jax.Array],
  x_blD: jax.Array,
  slot_bJL: jax.Array,
  choice_bEC: jax.Array,
  weight_bLJ: jax.Array,
  keep: jax.Array | None,
) -> jax.Array:
  """Fills a device's slots, has them served, and adds up the results.

  Devices that share an example see all its tokens, and have c of its C slots
  each. `counts` are the numbers of choices and of slots, for model FLOPs.
  """
  own = () if split is None else split.own
  x_bLD = whole_examples(split, x_blD)
  b, L, D = x_bLD.shape
  J = slot_bJL.shape[1]
  E, c = choice_bEC.shape[1:]
  part = jax.lax.axis_index(own) if own else 0
  parts = jax.lax.axis_size(own) if own else 1

  # The place of each choice among this device's slots, [E, b, c] in a row.
  row_b11 = jnp.arange(b)[:, None, None]
  expert_bJL, rank_bJL = jnp.divmod(slot_bJL, c * parts)
  mine = (expert_bJL < E) & (rank_bJL // c == part)
  slot_bJL = (expert_bJL * b + row_b11) * c + rank_bJL % c
  slot_bJL = jnp.where(mine, slot_bJL, E * b * c)
  back_Jt = jnp.swapaxes(slot_bJL, 0, 1).reshape(J, b * L)

  # And the reverse: token and choice of each slot.
  def flat(x_bEC: jax.Array) -> jax.Array:
    return jnp.swapaxes(x_bEC, 0, 1).reshape(-1)

  j_bEC, l_bEC = jnp.divmod(choice_bEC, L)
  token_S = flat(jnp.where(j_bEC < J, row_b11 * L + l_bEC, b * L))
  number_bEC = (j_bEC * b + row_b11) * L + l_bEC
  choice_S = flat(jnp.where(j_bEC < J, number_bEC, J * b * L))

  x_SD = moe_experts.rows(x_bLD.reshape(b * L, D), token_S, back_Jt)
  x_ESD = x_SD.reshape(E, b * c, D)
  y_ESD = serve_slots(experts, counts, split, weights, x_ESD, keep)

  # Each device adds up the results of its slots, and then all devices do.
  y_SD = y_ESD.reshape(-1, D)
  y = moe_experts.rows(y_SD, back_Jt.reshape(-1), choice_S[None])
  with model_flops.share(1, parts):
    y_JbLD = y.reshape(J, b, L, D)
    y_bLD = jnp.einsum("jbld,blj->bld", y_JbLD, weight_bLJ.astype(y.dtype))
  return own_positions(split, y_bLD)


def _sums_over_tensor(split: Split | None) -> bool:
  """Whether the parts of a result are summed only over `tensor`."""
  return split is not None and split.hidden and "tensor" not in split.length


def whole_examples(split: Split | None, x_blD: jax.Array) -> jax.Array:
  """On a device: all positions of its examples."""
  if split is not None and split.length:
    x_blD = jax.lax.all_gather(x_blD, split.length, axis=1, tiled=True)
  if _sums_over_tensor(split):
    x_blD = jax.lax.pcast(x_blD, "tensor", to="varying")
  return x_blD


def own_positions(split: Split | None, y_bLD: jax.Array) -> jax.Array:
  """Adds up what devices have for the same examples; each keeps its part."""
  if split is not None and split.length:
    y_bLD = jax.lax.psum_scatter(
      y_bLD, split.length, scatter_dimension=1, tiled=True
    )
  return jax.lax.psum(y_bLD, "tensor") if _sums_over_tensor(split) else y_bLD


def serve_slots(
  experts: Experts,
  counts: tuple[int, int],
  split: Split | None,
  weights: Mapping[str, jax.Array],
  x_ESD: jax.Array,
  keep: jax.Array | None,
) -> jax.Array:
  """Brings a device's slots to their experts and back, [E, S, D].

  `counts`: how many of how many slots are model FLOPs; empty ones are not.
  """
  axis = None if split is None else split.axis
  if axis is not None:  # All devices' slots of this device's experts.
    x_ESD = jax.lax.all_to_all(x_ESD, axis, 0, 1, tiled=True)
  if keep is not None:
    keep = keep.reshape(*x_ESD.shape[:2], -1)
  with model_flops.share(*counts):
    products = moe_experts.Products(
      functools.partial(jnp.einsum, "esd,edf->esf"), lambda bias: bias[:, None]
    )
    y_ESD = experts.run(x_ESD, weights, products, keep)
  if axis is not None:
    y_ESD = jax.lax.all_to_all(y_ESD, axis, 1, 0, tiled=True)
  return y_ESD


def _mask_spec(split: Split) -> PartitionSpec:
  """Spec of `_keep`'s result."""
  axes = dict.fromkeys((*sharding.batch_axes(), *_IN_EXAMPLES))
  for name in (*sharding.batch_axes(), *split.own):
    axes[name] = name if name != split.axis else None
  return PartitionSpec(split.axis, *axes.values(), None, None, split.units)


def _keep(
  experts: Experts,
  split: Split | None,
  shape: tuple[int, int, int],
  padded: int,
) -> jax.Array | None:
  """The mask of dropout, laid out for the devices where slots are served.

  Returns:
    bool [E, batch's axes, sequence, tensor, b, c, F], or None without dropout.
    On a device these are the examples and slots of all devices that share its
    experts, in the order of their arrival.
  """
  keep_BECF = experts.keep(*shape)
  if keep_BECF is None:
    return None
  B, E, C = shape
  more = padded - C
  keep_BECF = jnp.pad(keep_BECF, ((0, 0), (0, 0), (0, more), (0, 0)))
  axes = sharding.batch_axes()
  ways = dict.fromkeys((*axes, *_IN_EXAMPLES), 1)
  if split is not None:
    for name in (*axes, *split.own):
      ways[name] = split.mesh.shape[name]
  batch_ways = [ways[name] for name in axes]
  sequence, tensor = (ways[name] for name in _IN_EXAMPLES)
  b = B // math.prod(batch_ways)
  c = padded // (sequence * tensor)
  keep = keep_BECF.reshape(*batch_ways, b, E, sequence, tensor, c, -1)
  # From [batch's axes, b, E, sequence, tensor, c, F].
  n = len(batch_ways)
  order = (n + 1, *range(n), n + 2, n + 3, n, n + 4, n + 5)
  return jnp.transpose(keep, order)
