"""The decoder of captioners: a transformer with or without cross-attention.

Submodules are named as in the published CapPa checkpoints.

Axes: B batch (of texts, a multiple of the images), L length of a text, P
patches, E width of the encoder, D width of the decoder, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.models.layers import (
  attention,
  kernels,
  kv_cache,
  masks,
  mlp,
  stack,
)


class Options(NamedTuple):
  """Options of a block."""

  width: int
  mlp_dim: int
  num_heads: int
  dropout: float  # Rate in the MLPs and on each residual branch.
  attention: str
  # Whether the MLPs and the blocks' layer norms have biases. The attentions
  # never do; the final layer norm and output layer always do.
  use_bias: bool
  dtype: str
  mlp: str = "gelu"  # A name in mlp.KINDS.
  cross: bool = True  # Whether there is cross-attention.


class Block(nn.Module):
  """Pre-norm self-attention, cross-attention and MLP, each with a residual."""

  options: Options

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array | None, kv_cache.Cache | None],
    layer: Any,
    source: Any,
    mask: masks.Mask,
    source_mask: masks.Mask,
    start: Any,
    train: bool,
  ) -> tuple[tuple[jax.Array | None, kv_cache.Cache | None], None]:
    """`source` is the patches (b, P, E), or their cache."""
    options = self.options
    x_BLD, cache = carry
    norm = functools.partial(
      nn.LayerNorm, dtype=options.dtype, use_bias=options.use_bias
    )

    def drop(y_BLD: jax.Array) -> jax.Array:
      return nn.Dropout(options.dropout)(y_BLD, deterministic=not train)

    of_attention = attention.Options(
      options.num_heads,
      head_dim=options.width // options.num_heads,
      bias=(),
      backend=options.attention,
      dtype=options.dtype,
    )
    cross = attention.Attention(of_attention, name="CrossAttn")
    if x_BLD is None:  # Only writes the source's keys and values.
      return cross(None, source, cache=cache, layer=layer), None

    y_BLD = norm(name="LayerNorm1")(x_BLD)
    y_BLD, cache = attention.Attention(of_attention, name="SelfAttn")(
      y_BLD, y_BLD, mask=mask, cache=cache, layer=layer, start=start
    )
    x_BLD = x_BLD + drop(y_BLD)

    if options.cross:
      y_BLD = norm(name="LayerNorm2")(x_BLD)
      if isinstance(source, kv_cache.Cache):
        y_BLD, _ = cross(
          y_BLD, None, mask=source_mask, cache=source, layer=layer
        )
      else:
        y_BLD, _ = cross(y_BLD, source, mask=source_mask)
      x_BLD = x_BLD + drop(y_BLD)

    y_BLD = norm(name="LayerNorm3")(x_BLD)
    of_mlp = mlp.Options(
      options.mlp_dim,
      options.mlp,
      use_bias=options.use_bias,
      dropout=options.dropout,
      dtype=options.dtype,
      names=mlp.VIT_NAMES,
    )
    y_BLD = mlp.Mlp(of_mlp, name="MLP")(y_BLD, train)
    return (x_BLD + drop(y_BLD), cache), None


class Decoder(nn.Module):
  """Token embeddings and blocks; with cross-attention also norm and logits."""

  options: Options
  num_embeddings: int  # Number of rows of the embedding table.
  vocab_size: int
  depth: int
  scan: bool = False
  remat_policy: str = "none"

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array | None,
    source: Any,
    posemb_1LD: jax.Array | float = 0.0,
    *,
    last_11D: jax.Array | None = None,
    mask: masks.Mask = masks.Mask(causal=True),
    source_mask: masks.Mask = masks.Mask(),
    cache: kv_cache.Cache | None = None,
    start: Any = 0,
    train: bool = False,
  ) -> tuple[Any, kv_cache.Cache | None]:
    """Reads texts or, with a cache, their next positions or the source.

    Args:
      tokens: int (B, L), or the states (B, L, D) of another decoder.
      last_11D: an embedding that is appended to the tokens' embeddings.
      source_mask: which patches are seen, such as all but padding.

    Returns:
      ((last hidden states (B, L, D), (kernel (D, V), bias (V,)) of the output
      layer, None without cross-attention), the new cache); None for the first
      without tokens.
    """
    x_BLD = tokens
    if tokens is not None and tokens.ndim == 2:
      width = self.options.width
      x_BLD = nn.Embed(
        self.num_embeddings,
        width,
        embedding_init=nn.initializers.normal(1.0),
        name="EmbedTargets",
      )(tokens)
      if last_11D is not None:
        last_B1D = jnp.broadcast_to(last_11D, (len(tokens), 1, width))
        x_BLD = jnp.concatenate([x_BLD, last_B1D], axis=1)
      x_BLD = (x_BLD + posemb_1LD).astype(self.options.dtype)
    (x_BLD, cache), _ = stack.run(
      self,
      Block,
      [self.options],
      self.depth,
      (x_BLD, cache),
      source,
      mask,
      source_mask,
      start,
      train,
      scan=self.scan,
      remat_policy=self.remat_policy,
      name="EncDecBlock",
      separator="",
    )
    if x_BLD is None:
      return None, cache
    if not self.options.cross:
      return (x_BLD, None), cache
    D, V = self.options.width, self.vocab_size
    zeros = nn.initializers.zeros
    head = kernels.Kernel((D, V), (V,), zeros, name="LogitsDense")()
    norm = nn.LayerNorm(dtype=self.options.dtype, name="LayerNorm")
    return (norm(x_BLD), (head["kernel"], head["bias"])), cache
