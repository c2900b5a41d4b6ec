"""A transformer decoder with cross-attention, as image captioners have it.

Axes: B batch (of texts, a multiple of the images), L length of a text, P
patches, E width of the encoder, D width of the decoder, H heads, K head width,
F hidden width, V vocabulary.

Submodules are named as in the published CapPa checkpoints.
"""

from typing import Any

import flax.linen as nn
import jax

from bigtrain.models.layers import common


class DecoderBlock(nn.Module):
  """Pre-norm self-attention, cross-attention and MLP, each with a residual.

  Attributes: as those of `Decoder`.
  """

  width: int
  mlp_dim: int
  num_heads: int
  dropout: float = 0.0
  use_bias: bool = True
  dtype: str = "float32"

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array | None,
    source: Any,
    mask_BLL: jax.Array | None = None,
    past: common.Memory | None = None,
    position: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array | None, Any]:
    """One of three things, see `Decoder`.

    Args:
      x_BLD: the stream; None to compute keys and values of the source only.
      source: (B, P, E), or the Memory of it.
      mask_BLL: what positions see of each other; causal if None.
      past: keys and values of earlier positions, where there is `position`.
      position: of the single one that x holds.
      train: whether dropout acts.

    Returns:
      (the stream, the new past or, without x, the source's Memory).
    """

    def norm(name: str, x_BLD: jax.Array) -> jax.Array:
      return nn.LayerNorm(dtype=self.dtype, use_bias=self.use_bias, name=name)(
        x_BLD
      )

    def drop(x_BLD: jax.Array) -> jax.Array:
      return nn.Dropout(self.dropout)(x_BLD, deterministic=not train)

    def attention(name: str) -> common.Attention:
      return common.Attention(
        self.num_heads, self.dtype, use_bias=False, width=self.width, name=name
      )

    cross = attention("CrossAttn")
    if x_BLD is None:
      return None, cross(None, source)

    y_BLD = norm("LayerNorm1", x_BLD)
    if position is None:
      y_BLD = attention("SelfAttn")(
        y_BLD, y_BLD, mask_BLS=mask_BLL, causal=mask_BLL is None
      )
    else:
      y_BLD, past = attention("SelfAttn")(
        y_BLD, y_BLD, memory=past, position=position
      )
    x_BLD = x_BLD + drop(y_BLD)

    y_BLD = norm("LayerNorm2", x_BLD)
    if isinstance(source, common.Memory):
      y_BLD = cross(y_BLD, None, memory=source)
    else:
      y_BLD = cross(y_BLD, source)
    x_BLD = x_BLD + drop(y_BLD)

    y_BLD = norm("LayerNorm3", x_BLD)
    y_BLD = common.MlpBlock(
      self.mlp_dim, self.dropout, self.dtype, self.use_bias, name="MLP"
    )(y_BLD, train=train)
    return x_BLD + drop(y_BLD), past


class OutputLayer(nn.Module):
  """Parameters of the layer that makes logits, which the loss applies.

  So that it can do so for a few positions at a time.
  """

  vocab_size: int

  @nn.compact
  def __call__(self, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns kernel (D, V) and bias (V,)."""
    zeros = nn.initializers.zeros
    return (
      self.param("kernel", zeros, (width, self.vocab_size)),
      self.param("bias", zeros, (self.vocab_size,)),
    )


class Decoder(nn.Module):
  """Embeds tokens, a stack of `DecoderBlock`s, a final layer norm.

  Parameters of the blocks are EncDecBlock0, EncDecBlock1, ..., or with `scan`
  one EncDecBlock whose arrays have a leading axis of `depth`. The same key
  initializes both to the same values.

  Attributes:
    num_embeddings: rows of the table of embeddings.
    vocab_size: V, of the logits.
    width: D.
    depth: number of blocks.
    mlp_dim: F.
    num_heads: H; must divide D.
    dropout: rate in the MLPs and on each residual branch.
    use_bias: whether MLPs and the blocks' layer norms have biases. Attention
      has none, the final layer norm and the output layer always do.
    scan: one compiled block that loops over stacked parameters.
    remat_policy: see common.Encoder.
    dtype: of the computation.
  """

  num_embeddings: int
  vocab_size: int
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  dropout: float = 0.0
  use_bias: bool = True
  scan: bool = False
  remat_policy: str = "none"
  dtype: str = "float32"

  @nn.compact
  def __call__(
    self,
    tokens_BL: jax.Array | None,
    source: Any,
    posemb_1LD: jax.Array | None = None,
    *,
    mask_BLL: jax.Array | None = None,
    past: Any = None,
    position: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[Any, Any]:
    """Reads texts; or one more position of them; or only the source.

    Args:
      tokens_BL: what each position is given; a single one with `position`;
        None to compute keys and values of the source only.
      source: (b, P, E), b dividing B; or what this returned for it.
      posemb_1LD: embeddings of these positions.
      mask_BLL: what positions see of each other; causal if None.
      past: keys and values of earlier positions, where there is `position`:
        for each block, or stacked with `scan`, (B, H, ...) with room for all.
      position: int scalar: place of the only position.
      train: whether dropout acts.

    Returns:
      ((last hidden states (B, L, D), (kernel (D, V), bias (V,)) of the output
      layer), the new past). Without tokens: (None, the source's keys and
      values).
    """
    sizes = (
      self.width,
      self.mlp_dim,
      self.num_heads,
      self.dropout,
      self.use_bias,
      self.dtype,
    )
    x_BLD = None
    if tokens_BL is not None:
      embed = nn.Embed(
        self.num_embeddings,
        self.width,
        embedding_init=nn.initializers.normal(1.0),
        name="EmbedTargets",
      )
      x_BLD = (embed(tokens_BL) + posemb_1LD).astype(self.dtype)
    if self.is_initializing():
      one = DecoderBlock(*sizes, parent=None)
      common.init_blocks(
        self, "EncDecBlock", self.depth, one, x_BLD, source, separator=""
      )

    # Argument 6 is train; 0 is self.
    block = common.block_class(
      DecoderBlock, self.scan, self.remat_policy, train=6
    )
    if self.scan:
      # Memories are stacked behind the batch, which decoding wants in front.
      stacked = isinstance(source, common.Memory)
      blocks = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(1 if stacked else nn.broadcast, nn.broadcast, 1)
        + (nn.broadcast,) * 2,
        out_axes=1,
        length=self.depth,
      )(*sizes, name="EncDecBlock")
      x_BLD, kept = blocks(x_BLD, source, mask_BLL, past, position, train)
    else:
      kept = []
      for i in range(self.depth):
        x_BLD, kept_i = block(*sizes, name=f"EncDecBlock{i}")(
          x_BLD,
          source[i] if isinstance(source, list) else source,
          mask_BLL,
          None if past is None else past[i],
          position,
          train,
        )
        kept.append(kept_i)
    if x_BLD is None:
      return None, kept
    hidden_BLD = nn.LayerNorm(dtype=self.dtype, name="LayerNorm")(x_BLD)
    head = OutputLayer(self.vocab_size, name="LogitsDense")(self.width)
    return (hidden_BLD, head), kept
