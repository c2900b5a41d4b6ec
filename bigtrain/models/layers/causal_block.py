"""The block of decoder-only language models.

Options has everything in which layers of a model can differ; layer_kinds.py
makes them. Things that layers of a kind share, such as rotary tables, are in
tuples, to which the options have indices.

Axes: B batch, L length, D model width, N layers, I features of a layer's input.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.models.layers import (
  attention,
  deltanet,
  encoder,
  kernels,
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

NORMS = ("layernorm", "rmsnorm")
NORMS_AT = ("pre", "post", "sandwich")


class Options(NamedTuple):
  """Options of a block: fields of models.decoder.Model, changed by its kind."""

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
  chunk: int | None
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
  cache: int | None  # None if the layer has no keys and values.
  # Key in `Views` of the keys and values that the layer shares with later ones,
  # or, if `cache` is None, reads from an earlier one; None for other layers.
  view: int | None
  reads_view: bool
  drops_view: bool  # Whether no later layer reads it.

  def hidden_units(self) -> int:
    """Number of hidden units that a token uses, gates included."""
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
  inputs_BLNI: jax.Array | None = None  # See layer_inputs.py.
  # Added to the stream after each of the first N layers, such as features of
  # pictures (DeepStack, https://arxiv.org/abs/2406.04334).
  added_BNLD: jax.Array | None = None


# Keys and values that later layers read. The mask of a view is None if it is
# the call's.
Views = Mapping[int, kv_cache.View]
# The stream, the caches in generation, and the views.
Carry = tuple[jax.Array, kv_cache.Caches | None, Views]


class Block(nn.Module):
  """Two branches with norms, each of which is added to the stream.

  The first is attention or a recurrent layer, the second an MLP or experts.
  """

  options: Options

  @nn.compact
  def __call__(
    self,
    carry: Carry,
    layer: Any,
    tables: Tables,
    mask: masks.Mask,
    real_BL: jax.Array | None,
    start: Any,
    train: bool,
  ) -> tuple[Carry, Any]:
    options = self.options
    x_BLD, caches, views = carry

    def normed(y_BLD: jax.Array, name: str) -> jax.Array:
      return norm(options, y_BLD.shape[-1], name)(y_BLD)

    def before(x_BLD: jax.Array, name: str) -> jax.Array:
      """The input of a branch."""
      return x_BLD if options.norm_at == "post" else normed(x_BLD, name)

    def add(x_BLD: jax.Array, y_BLD: jax.Array, name: str) -> jax.Array:
      """The stream plus the output of a branch."""
      if options.norm_at != "pre":
        y_BLD = normed(y_BLD, name)
      return add_branch(x_BLD, y_BLD)

    def add_branch(x_BLD: jax.Array, y_BLD: jax.Array) -> jax.Array:
      y_BLD = nn.Dropout(options.dropout)(y_BLD, deterministic=not train)
      if options.residual_multiplier != 1:
        y_BLD *= options.residual_multiplier
      if train and options.drop_path:
        rate = options.drop_path * layer / max(1, options.depth - 1)
        y_BLD = encoder.drop_path(y_BLD, rate, self.make_rng("dropout"))
      return x_BLD + y_BLD

    # The first branch: attention, or a recurrent layer.
    cache, place, first = _own_cache(options, caches, layer, start)
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
      z_BLD, cache, views = _attended(
        self, y_BLD, tables, mask, views, cache, place, first, real_BL
      )
    if caches is not None and options.cache is not None:
      caches = caches.with_group(options.cache, cache)
    x_BLD = add(x_BLD, z_BLD, "attention_post_norm")

    # The second branch: an MLP, or experts. In parallel, it has the input of
    # the first one.
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

    # What some families add: a layer's own input, a factor, features of
    # pictures.
    if tables.inputs_BLNI is not None:
      y_BLD = _gated_input(options, x_BLD, tables.inputs_BLNI, layer)
      x_BLD = add_branch(x_BLD, normed(y_BLD, "layer_input_norm"))
    if options.layer_scalar:
      x_BLD *= _layer_scalar(self).astype(x_BLD.dtype)
    if tables.added_BNLD is not None:
      x_BLD = _with_added(x_BLD, tables.added_BNLD, layer)
    return (sharding.stream(x_BLD), caches, views), stats


def _own_cache(
  options: Options, caches: kv_cache.Caches | None, layer: Any, start: Any
) -> tuple[Any, Any, Any]:
  """The cache of a layer's kind, the layer's place in it, and its `start`."""
  if caches is None or options.cache is None:
    return None, 0, start
  first = None if caches.is_first else start
  return caches.groups[options.cache], caches.place(layer), first


def _pick(shared: tuple[Any, ...], index: int | None) -> Any:
  return None if index is None else shared[index]


def _attended(
  block: Block,
  y_BLD: jax.Array,
  tables: Tables,
  mask: masks.Mask,
  views: Views,
  cache: Any,
  place: Any,
  start: Any,
  real_BL: jax.Array | None,
) -> tuple[jax.Array, Any, Views]:
  """Returns (output of the attention, new cache, new views)."""
  options = block.options
  attend = functools.partial(
    _attention_layer(options),
    y_BLD,
    rope=_pick(tables.rotations, options.rope),
    query_scale_BL=_pick(tables.query_scales_BL, options.query_scale),
    real_BL=real_BL,
    layer=place,
  )
  if options.view is None:
    z_BLD, cache = attend(mask=mask, cache=cache, start=start)
    return z_BLD, cache, views
  if options.reads_view:
    view = views.get(options.view)
    if block.is_initializing():  # Initialisation calls layers one by one.
      view = _empty_view(options, y_BLD)
    assert view is not None, options.view
    own_mask = mask if view.mask is None else view.mask
    z_BLD, _ = attend(mask=own_mask, cache=view, start=view.start)
  else:
    z_BLD, kept = attend(mask=mask, cache=kv_cache.WithView(cache), start=start)
    cache, view = kept.cache, kept.view
    if view.mask is mask:
      view = view._replace(mask=None)
    views = {**views, options.view: view}
  if options.drops_view:
    views = {key: x for key, x in views.items() if key != options.view}
  return z_BLD, cache, views


def _empty_view(options: Options, x_BLD: jax.Array) -> kv_cache.View:
  shape = (*x_BLD.shape[:2], options.num_kv_heads, options.head_dim)
  zeros = jnp.zeros(shape, options.dtype)
  return kv_cache.View(zeros, zeros, None, None)


def _gated_input(
  options: Options, x_BLD: jax.Array, inputs_BLNI: jax.Array, layer: Any
) -> jax.Array:
  """The contribution of a layer's own input to the stream, before its norm."""
  input_BLI = jax.lax.dynamic_index_in_dim(
    inputs_BLNI, layer, axis=2, keepdims=False
  )
  dense = functools.partial(nn.Dense, use_bias=False, dtype=options.dtype)
  gate_BLI = dense(
    input_BLI.shape[-1],
    kernel_init=kernels.initializer(options.init_std),
    name="layer_input_gate",
  )(x_BLD)
  return dense(
    x_BLD.shape[-1],
    kernel_init=kernels.initializer(_out_init_std(options)),
    name="layer_input_out",
  )(mlp.KINDS[options.mlp].activation(gate_BLI) * input_BLI)


