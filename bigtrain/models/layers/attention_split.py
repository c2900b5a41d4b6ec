"""Attention of examples whose positions are split over the axis `sequence`.

Each device has a run of an example's queries, keys and values. Keys and values
are gathered, or they pass from device to device in a ring, as in Ring
Attention, https://arxiv.org/abs/2310.01889.

Later causal queries see more positions. So the devices exchange parts of their
queries first: of 2 n parts of an example, device i takes the parts i and
2 n - 1 - i, one early and one late, and with them as many scores as every other
device. In a ring keys and values are exchanged as well, and then each of its
steps is balanced. Outside of attention the positions keep their order, on which
dropout and the capacity of experts depend.

Axes: B batch, L length, S length attended to, G heads of keys and values, R
query heads of each, K head width; N blocks of A queries, M blocks of C
positions; T distances; n devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain import model_flops, sharding
from bigtrain.models.layers import (
  attention_blocks,
  attention_blockwise,
  attention_plan,
  attention_splash,
  masks,
  positions,
)

AXIS = "sequence"

# Computes a device's part of an attention: (q, k, v, what its queries see,
# number of its first query or None, bias) -> output.
LocalFn = Callable[..., jax.Array]


def attend(
  q_BLGRK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  local: LocalFn,
  *,
  bias: positions.BiasByDistance | None,
) -> jax.Array:
  """Gathers keys and values for any implementation.

  Returns:
    The output, of the shape and dtype of the queries.
  """
  ways = _ways(k_BSGK)
  L, S = q_BLGRK.shape[1], k_BSGK.shape[1]
  plan = attention_plan.make(ways, L, S, mask, False, False)._replace(
    padded_queries=math.ceil(L / ways) * ways,
    padded_keys=math.ceil(S / ways) * ways,
  )
  compute = functools.partial(_locally, plan, local)
  # Padding is not model FLOPs.
  with model_flops.share(L * S, plan.padded_queries * plan.padded_keys):
    return _split(plan, compute, q_BLGRK, k_BSGK, v_BSGK, mask, bias)


def attend_splash(
  q_BLGRK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  *,
  scale: float,
  softcap: float | None,
) -> jax.Array:
  """Balances causal work, by Splash kernels with all keys.

  Returns:
    The output, of the shape and dtype of the queries.
  """
  ways, L = _ways(k_BSGK), q_BLGRK.shape[1]
  block, part = attention_splash.part_blocks(L, 2 * ways)
  # A query of the padding sees itself, so that its output is finite.
  length = 2 * ways * part
  plan = attention_plan.make(ways, L, L, mask, False, True)._replace(
    block_q=block, padded_queries=length, padded_keys=length
  )
  local = functools.partial(
    attention_splash.attend_rows,
    numbers=attention_plan.numbers(plan),
    block_q=block,
    counted=L * mask.reach(L) // ways,
    scale=scale,
    softcap=softcap,
  )
  compute = functools.partial(_rows, plan, local)
  return _split(plan, compute, q_BLGRK, k_BSGK, v_BSGK, mask, None)


def attend_blockwise(
  q_BLGRK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  *,
  bias: positions.BiasByDistance | None,
  scale: float,
  softcap: float | None,
  ring: bool,
) -> jax.Array:
  """Balances causal work, block by block.

  Args:
    ring: whether keys and values pass in a ring.

  Returns:
    The output, of the shape and dtype of the queries.
  """
  balanced = mask.causal and mask.prefix_B is None
  L, S = q_BLGRK.shape[1], k_BSGK.shape[1]
  plan = attention_plan.make(_ways(k_BSGK), L, S, mask, ring, balanced)
  static = attention_blocks.Static(scale, softcap, plan.block_q, plan.block_k)
  compute = functools.partial(_blockwise, plan, static)
  return _split(plan, compute, q_BLGRK, k_BSGK, v_BSGK, mask, bias)


def _ways(k_BSGK: jax.Array) -> int:
  return int(sharding.ambient(k_BSGK.shape[0]).shape[AXIS])


def _split(
  plan: attention_plan.Plan,
  compute: Callable[..., jax.Array],
  q_BLGRK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  bias: positions.BiasByDistance | None,
) -> jax.Array:
  """Calls `compute` on each device with its part of the arrays.

  What a query sees comes as a whole: these arrays are small.
  """
  B, L, G = q_BLGRK.shape[:3]
  S = k_BSGK.shape[1]
  tensor = sharding.ambient(B).shape.get("tensor", 1)
  heads = "tensor" if tensor > 1 and G % tensor == 0 else None
  split = PartitionSpec(sharding.BATCH_AXES, AXIS, heads)
  by_example = PartitionSpec(sharding.BATCH_AXES)
  bias_GRT = None
  if bias is not None:
    more = plan.padded_queries - L, plan.padded_keys - S
    bias_GRT = jnp.pad(bias.by_group(G), ((0, 0), (0, 0), more))
  o_BLGRK = jax.shard_map(
    compute,
    in_specs=(split, split, split, by_example, PartitionSpec(heads)),
    out_specs=split,
    check_vma=False,
  )(
    _padded(q_BLGRK, plan.padded_queries),
    _padded(k_BSGK, plan.padded_keys),
    _padded(v_BSGK, plan.padded_keys),
    _padded_mask(plan, mask, B),
    bias_GRT,
  )
  return o_BLGRK[:, :L]


def _padded(x: jax.Array, length: int) -> jax.Array:
  """Pads dimension 1 with zeros."""
  if x.shape[1] == length:
    return x
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, length - x.shape[1])
  return jnp.pad(x, widths)


def _padded_mask(
  plan: attention_plan.Plan, mask: masks.Mask, B: int
) -> masks.Mask:
  """Hides the padding of the keys."""
  pad = lambda x, length: None if x is None else _padded(x, length)
  real_BS = mask.real_BS
  # Causal queries do not see the padding after them.
  hidden = plan.causal and not plan.prefix
  if real_BS is None and plan.padded_keys > plan.keys and not hidden:
    real_BS = jnp.ones((B, plan.keys), bool)
  return dataclasses.replace(
    mask,
    segments_BL=pad(mask.segments_BL, plan.padded_queries),
    segments_BS=pad(mask.segments_BS, plan.padded_keys),
    real_BS=pad(real_BS, plan.padded_keys),
  )


def _locally(
  plan: attention_plan.Plan,
  local: LocalFn,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: masks.Mask,
  bias_GRT: jax.Array | None,
) -> jax.Array:
  """A device's queries and all keys."""
  k, v = jax.lax.all_gather((k, v), AXIS, axis=1, tiled=True)
  L = q.shape[1]
  first = jax.lax.axis_index(AXIS) * L
  if mask.segments_BL is not None:
    segments = jax.lax.dynamic_slice_in_dim(mask.segments_BL, first, L, axis=1)
    mask = dataclasses.replace(mask, segments_BL=segments)
  bias = None
  if bias_GRT is not None:
    bias_GRT = jax.lax.dynamic_slice_in_dim(
      bias_GRT, plan.padded_queries - first - L, L + k.shape[1] - 1, axis=2
    )
    bias = positions.BiasByDistance(bias_GRT.reshape(-1, bias_GRT.shape[2]))
  o = local(q, k, v, mask, first if mask.causal else None, bias)
  return o.reshape(q.shape)


