"""Attention of examples whose positions are split over the axis `sequence`.

Each of n devices has a contiguous part of an example's queries, keys and
values. Keys and values are gathered, or pass from device to device in a ring,
as in Ring Attention, https://arxiv.org/abs/2310.01889. In causal attention
later queries see more positions, so the last device would have the most work.
Devices therefore exchange parts of their queries first, and in a ring also of
their keys: of 2 n parts, device i gets i and 2 n - 1 - i, which makes the work
equal.

`attend` makes a Plan (which blocks, in which order), pads the inputs to it, and
runs one of three functions on each device: `_blockwise` in plain JAX, with
gathered keys or a ring; `_by_splash`, the kernel for TPUs, with gathered keys;
or `_locally`, any other backend, with gathered keys and queries in order.

Axes: see attention_inputs.py; N blocks of A queries, M blocks of C positions;
n devices.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.models.layers import (
  attention_blockwise,
  attention_kernels,
  masks,
  positions,
)
from bigtrain.models.layers.attention_inputs import Inputs

AXIS = "sequence"

# Lanes of a TPU's vector registers. On accelerators, longer blocks are whole
# multiples of it, so that no register is partly empty.
_LANES = 128

# Computes a device's part. The second argument is the number of its first
# query, or None without a causal mask.
LocalFn = Callable[[Inputs, Any], jax.Array]


class Plan(NamedTuple):
  """The assignment of attention's blocks to devices, and their order."""

  ways: int  # n.
  queries: int  # L, in tokens.
  keys: int  # S.
  # Mask by the order of positions; not causal with a prefix.
  order: masks.Mask
  # Whether keys and values pass in a ring; otherwise they are gathered.
  ring: bool
  # Whether devices have an early and a late part of the queries and, in a ring,
  # of the keys.
  balanced: bool
  block_q: int  # A.
  block_k: int  # C.
  # L and S, padded to whole blocks on all devices.
  padded_queries: int
  padded_keys: int


class Tables(NamedTuple):
  """A plan's blocks on each device. The lists have an entry for each step.

  There is one step with all keys, or n steps with the keys of one device each.
  """

  rows: np.ndarray  # Int [n, N], number of the first query of each block.
  columns: list[np.ndarray]  # Int [n, M], the same of the keys.
  # Int [n, pairs, 2], as in attention_blockwise.Blocks.
  pairs: list[np.ndarray]


def plan_of(
  ways: int,
  queries: int,
  keys: int,
  mask: masks.Mask,
  *,
  ring: bool,
  balanced: bool,
) -> Plan:
  parts = 2 * ways if balanced else ways
  block_q, padded_queries = _blocks(queries, parts)
  block_k, padded_keys = _blocks(keys, parts)
  return Plan(
    ways=ways,
    queries=queries,
    keys=keys,
    order=masks.Mask(mask.in_order, mask.window),
    ring=ring,
    balanced=balanced,
    block_q=block_q,
    block_k=block_k,
    padded_queries=padded_queries,
    padded_keys=padded_keys,
  )


def _blocks(length: int, parts: int) -> tuple[int, int]:
  """The size of a block, and the length padded to whole blocks in each part."""
  largest = attention_blockwise.largest_block()
  part = math.ceil(length / parts)
  number = math.ceil(part / largest)
  size = math.ceil(part / number)
  if largest % _LANES == 0 and size > _LANES:
    size = math.ceil(size / _LANES) * _LANES
  return size, size * number * parts


@functools.lru_cache
def tables_of(plan: Plan) -> Tables:
  n = plan.ways
  rows = _firsts(plan, plan.padded_queries, plan.block_q)
  if plan.ring:
    # In step s, device i has the keys that device i - s had at first.
    keys = _firsts(plan, plan.padded_keys, plan.block_k)
    columns = [np.roll(keys, step, axis=0) for step in range(n)]
  else:
    all_keys = np.arange(0, plan.padded_keys, plan.block_k, dtype=np.int32)
    columns = [np.tile(all_keys, (n, 1))]
  # The pairs depend only on the sizes of the blocks.
  sizes = attention_blockwise.Static(1.0, None, plan.block_q, plan.block_k)
  pairs = []
  for step_columns in columns:
    visible = [
      attention_blockwise.visible_pairs(
        rows[device], step_columns[device], sizes, plan.order
      )
      for device in range(n)
    ]
    # All devices run the same program, so each needs as many pairs.
    most = max(len(device_pairs) for device_pairs in visible)
    shape = (rows.shape[1], step_columns.shape[1])
    pairs.append(np.stack([_filled(x, most, shape) for x in visible]))
  return Tables(rows, columns, pairs)


