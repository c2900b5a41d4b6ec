"""Attention block by block, in plain JAX, exact and in memory linear in length.

Only the scores of one block of queries with one block of keys exist at a time,
as in FlashAttention, https://arxiv.org/abs/2205.14135. The backward pass
computes them again, from the output and the logarithm of the softmax's
denominator. Pairs of blocks are left out if the causal order masks all of their
scores.

A Schedule has steps, each with some Blocks: here a single step with all keys,
and in a ring (attention_split.py) one step for the keys of each device. Pair by
pair, the forward pass adds to Sums and the backward pass to Gradients.

Axes: see attention_inputs.py; N blocks of A queries, M blocks of C positions.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.models.layers import attention_xla, masks, positions, remat
from bigtrain.models.layers.attention_inputs import Inputs

# Largest number of queries or positions in a block. On CPUs, smaller blocks
# stay in the caches; on accelerators, larger ones keep the matrix units busy.
_BLOCK = 512
_BLOCK_ON_CPU = 256

# A masked score. Not -inf: the difference of two of them must not be NaN.
_MASKED = -1e30

# Number of a block: an int outside of loops, an array in a loop.
Index = jax.Array | int


def attend(inputs: Inputs, *, scale: float, softcap: float | None) -> jax.Array:
  """Means of values (B, L, G, R, K), weighted by the softmax of scores."""
  L = inputs.q.shape[1]
  S, G = inputs.k_BSGK.shape[1:3]
  block = largest_block()
  static = Static(scale, softcap, min(block, L), min(block, S))
  if isinstance(inputs.bias, positions.BiasByDistance):
    more = -L % static.block_q, -S % static.block_k  # Padding has distances.
    bias_GRT = jnp.pad(inputs.bias.by_group(G), ((0, 0), (0, 0), more))
    inputs = inputs._replace(bias=bias_GRT)
  return attend_by_blocks(Schedule(static), inputs)


def largest_scores(
  inputs: Inputs, *, scale: float, schedule: "Schedule | None" = None
) -> jax.Array:
  """Largest score of each query, float32 (B, L, G, R), without a gradient.

  It is a large negative number for queries that see nothing.
  """
  L, S = inputs.q.shape[1], inputs.k_BSGK.shape[1]
  block = largest_block()
  static = Static(scale, None, min(block, L), min(block, S))
  blocks = (schedule or Schedule(static)).blocks(0, inputs)
  q_N, k_M = blocks.of_queries(inputs.q), blocks.of_keys(inputs.k_BSGK)

  def add(largest_N: jax.Array, pair: Any) -> tuple[jax.Array, None]:
    n, m = pair
    scores, _ = blocks.scores(_pick(q_N, n), _pick(k_M, m), n, m)
    largest = jnp.maximum(_pick(largest_N, n), jnp.max(scores, axis=-1))
    return _put(largest_N, n, largest), None

  lowest_N = jnp.full(q_N.shape[:-1], _MASKED, jnp.float32)
  largest_N, _ = jax.lax.scan(add, lowest_N, _pairs_after(q_N, blocks))
  like: Any = jax.ShapeDtypeStruct(inputs.q.shape, jnp.float32)
  return blocks.to_queries(largest_N[..., None], like)[..., 0]


def largest_block() -> int:
  return _BLOCK_ON_CPU if sharding.device()[0] == "cpu" else _BLOCK


class Static(NamedTuple):
  """Constants of the compiled program."""

  scale: float
  softcap: float | None
  block_q: int
  block_k: int


class Order(NamedTuple):
  """The blocks that a device computes; they may begin anywhere."""

  rows_N: jax.Array  # Number of the first query of each block.
  columns_M: jax.Array  # Number of the first position of each block.
  # Int [pairs, 2], the pairs (block of queries, block of positions) with a
  # score that the causal order does not mask.
  pairs: jax.Array
  length: int  # Queries of the example, from which a bias counts distances.
  # Numbers of scores of a head on all devices: those that model FLOPs count,
  # and those that are computed.
  counted: int
  computed: int


class Blocks:
  """Blocks of queries and positions, and the scores of a pair of them."""

  def __init__(self, static: Static, inputs: Inputs, order: Order):
    self.static = static
    self.order = order
    self.bias_GRT = inputs.bias
    self._mask = inputs.mask
    self._S = inputs.k_BSGK.shape[1]

    # Its arrays are in blocks: (N, B, A) and (M, B, C).
    self._mask_by_block = self._mask.map_queries(
      lambda x_BL: _to_blocks(x_BL, static.block_q)
    ).map_positions(lambda x_BS: _to_blocks(x_BS, static.block_k))

  def of_queries(self, x: jax.Array) -> jax.Array:
    """(B, L, G, R, K) as blocks (N, B, G, R, A, K)."""
    return jnp.moveaxis(_to_blocks(x, self.static.block_q), 2, 4)

  def to_queries(self, x_N: jax.Array, like: jax.Array) -> jax.Array:
    return _from_blocks(jnp.moveaxis(x_N, 4, 2), like)

  def of_keys(self, x: jax.Array) -> jax.Array:
    """(B, S, G, K) as blocks (M, B, G, C, K)."""
    return jnp.moveaxis(_to_blocks(x, self.static.block_k), 2, 3)

  def to_keys(self, x_M: jax.Array, like: jax.Array) -> jax.Array:
    return _from_blocks(jnp.moveaxis(x_M, 3, 2), like)

  def scores(
    self, q: jax.Array, k: jax.Array, n: Index, m: Index
  ) -> tuple[jax.Array, jax.Array | None]:
    """Float32 scores (B, G, R, A, C) of a pair of blocks, and their mask."""
    static = self.static
    scores = jnp.einsum(
      "bgrak,bgck->bgrac", q, k, preferred_element_type=jnp.float32
    )
    scores *= static.scale
    if self.bias_GRT is not None:
      scores += _by_pair(self._distances(self.bias_GRT, n, m), static)
    if static.softcap is not None:
      scores = static.softcap * jnp.tanh(scores / static.softcap)
    visible = self._visible(n, m)
    if visible is not None:
      visible = visible[:, None, None]
      scores = jnp.where(visible, scores, _MASKED)
    return scores, visible

  def _visible(self, n: Index, m: Index) -> jax.Array | None:
    """Bool (B or 1, A or 1, C) of a pair of blocks; None if all is visible."""
    static = self.static

    row_A = self.order.rows_N[n] + jnp.arange(static.block_q)
    column_C = self.order.columns_M[m] + jnp.arange(static.block_k)
    mask = self._mask_by_block.map_queries(lambda x_N: _pick(x_N, n))
    mask = mask.map_positions(lambda x_M: _pick(x_M, m))
    visible = mask.block(row_A, column_C)
    # Causal queries do not see the padding after them.
    if self._S % static.block_k and not self._mask.in_order:
      exists = (column_C < self._S)[None, None]
      visible = exists if visible is None else visible & exists
    return visible

  def _start(self, n: Index, m: Index) -> Index:
    """Index of a pair's first distance in the bias."""
    first = self.order.length - self.static.block_q
    return self.order.columns_M[m] - self.order.rows_N[n] + first

  def _distances(self, bias_GRT: jax.Array, n: Index, m: Index) -> jax.Array:
    """The biases of all distances in a pair of blocks."""
    num = self.static.block_q + self.static.block_k - 1
    start = self._start(n, m)
    return jax.lax.dynamic_slice_in_dim(bias_GRT, start, num, axis=2)

  def add_to_bias(
    self, dbias_GRT: jax.Array, dscores_GRAC: jax.Array, n: Index, m: Index
  ) -> jax.Array:
    """Adds the gradients of a pair's scores to the gradients by distance."""
    old = self._distances(dbias_GRT, n, m)
    expand = functools.partial(_by_pair, static=self.static)
    (new,) = jax.linear_transpose(expand, old)(dscores_GRAC)
    return jax.lax.dynamic_update_slice_in_dim(
      dbias_GRT, old + new, self._start(n, m), axis=2
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The steps in which a device computes its blocks; here a single step."""

  static: Static

  @property
  def num_steps(self) -> int:
    return 1

  def blocks(self, step: int, inputs: Inputs) -> Blocks:
    del step
    static, mask = self.static, inputs.mask
    L, S = inputs.q.shape[1], inputs.k_BSGK.shape[1]
    rows_N = np.arange(0, L, static.block_q, dtype=np.int32)
    columns_M = np.arange(0, S, static.block_k, dtype=np.int32)
    pairs = visible_pairs(rows_N, columns_M, static, mask)
    order = Order(
      jnp.asarray(rows_N),
      jnp.asarray(columns_M),
      jnp.asarray(pairs),
      len(rows_N) * static.block_q,
      counted=L * mask.reach(S),
      computed=len(pairs) * static.block_q * static.block_k,
    )
    return Blocks(static, inputs, order)

  def pass_on(self, arrays: Any) -> Any:
    """Exchanges the keys of this step for those of the next."""
    return arrays


def visible_pairs(
  rows_N: np.ndarray, columns_M: np.ndarray, static: Static, mask: masks.Mask
) -> np.ndarray:
  visible = np.ones((len(rows_N), len(columns_M)), bool)
  if mask.in_order:
    visible &= columns_M <= rows_N[:, None] + static.block_q - 1
    if mask.window:
      last = columns_M + static.block_k - 1
      visible &= last > rows_N[:, None] - mask.window
  return np.argwhere(visible).astype(np.int32)


def padded(x: jax.Array, length: int, value: int = 0) -> jax.Array:
  """Pads dimension 1 to a length."""
  if x.shape[1] == length:
    return x
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, length - x.shape[1])
  return jnp.pad(x, widths, constant_values=value)


def _to_blocks(x: jax.Array, size: int) -> jax.Array:
  """(B, L, ...) as (N, B, size, ...), padded with zeros."""
  x = padded(x, x.shape[1] + -x.shape[1] % size)
  return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


def _from_blocks(x_N: jax.Array, like: jax.Array) -> jax.Array:
  x = jnp.moveaxis(x_N, 0, 1).reshape(len(like), -1, *x_N.shape[3:])
  return x[:, : like.shape[1]].astype(like.dtype)


def _by_pair(bias_GRT: jax.Array, static: Static) -> jax.Array:
  """Biases (G, R, A, C) for the distances c - a; rows are shifted by one.

  This needs no gather: A copies of a row of T are read as rows of T - 1.
  """
  A, C = static.block_q, static.block_k
  G, R, T = bias_GRT.shape
  if A == 1:
    return bias_GRT[:, :, None]
  rows = jnp.broadcast_to(bias_GRT[:, :, None], (G, R, A, T))
  flat = rows.reshape(G, R, A * T)[:, :, A - 1 : A - 1 + A * (T - 1)]
  return flat.reshape(G, R, A, T - 1)[..., :C]


def _pick(x_N: jax.Array, n: Index) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x_N, n, 0, keepdims=False)


def _put(x_N: jax.Array, n: Index, x: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(x_N, x, n, 0)


class Sums(NamedTuple):
  """Sums over the positions that were attended to so far, float32."""

  largest_N: jax.Array  # Largest score of each query.
  total_N: jax.Array  # Sum of its weights, relative to the largest.
  out_N: jax.Array  # Weighted sum of values.


def _add_values(
  blocks: Blocks, sums: Sums, q_N: jax.Array, k_M: jax.Array, v_M: jax.Array
) -> Sums:
  def add(sums: Sums, pair: Any) -> tuple[Sums, None]:
    n, m = pair
    scores, visible = blocks.scores(_pick(q_N, n), _pick(k_M, m), n, m)
    old = _pick(sums.largest_N, n)
    largest = jnp.maximum(old, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    if visible is not None:  # Without a visible position, all are exp(0).
      weights = jnp.where(visible, weights, 0.0)
    shrink = jnp.exp(old - largest)
    total = _pick(sums.total_N, n) * shrink + jnp.sum(weights, axis=-1)
    out = _pick(sums.out_N, n) * shrink[..., None] + jnp.einsum(
      "bgrac,bgck->bgrak",
      weights.astype(v_M.dtype),
      _pick(v_M, m),
      preferred_element_type=jnp.float32,
    )
    new = Sums(largest, total, out)
    return jax.tree.map(lambda x_N, x: _put(x_N, n, x), sums, new), None

  order = blocks.order
  with model_flops.counts_as(order.counted, order.computed):
    return jax.lax.scan(add, sums, _pairs_after(q_N, blocks))[0]


def _pairs_after(q_N: jax.Array, blocks: Blocks) -> jax.Array:
  """The pairs of blocks, as if they depended on the queries.

  In a scan over layers, jax computes before the loop what does not depend on a
  layer's input, and keeps it. That would be the masks of all pairs, for each
  head.
  """
  one_number = q_N[(0,) * q_N.ndim]
  return jax.lax.optimization_barrier((blocks.order.pairs, one_number))[0]


def _results(
  blocks: Blocks, sums: Sums, q: jax.Array, sinks_GR: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """The output, and the logarithms of denominators (B, G, R, L)."""
  largest_N, total_N, out_N = sums
  if sinks_GR is not None:  # One more score, without a value.
    sinks_GR1 = sinks_GR[..., None]
    old_N, largest_N = largest_N, jnp.maximum(largest_N, sinks_GR1)
    shrink_N = jnp.exp(old_N - largest_N)
    total_N = total_N * shrink_N + jnp.exp(sinks_GR1 - largest_N)
    out_N = out_N * shrink_N[..., None]
  # Queries that see nothing, as those of padding, also need a number.
  sees_any_N = total_N > 0
  total_N = jnp.where(sees_any_N, total_N, 1.0)
  out = blocks.to_queries(out_N / total_N[..., None], q)
  log_N = jnp.where(sees_any_N, largest_N + jnp.log(total_N), 0.0)
  log_BGRL = jnp.moveaxis(log_N, 0, 3).reshape(*log_N.shape[1:4], -1)
  log_BGRL = log_BGRL[..., : q.shape[1]]
  return checkpoint_name((out, log_BGRL), remat.ATTENTION)


class Gradients(NamedTuple):
  """Gradients so far, float32, in blocks; None without a bias."""

  dq_N: jax.Array
  dk_M: jax.Array
  dv_M: jax.Array
  dbias_GRT: jax.Array | None


def _add_gradients(
  blocks: Blocks,
  grads: Gradients,
  queries: tuple[jax.Array, ...],
  k_M: jax.Array,
  v_M: jax.Array,
) -> Gradients:
  static = blocks.static
  q_N, grad_N, mean_N, log_N = queries

  def add(grads: Gradients, pair: Any) -> tuple[Gradients, None]:
    dq_N, dk_M, dv_M, dbias_GRT = grads
    n, m = pair
    scores, visible = blocks.scores(_pick(q_N, n), _pick(k_M, m), n, m)
    weights = jnp.exp(scores - _pick(log_N, n)[..., None])
    if visible is not None:
      weights = jnp.where(visible, weights, 0.0)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    low = weights.astype(v_M.dtype)
    dv = product("bgrac,bgrak->bgck", low, _pick(grad_N, n))
    dweights = product("bgrak,bgck->bgrac", _pick(grad_N, n), _pick(v_M, m))
    dscores = weights * (dweights - _pick(mean_N, n)[..., None])
    if static.softcap is not None:
      # A masked score is far below -softcap.
      ratio = jnp.clip(scores / static.softcap, -1.0, 1.0)
      dscores *= 1.0 - jnp.square(ratio)
    if dbias_GRT is not None:
      dbias_GRT = blocks.add_to_bias(dbias_GRT, jnp.sum(dscores, axis=0), n, m)
    dscores = (dscores * static.scale).astype(q_N.dtype)
    dq = product("bgrac,bgck->bgrak", dscores, _pick(k_M, m))
    dk = product("bgrac,bgrak->bgck", dscores, _pick(q_N, n))
    return Gradients(
      _put(dq_N, n, _pick(dq_N, n) + dq),
      _put(dk_M, m, _pick(dk_M, m) + dk),
      _put(dv_M, m, _pick(dv_M, m) + dv),
      dbias_GRT,
    ), None

  # Four products; the fifth computes the scores again.
  order = blocks.order
  with model_flops.counts_as(4 * order.counted, 5 * order.computed):
    return jax.lax.scan(add, grads, order.pairs)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_by_blocks(schedule: Schedule, inputs: Inputs) -> jax.Array:
  return _forward(schedule, inputs)[0]


def _forward(
  schedule: Schedule, inputs: Inputs
) -> tuple[jax.Array, tuple[Any, ...]]:
  steps = schedule.num_steps
  sums: Any = None
  kv = inputs.k_BSGK, inputs.v_BSGK
  for step in range(steps):
    # Sent during this step, for the next one.
    passed = schedule.pass_on(kv) if step + 1 < steps else kv
    blocks = schedule.blocks(step, inputs)
    q_N = blocks.of_queries(inputs.q)
    if sums is None:
      rows = q_N.shape[:-1]
      zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
      lowest = jnp.full(rows, _MASKED, jnp.float32)
      width = inputs.v_BSGK.shape[-1]
      sums = Sums(lowest, zeros(rows), zeros((*rows, width)))
    k_M, v_M = map(blocks.of_keys, kv)
    sums = _add_values(blocks, sums, q_N, k_M, v_M)
    kv = passed
  out, log_BGRL = _results(blocks, sums, inputs.q, inputs.sinks_GR)
  return out, (inputs, out, log_BGRL)


def _backward(
  schedule: Schedule, residuals: tuple[Any, ...], grad: jax.Array
) -> tuple[Inputs]:
  inputs, out, log_BGRL = residuals
  q, k, v = inputs[:3]
  steps = schedule.num_steps
  grads: Any = None
  kv = k, v
  if steps > 1:
    # Otherwise XLA keeps what remat's forward pass has received, all keys and
    # values, in place of passing them around once more.
    kv = jax.lax.optimization_barrier(kv)
  for step in range(steps):
    passed = schedule.pass_on(kv) if step + 1 < steps else kv
    blocks = schedule.blocks(step, inputs)
    k_M, v_M = map(blocks.of_keys, kv)
    if grads is None:
      # Gradient of a softmax: its output times (gradient - this mean).
      products = out.astype(jnp.float32) * grad.astype(jnp.float32)
      mean = jnp.sum(products, -1, keepdims=True)
      dsinks_GR = attention_xla.sinks_gradient(
        inputs.sinks_GR, log_BGRL, jnp.moveaxis(mean[..., 0], 1, 3)
      )
      log = jnp.moveaxis(log_BGRL, 3, 1)[..., None]
      q_N, grad_N, mean_N, log_N = map(blocks.of_queries, (q, grad, mean, log))
      queries = q_N, grad_N, mean_N[..., 0], log_N[..., 0]
      zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q_N, k_M, v_M)]
      dbias_GRT = jax.tree.map(jnp.zeros_like, blocks.bias_GRT)
      grads = Gradients(zeros[0], zeros[1], zeros[2], dbias_GRT)
    grads = _add_gradients(blocks, grads, queries, k_M, v_M)
    # They travel with their keys, and are home after the last step.
    dk_M, dv_M = schedule.pass_on((grads.dk_M, grads.dv_M))
    grads = grads._replace(dk_M=dk_M, dv_M=dv_M)
    kv = passed
  dq = blocks.to_queries(grads.dq_N, q)
  dk, dv = blocks.to_keys(grads.dk_M, k), blocks.to_keys(grads.dv_M, v)
  no_mask: Any = None
  return (Inputs(dq, dk, dv, no_mask, grads.dbias_GRT, dsinks_GR),)


attend_by_blocks.defvjp(_forward, _backward)