def _rows(
  plan: attention_plan.Plan,
  local: LocalFn,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: masks.Mask,
  bias_GRT: None,
) -> jax.Array:
  """A device's early and late queries, and all keys."""
  del bias_GRT
  k, v = jax.lax.all_gather((k, v), AXIS, axis=1, tiled=True)
  device = jax.lax.axis_index(AXIS)
  if mask.segments_BL is not None:
    own = jnp.asarray(attention_plan.numbers(plan))[device]
    segments = jnp.take(mask.segments_BL, own, axis=1)
    mask = dataclasses.replace(mask, segments_BL=segments)
  return _exchanged_back(local(_exchanged(q), k, v, mask, device=device))


def _blockwise(
  plan: attention_plan.Plan,
  static: attention_blocks.Static,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: masks.Mask,
  bias_GRT: jax.Array | None,
) -> jax.Array:
  """A device's blocks of queries and all keys, at once or in a ring."""
  if plan.balanced:
    q = _exchanged(q)
  if not plan.ring:
    k, v = jax.lax.all_gather((k, v), AXIS, axis=1, tiled=True)
  elif plan.balanced:
    k, v = _exchanged(k), _exchanged(v)
  o = _attend(plan, static, q, k, v, bias_GRT, mask)
  return _exchanged_back(o) if plan.balanced else o


def _owners(ways: int) -> list[list[tuple[int, int]]]:
  """Returns who sends its first part to whom, and its second one."""
  owner = lambda part: min(part, 2 * ways - 1 - part)
  return [[(i, owner(2 * i + half)) for i in range(ways)] for half in (0, 1)]


