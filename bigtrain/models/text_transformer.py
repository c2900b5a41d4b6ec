"""Transformer encoder of token ids: the text towers of SigLIP and CLIP.

Every position attends to every other, padding included, as in SigLIP, arXiv
2303.15343, and LiT, 2111.07991, or with `causal` to earlier ones only, as in
CLIP, 2103.00020.

Axes: B batch, L length, D model width, C outputs.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import dims, settings
from bigtrain.models import vit
from bigtrain.models.layers import encoder, layer_dims, masks, options, pooling

POOL_TYPES = ("last", "first", "eos", "gap", "max", "map")


class Model(nn.Module):
  """Text tower. After construction no size is None.

  Attributes:
    num_classes: C; None for a model without a head.
    variant: name of a ViT's sizes, such as "B", the defaults of the next four
      fields.
    width: D.
    depth: number of blocks.
    mlp_dim: hidden width of the MLPs; 4 D if neither it nor a variant is given.
    num_heads: number of attention heads; must divide D.
    vocab_size: number of token ids.
    pool_type: "last" position (which must not be cut off: tokenize with
      eos="sticky"), "first" position, "eos", the first token `eos_id`, "gap"
      global average, "max", or "map", attention.
    eos_id: id of the token that ends a text.
    causal: whether a position attends to no later one.
    norm_eps: added to the variance in norms.
    mlp: a name in vit.MLPS.
    head_bias: whether the head has a bias.
    dropout: rate in the MLPs and on residual branches.
    scan: whether to compile one block and loop over stacked parameters.
    attention, remat_policy: names in attention_backends.NAMES, remat.POLICIES.
    dtype: dtype of the computation; parameters, the pooled features and the
      head are float32.
  """

  num_classes: int | None = None
  variant: str | None = None
  width: int = options.DERIVED
  depth: int = options.DERIVED
  mlp_dim: int = options.DERIVED
  num_heads: int = options.DERIVED
  vocab_size: int = 32_000
  pool_type: str = "last"
  eos_id: int | None = None
  causal: bool = False
  norm_eps: float = 1e-6
  mlp: str = "gelu"
  head_bias: bool = True
  dropout: float = 0.0
  scan: bool = False
  attention: str = "auto"
  remat_policy: str = "none"
  dtype: str = "float32"

  def __post_init__(self) -> None:
    options.set_fields(self, vit.sizes(self, vit.SIZES, "B"))
    options.check_sizes(self, (*vit.SIZES, "vocab_size"))
    options.check_fields(self, "dropout", pool_type=POOL_TYPES, mlp=vit.MLPS)
    if self.pool_type == "eos" and self.eos_id is None:
      raise settings.ConfigError(
        "config.model.eos_id: missing; pool_type='eos' needs it."
      )
    super().__post_init__()

  @nn.compact
  def __call__(
    self, text: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Encodes texts: int (B, L) token ids. Ids without an embedding give NaN.

    Returns:
      (float32 (B, C), or the pooled features without a head; a dict with
      "encoded" (B, L, D), and "pre_logits" (B, D), pooled).
    """
    L, D = text.shape[1], self.width
    embed = nn.Embed(self.vocab_size, D, name="Embed_0")
    # For an id without an embedding XLA would read the last row.
    valid_BL1 = ((text >= 0) & (text < self.vocab_size))[..., None]
    x_BLD = jnp.where(valid_BL1, embed(text), jnp.nan)
    init = nn.initializers.normal(D**-0.5)
    x_BLD = x_BLD + self.param("pos_embedding", init, (1, L, D))
    x_BLD = encoder.Encoder(
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      dropout=self.dropout,
      norm_eps=self.norm_eps,
      mlp=self.mlp,
      scan=self.scan,
      attention=self.attention,
      remat_policy=self.remat_policy,
      dtype=self.dtype,
      name="Encoder_0",
    )(x_BLD, mask=masks.Mask(causal=self.causal), train=train)
    x_BD = self._pool(x_BLD, text).astype(jnp.float32)
    out = {"encoded": x_BLD, "pre_logits": x_BD}
    if self.num_classes:
      x_BD = nn.Dense(self.num_classes, self.head_bias, name="head")(x_BD)
    return x_BD, out

  def _pool(self, x_BLD: jax.Array, text: jax.Array) -> jax.Array:
    if self.pool_type == "last":
      return x_BLD[:, -1]
    if self.pool_type == "first":
      return x_BLD[:, 0]
    if self.pool_type == "eos":  # Without one, the first token.
      end_B11 = jnp.argmax(text == self.eos_id, axis=1)[:, None, None]
      return jnp.take_along_axis(x_BLD, end_B11, axis=1)[:, 0]
    if self.pool_type == "gap":
      return jnp.mean(x_BLD, axis=1, dtype=jnp.float32)
    if self.pool_type == "max":
      return jnp.max(x_BLD, axis=1)
    return pooling.MAPHead(
      self.mlp_dim,
      self.num_heads,
      self.norm_eps,
      self.mlp,
      self.dtype,
      name="MAPHead_0",
    )(x_BLD)


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, Any]
) -> dict[str, np.ndarray]:
  """Converts a text tower of the SigLIP or LiT releases.

  Some add two position embeddings. Other text lengths are not resampled.
  """
  flat = dict(flat)
  posemb_1LD = flat.pop("pos_embedding", None)
  second_1LD = flat.pop("Encoder_0/pos_embedding", None)
  # vit would resample the position embeddings, but they are not on a grid.
  flat = vit.from_published(flat, like)
  if posemb_1LD is not None:
    if second_1LD is not None:
      posemb_1LD = posemb_1LD + second_1LD
    flat["pos_embedding"] = posemb_1LD
  elif second_1LD is not None:
    flat["Encoder_0/pos_embedding"] = second_1LD
  return flat


DIMS = {
  "Embed_0/embedding": "V -> D",
  "pos_embedding": "1 positions -> D",
  "MAPHead_0/probe": "1 1 D",
  **layer_dims.head("head"),
  **layer_dims.LAYERS,
}


def param_dims(model: Model) -> dims.Table:
  del model
  return DIMS
