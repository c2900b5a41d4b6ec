"""The block that decoders stack.

Axes: B batch, L length, D model width.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from bigtrain import sharding
from bigtrain.models.layers import attention, mlp, moe


class Layer(NamedTuple):
  """What a block has to know; fields of Model."""

  depth: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  norm: str
  norm_eps: float
  mlp: str
  moe: moe.Options | None
  use_bias: bool
  qk_norm: bool
  window: int | None
  attention_softcap: float | None
  dropout: float
  init_std: float
  dtype: str

  @property
  def out_init_std(self) -> float:
    """Of kernels that write to the residual stream, twice in each layer."""
    return self.init_std / (2 * self.depth) ** 0.5


class Block(nn.Module):
  """Attention and MLP, each after a norm and added to the residual stream."""

  layer: Layer

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, attention.Cache | None],
    index: Any,
    rope: attention.Rotation | None,
    mask_BLL: jax.Array | None,
    real_BL: jax.Array | None,
    start: Any,
    train: bool,
  ) -> tuple[tuple[jax.Array, attention.Cache | None], Any]:
    """Returns the carry, (stream, cache), and statistics of the experts."""
    layer = self.layer
    x_BLD, cache = carry
    drop = lambda y: nn.Dropout(layer.dropout)(y, deterministic=not train)
    y_BLD, cache = attention.Attention(
      num_heads=layer.num_heads,
      num_kv_heads=layer.num_kv_heads,
      head_dim=layer.head_dim,
      use_bias=layer.use_bias,
      qk_norm=layer.qk_norm,
      window=layer.window,
      softcap=layer.attention_softcap,
      norm_eps=layer.norm_eps,
      init_std=layer.init_std,
      out_init_std=layer.out_init_std,
      dtype=layer.dtype,
      name="attention",
    )(norm(layer, "attention_norm")(x_BLD), rope, mask_BLL, cache, index, start)
    x_BLD += drop(y_BLD)
    options = mlp.Options(
      dim=layer.mlp_dim,
      kind=layer.mlp,
      init_std=layer.init_std,
      out_init_std=layer.out_init_std,
      use_bias=layer.use_bias,
      dtype=layer.dtype,
    )
    y_BLD = norm(layer, "mlp_norm")(x_BLD)
    y_BLD, stats = moe.mlp_or_experts(layer.moe, options, y_BLD, real_BL, train)
    return (sharding.over_batch(x_BLD + drop(y_BLD)), cache), stats


def norm(options: Any, name: str) -> nn.Module:
  """The norm that `options`, a Layer or a Model, describes."""
  if options.norm == "rmsnorm":
    return nn.RMSNorm(epsilon=options.norm_eps, dtype=options.dtype, name=name)
  return nn.LayerNorm(
    epsilon=options.norm_eps,
    use_bias=options.use_bias,
    dtype=options.dtype,
    name=name,
  )
