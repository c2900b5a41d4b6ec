"""Image captioner with parallel prediction (CapPa), arxiv.org/abs/2306.07915.

A ViT encodes the image, a transformer decoder with cross-attention reads the
caption: in order (Cap), where attention is causal; or in parallel, where the
inputs are mask tokens and all positions see each other.

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

from bigtrain import dims, settings
from bigtrain.models import vit
from bigtrain.models.layers import (
  captioner_decoder,
  kernels,
  kv_cache,
  layer_dims,
  masks,
  options,
  positions,
)
from bigtrain.models.published import blocks, conversions


class States(NamedTuple):
  """Factors of the logits, which are hidden @ kernel + bias."""

  hidden_BLD: jax.Array
  kernel_DV: jax.Array
  bias_V: jax.Array

  def logits(self) -> jax.Array:
    kernel_DV = self.kernel_DV.astype(self.hidden_BLD.dtype)
    return kernels.logits(self.hidden_BLD, kernel_DV) + self.bias_V


class Model(nn.Module):
  """Captioner. The encoder's fields are described in models/vit.py.

  Attributes:
    variant, patch_size, width, depth, mlp_dim, num_heads: the encoder's.
    dropout, drop_path: the encoder's.
    decoder_width, decoder_depth, decoder_mlp_dim: the encoder's if None.
  """

  vocab_size: int  # V.
  max_len: int = 64  # Largest number of tokens of a text.
  variant: str | None = None
  patch_size: Any = None
  width: int | None = None
  depth: int | None = None
  mlp_dim: int | None = None
  num_heads: int | None = None
  posemb: str = "learn"  # "learn" or "sincos2d", in encoder and decoder.
  dropout: float = 0.0
  drop_path: float = 0.0
  decoder_width: int = options.DERIVED
  decoder_depth: int = options.DERIVED
  decoder_mlp_dim: int = options.DERIVED
  decoder_num_heads: int = options.DERIVED  # Must divide D.
  decoder_dropout: float = 0.0  # Rate in the decoder.
  decoder_bias: bool = True  # Whether its MLPs and layer norms have biases.
  mask_token: bool = False  # Whether token V is one, for parallel prediction.
  scan: bool = False  # Whether a compiled block loops over stacked layers.
  attention: str = "auto"  # A name in attention_backends.NAMES.
  remat_policy: str = "none"  # A name in remat.POLICIES.
  dtype: str = "float32"  # Of activations; parameters and logits are float32.

  def __post_init__(self) -> None:
    encoder = _encoder(self, parent=None)
    sizes = [f"decoder_{name}" for name in vit.SIZES]
    missing = [name for name in sizes if getattr(self, name) is None]
    options.set_fields(
      self, {n: getattr(encoder, n.removeprefix("decoder_")) for n in missing}
    )
    options.check_sizes(self, ("vocab_size", "max_len", *sizes))
    if self.decoder_width % self.decoder_num_heads:
      raise settings.ConfigError(
        f"config.model.decoder_num_heads: {self.decoder_num_heads} does not "
        f"divide the decoder's width {self.decoder_width}."
      )
    options.check_fields(self, "decoder_dropout")
    super().__post_init__()

  def setup(self) -> None:
    self.encoder = _encoder(self)
    options = captioner_decoder.Options(
      width=self.decoder_width,
      mlp_dim=self.decoder_mlp_dim,
      num_heads=self.decoder_num_heads,
      dropout=self.decoder_dropout,
      use_bias=self.decoder_bias,
      attention=self.attention,
      dtype=self.dtype,
    )
    self.decoder = captioner_decoder.Decoder(
      options,
      num_embeddings=self.vocab_size + self.mask_token,
      vocab_size=self.vocab_size,
      depth=self.decoder_depth,
      scan=self.scan,
      remat_policy=self.remat_policy,
    )
    L, D = self.max_len, self.decoder_width
    if self.posemb == "learn":
      init = nn.initializers.normal(D**-0.5)
      self.posemb_1LD = self.param("pos_embedding_decoder", init, (1, L, D))
    else:
      self.posemb_1LD = jnp.asarray(positions.sincos_2d((1, L), D))

  def __call__(
    self,
    image: jax.Array,
    text: jax.Array,
    *,
    train: bool = False,
    **parallel: jax.Array | None,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the logits (B, L, V), and `encode`'s dict with "states".

    `image` is (B, height, width, channels) and `text` int (B, L) up to max_len;
    the other arguments go to `decode`.
    """
    out: dict[str, Any] = self.encode(image, train=train)
    out["states"] = self.decode(out["encoded"], text, train=train, **parallel)
    return out["states"].logits(), out

  def states(
    self,
    image: jax.Array,
    text: jax.Array,
    *,
    train: bool = False,
    **parallel: jax.Array | None,
  ) -> States:
    encoded_BPE = self.encode(image, train=train)["encoded"]
    return self.decode(encoded_BPE, text, train=train, **parallel)

  def encode(
    self, image: jax.Array, *, train: bool = False
  ) -> dict[str, jax.Array]:
    """Returns the ViT's dict: "encoded" (B, P, E), "pre_logits" (B, E), ..."""
    return self.encoder(image, train=train)[1]

  def decode(
    self,
    encoded_BPE: jax.Array,
    text: jax.Array,
    *,
    parallel_B: jax.Array | None = None,
    masked_BL: jax.Array | None = None,
    train: bool = False,
  ) -> States:
    """Runs the decoder; the factors of its logits.

    With M texts an image there are M B rows, those of the first image first.

    Args:
      text: int (B, L), L up to max_len.
      parallel_B: bool, whether an example is predicted in parallel.
      masked_BL: bool, whether the input of a position is the mask token in such
        an example, or the token itself; all masked if None.
    """
    L = text.shape[1]
    if L > self.max_len:
      raise settings.ConfigError(
        f"config.model.max_len: {self.max_len} is less than the {L} tokens of "
        "a text."
      )
    tokens_BL = jnp.pad(text, ((0, 0), (1, 0)))[:, :-1]
    mask = masks.Mask(causal=True)
    if parallel_B is not None:
      if not self.mask_token:
        raise settings.ConfigError(
          "config.model.mask_token: parallel prediction needs it to be True."
        )
      inputs_BL: Any = self.vocab_size
      if masked_BL is not None:
        inputs_BL = jnp.where(masked_BL, self.vocab_size, text)
      tokens_BL = jnp.where(parallel_B[:, None], inputs_BL, tokens_BL)
      mask = dataclasses.replace(mask, prefix_B=jnp.where(parallel_B, L, 0))
    (hidden_BLD, head), _ = self.decoder(
      tokens_BL, encoded_BPE, self.posemb_1LD[:, :L], mask=mask, train=train
    )
    return States(hidden_BLD, *head)

  def begin(
    self, encoded_BPE: jax.Array, num_tokens: int
  ) -> tuple[kv_cache.Cache, kv_cache.Cache]:
    """Returns the caches `source`, of the images, and `cache` of `step`."""
    B, P, _ = encoded_BPE.shape
    H = self.decoder_num_heads

    def empty(length: int) -> kv_cache.Cache:
      K = self.decoder_width // H
      return kv_cache.empty(B, self.decoder_depth, length, H, K, self.dtype)

    _, source = self.decoder(None, encoded_BPE, cache=empty(P))
    assert source is not None
    return source, empty(num_tokens)

  def step(
    self,
    source: kv_cache.Cache,
    cache: kv_cache.Cache,
    token_B: jax.Array,
    position: jax.Array,
  ) -> tuple[jax.Array, kv_cache.Cache]:
    """Returns (float32 logits (B, V) of the token at `position`, new cache).

    `token_B` come before it, 0 at first. B may be a multiple of the images.
    """
    posemb_11D = jax.lax.dynamic_slice_in_dim(self.posemb_1LD, position, 1, 1)
    (hidden_B1D, head), new_cache = self.decoder(
      token_B[:, None], source, posemb_11D, cache=cache, start=position
    )
    assert new_cache is not None
    return States(hidden_B1D, *head).logits()[:, 0], new_cache


