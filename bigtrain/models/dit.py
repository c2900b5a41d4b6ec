"""Diffusion transformer: a ViT that denoises images, or latents of images.

JiT (https://arxiv.org/abs/2511.13720) works on pixels and predicts the image.
It has large patches that a bottleneck embeds, rotary positions, and tokens of
the class beside those of the image. DiT (https://arxiv.org/abs/2212.09748) and
SiT (https://arxiv.org/abs/2401.08740) work on latents of an autoencoder and
predict the velocity. All of these are options of one model.

Time t goes from 0 (noise) to 1 (the image): z = t x + (1 - t) e. The task that
trains this model is tasks/flow_matching.py.

Axes: B batch, P patches, L length (P, after the class tokens), D model width.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.models.layers import (
  adaln,
  kernels,
  layer_dims,
  options,
  patches,
  positions,
  stack,
)

_JIT = dict(mlp="swiglu", norm="rms", qk_norm=True, rope_theta=1e4)
_JIT |= dict(class_tokens=32, predicts="image")
_DIT = dict(mlp="gelu", norm="layer", qk_norm=False, predicts="velocity")
# Fields by the name before the slash in config.model.variant; after it comes
# the size of a patch, as in "JiT-B/16".
VARIANTS: dict[str, dict[str, Any]] = {
  "JiT-mu": dict(  # For tests.
    _JIT | dict(class_tokens=4), width=32, depth=4, mlp_dim=96, num_heads=4,
    bottleneck=32, class_tokens_at=1,
  ),
  "JiT-B": dict(
    _JIT, width=768, depth=12, mlp_dim=2048, num_heads=12,
    bottleneck=128, class_tokens_at=4,
  ),
  "JiT-L": dict(
    _JIT, width=1024, depth=24, mlp_dim=2730, num_heads=16,
    bottleneck=128, class_tokens_at=8,
  ),
  "JiT-H": dict(
    _JIT, width=1280, depth=32, mlp_dim=3413, num_heads=16,
    bottleneck=256, class_tokens_at=10,
  ),
  "DiT-S": dict(_DIT, width=384, depth=12, mlp_dim=1536, num_heads=6),
  "DiT-B": dict(_DIT, width=768, depth=12, mlp_dim=3072, num_heads=12),
  "DiT-L": dict(_DIT, width=1024, depth=24, mlp_dim=4096, num_heads=16),
  "DiT-XL": dict(_DIT, width=1152, depth=28, mlp_dim=4608, num_heads=16),
}  # fmt: skip
# Values of fields that neither the config nor the variant gives.
_DEFAULTS: dict[str, Any] = _JIT | dict(
  class_tokens=0, class_tokens_at=0, bottleneck=None, rope_theta=None
)
_SIZES = ("width", "depth", "num_heads", "patch_size", "image_size", "channels")
PREDICTS = ("image", "velocity")
MLPS = ("gelu", "gelu_erf", "swiglu")
# Number of sines and cosines that describe a time, and their longest period.
_TIME_FEATURES, _TIME_PERIOD = 256, 10_000.0


class Model(nn.Module, kw_only=True):
  """The transformer. Fields that are None may come from the variant."""

  image_size: int  # Rows and columns of an image, or of its latents.
  channels: int = 3  # Of an image, or of its latents.
  num_classes: int | None = None  # None for images without classes.
  # Whether it reads latents of the autoencoder in config.teacher.
  latents: bool = False
  variant: str | None = None  # Such as "JiT-B/16" or "DiT-XL/2".
  patch_size: int = options.DERIVED  # Rows and columns of a patch.
  width: int = options.DERIVED  # D.
  depth: int = options.DERIVED  # Number of blocks.
  num_heads: int = options.DERIVED  # Number of attention heads; divides D.
  mlp_dim: int = options.DERIVED  # By default 4 D, or 8 D / 3 if it is gated.
  # Width of the bottleneck in the embedding of patches; None for none.
  bottleneck: int | None = options.DERIVED
  class_tokens: int = options.DERIVED  # Number of tokens of the class.
  # Number of the block before which they join the patches.
  class_tokens_at: int = options.DERIVED
  predicts: str = options.DERIVED  # "image" or "velocity".
  mlp: str = options.DERIVED  # "swiglu", "gelu" (tanh) or "gelu_erf".
  norm: str = options.DERIVED  # "rms", or "layer" without learned scales.
  qk_norm: bool = options.DERIVED  # Whether queries and keys have RMS norms.
  # Base of the rotary positions' wavelengths; None for none.
  rope_theta: float | None = options.DERIVED
  # Standard deviation of the noise. Larger images need more: 1 at 256 pixels, 2
  # at 512 in JiT.
  noise_scale: float = 1.0
  # Least 1 - t by which an image becomes a velocity.
  least_noise: float = 0.05
  dropout: float = 0.0  # In the middle half of the blocks, see adaln.Options.
  scan: bool = False  # Whether a compiled block loops over stacked layers.
  attention: str = "auto"  # A name in attention_backends.NAMES.
  remat_policy: str = "none"  # A name in remat.POLICIES.
  dtype: str = "float32"  # Of activations; parameters and results are float32.

  def __post_init__(self) -> None:
    options.set_fields(self, _fields(self))
    options.check_sizes(self, _SIZES)
    options.check_sizes(self, ("mlp_dim",))
    options.check_fields(
      self, "dropout", mlp=MLPS, norm=adaln.NORMS, predicts=PREDICTS
    )
    for name in ("class_tokens", "class_tokens_at"):
      value = getattr(self, name)
      check_number(f"config.model.{name}", value, least=0, whole=True)
    check_number(
      "config.model.class_tokens_at", self.class_tokens_at, most=self.depth
    )
    for name in ("bottleneck", "num_classes"):
      if getattr(self, name) is not None:
        options.check_sizes(self, (name,))
    check_number("config.model.noise_scale", self.noise_scale, above=0)
    check_number("config.model.least_noise", self.least_noise, above=0, most=1)
    if self.class_tokens and not self.num_classes:
      raise ConfigError(
        f"config.model.class_tokens={self.class_tokens}: needs num_classes."
      )
    if self.image_size % self.patch_size:
      raise ConfigError(
        f"config.model.patch_size: patches of {self.patch_size} do not tile an "
        f"image of image_size={self.image_size}."
      )
    if self.width % self.num_heads:
      raise ConfigError(
        f"config.model.num_heads: {self.num_heads} does not divide the width "
        f"{self.width}."
      )
    if self.rope_theta is not None:
      check_number("config.model.rope_theta", self.rope_theta, above=1)
      if self.width // self.num_heads % 4:
        raise ConfigError(
          "config.model.rope_theta: the width of a head must be a multiple of "
          f"4, got {self.width // self.num_heads}."
        )
    super().__post_init__()

  @property
  def shape(self) -> tuple[int, int, int]:
    """Shape of an image, or of its latents."""
    return self.image_size, self.image_size, self.channels

  @nn.compact
  def __call__(
    self,
    image: jax.Array,
    time_B: jax.Array | None = None,
    labels_B: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Predicts the image, or the velocity, of images with noise.

    Args:
      image: (B, rows, columns, channels), with noise. Only B matters for
        initialisation, where it may be an image in place of latents.
      time_B: from 0 (noise) to 1; by default 0.
      labels_B: class numbers; `num_classes` for no class, which is the default.

    Returns:
      (float32, in the shape of the images or latents; {"encoded": (B, P, D)}).
    """
    if self.is_initializing():
      image = jnp.zeros((len(image), *self.shape))
    B, D, N = len(image), self.width, self.class_tokens
    rows = self.image_size // self.patch_size
    if time_B is None:
      time_B = jnp.zeros(B)
    c_BD = self._time(time_B)
    class_BD = None
    if self.num_classes:
      if labels_B is None:
        labels_B = jnp.full(B, self.num_classes)
      init = nn.initializers.normal(0.02)
      table = self.param("classes", init, (self.num_classes + 1, D))
      class_BD = table[labels_B]
      c_BD += class_BD

    x_BLD = self._embed(image)
    x_BLD += jnp.asarray(positions.sincos_2d((rows, rows), D), x_BLD.dtype)
    x_BLD = self._blocks("block", 0, self._first_part, x_BLD, c_BD, train)
    if N:
      init = nn.initializers.normal(0.02)
      tokens_1ND = self.param("class_tokens", init, (1, N, D))
      assert class_BD is not None
      tokens_BND = (class_BD[:, None] + tokens_1ND).astype(x_BLD.dtype)
      x_BLD = jnp.concatenate([tokens_BND, x_BLD], axis=1)
      x_BLD = self._blocks(
        "class_block", self._first_part, self.depth, x_BLD, c_BD, train
      )[:, N:]

    norm = adaln.Norm(self._options(), 2, name="final_norm")
    y_BPD, _ = norm(x_BLD, c_BD)
    pixels = nn.Dense(
      self.patch_size**2 * self.channels,
      dtype=self.dtype,
      kernel_init=nn.initializers.zeros,
      name="pixels",
    )(y_BPD).astype(jnp.float32)
    size = (self.patch_size, self.patch_size)
    pixels = patches.join(pixels.reshape(B, rows, rows, -1), size)
    return pixels, {"encoded": x_BLD}

  @property
  def _first_part(self) -> int:
    """Number of leading blocks that do not see the class tokens."""
    return self.class_tokens_at if self.class_tokens else self.depth

  def _time(self, time_B: jax.Array) -> jax.Array:
    half = _TIME_FEATURES // 2
    omega = jnp.exp(-math.log(_TIME_PERIOD) * jnp.arange(half) / half)
    angle = time_B.astype(jnp.float32)[:, None] * omega
    x_BF = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    init = nn.initializers.normal(0.02)
    x_BD = nn.Dense(self.width, kernel_init=init, name="time_0")(x_BF)
    return nn.Dense(self.width, kernel_init=init, name="time_1")(nn.silu(x_BD))

  def _embed(self, image: jax.Array) -> jax.Array:
    """Embeddings (B, P, D) of the patches."""
    size = (self.patch_size, self.patch_size)
    x = patches.cut(jnp.asarray(image, self.dtype), size)
    x = x.reshape(len(x), -1, x.shape[-1])
    dense = functools.partial(
      nn.Dense, dtype=self.dtype, kernel_init=kernels.xavier
    )
    if self.bottleneck:
      x = dense(self.bottleneck, use_bias=False, name="squeeze")(x)
    return dense(self.width, name="embedding")(x)

  def _options(self, dropout: float = 0.0) -> adaln.Options:
    return options.pick(adaln.Options, self, dropout=dropout)

  def _blocks(
    self,
    name: str,
    start: int,
    stop: int,
    x_BLD: jax.Array,
    c_BD: jax.Array,
    train: bool,
  ) -> jax.Array:
    """The blocks from number `start` up to `stop`, exclusive, as a stack."""
    if start == stop:
      return x_BLD
    rope = None
    if self.rope_theta:
      rows = self.image_size // self.patch_size
      rope = positions.axial_rotation(
        (rows, rows),
        self.width // self.num_heads,
        self.rope_theta,
        prefix=x_BLD.shape[1] - rows**2,
      )
    first = []
    if self.dropout:  # The last quarter of all blocks has none and may loop.
      quarter = self.depth // 4
      for number in range(start, min(stop, 3 * quarter)):
        first.append(self._options(self.dropout if number >= quarter else 0.0))
    x_BLD, _ = stack.run(
      self,
      adaln.Block,
      [self._options()],
      stop - start,
      x_BLD,
      rope,
      c_BD,
      train,
      scan=self.scan,
      remat_policy=self.remat_policy,
      first=first,
      common=1,
      name=name,
    )
    return x_BLD


