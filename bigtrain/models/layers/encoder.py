"""The encoder of ViTs and of text towers.

Parameters are named as in the published ViT checkpoints. `dtype` is the dtype
of matrix products and of the activations between layers. Parameters, statistics
of layer norms, and softmaxes are always float32.

Axes: B batch, L length, S length attended to, D model width, N layers.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import (
  attention,
  masks,
  mlp,
  options,
  positions,
  remat,
  rms_norm,
  stack,
)

NORMS = ("layernorm", "rmsnorm")


class Fields(nn.Module, kw_only=True):
  """Fields of models with an encoder. By default, sizes are the variant's."""

  variant: str | None = None  # Of a ViT, such as "B", or "B/16" with patches.
  width: int = options.DERIVED  # D.
  depth: int = options.DERIVED  # N, number of blocks.
  mlp_dim: int = options.DERIVED  # By default the variant's or 4 D.
  num_heads: int = options.DERIVED  # Number of attention heads; must divide D.
  mlp: str = "gelu"  # "gelu" (tanh), "gelu_erf", "gelu_quick" or "swiglu".
  dropout: float = 0.0  # In MLPs, on branches, and after a ViT's embedding.
  drop_path: float = 0.0  # Of the last block; grows linearly from 0.
  scan: bool = False  # Whether a compiled block loops over stacked layers.
  attention: str = "auto"  # A name in attention_backends.NAMES.
  remat_policy: str = "none"  # A name in remat.POLICIES.
  dtype: str = "float32"  # Of activations; parameters and results are float32.


class Options(NamedTuple):
  """Options of a block."""

  mlp_dim: int | None = None  # Hidden width F; 4 D if None.
  num_heads: int = 12
  dropout: float = 0.0  # Rate in the MLPs and on each residual branch.
  attention: str = "auto"
  norm_eps: float = 1e-6  # Added to the variance in norms.
  mlp: str = "gelu"  # A name in mlp.KINDS.
  bias: tuple[str, ...] = ("qkv", "out", "mlp")
  # Initial value of a learned factor for each feature that a branch adds (CaiT,
  # arXiv 2103.17239); None for no factors.
  layer_scale: float | None = None
  # Grid of patches whose relative positions have a bias in each layer, if any.
  relative_grid: tuple[int, int] | None = None
  # Hidden width of an MLP over the tokens in place of attention (MLP-Mixer,
  # https://arxiv.org/abs/2105.01601), whose drop path does not rescale.
  token_mlp_dim: int | None = None
  post_norm: bool = False  # Whether norms follow the residual additions.
  branch_norm: bool = False  # Whether each branch ends with another norm.
  # Number of blocks that change the stream; the others keep their parameters.
  num_active: int | None = None
  norm: str = "layernorm"  # A name in NORMS.
  # Of attention, see attention.Options.
  head_dim: int | None = None
  num_kv_heads: int | None = None
  qk_norm: str | None = None
  v_norm: bool = False
  attention_scale: float | None = None
  clipped: bool = False  # Whether linear layers have bounds, see clipping.py.
  # Whether tokens see those of other segments, in a model whose other layers
  # have a mask with segments.
  ignores_segments: bool = False
  dtype: str = "float32"


def of_fields(
  model: Fields,
  name: str,
  final_norm: bool,
  taps: tuple[int, ...] = (),
  **others: Any,
) -> "Encoder":
  """The encoder of a model; `others` are options besides the model's fields."""
  return Encoder(
    layer_options(model, **others),
    depth=model.depth,
    drop_path=model.drop_path,
    final_norm=final_norm,
    scan=model.scan,
    remat_policy=model.remat_policy,
    taps=taps,
    name=name,
  )


def layer_options(model: Fields, **others: Any) -> Options:
  return options.pick(Options, model, **others)


def norm(options: Options, width: int, name: str) -> nn.Module:
  if options.norm == "rmsnorm":
    return rms_norm.RMSNorm(
      (width,), options.norm_eps, dtype=options.dtype, name=name
    )
  return nn.LayerNorm(options.norm_eps, options.dtype, name=name)


