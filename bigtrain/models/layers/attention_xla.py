"""Attention with a matrix of all scores, which XLA compiles.

`attend` is the general case. `_attend_in_half`, for plain attention in 16 bits,
has a custom backward pass that stores no float32 scores.

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

# A masked score. Not -inf: a query that sees no position must not become NaN.
_MASKED = -1e30


def attend(
  inputs: Inputs, start: Any, *, scale: float, softcap: float | None
) -> jax.Array:
  """Returns means of values, (B, L, G, R, K) or the same with heads joined."""
  q_BLGRK, k_BSGK, v_BSGK, mask, bias, sinks_GR = inputs
  _, L, G, R, _ = q_BLGRK.shape
  S = k_BSGK.shape[1]
  mask_BLS = mask.matrix(L, S, 0 if start is None else start)
  is_half = q_BLGRK.dtype in (jnp.bfloat16, jnp.float16)
  is_plain = start is None and bias is None and softcap is None and R == 1
  if is_half and is_plain and L > 1:  # The scores of a single query are few.
    sinks_H = None if sinks_GR is None else sinks_GR[:, 0]
    arrays = _Arrays(q_BLGRK[:, :, :, 0], k_BSGK, v_BSGK, mask_BLS, sinks_H)
    return _attend_in_half(_Static(scale, mask.reach(S), S), arrays)
  if isinstance(bias, positions.BiasByDistance):
    bias = bias.matrix(L, S)
  if bias is not None:
    bias = bias.reshape(1, G, R, L, S)
  # On CPUs XLA would transpose scores if heads were not first.
  q_BGRLK = jnp.moveaxis(q_BLGRK, 1, -2)
  # There, the first half of the queries of a causal text leaves out the later
  # keys, if the text is long enough to save more than a second product costs.
  in_order = start is None and mask.in_order and sharding.device()[0] == "cpu"
  num_parts = 2 if in_order and L >= 128 else 1
  means = []
  for i in range(num_parts):
    rows = slice(i * L // num_parts, (i + 1) * L // num_parts)
    seen = slice(rows.stop if num_parts > 1 else S)
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
  """Constants of the compiled program."""

  scale: float
  reach: int  # Number of positions that a query attends to, for model FLOPs.
  positions: int  # Number of positions that are computed.

  def einsum(
    self, subscripts: str, x: jax.Array, y: jax.Array, dtype: Any = None
  ) -> jax.Array:
    """A product; positions outside a window do not count as model FLOPs."""
    with model_flops.counts_as(self.reach, self.positions):
      return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_half(static: _Static, arrays: _Arrays) -> jax.Array:
  """Attends in 16 bits. Scores and softmax are float32, and not stored."""
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
  """Gradient of sinks, with axes x of H, or of G and R.

  `mean_BxL` is the mean of the gradients of a query's weights, weighted by
  these.
  """
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
  half = q_BLHK.dtype

  def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)

  scores_BHLS = _half_scores(static, arrays)
  weights_BHLS = jnp.exp(scores_BHLS - log_sum_BHL[..., None]).astype(half)
  # The mean of the weights' gradients, by the weights. As a sum over S it would
  # be another pass over two matrices.
  mean_BLH = jnp.sum(wide(grad_BLHK) * wide(o_BLHK), axis=-1)
  mean_BHL1 = jnp.swapaxes(mean_BLH, 1, 2)[..., None]
  dweights_BHLS = static.einsum("blhk,bshk->bhls", grad_BLHK, v_BSHK)
  dscores_BHLS = wide(weights_BHLS) * (wide(dweights_BHLS) - mean_BHL1)
  dscores_BHLS = (dscores_BHLS * static.scale).astype(half)
  dsinks_H = sinks_gradient(sinks_H, log_sum_BHL, mean_BHL1[..., 0])
  dq_BLHK = static.einsum("bhls,bshk->blhk", dscores_BHLS, k_BSHK)
  dk_BSHK = static.einsum("bhls,blhk->bshk", dscores_BHLS, q_BLHK)
  dv_BSHK = static.einsum("bhls,blhk->bshk", weights_BHLS, grad_BLHK)
  return (_Arrays(dq_BLHK, dk_BSHK, dv_BSHK, None, dsinks_H),)


_attend_in_half.defvjp(_half_forward, _half_backward)
