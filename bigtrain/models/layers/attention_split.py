"""Attention of examples whose positions are split over the axis `sequence`.

Each device has a run of an example's queries, keys and values. Keys and values
are gathered, or pass from device to device in a ring, as in Ring Attention,
https://arxiv.org/abs/2310.01889. Later causal queries see more positions. So
devices exchange parts of their queries first, and in a ring of their keys: of 2
n parts, device i takes i and 2 n - 1 - i, which makes their work equal.

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

# On accelerators, longer blocks are whole numbers of the registers' lanes.
_LANES = 128

# Computes a device's part, from the number of the first query, or None.
LocalFn = Callable[[Inputs, Any], jax.Array]


class Plan(NamedTuple):
  """Which blocks of an attention the devices compute, and in what order."""

  ways: int
  queries: int
  keys: int
  # What the order of the positions masks; not causal with a prefix.
  order: masks.Mask
  # Whether keys and values pass in a ring; otherwise they are gathered.
  ring: bool
  # Whether devices have an early and a late part of the queries and, in a ring,
  # of the keys.
  balanced: bool
  block_q: int
  block_k: int
  # L in whole blocks on all devices, and S in `padded_keys`.
  padded_queries: int
  padded_keys: int


class Tables(NamedTuple):
  """Blocks of each device; columns and pairs for each step.

  Int rows [n, N] and columns [n, M] are numbers of first queries and positions;
  pairs [n, pairs, 2] are as in attention_blockwise.Blocks.
  """

  rows: np.ndarray
  columns: list[np.ndarray]
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
    ways,
    queries,
    keys,
    masks.Mask(mask.in_order, mask.window),
    ring,
    balanced,
    block_q,
    block_k,
    padded_queries,
    padded_keys,
  )


def _blocks(length: int, parts: int) -> tuple[int, int]:
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
    keys = _firsts(plan, plan.padded_keys, plan.block_k)
    columns = [np.roll(keys, step, axis=0) for step in range(n)]
  else:
    all_keys = np.arange(0, plan.padded_keys, plan.block_k, dtype=np.int32)
    columns = [np.tile(all_keys, (n, 1))]
  sizes = attention_blockwise.Static(1.0, None, plan.block_q, plan.block_k)
  pairs = []
  for of_step in columns:
    visible = [
      attention_blockwise.visible_pairs(rows[i], of_step[i], sizes, plan.order)
      for i in range(n)
    ]
    most = max(map(len, visible))
    shape = rows.shape[1], of_step.shape[1]
    pairs.append(np.stack([_filled(x, most, shape) for x in visible]))
  return Tables(rows, columns, pairs)


def _firsts(plan: Plan, length: int, block: int) -> np.ndarray:
  """Int [n, blocks], number of the first position of a device's blocks."""
  n = plan.ways
  parts = [[i, 2 * n - 1 - i] if plan.balanced else [i] for i in range(n)]
  size = length // (n * len(parts[0]))
  inside = np.arange(0, size, block)
  firsts = np.asarray(parts)[..., None] * size + inside
  return firsts.reshape(n, -1).astype(np.int32)


def _filled(
  pairs: np.ndarray, number: int, shape: tuple[int, int]
) -> np.ndarray:
  """Adds masked pairs of blocks, which change nothing, up to a number."""
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
  """Attends by `local` where a backend needs all keys and queries in order."""
  mask = inputs.mask
  B, S = inputs.k_BSGK.shape[:2]
  L = inputs.q.shape[1]
  mesh: Any = sharding.ambient(B)
  ways = int(mesh.shape[AXIS])
  make = functools.partial(plan_of, ways, L, S, mask)
  compute: Callable[[Inputs], jax.Array]
  counted: Any = contextlib.nullcontext()
  if backend == "ring" or (backend == "blockwise" and mask.causal):
    plan = make(ring=backend == "ring", balanced=mask.in_order)
    static = attention_blockwise.Static(
      scale, softcap, plan.block_q, plan.block_k
    )
    compute = functools.partial(_blockwise, plan, static)
  elif backend == "splash" and mask.causal:
    block, part = attention_kernels.splash_parts(L, 2 * ways)
    # A query of the padding sees itself, so that its output is finite.
    length = 2 * ways * part
    plan = make(ring=False, balanced=True)._replace(
      block_q=block, padded_queries=length, padded_keys=length
    )
    compute = functools.partial(_by_splash, plan, scale, softcap)
  else:
    plan = make(ring=False, balanced=False)._replace(
      padded_queries=math.ceil(L / ways) * ways,
      padded_keys=math.ceil(S / ways) * ways,
    )
    compute = functools.partial(_locally, plan, local)
    # Padding is not model FLOPs.
    counted = model_flops.share(L * S, plan.padded_queries * plan.padded_keys)
  with counted:
    return _split(plan, compute, inputs)


