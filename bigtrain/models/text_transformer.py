"""Transformer encoder of token ids: text towers of SigLIP and CLIP, and BERT.

Every position attends to every other, padding included, as in SigLIP
(https://arxiv.org/abs/2303.15343) and LiT (2111.07991). With `causal` it
attends only to earlier ones, as in CLIP (2103.00020). With `post_norm` and the
fields after it, the model is a BERT (1810.04805) or RoBERTa (1907.11692).

Axes: B batch, L length, D model width, C outputs, V vocabulary.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError
from bigtrain.models import vit
from bigtrain.models.layers import (
  encoder,
  kernels,
  layer_dims,
  masks,
  mlp,
  options,
  pooling,
)
from bigtrain.models.published import bert_families

POOL_TYPES = ("last", "first", "eos", "gap", "max", "map")


class Model(encoder.Fields):
  """Text tower. After construction no size is None."""

  num_classes: int | None = None  # C; None for a model without a head.
  vocab_size: int = 32_000  # Number of token ids.
  # What represents a text: its "last" position (which must not be cut off:
  # tokenize with eos="sticky"), its "first" one, "eos" for that of the first
  # `eos_id`, "gap" for the mean, "max", or "map" for attention.
  pool_type: str = "last"
  eos_id: int | None = None  # Id of the token that ends a text.
  causal: bool = False  # Whether a position attends to no later one.
  norm_eps: float = 1e-6  # Added to the variance in norms.
  post_norm: bool = False  # Whether norms follow embeddings and residuals.
  token_types: int = 0  # Number of kinds of tokens, such as two sentences.
  max_len: int | None = None  # Number of positions; by default the texts' L.
  first_position: int = 0  # Position of the first token.
  pad_id: int | None = None  # Padding, to which no position attends; or none.
  rep_size: bool = False  # Whether a tanh layer of width D precedes the head.
  mlm_head: bool = False  # Whether it predicts the tokens, and pools nothing.
  head_bias: bool = True  # Whether the head has a bias.

  def __post_init__(self) -> None:
    options.set_fields(self, vit.sizes(self, vit.SIZES, "B"))
    options.check_sizes(self, (*vit.SIZES, "vocab_size"))
    options.check_fields(
      self, "dropout", "drop_path", pool_type=POOL_TYPES, mlp=vit.MLPS
    )
    if self.pool_type == "eos" and self.eos_id is None:
      raise ConfigError(
        "config.model.eos_id: missing; pool_type='eos' needs it."
      )
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    text: jax.Array,
    *,
    types: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Encodes texts: int (B, L) token ids. Ids without an embedding give NaN.

    Args:
      types: int (B, L), kind of each token; 0 by default.

    Returns:
      (float32 (B, C), or the pooled features without a head, or with `mlm_head`
      logits (B, L, V); a dict with "encoded" (B, L, D), and without `mlm_head`
      "pre_logits" (B, D), pooled).
    """
    L, D = text.shape[1], self.width
    embed = nn.Embed(self.vocab_size, D, name="Embed_0")
    # For an id without an embedding XLA would read the last row.
    valid_BL1 = ((text >= 0) & (text < self.vocab_size))[..., None]
    x_BLD = jnp.where(valid_BL1, embed(text), jnp.nan)
    if self.token_types:
      kinds = jnp.zeros_like(text) if types is None else types
      x_BLD += nn.Embed(self.token_types, D, name="token_types")(kinds)
    first, num_positions = self.first_position, self.max_len or L
    if first + L > max(num_positions, L):
      raise ConfigError(
        f"config.model.max_len={num_positions}: expected at least {first + L} "
        f"for texts of {L} tokens."
      )
    init = nn.initializers.normal(D**-0.5)
    table_1LD = self.param("pos_embedding", init, (1, num_positions, D))
    x_BLD = x_BLD + table_1LD[:, first : first + L]
    if self.post_norm:
      norm = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name="embed_norm")
      x_BLD = nn.Dropout(self.dropout)(norm(x_BLD), deterministic=not train)
    real_BL = None if self.pad_id is None else text != self.pad_id
    mask = masks.Mask(causal=self.causal, real_BS=real_BL)
    blocks = encoder.of_fields(self, "Encoder_0", final_norm=not self.post_norm)
    x_BLD = blocks(x_BLD, mask=mask, train=train)
    if self.mlm_head:
      return self._mlm_logits(x_BLD, embed), {"encoded": x_BLD}
    x_BD = self._pool(x_BLD, text).astype(jnp.float32)
    if self.rep_size:
      x_BD = nn.tanh(nn.Dense(D, name="pre_logits")(x_BD))
    out = {"encoded": x_BLD, "pre_logits": x_BD}
    if self.num_classes:
      x_BD = nn.Dense(self.num_classes, self.head_bias, name="head")(x_BD)
    return x_BD, out

  def _mlm_logits(self, x_BLD: jax.Array, embed: nn.Embed) -> jax.Array:
    x_BLD = nn.Dense(self.width, dtype=self.dtype, name="mlm_dense")(x_BLD)
    x_BLD = mlp.KINDS[self.mlp].activation(x_BLD)
    norm = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name="mlm_norm")
    kernel_DV = embed.embedding.T.astype(self.dtype)
    bias_V = self.param("mlm_bias", nn.initializers.zeros, (self.vocab_size,))
    return kernels.logits(norm(x_BLD), kernel_DV) + bias_V

  def _pool(self, x_BLD: jax.Array, text: jax.Array) -> jax.Array:
    if self.pool_type == "last":
      return x_BLD[:, -1]
    if self.pool_type == "first":
      return x_BLD[:, 0]
    if self.pool_type == "eos":  # Without one, the first token.
      end_B11 = jnp.argmax(text == self.eos_id, axis=1)[:, None, None]
      return jnp.take_along_axis(x_BLD, end_B11, axis=1)[:, 0]
    if self.pool_type == "gap":
      real = None if self.pad_id is None else text[..., None] != self.pad_id
      return jnp.mean(x_BLD, axis=1, dtype=jnp.float32, where=real)
    if self.pool_type == "max":
      return jnp.max(x_BLD, axis=1)
    return pooling.map_head(self)(x_BLD)[:, 0]


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, Any]
) -> dict[str, np.ndarray]:
  """Converts a text tower of the SigLIP or LiT releases, or a BERT.

  Some of them add two position embeddings. These are not resampled to other
  text lengths.
  """
  converted = bert_families.load(flat, like, DIMS)
  if converted is not None:
    return converted
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


DIMS: dict[str, str] = {
  r"Embed_0/embedding": "V -> D",
  r"pos_embedding": "1 positions -> D",
  r"MAPHead_0/probe": "1 1 D",
  r"token_types/embedding": "types -> D",
  r"(pre_logits|mlm_dense)/kernel": "D -> D",
  r"mlm_bias": "V",
  r"head/kernel": "D -> V",
  r"head/bias": "V",
  **layer_dims.LAYERS,
}
param_dims = dims.of_all(DIMS)
to_published = functools.partial(bert_families.PUBLISHED.export, DIMS)
published_fields = bert_families.PUBLISHED.fields
