"""SigLIP 2: two towers, LocCa's decoder, and the heads of self-distillation.

Tschannen et al. 2025, https://arxiv.org/abs/2502.14786. The towers are those of
models/two_towers.py, with the same names, so that a `two_towers` model can
start from them. The decoder (https://arxiv.org/abs/2403.19596) reads the image
tower before pooling, and writes tokens of text and locations. The heads are
DINO's, one for the pooled image and one for patches.

Axes: B batch, P patches, M chosen patches, L length of a text, E embedding,
N texts.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.models import cappa, dinov2, two_towers
from bigtrain.models.layers import layer_dims, options


class Model(two_towers.Model, cappa.Writer):
  """Both towers, the decoder and the heads. Texts are padded with 0."""

  max_len: int = 64  # Largest number of tokens of the decoder's texts.
  # Number of tokens of the decoder after those of the text tower. A box has
  # four of them.
  num_locations: int = 1024
  decoder_depth: int = options.DERIVED  # Half of the text tower's if None.
  decoder_width: int = options.DERIVED  # The text tower's if None.
  decoder_mlp_dim: int = options.DERIVED  # The text tower's if None.
  decoder_num_heads: int = options.DERIVED  # The text tower's if None.
  decoder_dropout: float = 0.0  # Rate in the decoder.
  decoder_bias: bool = False  # Whether its MLPs and layer norms have biases.
  num_prototypes: int | None = None  # Of pooled images; None for no heads.
  patch_prototypes: int | None = None  # Of patches; None for no such head.
  head_hidden: int = 2048  # Hidden width of the heads' MLPs.
  head_out: int = 256  # Width of their results.

  mask_token = True  # Of the decoder, for parallel prediction.

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.text_model is None or self.image_model != "vit":
      raise ConfigError(
        "config.model: expected image_model='vit' and a text_model, got "
        f"{self.image_model!r} and {self.text_model!r}."
      )
    text = self._text()
    derived = {"decoder_depth": max(1, text.depth // 2)}
    for size in ("width", "mlp_dim", "num_heads"):
      derived[f"decoder_{size}"] = getattr(text, size)
    given = {name: getattr(self, name) or x for name, x in derived.items()}
    options.set_fields(self, given)
    options.check_sizes(self, ("max_len", "num_locations", *derived))
    options.check_fields(self, "decoder_dropout")
    for name in ("num_prototypes", "patch_prototypes"):
      value = getattr(self, name)
      if value is not None:
        check_number(f"config.model.{name}", value, least=2, whole=True)
    if self.patch_prototypes and not self.num_prototypes:
      raise ConfigError(
        "config.model.num_prototypes: missing; patch_prototypes="
        f"{self.patch_prototypes} needs it."
      )

  def setup(self) -> None:
    super().setup()
    self.decoder = self.make_decoder(self.decoder_depth)
    self.posemb_1LD = self.make_posemb(self.max_len)

  def __call__(
    self,
    image: jax.Array | None = None,
    text: jax.Array | None = None,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array | None, jax.Array | None, dict[str, jax.Array]]:
    result = super().__call__(image, text, shapes=shapes, train=train)
    if self.is_initializing() and image is not None:
      texts = jnp.zeros((len(image), 1, self.max_len), jnp.int32)
      self.states(image, texts, shapes=shapes)
      self.views(image, shapes=shapes)
    return result

  # LocCa.

  def states(
    self,
    image: jax.Array,
    texts_BNL: jax.Array,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
    **parallel: jax.Array | None,
  ) -> cappa.States:
    """Factors of the logits of B N texts: N for each image."""
    encoded = self.encode(image, shapes=shapes, train=train)
    text = texts_BNL.reshape(-1, texts_BNL.shape[-1])
    return self.decode(encoded, text, train=train, **parallel)

  def encode(
    self,
    image: jax.Array,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
  ) -> dict[str, jax.Array]:
    """The image tower's dict: "encoded" (B, P, E), "pre_logits" (B, E), ..."""
    others = {} if shapes is None else {"shapes": shapes}
    return self.run_tower("img", image, train=train, **others)[1]

  @property
  def output_size(self) -> int:
    return self.first_location + self.num_locations

  @property
  def first_location(self) -> int:
    """The decoder's first token that is a location."""
    return self._text().vocab_size

  # Self-distillation.

  @nn.compact
  def views(
    self,
    image: jax.Array,
    *,
    chosen_BM: jax.Array | None = None,
    train: bool = False,
    **others: Any,
  ) -> dict[str, jax.Array]:
    """The image tower's dict, with "class_z" (B, E) and "patch_z" (B, M, E).

    Args:
      chosen_BM: int, the patches that go through the head of patches.
      others: arguments of the image tower, such as masked_BP.
    """
    others = {name: x for name, x in others.items() if x is not None}
    _, out = self.run_tower("img", image, train=train, **others)
    if self.is_initializing():
      chosen_BM = jnp.zeros((len(image), 1), jnp.int32)
    return dinov2.with_heads(self, out, chosen_BM)

  @property
  def patch_size(self) -> Any:
    return self._image().patch_size

  @property
  def posemb(self) -> str:
    return self._image().posemb

  @property
  def posemb_grid(self) -> Any:
    return self._image().posemb_grid

  # Of both towers.

  @property
  def dtype(self) -> str:
    return self._text().dtype

  @property
  def attention(self) -> str:
    return self._text().attention

  @property
  def scan(self) -> bool:
    return self._text().scan

  @property
  def remat_policy(self) -> str:
    return self._text().remat_policy

  def _towers(self) -> Any:
    towers = super()._towers()
    if self.patch_prototypes:
      towers["img"][1].setdefault("mask_token", True)
    return towers

  @nn.nowrap
  def _text(self) -> Any:
    model, given = self._towers()["txt"]
    return model(**given, parent=None)

  @nn.nowrap
  def _image(self) -> Any:
    model, given = self._towers()["img"]
    return model(**given, parent=None)


from_published = two_towers.from_published

_DIMS: dict[str, str] = {
  r"pos_embedding_decoder": "1 positions -> D",
  r"decoder/EmbedTargets/embedding": "V -> D",
  r"decoder/LogitsDense/kernel": "D -> V",
  r"decoder/LogitsDense/bias": "V",
  **dinov2.HEAD_DIMS,
  **layer_dims.LAYERS,
}


def param_dims(model: Model) -> dims.Table:
  return {**two_towers.param_dims(model), **_DIMS}
