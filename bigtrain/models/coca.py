"""Contrastive captioner (CoCa), https://arxiv.org/abs/2205.01917.

Learned queries pool the patches of a ViT. A causal decoder reads a text
followed by a class token, whose output is the text's embedding. The decoder of
captions continues from the first decoder's states, and attends to the pooled
image.

Axes: B batch, P patches, N queries, L length of a text, D width of the decoders
and of the pooled image, E embedding, V vocabulary.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.arrays import dims
from bigtrain.config.errors import check_number
from bigtrain.models import cappa, vit
from bigtrain.models.layers import layer_dims, masks, options, pooling

POOLS = ("cascade", "parallel")


class Model(cappa.Captioner):
  """CoCa. Texts are padded with 0, which is also the token before the first."""

  # Depth of the decoder that reads texts; by default decoder_depth.
  text_depth: int = options.DERIVED
  num_queries: int = 256  # N, for the captions.
  # Input of the embedding's query: "cascade", the output of the captions'
  # queries; or "parallel", the patches.
  pool: str = "cascade"
  out_dim: int = 512  # E.
  temperature_init: float = 1 / 0.07  # Scale of the logits; its log is learned.

  num_class_tokens = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.text_depth is None:
      options.set_fields(self, {"text_depth": self.decoder_depth})
    options.check_sizes(self, ("text_depth", "num_queries", "out_dim"))
    options.check_fields(self, pool=POOLS)
    key = "config.model.temperature_init"
    check_number(key, self.temperature_init, above=0)

  def setup(self) -> None:
    super().setup()
    D = self.decoder_width
    self.text = self.make_decoder(self.text_depth, cross=False)
    self.cls_11D = self.param("cls", nn.initializers.zeros, (1, 1, D))
    pool = functools.partial(
      pooling.MAPHead,
      num_heads=self.decoder_num_heads,
      width=D,
      mlp=None,
      dtype=self.dtype,
    )
    if self.pool == "parallel":
      # The last query is the embedding's.
      self.caption_pool = pool(num_queries=self.num_queries + 1)
    else:
      self.caption_pool = pool(num_queries=self.num_queries)
      self.contrastive_pool = pool()
    self.text_norm = nn.LayerNorm()
    self.image_head = nn.Dense(self.out_dim, use_bias=False)
    self.text_head = nn.Dense(self.out_dim, use_bias=False)
    init = nn.initializers.constant(math.log(self.temperature_init))
    self.t_1 = self.param("t", init, (1,))

  def __call__(
    self,
    image: jax.Array | None = None,
    text: jax.Array | None = None,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array | None, jax.Array | None, dict[str, Any]]:
    """Embeds images, texts int (B, L), or both.

    Args:
      image, shapes: as in models.vit.
      text: padded with 0.

    Returns:
      (image_BE, text_BE, out): float32 embeddings of length 1, or None without
      that input; a dict of the results of `encode` as "img/...", the
      temperature "t" and, given both, the captions' "states".
    """
    out: dict[str, Any] = {"t": jnp.exp(self.t_1)}
    image_BE = text_BE = None
    if image is not None:
      encoded = self.encode(image, shapes=shapes, train=train)
      out |= {f"img/{name}": x for name, x in encoded.items()}
      image_BE = pooling.normalise(self.image_head(encoded["pre_logits"]))
    if text is not None:
      text_BLD, cls_BD = self._read(text, train)
      text_BE = pooling.normalise(self.text_head(self.text_norm(cls_BD)))
      if image is not None:
        source = encoded["encoded"]
        out["states"] = self.factors(text_BLD, source, train=train)
    return image_BE, text_BE, out

  def encode(
    self,
    image: jax.Array,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
  ) -> dict[str, jax.Array]:
    """Returns the ViT's dict, whose "encoded" (B, P, width) is "patches" here.

    "encoded" (B, N, D) and "pre_logits" (B, D) are pooled by queries.
    """
    out = super().encode(image, shapes=shapes, train=train)
    # The queries see no padding, and what they pool has none.
    seen = masks.Mask(real_BS=out.pop("real", None))
    pooled = self.caption_pool(out["encoded"], seen)
    contrastive = pooled
    if self.pool == "cascade":
      contrastive = self.contrastive_pool(pooled)
    return {
      **out,
      "patches": out["encoded"],
      "encoded": pooled[:, : self.num_queries],
      "pre_logits": contrastive[:, -1].astype(jnp.float32),
    }

  def decode(  # type: ignore[override]  # Without parallel prediction.
    self,
    encoded: Mapping[str, jax.Array],
    text: jax.Array,
    *,
    train: bool = False,
  ) -> cappa.States:
    text_BLD, _ = self._read(text, train)
    return self.factors(text_BLD, encoded["encoded"], train=train)

  def _read(self, text: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
    """States of the tokens before a text's (B, L, D), and of the class (B, D).

    The tokens at the two ends, the first and the class token, are never
    padding.
    """
    ends = (0, 0), (1, 1)
    real_BS = jnp.pad(text[:, :-1] != 0, ends, constant_values=True)
    (x_BSD, _), _ = self.text(
      self.tokens_before(text),
      None,
      self.posemb_1LD[:, : real_BS.shape[1]],
      last_11D=self.cls_11D,
      mask=masks.Mask(causal=True, real_BS=real_BS),
      train=train,
    )
    return x_BSD[:, :-1], x_BSD[:, -1]


_DIMS: dict[str, str] = {
  r"pos_embedding_decoder": "1 positions -> D",
  r"cls": "1 1 D",
  r"(caption|contrastive)_pool/probe": "1 positions -> D",
  r"text/EmbedTargets/embedding": "V -> D",
  r"decoder/LogitsDense/kernel": "D -> V",
  r"decoder/LogitsDense/bias": "V",
  r"(image|text)_head/kernel": "D -> V",
  **layer_dims.LAYERS,
}


def param_dims(model: Model) -> dims.Table:
  encoder_dims = vit.param_dims(cappa.encoder_of(model, parent=None))
  return dims.under("encoder/", encoder_dims) | _DIMS
