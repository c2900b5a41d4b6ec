"""The block of decoder-only language models.

Options has all differences between layers of one model: layer_kinds.py makes
them. What layers of a kind share, such as rotary tables, they find by index.

Axes: B batch, L length, D model width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.models.layers import (
  attention,
  deltanet,
  encoder,
  kv_cache,
  latent_attention,
  masks,
  mlp,
  moe,
  positions,
  rms_norm,
  short_conv,
)
from bigtrain.models.layers.options import pick

# Projections of attention, MLPs, layer norms, experts, router, the head.
BIAS_SITES = ("qkv", "out", "mlp", "norm", "experts", "router", "head")
NORMS = ("layernorm", "rmsnorm")
NORMS_AT = ("pre", "post", "sandwich")


class Options(NamedTuple):
  """Options of a block: fields of models.decoder.Model, and of its kind."""

  depth: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mla: latent_attention.Options | None
  mlp_dim: int
  norm: str
  norm_eps: float
  norm_offset: float
  norm_scaled: bool
  norm_at: str
  parallel: bool
  parallel_norms: bool
  mlp: str
  mlp_clip: Any
  moe: moe.Options | None
  # In place of attention.
  deltanet: deltanet.Options | None
  short_conv: short_conv.Options | None
  use_bias: tuple[str, ...]
  qk_norm: str | None
  qk_norm_after_rope: bool
  qkv_clip: float | None
  v_norm: bool
  keys_as_values: bool
  output_gate: bool
  sinks: bool
  window: int | None
  attention_scale: float | None
  attention_softcap: float | None
  residual_multiplier: float
  layer_scalar: bool
  attention: str
  dropout: float
  drop_path: float
  init_std: float
  dtype: str
  # Indices into `Tables` and the cache, see layer_kinds.py.
  rope: int | None
  query_scale: int | None
  cache: int

  def hidden_units(self) -> int:
    """Number of hidden units that a token uses, with gates."""
    units = self.mlp_dim
    if self.moe is not None:
      dense = units if self.moe.beside_mlp else 0
      units = dense + self.moe.top_k * self.moe.width(units)
      units += self.moe.shared_width(self.mlp_dim)
    return units * (1 + mlp.is_gated(self.mlp))


class Tables(NamedTuple):
  """Rotary tables and query scales, computed once per kind of layer."""

  rotations: tuple[positions.Rotation, ...]
  query_scales_BL: tuple[jax.Array, ...]


class Block(nn.Module):
  """Attention or a recurrent layer, MLP or experts, with norms.

  Each is added to the stream.
  """

  options: Options

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, kv_cache.Caches | None],
    layer: Any,
    tables: Tables,
    mask: masks.Mask,
    real_BL: jax.Array | None,
    start: Any,
    train: bool,
  ) -> tuple[tuple[jax.Array, kv_cache.Caches | None], Any]:
    options = self.options
    x_BLD, caches = carry

    def normed(y_BLD: jax.Array, name: str) -> jax.Array:
      return norm(options, y_BLD.shape[-1], name)(y_BLD)

    def before(x_BLD: jax.Array, name: str) -> jax.Array:
      """The input of a branch."""
      return x_BLD if options.norm_at == "post" else normed(x_BLD, name)

    def add(x_BLD: jax.Array, y_BLD: jax.Array, name: str) -> jax.Array:
      """The stream, with the result of a branch."""
      if options.norm_at != "pre":
        y_BLD = normed(y_BLD, name)
      y_BLD = nn.Dropout(options.dropout)(y_BLD, deterministic=not train)
      if options.residual_multiplier != 1:
        y_BLD *= options.residual_multiplier
      if train and options.drop_path:
        rate = options.drop_path * layer / max(1, options.depth - 1)
        y_BLD = encoder.drop_path(y_BLD, rate, self.make_rng("dropout"))
      return x_BLD + y_BLD

    cache: Any = None
    place: Any = 0
    first = start
    if caches is not None:
      cache, place = caches.groups[options.cache], caches.place(layer)
      first = None if caches.is_first else start
    in_BLD = x_BLD
    y_BLD = before(in_BLD, "attention_norm")
    if options.deltanet is not None or options.short_conv is not None:
      z_BLD, cache = _recurrent_layer(options)(
        y_BLD,
        segments_BL=mask.segments_BL,
        real_BL=real_BL,
        cache=cache,
        layer=place,
        start=first,
      )
    else:
      z_BLD, cache = _attention_layer(options)(
        y_BLD,
        mask=mask,
        rope=_pick(tables.rotations, options.rope),
        query_scale_BL=_pick(tables.query_scales_BL, options.query_scale),
        cache=cache,
        layer=place,
        start=first,
      )
    if caches is not None:
      caches = caches.with_group(options.cache, cache)
    x_BLD = add(x_BLD, z_BLD, "attention_post_norm")

    # In parallel, the MLP has the input of the attention.
    if not options.parallel:
      y_BLD = before(x_BLD, "mlp_norm")
    elif options.parallel_norms:
      y_BLD = before(in_BLD, "mlp_norm")
    if options.moe is not None and options.moe.beside_mlp:
      y_BLD, stats = _mlp_beside_experts(options, y_BLD, x_BLD, real_BL, train)
    else:
      y_BLD, stats = moe.mlp_or_experts(
        options.moe, _mlp(options), y_BLD, real_BL, train, options.use_bias
      )
    x_BLD = add(x_BLD, y_BLD, "mlp_post_norm")
    if options.layer_scalar:
      x_BLD *= _layer_scalar(self).astype(x_BLD.dtype)
    return (sharding.stream(x_BLD), caches), stats


def _pick(shared: tuple[Any, ...], index: int | None) -> Any:
  return None if index is None else shared[index]


def _layer_scalar(block: nn.Module) -> jax.Array:
  """A factor of published models that is not trained, (1,)."""
  scalar_1 = block.param("layer_scalar", nn.initializers.ones, (1,))
  return jax.lax.stop_gradient(scalar_1)


def _mlp_beside_experts(
  options: Options,
  y_BLD: jax.Array,
  x_BLD: jax.Array,
  real_BL: jax.Array | None,
  train: bool,
) -> tuple[jax.Array, Any]:
  """The sum of an MLP of y and experts of x, each with norms of its own."""
  assert options.moe is not None
  dense = _mlp(options)
  y_BLD = mlp.Mlp(dense, name="mlp")(y_BLD, train)
  expert = dense._replace(
    dim=options.moe.width(dense.dim), use_bias="experts" in options.use_bias
  )
  experts = moe.Moe(
    options.moe,
    expert,
    "router" in options.use_bias,
    options.norm_eps,
    name="moe",
  )
  D = x_BLD.shape[-1]
  z_BLD = norm(options, D, "experts_norm")(x_BLD)
  z_BLD, stats = experts(z_BLD, real_BL, train, x_BLD)
  y_BLD = norm(options, D, "mlp_own_post_norm")(y_BLD)
  return y_BLD + norm(options, D, "experts_post_norm")(z_BLD), stats


def norm(options: Any, width: int, name: str) -> nn.Module:
  """The norm of a block's Options, or of a decoder."""
  eps, dtype, offset = options.norm_eps, options.dtype, options.norm_offset
  scaled = options.norm_scaled
  if options.norm == "rmsnorm":
    return rms_norm.RMSNorm(
      (width,), eps, offset, scaled, dtype=dtype, name=name
    )
  use_bias = "norm" in options.use_bias
  if not scaled:
    return nn.LayerNorm(
      eps, dtype, use_bias=use_bias, use_scale=False, name=name
    )
  if offset:
    return _OffsetLayerNorm(eps, offset, use_bias, dtype, name=name)
  return nn.LayerNorm(eps, dtype, use_bias=use_bias, name=name)