def _firsts(plan: Plan, length: int, block: int) -> np.ndarray:
  """Int [n, blocks], number of the first position of a device's blocks."""
  n = plan.ways
  if plan.balanced:
    parts = [[device, 2 * n - 1 - device] for device in range(n)]
  else:
    parts = [[device] for device in range(n)]
  part_size = length // (n * len(parts[0]))
  inside = np.arange(0, part_size, block)
  firsts = np.asarray(parts)[..., None] * part_size + inside
  return firsts.reshape(n, -1).astype(np.int32)


def _filled(
  pairs: np.ndarray, number: int, shape: tuple[int, int]
) -> np.ndarray:
  """Pads to a number of pairs of blocks; the added ones are fully masked."""
  if len(pairs) == number:
    return pairs
  masked = np.ones(shape, bool)
  masked[tuple(pairs.T)] = False
  one = np.argwhere(masked)[:1].astype(np.int32)
  return np.concatenate([pairs, np.repeat(one, number - len(pairs), axis=0)])


def attend(
  backend: str,
  inputs: Inputs,
  local: LocalFn,
  *,
  scale: float,
  softcap: float | None,
) -> jax.Array:
  """Attends, by `local` if a backend needs all keys and queries in order."""
  mask = inputs.mask
  B, S = inputs.k_BSGK.shape[:2]
  L = inputs.q.shape[1]
  mesh: Any = sharding.ambient(B)
  ways = int(mesh.shape[AXIS])
  make_plan = functools.partial(plan_of, ways, L, S, mask)
  compute: Callable[[Inputs], jax.Array]
  counted: Any = contextlib.nullcontext()
  if backend == "ring" or (backend == "blockwise" and mask.causal):
    plan = make_plan(ring=backend == "ring", balanced=mask.in_order)
    static = attention_blockwise.Static(
      scale, softcap, plan.block_q, plan.block_k
    )
    compute = functools.partial(_blockwise, plan, static)
  elif backend == "splash" and mask.causal:
    block, part = attention_kernels.splash_parts(L, 2 * ways)
    # A query of the padding sees itself, so that its output is finite.
    length = 2 * ways * part
    plan = make_plan(ring=False, balanced=True)._replace(
      block_q=block, padded_queries=length, padded_keys=length
    )
    compute = functools.partial(_by_splash, plan, scale, softcap)
  else:
    plan = make_plan(ring=False, balanced=False)._replace(
      padded_queries=math.ceil(L / ways) * ways,
      padded_keys=math.ceil(S / ways) * ways,
    )
    compute = functools.partial(_locally, plan, local)
    # Padding is not model FLOPs.
    counted = model_flops.share(L * S, plan.padded_queries * plan.padded_keys)
  with counted:
    return _split(plan, compute, inputs)


def largest_scores(inputs: Inputs, *, scale: float) -> jax.Array:
  """Like attention_blockwise.largest_scores, for causal attention."""
  mask = inputs.mask
  L, S = inputs.q.shape[1], inputs.k_BSGK.shape[1]
  mesh: Any = sharding.ambient(len(inputs.q))
  ways = int(mesh.shape[AXIS])
  plan = plan_of(ways, L, S, mask, ring=False, balanced=mask.in_order)
  static = attention_blockwise.Static(scale, None, plan.block_q, plan.block_k)

  def compute(inputs: Inputs) -> jax.Array:
    if plan.balanced:
      inputs = inputs._replace(q=_exchanged(inputs.q))
    largest = attention_blockwise.largest_scores(
      _with_all_keys(inputs), scale=scale, schedule=_Schedule(static, plan)
    )
    return _exchanged_back(largest) if plan.balanced else largest

  return _split(plan, compute, inputs)


