"""Attention pooling of an encoder's output, and embeddings on a sphere.

Axes: B batch, L length, N queries, D model width, E width of an encoder or of
an embedding.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.models.layers import attention, kernels, masks, mlp


class MAPHead(nn.Module):
  """Attention of learned queries to all positions, and an MLP.

  As in Set Transformer, https://arxiv.org/abs/1810.00825; without the MLP
  (mlp=None) as in CoCa, https://arxiv.org/abs/2205.01917.
  """

  mlp_dim: int | None = None
  num_heads: int = 12
  norm_eps: float = 1e-6
  mlp: str | None = "gelu"
  dtype: str = "float32"
  num_queries: int = 1
  width: int | None = None  # Of the queries, D; by default the encoder's.

  @nn.compact
  def __call__(
    self, x_BLE: jax.Array, mask: masks.Mask = masks.Mask()
  ) -> jax.Array:
    B, D = len(x_BLE), self.width or x_BLE.shape[-1]
    N, H = self.num_queries, self.num_heads
    probe_1ND = self.param("probe", kernels.xavier, (1, N, D))
    probe_BND = jnp.broadcast_to(probe_1ND, (B, N, D))
    x_BND, _ = attention.Attention(
      attention.Options(H, head_dim=D // H, dtype=self.dtype),
      name="MultiHeadDotProductAttention_0",
    )(probe_BND, x_BLE, mask=mask)
    norm = nn.LayerNorm(self.norm_eps, self.dtype, name="LayerNorm_0")
    y_BND = norm(x_BND)
    if self.mlp is None:
      return y_BND
    F = self.mlp_dim or 4 * D
    options = mlp.Options(
      F, self.mlp, use_bias=True, dtype=self.dtype, names=mlp.VIT_NAMES
    )
    return x_BND + mlp.Mlp(options, name="MlpBlock_0")(y_BND)


def map_head(fields: Any) -> MAPHead:
  """The pooling of a model with encoder.Fields and `norm_eps`."""
  names = ("mlp_dim", "num_heads", "norm_eps", "mlp", "dtype")
  values = {name: getattr(fields, name) for name in names}
  return MAPHead(**values, name="MAPHead_0")


# Added to norms, so that an embedding of zeros stays zero and has a gradient.
_EPSILON = 1e-8


def normalise(z_BE: jax.Array) -> jax.Array:
  """Scales embeddings to length 1, in float32."""
  z_BE = z_BE.astype(jnp.float32)
  square_B1 = jnp.sum(jnp.square(z_BE), axis=-1, keepdims=True)
  return z_BE / jnp.sqrt(square_B1 + _EPSILON**2)
