"""Image captioner with parallel prediction (CapPa), arxiv.org/abs/2306.07915.

A ViT encodes the image, and a transformer decoder with cross-attention predicts
the caption: either token by token (Cap), with causal attention; or in parallel,
where the inputs are mask tokens and all positions see each other.

Axes: B batch, P patches, E width of the encoder, L length of a text, D width
of the decoder, H heads, K head width, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError
from bigtrain.models import vit
from bigtrain.models.layers import (
  captioner_decoder,
  encoder,
  kernels,
  kv_cache,
  layer_dims,
  masks,
  options,
  positions,
)
from bigtrain.models.published import blocks, conversions


class States(NamedTuple):
  """Factors of the logits, which are hidden @ kernel + bias.

  They are for losses that never form all logits at once.
  """

  hidden_BLD: jax.Array
  kernel_DV: jax.Array
  bias_V: jax.Array

  def logits(self) -> jax.Array:
    kernel_DV = self.kernel_DV.astype(self.hidden_BLD.dtype)
    return kernels.logits(self.hidden_BLD, kernel_DV) + self.bias_V


class Source(NamedTuple):
  """Encoded images, as `step` reads them."""

  cache: kv_cache.Cache
  mask: masks.Mask  # Which patches are seen: all but padding.


class Writer(nn.Module):
  """Methods of models whose `decoder` writes texts about encoded images.

  Such a model has the fields decoder_width, decoder_depth and so on, like
  Captioner.
  """

  # CapPa has a mask token, with the id V.
  mask_token = False
  # CoCa has another decoder, which reads a text, and a class token after it.
  text_depth = 0

  @property
  def output_size(self) -> int:
    """V, the number of different tokens that the decoder can write."""
    return self.vocab_size

  @nn.nowrap
  def make_posemb(self, L: int) -> jax.Array:
    """Position embeddings [1, L, D] of the decoder."""
    D = self.decoder_width
    if self.posemb == "sincos2d":
      return jnp.asarray(positions.sincos_2d((1, L), D))
    init = nn.initializers.normal(D**-0.5)
    return self.param("pos_embedding_decoder", init, (1, L, D))

  @nn.nowrap
  def make_decoder(
    self, depth: int, **others: Any
  ) -> captioner_decoder.Decoder:
    decoder_options = options.pick(
      captioner_decoder.Options,
      self,
      width=self.decoder_width,
      mlp_dim=self.decoder_mlp_dim,
      num_heads=self.decoder_num_heads,
      dropout=self.decoder_dropout,
      use_bias=self.decoder_bias,
      **others,
    )
    return captioner_decoder.Decoder(
      decoder_options,
      num_embeddings=self.output_size + self.mask_token,
      vocab_size=self.output_size,
      depth=depth,
      scan=self.scan,
      remat_policy=self.remat_policy,
    )

  @nn.nowrap
  def tokens_before(self, text: jax.Array) -> jax.Array:
    """The token before each token of a text (B, L); 0 before the first."""
    L = text.shape[1]
    if L > self.max_len:
      raise ConfigError(
        f"config.model.max_len: {self.max_len} is less than the {L} tokens of "
        "a text."
      )
    return jnp.pad(text, ((0, 0), (1, 0)))[:, :-1]

  def factors(self, *args: Any, **kwargs: Any) -> States:
    """Calls the decoder; the factors of its logits."""
    (hidden_BLD, (kernel_DV, bias_V)), _ = self.decoder(*args, **kwargs)
    return States(hidden_BLD, kernel_DV, bias_V)

  def begin(
    self, encoded: Mapping[str, jax.Array], num_tokens: int
  ) -> tuple[Source, Any]:
    """Returns the cache of the images, and the caches that `step` changes.

    `encoded` is what `encode` returns.
    """
    encoded_BPE = encoded["encoded"]
    B, P, _ = encoded_BPE.shape
    H = self.decoder_num_heads

    def empty(length: int, depth: int) -> kv_cache.Cache:
      K = self.decoder_width // H
      return kv_cache.empty(B, depth, length, H, K, self.dtype)

    _, cache = self.decoder(
      None, encoded_BPE, cache=empty(P, self.decoder_depth)
    )
    source = Source(cache, masks.Mask(real_BS=encoded.get("real")))
    of_decoder = empty(num_tokens, self.decoder_depth)
    of_text = None
    if self.text_depth:
      of_text = empty(num_tokens, self.text_depth)
    return source, [of_decoder, of_text]

  def step(
    self, source: Source, caches: Any, token_B: jax.Array, position: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Returns (float32 logits (B, V) of the token at `position`, new caches).

    `token_B` are the tokens before that position, 0 for the first one. B may be
    a multiple of the number of images.
    """
    of_decoder, of_text = caches
    x = token_B[:, None]
    posemb: Any = self.posemb_1LD
    posemb = jax.lax.dynamic_slice_in_dim(posemb, position, 1, 1)
    if self.text_depth:
      (x, _), of_text = self.text(
        x, None, posemb, cache=of_text, start=position
      )
      posemb = 0.0  # The text's decoder has added it.
    (hidden_B1D, (kernel_DV, bias_V)), of_decoder = self.decoder(
      x,
      source.cache,
      posemb,
      source_mask=source.mask,
      cache=of_decoder,
      start=position,
    )
    states = States(hidden_B1D, kernel_DV, bias_V)
    return states.logits()[:, 0], [of_decoder, of_text]

  def decode(
    self,
    encoded: Mapping[str, jax.Array],
    text: jax.Array,
    *,
    parallel_B: jax.Array | None = None,
    masked_BL: jax.Array | None = None,
    train: bool = False,
  ) -> States:
    """Runs the decoder; the factors of its logits.

    With M texts per image there are M B texts, grouped by image.

    Args:
      encoded: what `encode` returns: "encoded" (B, P, E) and, if some patches
        are padding, "real" bool (B, P), False for these.
      text: int (B, L), L up to max_len.
      parallel_B: bool, whether an example is predicted in parallel.
      masked_BL: bool, whether the input of a position in such an example is the
        mask token rather than the token itself; None masks all positions.
    """
    tokens_BL, L = self.tokens_before(text), text.shape[1]
    mask = masks.Mask(causal=True)
    if parallel_B is not None:
      if not self.mask_token:
        raise ConfigError(
          "config.model.mask_token: parallel prediction needs it to be True."
        )
      inputs_BL: Any = self.output_size
      if masked_BL is not None:
        inputs_BL = jnp.where(masked_BL, self.output_size, text)
      tokens_BL = jnp.where(parallel_B[:, None], inputs_BL, tokens_BL)
      mask = dataclasses.replace(mask, prefix_B=jnp.where(parallel_B, L, 0))
    return self.factors(
      tokens_BL,
      encoded["encoded"],
      self.posemb_1LD[:, :L],
      mask=mask,
      source_mask=masks.Mask(real_BS=encoded.get("real")),
      train=train,
    )