def _mlp_options(options: Options, width: int) -> mlp.Options:
  return mlp.Options(
    options.mlp_dim or 4 * width,
    options.mlp,
    use_bias="mlp" in options.bias,
    dropout=options.dropout,
    dtype=options.dtype,
    names=mlp.VIT_NAMES,
    clipped=options.clipped,
  )


def _attention_options(options: Options) -> attention.Options:
  return attention.Options(
    options.num_heads,
    head_dim=options.head_dim,
    num_kv_heads=options.num_kv_heads,
    bias=options.bias,
    qk_norm=options.qk_norm,
    norm_eps=options.norm_eps,
    v_norm=options.v_norm,
    scale=options.attention_scale,
    clipped=options.clipped,
    backend=options.attention,
    dtype=options.dtype,
  )


@struct.dataclass
class _Tapped:
  """The stream, and copies of it after some of the layers."""

  x_BLD: jax.Array
  taps_BTLD: jax.Array
  layers_T: tuple[int, ...] = struct.field(pytree_node=False)

  def after(self, layer: Any, x_BLD: jax.Array) -> "_Tapped":
    is_tapped_T11 = (jnp.asarray(self.layers_T) == layer)[:, None, None]
    taps_BTLD = jnp.where(is_tapped_T11, x_BLD[:, None], self.taps_BTLD)
    return _Tapped(x_BLD, taps_BTLD, self.layers_T)


class Block(nn.Module):
  """Attention, or an MLP over tokens, and an MLP, added to the stream."""

  options: Options

  @nn.compact
  def __call__(
    self,
    carry: jax.Array | _Tapped,
    layer: Any,
    drop_path_rates_N: jax.Array | None,
    rope: positions.Rotation | None,
    mask: masks.Mask,
    bias_1HLS: jax.Array | None,
    train: bool,
  ) -> tuple[jax.Array | _Tapped, None]:
    options = self.options
    x_BLD = carry.x_BLD if isinstance(carry, _Tapped) else carry
    given_BLD = x_BLD
    if options.ignores_segments:
      mask = dataclasses.replace(mask, segments_BL=None, segments_BS=None)

    def branch(y_BLD: jax.Array, number: int) -> jax.Array:
      """Scales a branch's output before it is added to the stream.

      Branch 0 is attention, branch 1 the MLP.
      """
      if options.branch_norm:
        name = f"branch_norm_{number}"
        y_BLD = norm(options, y_BLD.shape[-1], name)(y_BLD)
      if options.layer_scale is not None:
        scale_D = self.param(
          f"layer_scale_{number}",
          nn.initializers.constant(options.layer_scale),
          y_BLD.shape[-1:],
        )
        y_BLD = y_BLD * scale_D.astype(y_BLD.dtype)
      y_BLD = nn.Dropout(options.dropout)(y_BLD, deterministic=not train)
      if train and drop_path_rates_N is not None:
        y_BLD = drop_path(
          y_BLD,
          drop_path_rates_N[layer],
          self.make_rng("dropout"),
          rescale=options.token_mlp_dim is None,
        )
      return y_BLD

    def normed(x_BLD: jax.Array, number: int) -> jax.Array:
      return norm(options, x_BLD.shape[-1], f"LayerNorm_{number}")(x_BLD)

    def before(x_BLD: jax.Array, number: int) -> jax.Array:
      return x_BLD if options.post_norm else normed(x_BLD, number)

    def after(x_BLD: jax.Array, number: int) -> jax.Array:
      return normed(x_BLD, number) if options.post_norm else x_BLD

    if options.relative_grid:
      bias_1HLS = positions.GridBias(
        options.num_heads, options.relative_grid, name="relative_bias"
      )()
    of_mlp = _mlp_options(options, x_BLD.shape[-1])

    y_BLD = before(x_BLD, 0)
    if options.token_mlp_dim:
      of_tokens = of_mlp._replace(
        dim=options.token_mlp_dim, kind="gelu", use_bias=True
      )
      mixing = mlp.Mlp(of_tokens, name="token_mixing")
      y_BLD = mixing(y_BLD.swapaxes(1, 2), train).swapaxes(1, 2)
    else:
      y_BLD, _ = attention.Attention(
        _attention_options(options),
        name="MultiHeadDotProductAttention_0",
      )(y_BLD, y_BLD, rope=rope, mask=mask, bias=bias_1HLS)
    x_BLD = after(x_BLD + branch(y_BLD, 0), 0)

    y_BLD = before(x_BLD, 1)
    y_BLD = mlp.Mlp(of_mlp, name="MlpBlock_0")(y_BLD, train)
    x_BLD = after(x_BLD + branch(y_BLD, 1), 1)
    if options.num_active is not None:
      x_BLD = jnp.where(layer < options.num_active, x_BLD, given_BLD)
    x_BLD = sharding.stream(x_BLD)
    if isinstance(carry, _Tapped):
      return carry.after(layer, x_BLD), None
    return x_BLD, None


