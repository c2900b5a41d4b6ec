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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bigtrain import model_flops, sharding
from bigtrain.models.layers import (
  attention_backends,
  attention_blocks,
  masks,
  remat,
)

# Largest number of queries or positions in a block. On CPUs, smaller blocks
# stay in the caches; on accelerators, larger ones keep the matrix units busy.
_BLOCK, _BLOCK_ON_CPU = 512, 256

# Number of scores of a head from which blocks are used. On two CPU cores, the
# forward and backward pass of 8 heads of width 64 in float32 takes 0.43 of the
# CPU time and 0.16 of the memory of the full matrix of scores with 1,024
# positions, and 0.34 and 0.06 with 2,048.
_MANY_SCORES = 1024 * 1024


pick, put = attention_blocks.pick, attention_blocks.put


def unsupported_because(case: attention_backends.Case) -> str:
  """Returns why this implementation cannot serve a case, or ""."""
  if case.causal and case.queries != case.positions:
    return "causal queries need as many positions"
  return ""


def best_because(case: attention_backends.Case) -> str:
  """Returns why this implementation is best for a case, or ""."""
  if case.sequence > 1 and (case.causal or case.bias):
    return "a device's queries begin anywhere in an example"
  if case.queries * case.positions < _MANY_SCORES:
    return ""
  return f"memory linear in the length, from {_MANY_SCORES:,} scores a head on"


class Sums(NamedTuple):
  """Sums over the positions that were attended to so far, float32.

  Attributes:
    largest_N: largest score of each query.
    total_N: sum of its weights, relative to the largest.
    out_N: weighted sum of values.
  """

  largest_N: jax.Array
  total_N: jax.Array
  out_N: jax.Array


class Gradients(NamedTuple):
  """Gradients so far, float32, in blocks; of the bias, or None."""

  dq_N: jax.Array
  dk_M: jax.Array
  dv_M: jax.Array
  dbias: jax.Array | None


def attend(
  q_BLGRK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  *,
  bias_GRT: jax.Array | None = None,
  scale: float,
  softcap: float | None,
  block: int | None = None,
) -> jax.Array:
  """Returns the output, of the shape and dtype of the queries.

  Args:
    bias_GRT: float32, added to the scaled scores, by the distance of a position
      from a query, from -(L - 1) to S - 1.
  """
  L, S = q_BLGRK.shape[1], k_BSGK.shape[1]
  block = block or largest_block()
  static = attention_blocks.Static(scale, softcap, min(block, L), min(block, S))
  return _attend(static, q_BLGRK, k_BSGK, v_BSGK, bias_GRT, mask)


def largest_block() -> int:
  """Returns the largest number of queries or positions in a block."""
  return _BLOCK_ON_CPU if sharding.device()[0] == "cpu" else _BLOCK


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  static: attention_blocks.Static,
  q: Any,
  k: Any,
  v: Any,
  bias: Any,
  mask: masks.Mask,
) -> jax.Array:
  return _forward(static, q, k, v, bias, mask)[0]


def _forward(
  static: attention_blocks.Static,
  q: Any,
  k: Any,
  v: Any,
  bias: Any,
  mask: masks.Mask,
) -> tuple[jax.Array, jax.Array]:
  """Returns the output, and the logarithms of denominators (B, G, R, L)."""
  blocks = attention_blocks.Blocks(static, q, k, bias, mask)
  q_N, k_M, v_M = blocks.of_queries(q), blocks.of_keys(k), blocks.of_keys(v)
  sums = add_values(blocks, no_sums(q_N, v), q_N, k_M, v_M)
  return results(blocks, sums, q)


def no_sums(q_N: jax.Array, v: jax.Array) -> Sums:
  """Returns the sums before the first position."""
  rows = q_N.shape[:-1]
  return Sums(
    jnp.full(rows, attention_blocks.MASKED, jnp.float32),
    jnp.zeros(rows, jnp.float32),
    jnp.zeros((*rows, v.shape[-1]), jnp.float32),
  )


