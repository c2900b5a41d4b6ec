"""The block of decoder-only language models.

Axes: B batch, L length, D model width.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from bigtrain import sharding
from bigtrain.models.layers import attention as attention_lib
from bigtrain.models.layers import (
  dropout,
  kv_cache,
  masks,
  moe,
  positions,
  stack,
)
from bigtrain.models.layers import mlp as mlp_lib


class Options(NamedTuple):
  """Options of a block: fields of models.decoder.Model."""

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
  attention: str
  dropout: float
  init_std: float
  dtype: str

  @property
  def out_init_std(self) -> float:
    """Of kernels that write to the residual stream, twice in each layer."""
    return self.init_std / (2 * self.depth) ** 0.5

  def attention_options(self) -> attention_lib.Options:
    """Returns the options of the attention."""
    return attention_lib.Options(
      num_heads=self.num_heads,
      head_dim=self.head_dim,
      num_kv_heads=self.num_kv_heads,
      use_bias=self.use_bias,
      qk_norm=self.qk_norm,
      norm_eps=self.norm_eps,
      window=self.window,
      softcap=self.attention_softcap,
      implementation=self.attention,
      query_std=self.init_std,
      kv_std=self.init_std,
      out_std=self.out_init_std,
      dtype=self.dtype,
    )

  def mlp_options(self) -> mlp_lib.Options:
    """Returns the options of the MLP, or of each expert."""
    return mlp_lib.Options(
      dim=self.mlp_dim,
      kind=self.mlp,
      init_std=self.init_std,
      out_init_std=self.out_init_std,
      use_bias=self.use_bias,
      dtype=self.dtype,
    )


class Block(nn.Module):
  """Attention and MLP, each after a norm and added to the residual stream.

  Experts may replace the MLP.
  """

  options: Options

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, kv_cache.Cache | None],
    layer: Any,
    numbers: Any,
    rope: positions.Rotation | None,
    mask: masks.Mask,
    real_BL: jax.Array | None,
    start: Any,
    train: bool,
  ) -> tuple[tuple[jax.Array, kv_cache.Cache | None], Any]:
    """Returns the carry, and the experts' statistics or None.

    Args:
      carry: the stream (B, L, D), and in decoding the cache of all layers.
      rope: rotary embeddings of the positions, or None.
      real_BL: bool, False for padding; all real if None.
      train: whether dropout acts.
    """
    options = stack.join(self.options, numbers)
    x_BLD, cache = carry
    drop = lambda y: dropout.Dropout(options.dropout)(y, train=train)
    y_BLD = norm(options, "attention_norm")(x_BLD)
    y_BLD, cache = attention_lib.Attention(
      options.attention_options(), name="attention"
    )(
      y_BLD,
      y_BLD,
      mask=mask,
      rope=rope,
      cache=cache,
      layer=layer,
      start=start,
    )
    x_BLD += drop(y_BLD)
    y_BLD = norm(options, "mlp_norm")(x_BLD)
    y_BLD, stats = moe.mlp_or_experts(
      options.moe, options.mlp_options(), y_BLD, real_BL, train
    )
    return (sharding.stream(x_BLD + drop(y_BLD)), cache), stats


def norm(options: Any, name: str) -> nn.Module:
  """Returns the norm that `options`, a block's or a Model, asks for."""
  if options.norm == "rmsnorm":
    return nn.RMSNorm(epsilon=options.norm_eps, dtype=options.dtype, name=name)
  return nn.LayerNorm(
    epsilon=options.norm_eps,
    use_bias=options.use_bias,
    dtype=options.dtype,
    name=name,
  )
