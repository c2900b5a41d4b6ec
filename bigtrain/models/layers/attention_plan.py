"""Which blocks of an attention a device computes, and when.

Attention of examples whose positions are split over devices, see
attention_split.py. Axes: L length, S length attended to; N blocks of A queries,
M blocks of C positions; n devices.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from bigtrain.models.layers import (
  attention_blocks,
  attention_blockwise,
  masks,
)

# On accelerators, longer blocks are whole numbers of the registers' lanes.
_LANES = 128


class Plan(NamedTuple):
  """What the devices compute, in what order.

  Attributes:
    ways: n.
    queries: L.
    keys: S.
    causal: as in visibility.Sees.
    window: as there.
    prefix: whether a prefix is visible.
    ring: whether keys and values pass in a ring; otherwise they are gathered.
    balanced: whether devices have an early and a late part of the queries, and
      in a ring of the keys.
    block_q: A.
    block_k: C.
    padded_queries: L in whole blocks on all devices.
    padded_keys: S in the same way.
  """

  ways: int
  queries: int
  keys: int
  causal: bool
  window: int | None
  prefix: bool
  ring: bool
  balanced: bool
  block_q: int
  block_k: int
  padded_queries: int
  padded_keys: int


class Tables(NamedTuple):
  """Blocks of each device.

  Attributes:
    rows: int [n, N], number of the first query of each block.
    columns: for each step, int [n, M], number of the first position.
    pairs: for each step, int [n, pairs, 2], see attention_blocks.Blocks. In
      devices with fewer pairs than others, the last are hidden.
  """

  rows: np.ndarray
  columns: list[np.ndarray]
  pairs: list[np.ndarray]


def make(
  ways: int,
  queries: int,
  keys: int,
  mask: masks.Mask,
  ring: bool,
  balanced: bool,
) -> Plan:
  """Returns the plan of an attention; see there for the arguments."""
  parts = 2 * ways if balanced else ways
  block_q, padded_queries = _blocks(queries, parts)
  block_k, padded_keys = _blocks(keys, parts)
  return Plan(
    ways,
    queries,
    keys,
    mask.causal,
    mask.window,
    mask.prefix_B is not None,
    ring,
    balanced,
    block_q,
    block_k,
    padded_queries,
    padded_keys,
  )


def _blocks(length: int, parts: int) -> tuple[int, int]:
  """Returns the size of blocks, and the length padded to whole ones."""
  largest = attention_blockwise.largest_block()
  part = math.ceil(length / parts)
  number = math.ceil(part / largest)
  size = math.ceil(part / number)
  if largest % _LANES == 0 and size > _LANES:
    size = math.ceil(size / _LANES) * _LANES
  return size, size * number * parts


@functools.lru_cache
def tables(plan: Plan) -> Tables:
  """The blocks of all devices at all steps."""
  n = plan.ways
  rows = _firsts(plan, plan.padded_queries, plan.block_q)
  if plan.ring:
    keys = _firsts(plan, plan.padded_keys, plan.block_k)
    columns = [np.roll(keys, step, axis=0) for step in range(n)]
  else:
    all_keys = np.arange(0, plan.padded_keys, plan.block_k, dtype=np.int32)
    columns = [np.tile(all_keys, (n, 1))]
  mask = masks.Mask(plan.causal and not plan.prefix, plan.window)
  sizes = attention_blocks.Static(1.0, None, plan.block_q, plan.block_k)
  pairs = []
  for of_step in columns:
    visible = [
      attention_blocks.visible_pairs(rows[i], of_step[i], sizes, mask)
      for i in range(n)
    ]
    most = max(map(len, visible))
    shape = rows.shape[1], of_step.shape[1]
    pairs.append(np.stack([_filled(x, most, shape) for x in visible]))
  return Tables(rows, columns, pairs)


def numbers(plan: Plan) -> np.ndarray:
  """Int [n, L / n], number of each query of each device."""
  rows = _firsts(plan, plan.padded_queries, plan.block_q)
  return (rows[..., None] + np.arange(plan.block_q)).reshape(plan.ways, -1)


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
  """Adds hidden pairs of blocks, which change nothing, up to a number."""
  if len(pairs) == number:
    return pairs
  hidden = np.ones(shape, bool)
  hidden[tuple(pairs.T)] = False
  one = np.argwhere(hidden)[:1].astype(np.int32)
  return np.concatenate([pairs, np.repeat(one, number - len(pairs), axis=0)])