class Captioner(encoder.Fields, Writer):
  """The base of captioners. Sizes and rates describe the encoder, a ViT."""

  vocab_size: int  # V.
  max_len: int = 64  # Largest number of tokens of a text.
  patch_size: Any = None  # Height and width in pixels, or one for both.
  posemb: str = "learn"  # "learn" or "sincos2d", in encoder and decoder.
  # Rows and columns of the encoder's learned embeddings; needed for images of
  # several shapes.
  posemb_grid: Any = None
  decoder_width: int = options.DERIVED  # D; the encoder's if None.
  decoder_depth: int = options.DERIVED  # The encoder's if None.
  decoder_mlp_dim: int = options.DERIVED  # The encoder's if None.
  decoder_num_heads: int = options.DERIVED  # Must divide D.
  decoder_dropout: float = 0.0  # Rate in the decoder.
  decoder_bias: bool = True  # Whether its MLPs and layer norms have biases.

  # CoCa has a class token after a text.
  num_class_tokens = 0

  def __post_init__(self) -> None:
    image_encoder = encoder_of(self, parent=None)
    sizes = [f"decoder_{name}" for name in vit.SIZES]
    for size in sizes:
      if getattr(self, size) is None:
        default = getattr(image_encoder, size.removeprefix("decoder_"))
        options.set_fields(self, {size: default})
    options.check_sizes(self, ("vocab_size", "max_len", *sizes))
    if self.decoder_width % self.decoder_num_heads:
      raise ConfigError(
        f"config.model.decoder_num_heads: {self.decoder_num_heads} does not "
        f"divide the decoder's width {self.decoder_width}."
      )
    options.check_fields(self, "decoder_dropout")
    super().__post_init__()

  def setup(self) -> None:
    self.encoder = encoder_of(self)
    self.decoder = self.make_decoder(self.decoder_depth)
    self.posemb_1LD = self.make_posemb(self.max_len + self.num_class_tokens)

  def states(
    self,
    image: jax.Array,
    text: jax.Array,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
    **parallel: jax.Array | None,
  ) -> States:
    encoded = self.encode(image, shapes=shapes, train=train)
    return self.decode(encoded, text, train=train, **parallel)

  def encode(
    self,
    image: jax.Array,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
  ) -> dict[str, jax.Array]:
    """Returns the ViT's dict: "encoded" (B, P, E), "pre_logits" (B, E), ..."""
    return self.encoder(image, shapes=shapes, train=train)[1]


