"""The block of decoder-only language models.

Axes: B batch, L length, D model width.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from bigtrain import sharding
from bigtrain.models.layers import (
  attention,
  kv_cache,
  masks,
  mlp,
  moe,
  positions,
)


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


class Block(nn.Module):
  """Attention and MLP or experts, each after a norm, added to the stream."""

  options: Options

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, kv_cache.Cache | None],
    layer: Any,
    rope: positions.Rotation | None,
    mask: masks.Mask,
    real_BL: jax.Array | None,
    start: Any,
    train: bool,
  ) -> tuple[tuple[jax.Array, kv_cache.Cache | None], Any]:
    options = self.options
    x_BLD, cache = carry
    drop = lambda y: nn.Dropout(options.dropout)(y, deterministic=not train)
    y_BLD = norm(options, "attention_norm")(x_BLD)
    y_BLD, cache = attention.Attention(_attention(options), name="attention")(
      y_BLD, y_BLD, mask=mask, rope=rope, cache=cache, layer=layer, start=start
    )
    x_BLD += drop(y_BLD)
    y_BLD = norm(options, "mlp_norm")(x_BLD)
    y_BLD, stats = moe.mlp_or_experts(
      options.moe, _mlp(options), y_BLD, real_BL, train
    )
    return (sharding.stream(x_BLD + drop(y_BLD)), cache), stats


def norm(options: Any, name: str) -> nn.Module:
  if options.norm == "rmsnorm":
    return nn.RMSNorm(epsilon=options.norm_eps, dtype=options.dtype, name=name)
  return nn.LayerNorm(
    epsilon=options.norm_eps,
    use_bias=options.use_bias,
    dtype=options.dtype,
    name=name,
  )


def _attention(options: Options) -> attention.Options:
  return attention.Options(
    num_heads=options.num_heads,
    head_dim=options.head_dim,
    num_kv_heads=options.num_kv_heads,
    bias=("qkv", "out") if options.use_bias else (),
    qk_norm="head" if options.qk_norm else None,
    norm_eps=options.norm_eps,
    window=options.window,
    softcap=options.attention_softcap,
    backend=options.attention,
    query_std=options.init_std,
    kv_std=options.init_std,
    out_std=_out_init_std(options),
    dtype=options.dtype,
  )


def _mlp(options: Options) -> mlp.Options:
  return mlp.Options(
    dim=options.mlp_dim,
    kind=options.mlp,
    init_std=options.init_std,
    out_init_std=_out_init_std(options),
    use_bias=options.use_bias,
    dtype=options.dtype,
  )


def _out_init_std(options: Options) -> float:
  """Of kernels that write to the residual stream, twice in each layer."""
  return options.init_std / (2 * options.depth) ** 0.5
