"""Layer norms of queries and keys, by head.

Axes: B batch, L length, H heads, K head width.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.models.layers import rms_norm


class HeadLayerNorm(nn.Module):
  """Layer norm of each head: a "scale", and "bias" if wanted."""

  shape: tuple[int, ...]  # Of the scale: (K,) for all heads, or (H, K).
  epsilon: float
  use_bias: bool = False
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x_BLHK: jax.Array) -> jax.Array:
    centered = x_BLHK.astype(jnp.float32)
    centered -= jnp.mean(centered, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    scale = self.param("scale", nn.initializers.ones, self.shape)
    scale = rms_norm.repeated(scale, x_BLHK.shape)
    y_BLHK = centered * (jax.lax.rsqrt(variance + self.epsilon) * scale)
    if self.use_bias:
      y_BLHK += self.param("bias", nn.initializers.zeros, self.shape)
    return y_BLHK.astype(self.dtype)
