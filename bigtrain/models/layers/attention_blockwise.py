"""Attention block by block, in plain JAX, exact and in memory linear in length.

Scores of a block of queries and a block of keys exist at a time, as in
FlashAttention, https://arxiv.org/abs/2205.14135. The backward pass computes
them again from the output and the logarithm of the softmax's denominator.
Pairs of blocks of which the causal order hides every score are left out.

Axes: B batch, L length, S length attended to, G heads of keys and values, R
query heads of each, K head width; N blocks of A queries, M blocks of C
positions; T distances.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from bigtrain import model_flops, sharding
from bigtrain.models.layers import attention_choice, remat, visibility

# Largest number of queries or positions in a block. On CPUs, smaller blocks
# stay in the caches; on accelerators, larger ones keep the matrix units busy.
_BLOCK, _BLOCK_ON_CPU = 512, 256

# Number of scores of a head from which blocks are used. On two CPU cores, the
# forward and backward pass of 8 heads of width 64 in float32 takes 0.43 of the
# CPU time and 0.16 of the memory of the full matrix of scores with 1,024
# positions, and 0.34 and 0.06 with 2,048.
_MANY_SCORES = 1024 * 1024

# Not -inf: the difference of two of them must not be NaN.
_MASKED = -1e30


def refuses(case: attention_choice.Case) -> str:
  """Returns why this implementation cannot serve a case, or ""."""
  if case.causal and case.queries != case.positions:
    return "causal queries need as many positions"
  return ""


def pays(case: attention_choice.Case) -> str:
  """Returns why this implementation is best for a case, or ""."""
  if case.queries * case.positions < _MANY_SCORES:
    return ""
  return f"memory linear in the length, from {_MANY_SCORES:,} scores a head on"


class _Static(NamedTuple):
  """What the compiled program depends on."""

  scale: float
  softcap: float | None
  block_q: int
  block_k: int


def attend(
  q_BLGRK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  sees: visibility.Sees,
  *,
  bias_GRT: jax.Array | None = None,
  scale: float,
  softcap: float | None,
  block: int | None = None,
) -> jax.Array:
  """Returns the output, of the shape and dtype of the queries.

  Args:
    q_BLGRK: queries.
    k_BSGK: keys.
    v_BSGK: values.
    sees: what a query sees.
    bias_GRT: float32, added to the scaled scores, by the distance of a position
      from a query, from -(L - 1) to S - 1.
    scale: factor of the scores.
    softcap: see attention.attend.
    block: largest number of queries or positions in a block.
  """
  L, S = q_BLGRK.shape[1], k_BSGK.shape[1]
  if block is None:
    block = _BLOCK_ON_CPU if sharding.device()[0] == "cpu" else _BLOCK
  static = _Static(scale, softcap, min(block, L), min(block, S))
  return _attend(static, q_BLGRK, k_BSGK, v_BSGK, bias_GRT, sees)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  static: _Static, q: Any, k: Any, v: Any, bias: Any, sees: visibility.Sees
) -> jax.Array:
  return _forward(static, q, k, v, bias, sees)[0]


def _forward(
  static: _Static, q: Any, k: Any, v: Any, bias: Any, sees: visibility.Sees
) -> tuple[jax.Array, jax.Array]:
  """Returns the output, and the logarithms of denominators (B, G, R, L)."""
  blocks = _Blocks(static, q, k, bias, sees)
  q_N, k_M, v_M = blocks.of_queries(q), blocks.of_keys(k), blocks.of_keys(v)

  def add(carry: Any, pair: Any) -> tuple[Any, None]:
    """Adds the values of a block of positions to a block of queries."""
    largest_N, total_N, out_N = carry
    n, m = pair
    scores, mask = blocks.scores(_pick(q_N, n), _pick(k_M, m), n, m)
    largest = jnp.maximum(_pick(largest_N, n), jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    if mask is not None:  # Also for a row without a visible position.
      weights = jnp.where(mask, weights, 0.0)
    shrink = jnp.exp(_pick(largest_N, n) - largest)
    total = _pick(total_N, n) * shrink + jnp.sum(weights, axis=-1)
    out = _pick(out_N, n) * shrink[..., None] + jnp.einsum(
      "bgrac,bgck->bgrak",
      weights.astype(v.dtype),
      _pick(v_M, m),
      preferred_element_type=jnp.float32,
    )
    return (
      _put(largest_N, n, largest),
      _put(total_N, n, total),
      _put(out_N, n, out),
    ), None

  rows = q_N.shape[:-1]
  carry = (
    jnp.full(rows, _MASKED, jnp.float32),
    jnp.zeros(rows, jnp.float32),
    jnp.zeros((*rows, v.shape[-1]), jnp.float32),
  )
  with model_flops.counts_as(blocks.counted, blocks.computed):
    (largest_N, total_N, out_N), _ = jax.lax.scan(add, carry, blocks.pairs)
  some_N = total_N > 0
  total_N = jnp.where(some_N, total_N, 1.0)
  out = blocks.to_queries(out_N / total_N[..., None], q)
  # Padding and rows that see nothing also need a number.
  log_N = jnp.where(some_N, largest_N + jnp.log(total_N), 0.0)
  log_BGRL = jnp.moveaxis(log_N, 0, 3).reshape(*log_N.shape[1:4], -1)
  log_BGRL = log_BGRL[..., : q.shape[1]]
  return (
    checkpoint_name(out, remat.ATTENTION),
    checkpoint_name(log_BGRL, remat.ATTENTION),
  )


def _forward_rule(
  static: _Static, q: Any, k: Any, v: Any, bias: Any, sees: visibility.Sees
) -> tuple[jax.Array, Any]:
  out, log_BGRL = _forward(static, q, k, v, bias, sees)
  return out, (q, k, v, bias, sees, out, log_BGRL)


def _backward_rule(static: _Static, saved: Any, grad: jax.Array) -> Any:
  q, k, v, bias, sees, out, log_BGRL = saved
  blocks = _Blocks(static, q, k, bias, sees)
  q_N, k_M, v_M = blocks.of_queries(q), blocks.of_keys(k), blocks.of_keys(v)
  grad_N = blocks.of_queries(grad)
  # Gradient of a softmax: its output times (gradient - this mean).
  mean = jnp.sum(
    out.astype(jnp.float32) * grad.astype(jnp.float32), -1, keepdims=True
  )
  mean_N = blocks.of_queries(mean)[..., 0]
  log_N = blocks.of_queries(jnp.moveaxis(log_BGRL, 3, 1)[..., None])[..., 0]

  def add(carry: Any, pair: Any) -> tuple[Any, None]:
    """Adds the gradients through a pair of blocks."""
    dq_N, dk_M, dv_M, dbias = carry
    n, m = pair
    scores, mask = blocks.scores(_pick(q_N, n), _pick(k_M, m), n, m)
    weights = jnp.exp(scores - _pick(log_N, n)[..., None])
    if mask is not None:
      weights = jnp.where(mask, weights, 0.0)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dv = product("bgrac,bgrak->bgck", weights.astype(v.dtype), _pick(grad_N, n))
    dweights = product("bgrak,bgck->bgrac", _pick(grad_N, n), _pick(v_M, m))
    dscores = weights * (dweights - _pick(mean_N, n)[..., None])
    if static.softcap is not None:
      # A masked score is far below -softcap.
      ratio = jnp.clip(scores / static.softcap, -1.0, 1.0)
      dscores *= 1.0 - jnp.square(ratio)
    if bias is not None:
      dbias = blocks.add_to_bias(dbias, jnp.sum(dscores, axis=0), n, m)
    dscores = (dscores * static.scale).astype(q.dtype)
    dq = product("bgrac,bgck->bgrak", dscores, _pick(k_M, m))
    dk = product("bgrac,bgrak->bgck", dscores, _pick(q_N, n))
    return (
      _put(dq_N, n, _pick(dq_N, n) + dq),
      _put(dk_M, m, _pick(dk_M, m) + dk),
      _put(dv_M, m, _pick(dv_M, m) + dv),
      dbias,
    ), None

  zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
  carry = (zeros(q_N), zeros(k_M), zeros(v_M), blocks.no_bias_gradient())
  # Four products; the fifth computes the scores again.
  with model_flops.counts_as(4 * blocks.counted, 5 * blocks.computed):
    (dq_N, dk_M, dv_M, dbias), _ = jax.lax.scan(add, carry, blocks.pairs)
  dq = blocks.to_queries(dq_N, q)
  dk, dv = blocks.to_keys(dk_M, k), blocks.to_keys(dv_M, v)
  if bias is not None:
    dbias = blocks.without_padding(dbias)
  return dq, dk, dv, dbias, None


_attend.defvjp(_forward_rule, _backward_rule)


class _Blocks:
  """Blocks of queries and positions, and the scores of a pair of them.

  Attributes:
    pairs: int (pairs, 2), numbers of the blocks of queries and of positions
      whose scores are not all hidden by the causal order.
    computed: number of scores of a head that these blocks have.
    counted: number of scores of a head that model FLOPs count.
  """

  def __init__(
    self,
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
    sees: visibility.Sees,
  ):
    """See `_attend`."""
    self._static, self._sees = static, sees
    _, self._L, self._G, self._R, _ = q.shape
    self._S = k.shape[1]
    A, C = static.block_q, static.block_k
    self._N, self._M = math.ceil(self._L / A), math.ceil(self._S / C)
    first_row, first_column = np.arange(self._N) * A, np.arange(self._M) * C
    visible = np.ones((self._N, self._M), bool)
    if sees.causal and sees.prefix_B is None:
      visible &= first_column <= first_row[:, None] + A - 1
      if sees.window:
        last = first_column + C - 1
        visible &= last > first_row[:, None] - sees.window
    self.pairs = np.argwhere(visible).astype(np.int32)
    self.computed = len(self.pairs) * A * C
    self.counted = self._L * sees.reach(self._S)
    pad = lambda x, size: jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    split = lambda x, size: (
      None if x is None else _to_blocks(pad(x, size), size)
    )
    self._segments_NBA = split(sees.segments_BL, A)
    self._segments_MBC = split(sees.segments_BS, C)
    self._real_MBC = split(sees.real_BS, C)
    self._bias = None
    if bias is not None:  # The padding also needs distances.
      more = self._N * A - self._L, self._M * C - self._S
      self._bias = jnp.pad(bias, ((0, 0), (0, 0), more))

  def of_queries(self, x: jax.Array) -> jax.Array:
    """(B, L, G, R, K) as blocks (N, B, G, R, A, K)."""
    rows = -self._L % self._static.block_q
    x = jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, 0), (0, 0)))
    return jnp.moveaxis(_to_blocks(x, self._static.block_q), 2, 4)

  def to_queries(self, x_N: jax.Array, like: jax.Array) -> jax.Array:
    """The reverse; shape and dtype are those of `like`."""
    x = jnp.moveaxis(jnp.moveaxis(x_N, 4, 2), 0, 1)
    x = x.reshape(like.shape[0], -1, *like.shape[2:])
    return x[:, : self._L].astype(like.dtype)

  def of_keys(self, x: jax.Array) -> jax.Array:
    """(B, S, G, K) as blocks (M, B, G, C, K)."""
    rows = -self._S % self._static.block_k
    x = jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, 0)))
    return jnp.moveaxis(_to_blocks(x, self._static.block_k), 2, 3)

  def to_keys(self, x_M: jax.Array, like: jax.Array) -> jax.Array:
    """The reverse; shape and dtype are those of `like`."""
    x = jnp.moveaxis(jnp.moveaxis(x_M, 3, 2), 0, 1)
    x = x.reshape(like.shape[0], -1, *like.shape[2:])
    return x[:, : self._S].astype(like.dtype)

  def scores(
    self, q: jax.Array, k: jax.Array, n: Any, m: Any
  ) -> tuple[jax.Array, jax.Array | None]:
    """Float32 scores (B, G, R, A, C) of a pair of blocks, and their mask."""
    static = self._static
    scores = jnp.einsum(
      "bgrak,bgck->bgrac", q, k, preferred_element_type=jnp.float32
    )
    scores *= static.scale
    if self._bias is not None:
      scores += _by_pair(self._distances(self._bias, n, m), static)
    if static.softcap is not None:
      scores = static.softcap * jnp.tanh(scores / static.softcap)
    mask = self._mask(n, m)
    if mask is not None:
      mask = mask[:, None, None]
      scores = jnp.where(mask, scores, _MASKED)
    return scores, mask

  def _mask(self, n: Any, m: Any) -> jax.Array | None:
    """Bool (B or 1, A or 1, C) of a pair of blocks; None if all is visible."""
    static = self._static
    pick = lambda x, i: None if x is None else _pick(x, i)
    column_C = m * static.block_k + jnp.arange(static.block_k)
    mask = self._sees.block(
      n * static.block_q + jnp.arange(static.block_q),
      column_C,
      pick(self._segments_NBA, n),
      pick(self._segments_MBC, m),
      pick(self._real_MBC, m),
    )
    # Causal queries do not see the padding after them.
    if self._S % static.block_k and not (
      self._sees.causal and self._sees.prefix_B is None
    ):
      exists = (column_C < self._S)[None, None]
      mask = exists if mask is None else mask & exists
    return mask

  def _start(self, n: Any, m: Any) -> Any:
    """Index in the bias of a pair of blocks' least distance."""
    static = self._static
    return m * static.block_k + (self._N - 1 - n) * static.block_q

  def _distances(self, bias: jax.Array, n: Any, m: Any) -> jax.Array:
    """Entries of the bias for the A + C - 1 distances in a pair of blocks."""
    num = self._static.block_q + self._static.block_k - 1
    return jax.lax.dynamic_slice_in_dim(bias, self._start(n, m), num, axis=2)

  def no_bias_gradient(self) -> jax.Array | None:
    """Zeros to which `add_to_bias` adds, or None without a bias."""
    return None if self._bias is None else jnp.zeros_like(self._bias)

  def add_to_bias(
    self, dbias: jax.Array, dscores_GRAC: jax.Array, n: Any, m: Any
  ) -> jax.Array:
    """Adds the gradients of a pair's scores to those of their distances."""
    old = self._distances(dbias, n, m)
    expand = functools.partial(_by_pair, static=self._static)
    (new,) = jax.linear_transpose(expand, old)(dscores_GRAC)
    return jax.lax.dynamic_update_slice_in_dim(
      dbias, old + new, self._start(n, m), axis=2
    )

  def without_padding(self, dbias: jax.Array) -> jax.Array:
    """Entries of the distances of real queries and positions."""
    first = self._N * self._static.block_q - self._L
    return dbias[:, :, first : first + self._L + self._S - 1]


def _to_blocks(x: jax.Array, size: int) -> jax.Array:
  """(B, L, ...) as (L / size, B, size, ...)."""
  return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


def _by_pair(bias_GRT: jax.Array, static: _Static) -> jax.Array:
  """Biases (G, R, A, C) from those of the A + C - 1 distances c - a.

  Rows of a matrix whose rows are all `bias` shift by one if it is read with
  rows that are shorter by one.
  """
  A, C = static.block_q, static.block_k
  G, R, T = bias_GRT.shape
  if A == 1:
    return bias_GRT[:, :, None]
  rows = jnp.broadcast_to(bias_GRT[:, :, None], (G, R, A, T))
  flat = rows.reshape(G, R, A * T)[:, :, A - 1 : A - 1 + A * (T - 1)]
  return flat.reshape(G, R, A, T - 1)[..., :C]


def _pick(x_N: jax.Array, n: Any) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x_N, n, 0, keepdims=False)


def _put(x_N: jax.Array, n: Any, x: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(x_N, x, n, 0)