class Model(Captioner):
  """Cap, or with a mask token CapPa."""

  mask_token: bool = False  # Whether token V is one, for parallel prediction.

  def __call__(
    self,
    image: jax.Array,
    text: jax.Array,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
    **parallel: jax.Array | None,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the logits (B, L, V), and `encode`'s dict with "states".

    `image` and `shapes` are as in models.vit, and `text` is int (B, L) up to
    max_len; the other arguments go to `decode`.
    """
    out: dict[str, Any] = self.encode(image, shapes=shapes, train=train)
    out["states"] = self.decode(out, text, train=train, **parallel)
    return out["states"].logits(), out


def encoder_of(model: Captioner, **kwargs: Any) -> vit.Model:
  """The ViT, all of whose fields come from the captioner."""
  fields = (
    "variant",
    "patch_size",
    *vit.SIZES,
    "posemb",
    "posemb_grid",
    "mlp",
    "dropout",
    "drop_path",
    "scan",
    "attention",
    "remat_policy",
    "dtype",
  )
  return vit.Model(**{name: getattr(model, name) for name in fields}, **kwargs)


def from_published(
  flat: Mapping[str, np.ndarray],
  like: Mapping[str, jax.ShapeDtypeStruct],
  *,
  posemb_align: str = "centers",
) -> dict[str, np.ndarray]:
  """Reads the released CapPa, and this program's own files."""
  flat = conversions.normalise(flat)
  image_encoder = vit.from_published(
    conversions.below("encoder/", flat),
    conversions.below("encoder/", like),
    posemb_align=posemb_align,
  )
  decoder = {
    name: x for name, x in flat.items() if not name.startswith("encoder/")
  }
  block = "EncDecBlock"
  prefix = f"decoder/{block}/"
  norm = decoder.get(prefix + "LayerNorm1/scale")
  width = decoder.get("decoder/LayerNorm/scale", np.zeros(0)).shape
  # A scale is a vector (D,), so the other axis of stacked scales counts blocks.
  # If both are D long, the file is taken to be our own.
  if norm is not None and norm.shape[:1] == width != norm.shape[1:]:
    for name, x in decoder.items():
      if name.startswith(prefix):
        decoder[name] = np.moveaxis(x, 1, 0)
  decoder = blocks.restack_blocks(decoder, like, block=block, separator="")
  image_encoder = {f"encoder/{name}": x for name, x in image_encoder.items()}
  return image_encoder | decoder


_DIMS: dict[str, str] = {
  r"pos_embedding_decoder": "1 positions -> D",
  r"decoder/EmbedTargets/embedding": "V -> D",
  r"decoder/LogitsDense/kernel": "D -> V",
  r"decoder/LogitsDense/bias": "V",
  **layer_dims.LAYERS,
}


def param_dims(model: Model) -> dims.Table:
  encoder_dims = vit.param_dims(encoder_of(model, parent=None))
  return dims.under("encoder/", encoder_dims) | _DIMS