def _fields(model: Model) -> dict[str, Any]:
  """The fields that other fields determine."""
  known = dict(_DEFAULTS)
  if model.variant is not None:
    name, slash, patch = str(model.variant).partition("/")
    choices = [f"{known}{slash}{patch}" for known in VARIANTS]
    check_choice("config.model.variant", model.variant, choices)
    known |= VARIANTS[name]
    if (
      model.depth is not None
    ):  # Another number of blocks than the variant has.
      known["class_tokens_at"] = min(known["class_tokens_at"], model.depth)
    if slash and patch.isdigit():
      known["patch_size"] = int(patch)
    elif slash:
      raise ConfigError(
        "config.model.variant: expected a patch size after the slash, such as "
        f"'{name}/16', got {model.variant!r}."
      )
  for name in (*_SIZES, "mlp_dim", *_DEFAULTS):
    value = getattr(model, name)
    if value is not None:
      known[name] = value
  for name in _SIZES:
    if name not in known:
      raise ConfigError(
        f"config.model.{name}: missing; give it, or a variant such as "
        "'JiT-B/16'."
      )
  width = known["width"]
  is_gated = known["mlp"] == "swiglu"
  known.setdefault("mlp_dim", int(8 * width / 3) if is_gated else 4 * width)
  return known


DIMS: dict[str, str] = {
  r"time_0/kernel": "features -> D",
  r"time_1/kernel": "D -> D",
  r"time_\d/bias": "D",
  r"classes": "classes D",
  r"class_tokens": "1 tokens D",
  r"squeeze/kernel": "pixels -> bottleneck",
  r"embedding/kernel": "bottleneck -> D",
  r"pixels/kernel": "D -> pixels",
  r"pixels/bias": "pixels",
  **adaln.DIMS,
  **layer_dims.LAYERS,
}
param_dims = dims.of_all(DIMS)