def _swapped(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (x, y) on devices with an even number, (y, x) on the others."""
  even = jax.lax.axis_index(AXIS) % 2 == 0
  return jnp.where(even, x, y), jnp.where(even, y, x)


def _exchanged(x: jax.Array) -> jax.Array:
  """An early and a late part of dimension 1 in place of a run."""
  to_first, to_second = _owners(jax.lax.axis_size(AXIS))
  first, second = jnp.split(x, 2, axis=1)
  # An even part is early on devices with an even number, late on the others.
  even = jax.lax.ppermute(first, AXIS, to_first)
  odd = jax.lax.ppermute(second, AXIS, to_second)
  return jnp.concatenate(_swapped(even, odd), axis=1)


def _exchanged_back(x: jax.Array) -> jax.Array:
  """The inverse of `_exchanged`."""
  to_first, to_second = _owners(jax.lax.axis_size(AXIS))
  back = lambda pairs: [(receiver, sender) for sender, receiver in pairs]
  even, odd = _swapped(*jnp.split(x, 2, axis=1))
  first = jax.lax.ppermute(even, AXIS, back(to_first))
  second = jax.lax.ppermute(odd, AXIS, back(to_second))
  return jnp.concatenate([first, second], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
  plan: attention_plan.Plan,
  static: Any,
  q: Any,
  k: Any,
  v: Any,
  bias: Any,
  mask: Any,
) -> jax.Array:
  """Blockwise attention in one step, or in one for each device of a ring."""
  return _forward(plan, static, q, k, v, bias, mask)[0]


def _forward(
  plan: attention_plan.Plan,
  static: Any,
  q: Any,
  k: Any,
  v: Any,
  bias: Any,
  mask: Any,
) -> tuple[jax.Array, Any]:
  steps = len(attention_plan.tables(plan).pairs)
  sums: Any = None
  kv = k, v
  for step in range(steps):
    # Sent before the step that needs them, behind the present one.
    passed = _passed_on(kv) if step + 1 < steps else kv
    blocks = _blocks_at(plan, static, q, kv[0], bias, mask, step)
    q_N = blocks.of_queries(q)
    if sums is None:
      sums = attention_blockwise.no_sums(q_N, v)
    k_M, v_M = map(blocks.of_keys, kv)
    sums = attention_blockwise.add_values(blocks, sums, q_N, k_M, v_M)
    kv = passed
  out, log_BGRL = attention_blockwise.results(blocks, sums, q)
  return out, (q, k, v, bias, mask, out, log_BGRL)


def _backward(
  plan: attention_plan.Plan, static: Any, saved: Any, grad: jax.Array
) -> tuple[Any, ...]:
  q, k, v, bias, mask, out, log_BGRL = saved
  steps = len(attention_plan.tables(plan).pairs)
  grads: Any = None
  kv = k, v
  for step in range(steps):
    passed = _passed_on(kv) if step + 1 < steps else kv
    blocks = _blocks_at(plan, static, q, kv[0], bias, mask, step)
    k_M, v_M = map(blocks.of_keys, kv)
    if grads is None:
      of_outputs = attention_blockwise.of_outputs(blocks, grad, out, log_BGRL)
      by_query = blocks.of_queries(q), *of_outputs
      grads = attention_blockwise.no_gradients(blocks, by_query[0], k_M, v_M)
    grads = attention_blockwise.add_gradients(blocks, grads, by_query, k_M, v_M)
    if plan.ring:  # With their keys, and home after the last step.
      dk_M, dv_M = _passed_on((grads.dk_M, grads.dv_M))
      grads = grads._replace(dk_M=dk_M, dv_M=dv_M)
    kv = passed
  dq = blocks.to_queries(grads.dq_N, q)
  dk, dv = blocks.to_keys(grads.dk_M, k), blocks.to_keys(grads.dv_M, v)
  return dq, dk, dv, grads.dbias, None


_attend.defvjp(_forward, _backward)


def _passed_on(arrays: Any) -> Any:
  """Sends arrays to the next device of the ring."""
  n = jax.lax.axis_size(AXIS)
  return jax.lax.ppermute(arrays, AXIS, [(i, (i + 1) % n) for i in range(n)])


def _blocks_at(
  plan: attention_plan.Plan,
  static: attention_blocks.Static,
  q: jax.Array,
  k: jax.Array,
  bias: jax.Array | None,
  mask: masks.Mask,
  step: int,
) -> attention_blocks.Blocks:
  """The blocks of this device at a step."""
  tables = attention_plan.tables(plan)
  device = jax.lax.axis_index(AXIS)
  own = lambda table: jnp.asarray(table)[device]
  rows_N, columns_M = own(tables.rows), own(tables.columns[step])
  computed = sum(pairs.size // 2 for pairs in tables.pairs)
  order = attention_blocks.Order(
    rows_N,
    columns_M,
    own(tables.pairs[step]),
    plan.padded_queries,
    counted=plan.queries * mask.reach(plan.keys),
    computed=computed * plan.block_q * plan.block_k,
  )

  def of_blocks(x: Any, firsts: jax.Array, size: int) -> Any:
    numbers = (firsts[:, None] + jnp.arange(size)).reshape(-1)
    return None if x is None else jnp.take(x, numbers, axis=1)

  mask = dataclasses.replace(
    mask,
    segments_BL=of_blocks(mask.segments_BL, rows_N, plan.block_q),
    segments_BS=of_blocks(mask.segments_BS, columns_M, plan.block_k),
    real_BS=of_blocks(mask.real_BS, columns_M, plan.block_k),
  )
  return attention_blocks.Blocks(static, q, k, bias, mask, order)