def _split(
  plan: Plan, compute: Callable[[Inputs], jax.Array], inputs: Inputs
) -> jax.Array:
  """Calls `compute` on each device, with the whole mask, which is small."""
  B, L, G = inputs.q.shape[:3]
  S = inputs.k_BSGK.shape[1]
  mesh: Any = sharding.ambient(B)
  tensor = mesh.shape.get("tensor", 1)
  heads = "tensor" if tensor > 1 and G % tensor == 0 else None
  batch_axes = sharding.batch_axes()
  split = PartitionSpec(batch_axes, AXIS, heads)
  by_example = PartitionSpec(batch_axes)
  by_head = PartitionSpec(heads)
  bias_GRT = None
  if isinstance(inputs.bias, positions.BiasByDistance):
    # A bias for each distance of a query and a key, T = L + S - 1.
    more = (plan.padded_queries - L, plan.padded_keys - S)
    bias_GRT = jnp.pad(inputs.bias.by_group(G), ((0, 0), (0, 0), more))
  padded = attention_blockwise.padded
  padded_inputs = Inputs(
    padded(inputs.q, plan.padded_queries),
    padded(inputs.k_BSGK, plan.padded_keys),
    padded(inputs.v_BSGK, plan.padded_keys),
    _padded_mask(plan, inputs.mask, B),
    bias_GRT,
    inputs.sinks_GR,
  )
  # In the order of the fields of Inputs.
  specs: Any = (split, split, split, by_example, by_head, by_head)
  on_devices = jax.shard_map(
    compute, in_specs=(Inputs._make(specs),), out_specs=split, check_vma=False
  )
  return on_devices(padded_inputs)[:, :L]


def _padded_mask(plan: Plan, mask: masks.Mask, B: int) -> masks.Mask:
  def pad(length: int) -> Callable[[jax.Array], jax.Array]:
    return functools.partial(attention_blockwise.padded, length=length)

  real_BS = mask.real_BS
  # Causal queries do not see the padding after them anyway.
  sees_padding = plan.padded_keys > plan.keys and not plan.order.causal
  if real_BS is None and sees_padding:
    real_BS = jnp.ones((B, plan.keys), bool)
  mask = dataclasses.replace(mask, real_BS=real_BS)
  mask = mask.map_queries(pad(plan.padded_queries))
  return mask.map_positions(pad(plan.padded_keys))


def _with_all_keys(inputs: Inputs) -> Inputs:
  kv = (inputs.k_BSGK, inputs.v_BSGK)
  k_BSGK, v_BSGK = jax.lax.all_gather(kv, AXIS, axis=1, tiled=True)
  return inputs._replace(k_BSGK=k_BSGK, v_BSGK=v_BSGK)


def _locally(plan: Plan, local: LocalFn, inputs: Inputs) -> jax.Array:
  """One device's queries, in order, with all keys, by any backend."""
  inputs = _with_all_keys(inputs)
  mask = inputs.mask
  bias_GRT = inputs.bias
  L = inputs.q.shape[1]  # This device's queries.
  S = inputs.k_BSGK.shape[1]
  first = jax.lax.axis_index(AXIS) * L
  mask = mask.map_queries(
    lambda x_BL: jax.lax.dynamic_slice_in_dim(x_BL, first, L, axis=1)
  )
  bias = None
  if bias_GRT is not None:
    # The distances from this device's queries to all keys.
    bias_GRT = jax.lax.dynamic_slice_in_dim(
      bias_GRT, plan.padded_queries - first - L, L + S - 1, axis=2
    )
    bias = positions.BiasByDistance(bias_GRT.reshape(-1, bias_GRT.shape[2]))
  inputs = inputs._replace(mask=mask, bias=bias)
  o = local(inputs, first if mask.causal else None)
  return o.reshape(inputs.q.shape)


def _by_splash(
  plan: Plan, scale: float, softcap: float | None, inputs: Inputs
) -> jax.Array:
  """One device's early and late queries, with all keys, by the kernel."""
  mask = inputs.mask
  device = jax.lax.axis_index(AXIS)
  # The numbers of each device's queries, [n, queries].
  rows = _firsts(plan, plan.padded_queries, plan.block_q)
  numbers = rows[..., None] + np.arange(plan.block_q)
  numbers = numbers.reshape(plan.ways, -1)
  if mask.segments_BL is not None:
    own_numbers = jnp.asarray(numbers)[device]
    segments = jnp.take(mask.segments_BL, own_numbers, axis=1)
    mask = dataclasses.replace(mask, segments_BL=segments)
  o = attention_kernels.attend_rows_by_splash(
    _with_all_keys(inputs._replace(q=_exchanged(inputs.q), mask=mask)),
    numbers=numbers,
    device=device,
    block_q=plan.block_q,
    counted=plan.queries * mask.reach(plan.queries) // plan.ways,
    scale=scale,
    softcap=softcap,
  )
  return _exchanged_back(o)


