"""Attention with a matrix of all scores, which XLA compiles.

Axes: see attention_inputs.py.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bigtrain import model_flops
from bigtrain.models.layers import positions, remat
from bigtrain.models.layers.attention_inputs import Inputs

# Not -inf: a row of padding that sees no position must not become NaN.
_MASKED = -1e30


def attend(
  inputs: Inputs, start: Any, *, scale: float, softcap: float | None
) -> jax.Array:
  """Attends with queries (B, L, H, K), or (B, L, G, R, K) in groups."""
  q, k_BSGK, v_BSGK, mask, bias, sinks_GR = inputs
  L, S = q.shape[1], k_BSGK.shape[1]
  grouped = q.ndim == 5
  mask_BLS = mask.matrix(L, S, 0 if start is None else start)
  static = _Static(scale, mask.reach(S), S)
  # The scores of a single query are few.
  if (
    q.dtype in (jnp.bfloat16, jnp.float16)
    and start is bias is softcap is None
    and not grouped
    and L > 1
  ):
    sinks_H = None if sinks_GR is None else sinks_GR[:, 0]
    arrays = _Arrays(q, k_BSGK, v_BSGK, mask_BLS, sinks_H)
    return _attend_in_half(static, arrays)
  heads, kv_heads = ("gr", "g") if grouped else ("h", "h")
  with static.in_window():
    product = f"bl{heads}k,bs{kv_heads}k->b{heads}ls"
    wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = wide(product, q, k_BSGK)
  scores *= scale
  if isinstance(bias, positions.BiasByDistance):
    bias = bias.matrix(L, S)
  if bias is not None:
    scores += bias.reshape(1, *scores.shape[1:])
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  if mask_BLS is not None:
    visible = jnp.expand_dims(mask_BLS, [*range(1, scores.ndim - 2)])
    scores = jnp.where(visible, scores, _MASKED)
  if sinks_GR is None:
    weights = jax.nn.softmax(scores, axis=-1)
  else:
    sinks = sinks_GR.reshape(*scores.shape[1:-2], 1, 1)
    powers, _, total = _powers(scores, sinks)
    weights = powers / total
  weights = weights.astype(q.dtype)
  with static.in_window():
    return jnp.einsum(f"b{heads}ls,bs{kv_heads}k->bl{heads}k", weights, v_BSGK)


class _Arrays(NamedTuple):
  """Inputs of attention in half precision, where G = H."""

  q_BLHK: jax.Array
  k_BSHK: jax.Array
  v_BSHK: jax.Array
  mask_BLS: jax.Array | None
  sinks_H: jax.Array | None


def _powers(
  scores: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Exponentials of scores minus the largest one, this score, and their sum."""
  largest = jnp.max(scores, axis=-1, keepdims=True)
  if sinks is not None:
    largest = jnp.maximum(largest, sinks)
  largest = jax.lax.stop_gradient(largest)
  powers = jnp.exp(scores - largest)
  total = jnp.sum(powers, axis=-1, keepdims=True)
  if sinks is not None:
    total += jnp.exp(sinks - largest)
  return powers, largest, total


class _Static(NamedTuple):
  """What is known before the run; a query attends to `reach` positions."""

  scale: float
  reach: int
  positions: int

  def in_window(self) -> contextlib.AbstractContextManager[Any]:
    """Marks products: positions outside of a window are not model FLOPs."""
    return model_flops.share(self.reach, self.positions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_half(static: _Static, arrays: _Arrays) -> jax.Array:
  """Attends in 16 bits; scores and softmax are float32, and not stored."""
  return _half_forward(static, arrays)[0]


def _half_scores(static: _Static, arrays: _Arrays) -> jax.Array:
  q_BLHK, k_BSHK, _, mask_BLS, _ = arrays
  with static.in_window():
    scores_BHLS = jnp.einsum(
      "blhk,bshk->bhls", q_BLHK, k_BSHK, preferred_element_type=jnp.float32
    )
  scores_BHLS *= static.scale
  if mask_BLS is None:
    return scores_BHLS
  return jnp.where(mask_BLS[:, None], scores_BHLS, _MASKED)


def _half_forward(
  static: _Static, arrays: _Arrays
) -> tuple[jax.Array, tuple[_Arrays, jax.Array, jax.Array]]:
  sinks_H = arrays.sinks_H
  powers_BHLS, largest_BHL1, sum_BHL1 = _powers(
    _half_scores(static, arrays),
    None if sinks_H is None else sinks_H[:, None, None],
  )
  weights_BHLS = (powers_BHLS / sum_BHL1).astype(arrays.q_BLHK.dtype)
  with static.in_window():
    o_BLHK = jnp.einsum("bhls,bshk->blhk", weights_BHLS, arrays.v_BSHK)
  o_BLHK, log_sum_BHL = checkpoint_name(
    (o_BLHK, (largest_BHL1 + jnp.log(sum_BHL1))[..., 0]), remat.ATTENTION
  )
  return o_BLHK, (arrays, o_BLHK, log_sum_BHL)


def sinks_gradient(
  sinks: jax.Array | None, log_sum_BxL: jax.Array, mean_BxL: jax.Array
) -> jax.Array | None:
  """Gradient of sinks (H, or G and R), from the gradients' weighted means."""
  if sinks is None:
    return None
  weights_BxL = jnp.exp(sinks[..., None] - log_sum_BxL)
  return -jnp.sum(weights_BxL * mean_BxL, axis=(0, -1)).astype(sinks.dtype)


def _half_backward(
  static: _Static,
  residuals: tuple[_Arrays, jax.Array, jax.Array],
  grad_BLHK: jax.Array,
) -> tuple[_Arrays]:
  arrays, o_BLHK, log_sum_BHL = residuals
  q_BLHK, k_BSHK, v_BSHK, _, sinks_H = arrays
  half, wide = q_BLHK.dtype, lambda x: x.astype(jnp.float32)
  scores_BHLS = _half_scores(static, arrays)
  weights_BHLS = jnp.exp(scores_BHLS - log_sum_BHL[..., None]).astype(half)
  # As a sum over S it would be another pass over two matrices.
  mean_BLH = jnp.sum(wide(grad_BLHK) * wide(o_BLHK), axis=-1)
  mean_BHL1 = jnp.swapaxes(mean_BLH, 1, 2)[..., None]
  with static.in_window():
    gains_BHLS = jnp.einsum("blhk,bshk->bhls", grad_BLHK, v_BSHK)
  change = wide(weights_BHLS) * (wide(gains_BHLS) - mean_BHL1)
  change_BHLS = (change * static.scale).astype(half)
  dsinks_H = sinks_gradient(sinks_H, log_sum_BHL, mean_BHL1[..., 0])
  with static.in_window():
    dq_BLHK = jnp.einsum("bhls,bshk->blhk", change_BHLS, k_BSHK)
    dk_BSHK = jnp.einsum("bhls,blhk->bshk", change_BHLS, q_BLHK)
    dv_BSHK = jnp.einsum("bhls,blhk->bshk", weights_BHLS, grad_BLHK)
  return (_Arrays(dq_BLHK, dk_BSHK, dv_BSHK, None, dsinks_H),)


_attend_in_half.defvjp(_half_forward, _half_backward)
