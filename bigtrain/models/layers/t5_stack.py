"""The blocks and stacks of T5 (https://arxiv.org/abs/1910.10683).

Positions enter as biases of the scores, which depend on distance and are shared
by all layers of a stack. Scores are not divided by the root of the head width.

Axes: B batch, L length, S length attended to, D model width, H heads.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.models.layers import (
  attention,
  encoder,
  kv_cache,
  masks,
  mlp,
  moe,
  positions,
  stack,
)


class Options(NamedTuple):
  """Options of a stack and its blocks: fields of models.t5.Model."""

  depth: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  mlp: str
  moe: moe.Options | None
  num_buckets: int
  max_distance: int
  norm_eps: float
  init_scale: float
  dropout: float
  drop_path: float
  attention: str
  scan: bool
  remat_policy: str
  dtype: str

  def std(self, fan_in: int) -> float:
    return (self.init_scale / fan_in) ** 0.5


def _attention(options: Options, width: int) -> attention.Options:
  """An attention layer. Small initial queries make up for unscaled scores."""
  H, K = options.num_heads, options.head_dim
  return attention.Options(
    num_heads=H,
    head_dim=K,
    bias=(),
    scale=1.0,
    backend=options.attention,
    query_std=options.std(width * K),
    kv_std=options.std(width),
    out_std=options.std(H * K),
    dtype=options.dtype,
  )


def _mlp(options: Options, width: int) -> mlp.Options:
  return mlp.Options(
    dim=options.mlp_dim,
    kind=options.mlp,
    init_std=options.std(width),
    out_init_std=options.std(options.mlp_dim),
    dropout=options.dropout,
    dtype=options.dtype,
  )


class DecodingState(NamedTuple):
  """The state of decoding for all layers; the batch axis comes first."""

  past: kv_cache.Cache  # Keys and values of the targets until now.
  source: kv_cache.Cache  # Keys and values of the encoded inputs.
  source_mask_BS: jax.Array  # False for padding of the inputs.


class Source(NamedTuple):
  """Keys and values of a decoder's cross-attention, and their mask."""

  # The encoder's output; None if a cache has its keys and values.
  encoded_BSD: jax.Array | None
  mask: masks.Mask


class Block(nn.Module):
  """Self-attention, in a decoder cross-attention, MLP; each after a norm."""

  options: Options

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, DecodingState | None],
    layer: Any,
    bias: jax.Array | positions.BiasByDistance,
    mask: masks.Mask,
    source: Source | None,
    real_BL: jax.Array | None,
    start: Any,
    train: bool,
  ) -> tuple[tuple[jax.Array, DecodingState | None], Any]:
    options = self.options
    x_BLD, state = carry
    D = x_BLD.shape[-1]
    norm = functools.partial(
      nn.RMSNorm, epsilon=options.norm_eps, dtype=options.dtype
    )
    attend = functools.partial(attention.Attention, _attention(options, D))

    def drop(y_BLD: jax.Array) -> jax.Array:
      y_BLD = nn.Dropout(options.dropout)(y_BLD, deterministic=not train)
      if train and options.drop_path:
        rate = options.drop_path * layer / max(1, options.depth - 1)
        y_BLD = encoder.drop_path(y_BLD, rate, self.make_rng("dropout"))
      return y_BLD

    y_BLD = norm(name="attention_norm")(x_BLD)
    y_BLD, past = attend(name="attention")(
      y_BLD,
      y_BLD,
      mask=mask,
      bias=bias,
      cache=None if state is None else state.past,
      layer=layer,
      start=start,
    )
    x_BLD += drop(y_BLD)
    if state is not None:
      state = state._replace(past=past)

    if source is not None:
      y_BLD = norm(name="cross_attention_norm")(x_BLD)
      y_BLD, cache = attend(name="cross_attention")(
        y_BLD,
        source.encoded_BSD,
        mask=source.mask,
        cache=None if state is None else state.source,
        layer=layer,
      )
      x_BLD += drop(y_BLD)
      if state is not None:
        state = state._replace(source=cache)

    y_BLD = norm(name="mlp_norm")(x_BLD)
    y_BLD, stats = moe.mlp_or_experts(
      options.moe, _mlp(options, D), y_BLD, real_BL, train
    )
    return (sharding.stream(x_BLD + drop(y_BLD)), state), stats


class Stack(nn.Module):
  """The blocks of a decoder, or of an encoder, where all positions are seen."""

  options: Options
  two_sided: bool

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    mask: masks.Mask,
    *,
    source: Source | None = None,
    real_BL: jax.Array | None = None,
    state: DecodingState | None = None,
    start: Any = 0,
    train: bool = False,
  ) -> tuple[jax.Array, DecodingState | None, dict[str, jax.Array] | None]:
    """Returns the normalised stream, the state, statistics; see moe.Moe."""
    options = self.options

    def drop(y_BLD: jax.Array) -> jax.Array:
      return nn.Dropout(options.dropout)(y_BLD, deterministic=not train)

    L = x_BLD.shape[1]
    S = L if state is None else state.past.length
    needs_matrix = self.is_initializing() or state is not None
    by_distance = not needs_matrix and attention.wants_bias_by_distance(
      _attention(options, x_BLD.shape[-1]), x_BLD, mask
    )
    bias = positions.RelativeBias(
      options.num_heads,
      options.num_buckets,
      options.max_distance,
      self.two_sided,
      options.std(x_BLD.shape[-1]),
      name="relative_bias",
    )(start + jnp.arange(L), jnp.arange(S), by_distance=by_distance)
    if options.moe is not None:
      options = options._replace(moe=options.moe.in_stack(self.two_sided))
    (x_BLD, state), stats = stack.run(
      self,
      Block,
      moe.kinds(options),
      options.depth,
      (drop(x_BLD), state),
      bias,
      mask,
      source,
      real_BL,
      start,
      train,
      common=1,
      scan=options.scan,
      remat_policy=options.remat_policy,
    )
    x_BLD = nn.RMSNorm(options.norm_eps, options.dtype, name="norm")(x_BLD)
    return drop(x_BLD), state, stats