def _blockwise(
  plan: Plan, static: attention_blockwise.Static, inputs: Inputs
) -> jax.Array:
  """One device's queries, with all keys or a ring of them, in plain JAX."""
  if plan.balanced:
    inputs = inputs._replace(q=_exchanged(inputs.q))
  if not plan.ring:
    inputs = _with_all_keys(inputs)
  elif plan.balanced:
    inputs = inputs._replace(
      k_BSGK=_exchanged(inputs.k_BSGK), v_BSGK=_exchanged(inputs.v_BSGK)
    )
  schedule = _Schedule(static, plan)
  o = attention_blockwise.attend_by_blocks(schedule, inputs)
  return _exchanged_back(o) if plan.balanced else o


def _owners(ways: int) -> list[list[tuple[int, int]]]:
  """Pairs of devices (from, to), for each one's first and its second part.

  Before the exchange, device i has the parts 2 i and 2 i + 1 of 2 n.
  """

  def owner(part: int) -> int:
    return min(part, 2 * ways - 1 - part)

  first = [(i, owner(2 * i)) for i in range(ways)]
  second = [(i, owner(2 * i + 1)) for i in range(ways)]
  return [first, second]


def _swapped(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(x, y) on devices with an even number, (y, x) on the others."""
  even = jax.lax.axis_index(AXIS) % 2 == 0
  return jnp.where(even, x, y), jnp.where(even, y, x)


def _exchanged(x: jax.Array) -> jax.Array:
  """Replaces a contiguous part of dimension 1 by an early and a late part."""
  to_first, to_second = _owners(jax.lax.axis_size(AXIS))
  first, second = jnp.split(x, 2, axis=1)
  # An even part is early on devices with an even number, late on the others.
  even = jax.lax.ppermute(first, AXIS, to_first)
  odd = jax.lax.ppermute(second, AXIS, to_second)
  return jnp.concatenate(_swapped(even, odd), axis=1)


def _exchanged_back(x: jax.Array) -> jax.Array:
  """The inverse of `_exchanged`."""
  to_first, to_second = _owners(jax.lax.axis_size(AXIS))
  first_back = [(receiver, sender) for sender, receiver in to_first]
  second_back = [(receiver, sender) for sender, receiver in to_second]
  even, odd = _swapped(*jnp.split(x, 2, axis=1))
  first = jax.lax.ppermute(even, AXIS, first_back)
  second = jax.lax.ppermute(odd, AXIS, second_back)
  return jnp.concatenate([first, second], axis=1)


@dataclasses.dataclass(frozen=True)
class _Schedule(attention_blockwise.Schedule):
  """A single step with all keys, or a step for each device of a ring."""

  plan: Plan

  @property
  def num_steps(self) -> int:
    return len(tables_of(self.plan).pairs)

  def pass_on(self, arrays: Any) -> Any:
    if not self.plan.ring:
      return arrays
    n = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(arrays, AXIS, [(i, (i + 1) % n) for i in range(n)])

  def blocks(self, step: int, inputs: Inputs) -> attention_blockwise.Blocks:
    plan = self.plan
    tables = tables_of(plan)
    mask = inputs.mask
    device = jax.lax.axis_index(AXIS)
    rows_N = jnp.asarray(tables.rows)[device]
    columns_M = jnp.asarray(tables.columns[step])[device]
    computed = sum(pairs.size // 2 for pairs in tables.pairs)
    order = attention_blockwise.Order(
      rows_N,
      columns_M,
      jnp.asarray(tables.pairs[step])[device],
      plan.padded_queries,
      counted=plan.queries * mask.reach(plan.keys),
      computed=computed * plan.block_q * plan.block_k,
    )

    def of_blocks(firsts: jax.Array, size: int) -> Any:
      """The entries of a mask for this device's blocks."""
      numbers = (firsts[:, None] + jnp.arange(size)).reshape(-1)
      return functools.partial(jnp.take, indices=numbers, axis=1)

    mask = mask.map_queries(of_blocks(rows_N, plan.block_q))
    mask = mask.map_positions(of_blocks(columns_M, plan.block_k))
    inputs = inputs._replace(mask=mask)
    return attention_blockwise.Blocks(self.static, inputs, order)