def _with_added(
  x_BLD: jax.Array, added_BNLD: jax.Array, layer: Any
) -> jax.Array:
  """Adds a layer's entry, if there is one."""
  N = added_BNLD.shape[1]
  if isinstance(layer, int):
    return x_BLD + added_BNLD[:, layer] if layer < N else x_BLD

  def add(x_BLD: jax.Array) -> jax.Array:
    own_BLD = jax.lax.dynamic_index_in_dim(added_BNLD, layer, 1, keepdims=False)
    return x_BLD + own_BLD

  return jax.lax.cond(layer < N, add, lambda x_BLD: x_BLD, x_BLD)


def _layer_scalar(block: nn.Module) -> jax.Array:
  """A factor (1,) in published models, which is not trained."""
  scalar_1 = block.param("layer_scalar", nn.initializers.ones, (1,))
  return jax.lax.stop_gradient(scalar_1)


def _mlp_beside_experts(
  options: Options,
  y_BLD: jax.Array,
  x_BLD: jax.Array,
  real_BL: jax.Array | None,
  train: bool,
) -> tuple[jax.Array, Any]:
  """The sum of an MLP of y and experts of x, each with its own norms."""
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
  """The norm that the Options of a block, or a decoder, ask for."""
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
  if options.reads_view:
    return lambda y_BLD, **others: layer(y_BLD, None, **others)
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
  """Initial deviation of kernels that write to the residual stream.

  There are two of them in each layer.
  """
  return options.init_std / (2 * options.depth) ** 0.5
