"""The largest logits of attention, and what clips them: MuonClip.

Under Muon the logits of attention, the scaled products of queries and keys, can
grow without bound (Kimi K2, arXiv 2507.20534, section 2.1). After a step in
which a head's largest logit was above tau, `factors` shrinks the head's
projections so that it would have been tau. With gamma = min(1, tau / largest
logit):

  heads with own keys    queries by gamma^alpha, keys by gamma^(1 - alpha)
  heads that share keys  queries by gamma
  latent attention       features without rotation as with own keys; rotated
                         queries by gamma

The paper shrinks each head separately, and leaves the rotated keys of latent
attention untouched, because all heads share them. It says nothing about grouped
queries. Here they follow the same rule: keys that several heads share stay as
they are, so that a large logit of one head does not change the others.

`record` computes the largest logits. No attention kernel returns them, so they
need another product of queries and keys, computed in blocks. It costs a seventh
of the FLOPs of attention in a training step, and memory linear in the length.

Axes: B batch, L length, S length attended to, H heads, G heads of keys and
values, R = H / G, K head width; of latent attention N features of a query or
key without rotation, V width of values.
"""

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.arrays import model_flops, trees
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import (
  attention_blockwise,
  attention_split,
  masks,
)
from bigtrain.models.layers.attention_inputs import Inputs

# Flax's collection with the largest logits of a step; the model is asked for
# them by making it mutable (losses/forward.py).
STEP_LARGEST = "step_largest"
# Name of its variable (H,) in each attention layer.
_NAME = "largest"


def record(
  layer: nn.Module,
  q: jax.Array,
  k_BSGK: jax.Array,
  mask: masks.Mask,
  real_BL: jax.Array | None,
  scale: float | None,
) -> None:
  """Stores the largest logit of each head, (H,), if it is asked for.

  Logits of padding and masked logits do not count. A cap on the scores is not
  applied.

  Args:
    q: queries [B, L, H, K], or [B, L, G, R, K].
    real_BL: bool, False for padding; None if all are real.
    scale: factor of the logits; 1 / sqrt(K) if None.
  """
  if layer.is_initializing() or not layer.is_mutable_collection(STEP_LARGEST):
    return
  B, L = q.shape[:2]
  G, K = k_BSGK.shape[2:]
  q, k_BSGK = jax.lax.stop_gradient((q.reshape(B, L, G, -1, K), k_BSGK))
  inputs = Inputs(q, k_BSGK, k_BSGK, mask)
  scale = 1 / math.sqrt(K) if scale is None else scale
  largest_of: Any = attention_blockwise.largest_scores
  if sharding.length_ways(B, L) > 1:
    largest_of = attention_split.largest_scores
  with model_flops.share(0, 1):  # No part of the model.
    largest_BLGR = largest_of(inputs, scale=scale)
  if real_BL is not None:
    real_BL11 = real_BL[..., None, None]
    largest_BLGR = jnp.where(real_BL11, largest_BLGR, -jnp.inf)
  largest_H = jnp.max(largest_BLGR, axis=(0, 1)).reshape(-1)
  layer.put_variable(STEP_LARGEST, _NAME, largest_H)


def by_layer(logits: Any) -> dict[str, jax.Array]:
  """{layer: the largest logits of its heads (H,)}.

  The layers of a loop have a number after the name, as in "blocks/3".
  """
  result: dict[str, jax.Array] = {}
  for name, largest in trees.flatten_with_names(logits):
    block, _, _ = name.removesuffix(f"/{_NAME}").rpartition("/")
    if largest.ndim == 1:
      result[block] = largest
    else:
      result |= {f"{block}/{i}": x_H for i, x_H in enumerate(largest)}
  return result


def factors(
  params: Any, logits: Any, tau: float, alpha: float
) -> dict[str, jax.Array]:
  """Factors of parameters, by name. They broadcast to the parameter.

  Args:
    params: trained parameters.
    logits: the collection STEP_LARGEST.
  """
  shapes = {n: x.shape for n, x in trees.flatten_with_names(params)}
  result: dict[str, jax.Array] = {}
  for name, largest_H in trees.flatten_with_names(logits):
    layer = name.removesuffix(f"/{_NAME}")
    # Not a minimum: of -inf, if a batch has only padding, it would be 0.
    gamma_H = jnp.where(largest_H > tau, tau / largest_H, 1.0)
    if f"{layer}/kv_up/kernel" in shapes:
      scaled = _of_latents(layer, shapes, gamma_H[..., None], alpha)
    else:
      scaled = _of_heads(layer, shapes, gamma_H[..., None], alpha)
    for projection, factor_HK in scaled.items():
      kernel, bias = f"{projection}/kernel", f"{projection}/bias"
      if kernel not in shapes:
        raise ConfigError(
          f"config.qk_clip: {kernel} does not train, so the logits of its "
          "heads have no limit. Expected queries and keys that train."
        )
      result[kernel] = factor_HK[..., None, :, :]  # (*layers, inputs, H, K).
      if bias in shapes:
        result[bias] = factor_HK
  return result


def _of_heads(
  layer: str,
  shapes: Mapping[str, tuple[int, ...]],
  gamma_H1: jax.Array,
  alpha: float,
) -> dict[str, jax.Array]:
  query, key = f"{layer}/query", f"{layer}/key"
  key_shape = shapes.get(f"{key}/kernel")
  if key_shape is not None and key_shape[-2] < gamma_H1.shape[-2]:
    return {query: gamma_H1}
  return {query: gamma_H1**alpha, key: gamma_H1 ** (1 - alpha)}


def _of_latents(
  layer: str,
  shapes: Mapping[str, tuple[int, ...]],
  gamma_H1: jax.Array,
  alpha: float,
) -> dict[str, jax.Array]:
  query = f"{layer}/query_up"
  if f"{query}/kernel" not in shapes:
    query = f"{layer}/query"
  up_shape = shapes[f"{layer}/kv_up/kernel"]
  V = shapes[f"{layer}/out/kernel"][-2]
  N = up_shape[-1] - V
  R = shapes[f"{query}/kernel"][-1] - N if f"{query}/kernel" in shapes else 0

  def features(factor_H1: jax.Array, number: int) -> jax.Array:
    return jnp.broadcast_to(factor_H1, (*factor_H1.shape[:-1], number))

  def both(first: jax.Array, N: int, second: jax.Array, M: int) -> jax.Array:
    return jnp.concatenate([features(first, N), features(second, M)], axis=-1)

  ones = jnp.ones_like(gamma_H1)
  return {
    query: both(gamma_H1**alpha, N, gamma_H1, R),
    f"{layer}/kv_up": both(gamma_H1 ** (1 - alpha), N, ones, V),
  }