def drop_path(
  x_BLD: jax.Array,
  rate: float | jax.Array,
  key: jax.Array,
  rescale: bool = True,
) -> jax.Array:
  """Stochastic depth (https://arxiv.org/abs/1603.09382), drawn per example.

  `rescale` divides what is kept by its probability, so that the mean does not
  change.
  """
  keep_rate = 1.0 - rate
  kept_B = jax.random.bernoulli(key, keep_rate, x_BLD.shape[:1])
  scale_B = kept_B.astype(jnp.float32) / (keep_rate if rescale else 1.0)
  scale = scale_B.reshape((-1,) + (1,) * (x_BLD.ndim - 1))
  return (x_BLD * scale).astype(x_BLD.dtype)


class Encoder(nn.Module):
  """A stack of blocks and a final layer norm."""

  options: Options
  depth: int
  drop_path: float = 0.0  # Of the last block; grows linearly from 0.
  final_norm: bool = True  # Whether a norm follows the blocks.
  scan: bool = False
  remat_policy: str = "none"
  # Options of the layers of one period, if they differ.
  period: tuple[Options, ...] = ()
  # Numbers of layers whose outputs are returned too.
  taps: tuple[int, ...] = ()

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    *,
    rope: positions.Rotation | None = None,
    mask: masks.Mask = masks.Mask(),
    bias_1HLS: jax.Array | None = None,
    train: bool = False,
  ) -> Any:
    """Returns (B, L, D); with `taps` also (B, layers, L, D)."""
    rates_N = None
    if self.drop_path:
      rates_N = jnp.linspace(0.0, self.drop_path, self.depth)
    options = self.options
    carry: Any = sharding.stream(x_BLD.astype(options.dtype))
    if self.taps:
      self._check_taps()
      shape = (len(carry), len(self.taps), *carry.shape[1:])
      carry = _Tapped(carry, jnp.zeros(shape, carry.dtype), self.taps)
    carry, _ = stack.run(
      self,
      Block,
      self.period or [options],
      self.depth,
      carry,
      rates_N,
      rope,
      mask,
      bias_1HLS,
      train,
      scan=self.scan,
      remat_policy=self.remat_policy,
      common=1,
      name="encoderblock",
    )
    x_BLD = carry.x_BLD if self.taps else carry
    if self.final_norm:
      y_BLD = norm(options, x_BLD.shape[-1], "encoder_norm")(x_BLD)
      x_BLD = y_BLD if options.num_active is None else x_BLD
    return (x_BLD, carry.taps_BTLD) if self.taps else x_BLD

  def _check_taps(self) -> None:
    _, every = remat.read(self.remat_policy)
    if every > 1:
      raise ConfigError(
        f"config.model.remat_policy: every={every}: expected 1 for a model "
        "with taps."
      )
