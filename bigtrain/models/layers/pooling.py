"""Attention pooling of an encoder's output.

Axes: B batch, L length, D model width.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.models.layers import attention, kernels, masks, mlp


class MAPHead(nn.Module):
  """Set Transformer's pooling (https://arxiv.org/abs/1810.00825), an MLP."""

  mlp_dim: int | None = None
  num_heads: int = 12
  norm_eps: float = 1e-6
  mlp: str = "gelu"
  dtype: str = "float32"

  @nn.compact
  def __call__(
    self, x_BLD: jax.Array, mask: masks.Mask = masks.Mask()
  ) -> jax.Array:
    B, _, D = x_BLD.shape
    probe_11D = self.param("probe", kernels.xavier, (1, 1, D))
    probe_B1D = jnp.broadcast_to(probe_11D, (B, 1, D))
    x_B1D, _ = attention.Attention(
      attention.Options(self.num_heads, dtype=self.dtype),
      name="MultiHeadDotProductAttention_0",
    )(probe_B1D, x_BLD, mask=mask)
    norm = nn.LayerNorm(self.norm_eps, self.dtype, name="LayerNorm_0")
    y_B1D = norm(x_B1D)
    F = self.mlp_dim or 4 * D
    options = mlp.Options(
      F, self.mlp, use_bias=True, dtype=self.dtype, names=mlp.VIT_NAMES
    )
    y_B1D = mlp.Mlp(options, name="MlpBlock_0")(y_B1D)
    return (x_B1D + y_B1D)[:, 0]