class _OffsetLayerNorm(nn.Module):
  """A layer norm whose scale is the parameter plus an offset."""

  epsilon: float
  offset: float
  use_bias: bool
  dtype: str

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    plain = nn.LayerNorm(
      self.epsilon, jnp.float32, use_bias=False, use_scale=False
    )
    init = nn.initializers.constant(1.0 - self.offset)
    scale_D = self.param("scale", init, x_BLD.shape[-1:])
    y_BLD = plain(x_BLD) * (self.offset + scale_D)
    if self.use_bias:
      y_BLD += self.param("bias", nn.initializers.zeros, x_BLD.shape[-1:])
    return y_BLD.astype(self.dtype)


def _attention_layer(options: Options) -> Callable[..., tuple[Any, Any]]:
  """The module "attention", as a function of its input and keywords."""
  own = pick(
    attention.Options,
    options,
    bias=options.use_bias,
    scale=options.attention_scale,
    softcap=options.attention_softcap,
    backend=options.attention,
    query_std=options.init_std,
    kv_std=options.init_std,
    out_std=_out_init_std(options),
  )
  if options.mla is not None:
    return latent_attention.LatentAttention(options.mla, own, name="attention")
  layer = attention.Attention(own, name="attention")
  return lambda y_BLD, **others: layer(y_BLD, y_BLD, **others)


def _recurrent_layer(
  options: Options,
) -> deltanet.DeltaNet | short_conv.ShortConv:
  if options.short_conv is not None:
    return short_conv.ShortConv(
      options.short_conv,
      init_std=options.init_std,
      out_init_std=_out_init_std(options),
      dtype=options.dtype,
      name="short_conv",
    )
  assert options.deltanet is not None
  return deltanet.DeltaNet(
    options.deltanet,
    norm_eps=options.norm_eps,
    init_std=options.init_std,
    out_init_std=_out_init_std(options),
    dtype=options.dtype,
    name="deltanet",
  )


def _mlp(options: Options) -> mlp.Options:
  return mlp.Options(
    dim=options.mlp_dim,
    kind=options.mlp,
    init_std=options.init_std,
    out_init_std=_out_init_std(options),
    use_bias="mlp" in options.use_bias,
    dtype=options.dtype,
    clip=options.mlp_clip,
  )


def _out_init_std(options: Options) -> float:
  """Of kernels that write to the residual stream, twice in each layer."""
  return options.init_std / (2 * options.depth) ** 0.5
