"""Image captioner with parallel prediction (CapPa), arxiv.org/abs/2306.07915.

A ViT encodes the image, a transformer decoder with cross-attention reads the
caption. An example is predicted either in order, each position given the
token before it and seeing no later one (Cap), or in parallel: positions are
given a mask token in place of their own and see each other.

Axes: B batch, P patches, E width of the encoder, L length of a text, D width
of the decoder, H heads, K head width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import settings
from bigtrain.models import vit
from bigtrain.models.layers import common, decoder_layers
from bigtrain.models.published import arrays, blocks


class States(NamedTuple):
  """What logits are made of: hidden @ kernel + bias."""

  hidden_BLD: jax.Array
  kernel_DV: jax.Array
  bias_V: jax.Array

  def logits(self) -> jax.Array:
    """float32 [B, L, V], all of them at once."""
    product = jnp.einsum(
      "bld,dv->blv",
      self.hidden_BLD,
      self.kernel_DV.astype(self.hidden_BLD.dtype),
      preferred_element_type=jnp.float32,
    )
    return product + self.bias_V


class Model(nn.Module):
  """Captioner; the fields up to `drop_path` are those of models/vit.py.

  Attributes:
    vocab_size: V.
    max_len: longest text, in tokens.
    variant: of the encoder, such as "B/16".
    patch_size: of the encoder.
    width: of the encoder, E.
    depth: of the encoder.
    mlp_dim: of the encoder.
    num_heads: of the encoder.
    posemb: "learn" or "sincos2d", of both.
    dropout: rate in the encoder.
    drop_path: rate of stochastic depth in the encoder's last block.
    decoder_width: D; the encoder's unless given, as the next three are.
    decoder_depth: number of blocks.
    decoder_mlp_dim: hidden width of the MLPs.
    decoder_num_heads: must divide D.
    decoder_dropout: rate in the decoder.
    decoder_bias: whether the decoder's MLPs and its blocks' layer norms have
      biases.
    mask_token: whether there is an embedding for the mask token, whose number
      is V: parallel prediction needs it.
    scan: one compiled block that loops over stacked parameters, in both.
    remat_policy: "none" or a name of jax.checkpoint_policies, for both.
    dtype: of the computation; parameters and logits are float32.
  """

  vocab_size: int
  max_len: int = 64
  variant: str | None = None
  patch_size: Any = None
  width: int | None = None
  depth: int | None = None
  mlp_dim: int | None = None
  num_heads: int | None = None
  posemb: str = "learn"
  dropout: float = 0.0
  drop_path: float = 0.0
  decoder_width: int | None = None
  decoder_depth: int | None = None
  decoder_mlp_dim: int | None = None
  decoder_num_heads: int | None = None
  decoder_dropout: float = 0.0
  decoder_bias: bool = True
  mask_token: bool = False
  scan: bool = False
  remat_policy: str = "none"
  dtype: str = "float32"

  def __post_init__(self) -> None:
    encoder = _encoder(self, parent=None)
    for name in ("width", "depth", "mlp_dim", "num_heads"):
      if getattr(self, f"decoder_{name}") is None:
        # Linen's own setter works only after its __post_init__.
        object.__setattr__(self, f"decoder_{name}", getattr(encoder, name))
    sizes = ["width", "depth", "mlp_dim", "num_heads"]
    for name in ["vocab_size", "max_len", *(f"decoder_{n}" for n in sizes)]:
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise settings.ConfigError(
          f"config.model.{name}: expected a positive whole number, got "
          f"{value!r}."
        )
    if self.decoder_width % self.decoder_num_heads:
      raise settings.ConfigError(
        f"config.model.decoder_num_heads: {self.decoder_num_heads} does not "
        f"divide the decoder's width {self.decoder_width}."
      )
    common.check_rate("decoder_dropout", self.decoder_dropout)
    super().__post_init__()

  def setup(self) -> None:
    """Makes the towers."""
    self.encoder = _encoder(self)
    self.decoder = decoder_layers.Decoder(
      num_embeddings=self.vocab_size + self.mask_token,
      vocab_size=self.vocab_size,
      width=self.decoder_width,
      depth=self.decoder_depth,
      mlp_dim=self.decoder_mlp_dim,
      num_heads=self.decoder_num_heads,
      dropout=self.decoder_dropout,
      use_bias=self.decoder_bias,
      scan=self.scan,
      remat_policy=self.remat_policy,
      dtype=self.dtype,
    )
    L, D = self.max_len, self.decoder_width
    if self.posemb == "learn":
      init = nn.initializers.normal(D**-0.5)
      self.posemb_1LD = self.param("pos_embedding_decoder", init, (1, L, D))
    else:
      self.posemb_1LD = jnp.asarray(common.sincos_2d((1, L), D))

  def __call__(
    self,
    image: jax.Array,
    text: jax.Array,
    *,
    parallel_B: jax.Array | None = None,
    masked_BL: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Predicts each token of the texts; arguments as those of `states`.

    Returns:
      float32 logits (B, L, V); and what was computed on the way: what the
      ViT gives ("encoded" (B, P, E), "pre_logits" (B, E), ...) and "states".
    """
    out: dict[str, Any] = self.encode(image, train=train)
    out["states"] = self.decode(
      out["encoded"],
      text,
      parallel_B=parallel_B,
      masked_BL=masked_BL,
      train=train,
    )
    return out["states"].logits(), out

  def states(
    self,
    image: jax.Array,
    text: jax.Array,
    *,
    parallel_B: jax.Array | None = None,
    masked_BL: jax.Array | None = None,
    train: bool = False,
  ) -> States:
    """What the logits of each token are made of, for losses in chunks.

    Args:
      image: (B, height, width, channels).
      text: int (B, L), L up to max_len.
      parallel_B: bool: the examples that are predicted in parallel.
      masked_BL: bool: positions that such an example is given the mask token
        for; all unless given. At the others it is given the token itself.
      train: whether dropout acts; it draws from the rng "dropout".
    """
    encoded_BPE = self.encode(image, train=train)["encoded"]
    return self.decode(
      encoded_BPE,
      text,
      parallel_B=parallel_B,
      masked_BL=masked_BL,
      train=train,
    )

  def encode(
    self, image: jax.Array, *, train: bool = False
  ) -> dict[str, jax.Array]:
    """Features of images: "encoded" (B, P, E), "pre_logits" (B, E), ..."""
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
    """The decoder's part of `states`.

    There may be several texts for an image: M B of them, M for the first image
    in front, so that keys and values of its patches are computed once.
    """
    L = text.shape[1]
    if L > self.max_len:
      raise settings.ConfigError(
        f"config.model.max_len: {self.max_len} is less than the {L} tokens of "
        "a text."
      )
    tokens_BL = jnp.pad(text, ((0, 0), (1, 0)))[:, :-1]
    mask_BLL = None
    if parallel_B is not None:
      if not self.mask_token:
        raise settings.ConfigError(
          "config.model.mask_token: parallel prediction needs it to be True."
        )
      given_BL: Any = self.vocab_size
      if masked_BL is not None:
        given_BL = jnp.where(masked_BL, self.vocab_size, text)
      tokens_BL = jnp.where(parallel_B[:, None], given_BL, tokens_BL)
      mask_BLL = jnp.tri(L, dtype=bool) | parallel_B[:, None, None]
    (hidden_BLD, head), _ = self.decoder(
      tokens_BL,
      encoded_BPE,
      self.posemb_1LD[:, :L],
      mask_BLL=mask_BLL,
      train=train,
    )
    return States(hidden_BLD, *head)

  def begin(self, encoded_BPE: jax.Array, num_tokens: int) -> tuple[Any, Any]:
    """What `step` needs to write texts of `num_tokens`.

    Returns:
      (keys and values of the images, which stay as they are; the cache for
      those of the tokens, leaves with leading axis B).
    """
    _, source = self.decoder(None, encoded_BPE)
    B, H = len(encoded_BPE), self.decoder_num_heads
    N = self.decoder_depth
    shape = (num_tokens, H, self.decoder_width // H)
    zeros = lambda *axes: jnp.zeros((*axes, *shape), self.dtype)
    if self.scan:
      return source, common.Memory(zeros(B, N), zeros(B, N))
    return source, [common.Memory(zeros(B), zeros(B)) for _ in range(N)]

  def step(
    self, source: Any, cache: Any, token_B: jax.Array, position: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Reads one more token; B may be a multiple of the number of images.

    Args:
      source: keys and values of the images, from `begin`.
      cache: those of the tokens so far.
      token_B: the token before the one to predict; 0 at first.
      position: int scalar: place of the one to predict.

    Returns:
      (its float32 logits (B, V), the new cache).
    """
    posemb_11D = jax.lax.dynamic_slice_in_dim(self.posemb_1LD, position, 1, 1)
    (hidden_B1D, head), cache = self.decoder(
      token_B[:, None], source, posemb_11D, past=cache, position=position
    )
    return States(hidden_B1D, *head).logits()[:, 0], cache


def _encoder(model: Model, **kwargs: Any) -> vit.Model:
  return vit.Model(
    variant=model.variant,
    patch_size=model.patch_size,
    width=model.width,
    depth=model.depth,
    mlp_dim=model.mlp_dim,
    num_heads=model.num_heads,
    posemb=model.posemb,
    dropout=model.dropout,
    drop_path=model.drop_path,
    scan=model.scan,
    remat_policy=model.remat_policy,
    dtype=model.dtype,
    **kwargs,
  )


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
  """Renames and reshapes the parameters of a published CapPa to this model's.

  Knows what vit.from_published knows, for the encoder, and decoder blocks
  that are stacked or not, along the second axis in the files of big_vision.

  Args:
    flat: parameters by "/"-joined name.
    like: the model's parameters by name.

  Returns:
    Parameters by name. What matches nothing in `like` keeps its name and
    shape, so that the caller can list it.
  """
  flat = arrays.normalise(flat)

  def part(names: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "encoder/"
    return {
      name.removeprefix(prefix): value
      for name, value in names.items()
      if name.startswith(prefix)
    }

  encoder = vit.from_published(part(flat), part(like))
  decoder = {n: v for n, v in flat.items() if not n.startswith("encoder/")}
  block = "EncDecBlock"
  prefix = f"decoder/{block}/"
  norm = decoder.get(prefix + "LayerNorm1/scale")
  width = decoder.get("decoder/LayerNorm/scale", np.zeros(0)).shape
  # A scale is a vector (D,), so the other axis of a stack of them is the
  # blocks'. Should both be D, it is taken to be a file of our own.
  if norm is not None and norm.shape[:1] == width != norm.shape[1:]:
    decoder = {
      n: np.moveaxis(v, 1, 0) if n.startswith(prefix) else v
      for n, v in decoder.items()
    }
  decoder = blocks.restack_blocks(decoder, like, block=block, separator="")
  return {f"encoder/{n}": v for n, v in encoder.items()} | decoder