def add_values(
  blocks: attention_blocks.Blocks, sums: Sums, q_N: Any, k_M: Any, v_M: Any
) -> Sums:
  """Returns the sums with the values of all pairs of blocks."""

  def add(carry: Any, pair: Any) -> tuple[Any, None]:
    """Adds the values of a block of positions to a block of queries."""
    largest_N, total_N, out_N = carry
    n, m = pair
    scores, mask = blocks.scores(pick(q_N, n), pick(k_M, m), n, m)
    largest = jnp.maximum(pick(largest_N, n), jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    if mask is not None:  # Also for a row without a visible position.
      weights = jnp.where(mask, weights, 0.0)
    shrink = jnp.exp(pick(largest_N, n) - largest)
    total = pick(total_N, n) * shrink + jnp.sum(weights, axis=-1)
    out = pick(out_N, n) * shrink[..., None] + jnp.einsum(
      "bgrac,bgck->bgrak",
      weights.astype(v_M.dtype),
      pick(v_M, m),
      preferred_element_type=jnp.float32,
    )
    return (
      put(largest_N, n, largest),
      put(total_N, n, total),
      put(out_N, n, out),
    ), None

  with model_flops.counts_as(blocks.counted, blocks.computed):
    carry, _ = jax.lax.scan(add, tuple(sums), blocks.pairs)
  return Sums(*carry)


def results(
  blocks: attention_blocks.Blocks, sums: Sums, q: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the output, and the logarithms of denominators (B, G, R, L).

  Args:
    q: queries, whose shape and dtype are the output's.
  """
  largest_N, total_N, out_N = sums
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
  static: attention_blocks.Static,
  q: Any,
  k: Any,
  v: Any,
  bias: Any,
  mask: masks.Mask,
) -> tuple[jax.Array, Any]:
  out, log_BGRL = _forward(static, q, k, v, bias, mask)
  return out, (q, k, v, bias, mask, out, log_BGRL)


def _backward_rule(
  static: attention_blocks.Static, saved: Any, grad: jax.Array
) -> Any:
  q, k, v, bias, mask, *_ = saved
  blocks = attention_blocks.Blocks(static, q, k, bias, mask)
  q_N, k_M, v_M = blocks.of_queries(q), blocks.of_keys(k), blocks.of_keys(v)
  by_query = q_N, *of_outputs(blocks, grad, *saved[-2:])
  zeros = no_gradients(blocks, q_N, k_M, v_M)
  grads = add_gradients(blocks, zeros, by_query, k_M, v_M)
  dq = blocks.to_queries(grads.dq_N, q)
  dk, dv = blocks.to_keys(grads.dk_M, k), blocks.to_keys(grads.dv_M, v)
  dbias = None if bias is None else blocks.without_padding(grads.dbias)
  return dq, dk, dv, dbias, None


def of_outputs(
  blocks: attention_blocks.Blocks, grad: Any, out: Any, log_BGRL: Any
) -> tuple[jax.Array, ...]:
  """Returns what gradients need of the outputs, in blocks.

  Returns:
    (grad_N, the sum of output times gradient of each query, log_N).
  """
  grad_N = blocks.of_queries(grad)
  # Gradient of a softmax: its output times (gradient - this mean).
  mean = jnp.sum(
    out.astype(jnp.float32) * grad.astype(jnp.float32), -1, keepdims=True
  )
  mean_N = blocks.of_queries(mean)[..., 0]
  log_N = blocks.of_queries(jnp.moveaxis(log_BGRL, 3, 1)[..., None])[..., 0]
  return grad_N, mean_N, log_N


def no_gradients(
  blocks: attention_blocks.Blocks, q_N: Any, k_M: Any, v_M: Any
) -> Gradients:
  """Returns gradients of zero."""
  zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
  return Gradients(
    zeros(q_N), zeros(k_M), zeros(v_M), blocks.no_bias_gradient()
  )


def add_gradients(
  blocks: attention_blocks.Blocks,
  grads: Gradients,
  by_query: tuple[jax.Array, ...],
  k_M: jax.Array,
  v_M: jax.Array,
) -> Gradients:
  """Returns the gradients with those through all pairs of blocks."""
  static = blocks.static
  q_N, grad_N, mean_N, log_N = by_query

  def add(carry: Any, pair: Any) -> tuple[Any, None]:
    """Adds the gradients through a pair of blocks."""
    dq_N, dk_M, dv_M, dbias = carry
    n, m = pair
    scores, mask = blocks.scores(pick(q_N, n), pick(k_M, m), n, m)
    weights = jnp.exp(scores - pick(log_N, n)[..., None])
    if mask is not None:
      weights = jnp.where(mask, weights, 0.0)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dv = product(
      "bgrac,bgrak->bgck", weights.astype(v_M.dtype), pick(grad_N, n)
    )
    dweights = product("bgrak,bgck->bgrac", pick(grad_N, n), pick(v_M, m))
    dscores = weights * (dweights - pick(mean_N, n)[..., None])
    if static.softcap is not None:
      # A masked score is far below -softcap.
      ratio = jnp.clip(scores / static.softcap, -1.0, 1.0)
      dscores *= 1.0 - jnp.square(ratio)
    if dbias is not None:
      dbias = blocks.add_to_bias(dbias, jnp.sum(dscores, axis=0), n, m)
    dscores = (dscores * static.scale).astype(q_N.dtype)
    dq = product("bgrac,bgck->bgrak", dscores, pick(k_M, m))
    dk = product("bgrac,bgrak->bgck", dscores, pick(q_N, n))
    return (
      put(dq_N, n, pick(dq_N, n) + dq),
      put(dk_M, m, pick(dk_M, m) + dk),
      put(dv_M, m, pick(dv_M, m) + dv),
      dbias,
    ), None

  # Four products; the fifth computes the scores again.
  with model_flops.counts_as(4 * blocks.counted, 5 * blocks.computed):
    carry, _ = jax.lax.scan(add, tuple(grads), blocks.pairs)
  return Gradients(*carry)


_attend.defvjp(_forward_rule, _backward_rule)