def _encoder(model: Model, **kwargs: Any) -> vit.Model:
  sizes = ("variant", "patch_size", *vit.SIZES)
  others = ("posemb", "dropout", "drop_path", "scan", "attention")
  fields = (*sizes, *others, "remat_policy", "dtype")
  return vit.Model(**{name: getattr(model, name) for name in fields}, **kwargs)


def from_published(
  flat: Mapping[str, np.ndarray],
  like: Mapping[str, jax.ShapeDtypeStruct],
  *,
  posemb_align: str = "centers",
) -> dict[str, np.ndarray]:
  flat = conversions.normalise(flat)
  encoder = vit.from_published(
    conversions.below("encoder/", flat),
    conversions.below("encoder/", like),
    posemb_align=posemb_align,
  )
  decoder = {n: v for n, v in flat.items() if not n.startswith("encoder/")}
  block = "EncDecBlock"
  prefix = f"decoder/{block}/"
  norm = decoder.get(prefix + "LayerNorm1/scale")
  width = decoder.get("decoder/LayerNorm/scale", np.zeros(0)).shape
  # A scale is a vector (D,), so the other axis of stacked scales counts blocks.
  # If both are D long, the file is taken to be our own.
  if norm is not None and norm.shape[:1] == width != norm.shape[1:]:
    decoder = {
      n: np.moveaxis(v, 1, 0) if n.startswith(prefix) else v
      for n, v in decoder.items()
    }
  decoder = blocks.restack_blocks(decoder, like, block=block, separator="")
  return {f"encoder/{n}": v for n, v in encoder.items()} | decoder


def param_dims(model: Model) -> dims.Table:
  encoder = vit.param_dims(_encoder(model, parent=None))
  return dims.under("encoder/", encoder) | layer_dims.of_module("cappa")
