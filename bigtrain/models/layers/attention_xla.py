"""Attention with a matrix of all scores, which XLA compiles.

Axes: B batch, L length, S length attended to, H heads, G heads of keys and
values, R = H / G, K head width.
"""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from bigtrain import model_flops
from bigtrain.models.layers import (
  attention_backends,
  masks,
  positions,
  remat,
)

# Not -inf: a row of padding that sees no position must not become NaN.
_MASKED = -1e30


def best_because(case: attention_backends.Case) -> str:
  """Returns why this implementation is best for a case."""
  scores = case.queries * case.positions
  return f"the fastest for {scores:,} scores a head"


def attend(
  q: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  start: Any,
  bias: jax.Array | positions.BiasByDistance | None,
  scaled: bool,
  softcap: float | None,
) -> jax.Array:
  """Returns the output, in the shape and dtype of the queries.

  Args:
    q: queries (B, L, H, K), or (B, L, G, R, K) for groups of heads.
    start: int scalar, number of the first query's position; None for 0.
  """
  L, S = q.shape[1], k_BSGK.shape[1]
  grouped = q.ndim == 5
  in_order = mask.causal and not mask.selects and start is None
  first = 0 if start is None else start
  # Positions outside of a window are not model FLOPs.
  in_window = functools.partial(model_flops.share, mask.reach(S), S)
  # The scores of a single query are few.
  if (
    q.dtype in (jnp.bfloat16, jnp.float16)
    and start is bias is softcap is None
    and not grouped
    and L > 1
  ):
    scale = 1 / math.sqrt(q.shape[-1]) if scaled else 1.0
    static = _Static(scale, mask.reach(S), S)
    return _attend_in_half(static, q, k_BSGK, v_BSGK, mask.matrix(L, S, first))
  # jax.nn adds up the heads of a group in another order, which would change the
  # last bits of existing configs' results.
  if scaled and bias is None and softcap is None and not grouped:
    mask_BLS = None if in_order else mask.matrix(L, S, first)
    window = mask.window if in_order else None
    with in_window():
      return jax.nn.dot_product_attention(
        q,
        k_BSGK,
        v_BSGK,
        mask=None if mask_BLS is None else mask_BLS[:, None],
        is_causal=in_order,
        local_window_size=(window - 1, 0) if window else None,
        implementation="xla",
      )
  heads, kv_heads = ("gr", "g") if grouped else ("h", "h")
  with in_window():
    scores = jnp.einsum(
      f"bl{heads}k,bs{kv_heads}k->b{heads}ls",
      q,
      k_BSGK,
      preferred_element_type=jnp.float32,
    )
  if scaled:
    scores /= math.sqrt(q.shape[-1])
  if isinstance(bias, positions.BiasByDistance):
    bias = bias.matrix(L, S)
  if bias is not None:
    scores += bias.reshape(1, *scores.shape[1:])
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  mask_BLS = mask.matrix(L, S, first)
  if mask_BLS is not None:
    mask = jnp.expand_dims(mask_BLS, [*range(1, scores.ndim - 2)])
    scores = jnp.where(mask, scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  with in_window():
    return jnp.einsum(f"b{heads}ls,bs{kv_heads}k->bl{heads}k", weights, v_BSGK)


class _Static(NamedTuple):
  """What is known before the run.

  Attributes:
    scale: factor of the scores.
    reach: number of positions that a query sees at most.
    positions: S.
  """

  scale: float
  reach: int
  positions: int

  def in_window(self) -> contextlib.AbstractContextManager[Any]:
    """Marks products whose other positions are not model FLOPs."""
    return model_flops.share(self.reach, self.positions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_half(
  static: _Static,
  q_BLHK: jax.Array,
  k_BSHK: jax.Array,
  v_BSHK: jax.Array,
  mask_BLS: jax.Array | None,
) -> jax.Array:
  """Attends in a dtype of 16 bits, with scores and softmax in float32.

  The backward pass gets the probabilities from the scores and the logarithms of
  the softmax's sums, without another softmax, and the matrices that it stores
  have 16 bits.

  Args:
    mask_BLS: bool, what a query sees; all if None.

  Returns:
    [B, L, H, K].
  """
  return _half_forward(static, q_BLHK, k_BSHK, v_BSHK, mask_BLS)[0]


def _half_scores(
  static: _Static,
  q_BLHK: jax.Array,
  k_BSHK: jax.Array,
  mask_BLS: jax.Array | None,
) -> jax.Array:
  """Returns float32 [B, H, L, S]."""
  with static.in_window():
    scores_BHLS = jnp.einsum(
      "blhk,bshk->bhls", q_BLHK, k_BSHK, preferred_element_type=jnp.float32
    )
  scores_BHLS *= static.scale
  if mask_BLS is None:
    return scores_BHLS
  return jnp.where(mask_BLS[:, None], scores_BHLS, _MASKED)


def _half_forward(
  static: _Static,
  q_BLHK: jax.Array,
  k_BSHK: jax.Array,
  v_BSHK: jax.Array,
  mask_BLS: jax.Array | None,
) -> tuple[jax.Array, Any]:
  scores_BHLS = _half_scores(static, q_BLHK, k_BSHK, mask_BLS)
  largest_BHL1 = jnp.max(scores_BHLS, axis=-1, keepdims=True)
  powers_BHLS = jnp.exp(scores_BHLS - largest_BHL1)
  sum_BHL1 = jnp.sum(powers_BHLS, axis=-1, keepdims=True)
  weights_BHLS = (powers_BHLS / sum_BHL1).astype(q_BLHK.dtype)
  with static.in_window():
    o_BLHK = jnp.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK)
  o_BLHK, log_sum_BHL = ad_checkpoint.checkpoint_name(
    (o_BLHK, (largest_BHL1 + jnp.log(sum_BHL1))[..., 0]), remat.ATTENTION
  )
  return o_BLHK, (q_BLHK, k_BSHK, v_BSHK, mask_BLS, o_BLHK, log_sum_BHL)


def _half_backward(
  static: _Static, residuals: Any, grad_BLHK: jax.Array
) -> tuple[Any, ...]:
  q_BLHK, k_BSHK, v_BSHK, mask_BLS, o_BLHK, log_sum_BHL = residuals
  half, wide = q_BLHK.dtype, lambda x: x.astype(jnp.float32)
  scores_BHLS = _half_scores(static, q_BLHK, k_BSHK, mask_BLS)
  weights_BHLS = jnp.exp(scores_BHLS - log_sum_BHL[..., None]).astype(half)
  # As a sum over S it would be another pass over two matrices.
  mean_BLH = jnp.sum(wide(grad_BLHK) * wide(o_BLHK), axis=-1)
  mean_BHL1 = jnp.swapaxes(mean_BLH, 1, 2)[..., None]
  with static.in_window():
    gains_BHLS = jnp.einsum("blhk,bshk->bhls", grad_BLHK, v_BSHK)
  change = wide(weights_BHLS) * (wide(gains_BHLS) - mean_BHL1)
  change_BHLS = (change * static.scale).astype(half)
  with static.in_window():
    return (
      jnp.einsum("bhls,bshk->blhk", change_BHLS, k_BSHK),
      jnp.einsum("bhls,blhk->bshk", change_BHLS, q_BLHK),
      jnp.einsum("bhls,blhk->bshk", weights_BHLS, grad_BLHK),
      None,
    )


_attend_in_half.defvjp(_half_forward, _half_backward)
