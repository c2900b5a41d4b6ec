"""Heads for self-supervised learning, with norms over the global batch.

Axes: N samples of the global batch, D width, F hidden width.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.config.errors import check_choice

NORMS = ("batch", "none")
_NORM_EPS = 1e-5  # Added to the variance.
_EPS = 1e-12


class BatchNorm(nn.Module):
  """Normalises each feature over all samples, on any mesh.

  There are no running statistics, because heads are used only in training.
  Samples of weight 0 do not count.
  """

  affine: bool = True  # Whether a scale and a bias are learned.

  @nn.compact
  def __call__(self, x_ND: jax.Array, weight_N: jax.Array) -> jax.Array:
    x_ND = x_ND.astype(jnp.float32)
    share_N1 = (weight_N / jnp.maximum(jnp.sum(weight_N), 1.0))[:, None]
    centred_ND = x_ND - jnp.sum(share_N1 * x_ND, axis=0)
    variance_D = jnp.sum(share_N1 * jnp.square(centred_ND), axis=0)
    y_ND = centred_ND * jax.lax.rsqrt(variance_D + _NORM_EPS)
    if not self.affine:
      return y_ND
    width = x_ND.shape[-1]
    scale_D = self.param("scale", nn.initializers.ones, (width,))
    bias_D = self.param("bias", nn.initializers.zeros, (width,))
    return y_ND * scale_D + bias_D


class Head(nn.Module):
  """An MLP whose layers are followed by norms, and all but the last by ReLU.

  As in SimCLR and MoCo v3, the last norm learns no scale and no bias, and
  layers before a norm have no bias.
  """

  layers: int
  hidden: int  # F.
  out: int
  norm: str = "batch"  # A name in NORMS.
  dtype: str = "float32"  # Of matrix products.

  @nn.compact
  def __call__(self, x: jax.Array, weight_N: jax.Array) -> jax.Array:
    check_choice("config.model.head_norm", self.norm, NORMS)
    for i in range(self.layers):
      is_last = i == self.layers - 1
      x = nn.Dense(
        self.out if is_last else self.hidden,
        use_bias=self.norm == "none",
        dtype=self.dtype,
        name=f"Dense_{i}",
      )(x)
      if self.norm == "batch":
        x = BatchNorm(affine=not is_last, name=f"norm_{i}")(x, weight_N)
      if not is_last:
        x = nn.relu(x)
    return x.astype(jnp.float32)


def unit(x: jax.Array) -> jax.Array:
  """Vectors of length 1, float32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + _EPS)