def _split(
  plan: Plan, compute: Callable[[Inputs], jax.Array], inputs: Inputs
) -> jax.Array:
  """Calls `compute` on each device, with the whole of the mask: it is small."""
  B, L, G = inputs.q.shape[:3]
  S = inputs.k_BSGK.shape[1]
  mesh: Any = sharding.ambient(B)
  tensor = mesh.shape.get("tensor", 1)
  heads = "tensor" if tensor > 1 and G % tensor == 0 else None
  batch_axes = sharding.batch_axes()
  split = PartitionSpec(batch_axes, AXIS, heads)
  by_example, by_head = PartitionSpec(batch_axes), PartitionSpec(heads)
  bias_GRT = None
  if isinstance(inputs.bias, positions.BiasByDistance):
    more = plan.padded_queries - L, plan.padded_keys - S
    bias_GRT = jnp.pad(inputs.bias.by_group(G), ((0, 0), (0, 0), more))
  specs: Any = (split, split, split, by_example, by_head, by_head)
  padded = attention_blockwise.padded
  o_BLGRK = jax.shard_map(
    compute, in_specs=(Inputs._make(specs),), out_specs=split, check_vma=False
  )(
    Inputs(
      padded(inputs.q, plan.padded_queries),
      padded(inputs.k_BSGK, plan.padded_keys),
      padded(inputs.v_BSGK, plan.padded_keys),
      _padded_mask(plan, inputs.mask, B),
      bias_GRT,
      inputs.sinks_GR,
    )
  )
  return o_BLGRK[:, :L]


def _padded_mask(plan: Plan, mask: masks.Mask, B: int) -> masks.Mask:
  fill = attention_blockwise.padded
  pad = lambda x, length: None if x is None else fill(x, length)
  real_BS = mask.real_BS
  # Causal queries do not see the padding after them.
  padded = plan.padded_keys > plan.keys and not plan.order.causal
  if real_BS is None and padded:
    real_BS = jnp.ones((B, plan.keys), bool)
  return dataclasses.replace(
    mask,
    segments_BL=pad(mask.segments_BL, plan.padded_queries),
    segments_BS=pad(mask.segments_BS, plan.padded_keys),
    real_BS=pad(real_BS, plan.padded_keys),
  )


def _with_all_keys(inputs: Inputs) -> Inputs:
  kv = inputs.k_BSGK, inputs.v_BSGK
  k_BSGK, v_BSGK = jax.lax.all_gather(kv, AXIS, axis=1, tiled=True)
  return inputs._replace(k_BSGK=k_BSGK, v_BSGK=v_BSGK)


def _locally(plan: Plan, local: LocalFn, inputs: Inputs) -> jax.Array:
  inputs = _with_all_keys(inputs)
  mask, bias_GRT = inputs.mask, inputs.bias
  L, S = inputs.q.shape[1], inputs.k_BSGK.shape[1]
  first = jax.lax.axis_index(AXIS) * L
  if mask.segments_BL is not None:
    segments = jax.lax.dynamic_slice_in_dim(mask.segments_BL, first, L, axis=1)
    mask = dataclasses.replace(mask, segments_BL=segments)
  bias = None
  if bias_GRT is not None:
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
  mask = inputs.mask
  device = jax.lax.axis_index(AXIS)
  rows = _firsts(plan, plan.padded_queries, plan.block_q)
  numbers = rows[..., None] + np.arange(plan.block_q)  # Of queries, by device.
  numbers = numbers.reshape(plan.ways, -1)
  if mask.segments_BL is not None:
    own = jnp.asarray(numbers)[device]
    segments = jnp.take(mask.segments_BL, own, axis=1)
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
  """Pairs of devices (from, to), for each one's first and its second part."""
  owner = lambda part: min(part, 2 * ways - 1 - part)
  return [[(i, owner(2 * i + half)) for i in range(ways)] for half in (0, 1)]


def _swapped(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(x, y) on devices with an even number, (y, x) on the others."""
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
  to_first, to_second = _owners(jax.lax.axis_size(AXIS))
  back = lambda pairs: [(receiver, sender) for sender, receiver in pairs]
  even, odd = _swapped(*jnp.split(x, 2, axis=1))
  first = jax.lax.ppermute(even, AXIS, back(to_first))
  second = jax.lax.ppermute(odd, AXIS, back(to_second))
  return jnp.concatenate([first, second], axis=1)


@dataclasses.dataclass(frozen=True)
class _Schedule(attention_blockwise.Schedule):
  """All keys in one step, or a step for each device of a ring."""

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
    plan, tables, mask = self.plan, tables_of(self.plan), inputs.mask
    device = jax.lax.axis_index(AXIS)
    own = lambda table: jnp.asarray(table)[device]
    rows_N, columns_M = own(tables.rows), own(tables.columns[step])
    computed = sum(pairs.size // 2 for pairs in tables.pairs)
    order = attention_blockwise.Order(
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
    inputs = inputs._replace(mask=mask)
    return attention_blockwise.Blocks(self.static, inputs, order)
