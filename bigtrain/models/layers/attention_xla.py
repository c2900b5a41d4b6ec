"""Attention with a matrix of all scores, which XLA compiles.

Axes: see attention_inputs.py.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.models.layers import positions, remat
from bigtrain.models.layers.attention_inputs import Inputs

# Not -inf: a row of padding that sees no position must not become NaN.
_MASKED = -1e30


def attend(
  inputs: Inputs, start: Any, *, scale: float, softcap: float | None
) -> jax.Array:
  """Returns means of values, (B, L, G, R, K) up to a reshape."""
  q_BLGRK, k_BSGK, v_BSGK, mask, bias, sinks_GR = inputs
  (_, L, G, R, _), S = q_BLGRK.shape, k_BSGK.shape[1]
  mask_BLS = mask.matrix(L, S, 0 if start is None else start)
  half = q_BLGRK.dtype in (jnp.bfloat16, jnp.float16)
  # The scores of a single query are few.
  if half and start is bias is softcap is None and R == 1 and L > 1:
    sinks_H = None if sinks_GR is None else sinks_GR[:, 0]
    arrays = _Arrays(q_BLGRK[:, :, :, 0], k_BSGK, v_BSGK, mask_BLS, sinks_H)
    return _attend_in_half(_Static(scale, mask.reach(S), S), arrays)
  if isinstance(bias, positions.BiasByDistance):
    bias = bias.matrix(L, S)
  if bias is not None:
    bias = bias.reshape(1, G, R, L, S)
  # On CPUs XLA would transpose scores if heads were not first. There, half of a
  # long text saves more by leaving out later keys than another program costs.
  q_BGRLK = jnp.moveaxis(q_BLGRK, 1, -2)
  in_order = start is None and mask.in_order and sharding.device()[0] == "cpu"
  blocks = 2 if in_order and L >= 128 else 1
  means = []
  for i in range(blocks):
    rows = slice(i * L // blocks, (i + 1) * L // blocks)
    seen = slice(rows.stop if blocks > 1 else S)
    einsum = _Static(scale, mask.reach(S), seen.stop).einsum
    scores = einsum(
      "bgrlk,bsgk->bgrls", q_BGRLK[..., rows, :], k_BSGK[:, seen], jnp.float32
    )
    scores *= scale
    if bias is not None:
      scores += bias[..., rows, seen]
    if softcap is not None:
      scores = softcap * jnp.tanh(scores / softcap)
    if mask_BLS is not None:
      scores = jnp.where(mask_BLS[:, None, None, rows, seen], scores, _MASKED)
    if sinks_GR is None:
      weights = jax.nn.softmax(scores, axis=-1)
    else:
      powers, _, total = _powers(scores, sinks_GR[..., None, None])
      weights = powers / total
    weights = weights.astype(q_BLGRK.dtype)
    means.append(einsum("bgrls,bsgk->bgrlk", weights, v_BSGK[:, seen]))
  return jnp.moveaxis(jnp.concatenate(means, axis=-2), -2, 1)


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

  def einsum(
    self, subscripts: str, x: jax.Array, y: jax.Array, dtype: Any = None
  ) -> jax.Array:
    """A product; positions outside of a window are not model FLOPs."""
    with model_flops.counts_as(self.reach, self.positions):
      return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_half(static: _Static, arrays: _Arrays) -> jax.Array:
  """Attends in 16 bits; scores and softmax are float32, and not stored."""
  return _half_forward(static, arrays)[0]


def _half_scores(static: _Static, arrays: _Arrays) -> jax.Array:
  q_BLHK, k_BSHK, _, mask_BLS, _ = arrays
  scores_BHLS = static.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK, jnp.float32)
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
  o_BLHK = static.einsum("bhls,bshk->blhk", weights_BHLS, arrays.v_BSHK)
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
  gains_BHLS = static.einsum("blhk,bshk->bhls", grad_BLHK, v_BSHK)
  change = wide(weights_BHLS) * (wide(gains_BHLS) - mean_BHL1)
  change_BHLS = (change * static.scale).astype(half)
  dsinks_H = sinks_gradient(sinks_H, log_sum_BHL, mean_BHL1[..., 0])
  dq_BLHK = static.einsum("bhls,bshk->blhk", change_BHLS, k_BSHK)
  dk_BSHK = static.einsum("bhls,blhk->bshk", change_BHLS, q_BLHK)
  dv_BSHK = static.einsum("bhls,blhk->bshk", weights_BHLS, grad_BLHK)
  return (_Arrays(dq_BLHK, dk_BSHK, dv_BSHK, None, dsinks_H),)


_attend_in_half.defvjp(_half_forward, _half_backward)
