"""Vision Transformer, https://arxiv.org/abs/2010.11929.

By default, features are averaged over patches. There are also 2D sine-cosine
position embeddings (https://arxiv.org/abs/2205.01580), attention pooling and
larger sizes (https://arxiv.org/abs/2106.04560), and So400m
(https://arxiv.org/abs/2305.13035). The fields of Model make it a CLIP, SigLIP,
DINOv2, DINOv3, BEiT, MAE or MLP-Mixer. The blocks are in layers/encoder.py.
Everything around them is here: patches, positions, class token and registers,
pooling, and head.

Axes: B batch, P patches, L length (P, after a class token and registers), D
model width, E width of "encoded", D for each layer of it, H heads, C classes.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import dims
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_number,
  nearest_divisors,
)
from bigtrain.models.layers import (
  encoder,
  layer_dims,
  masks,
  options,
  patches,
  pooling,
  positions,
)
from bigtrain.models.published import blocks, conversions, vit_families

# Sizes by the name before the slash in config.model.variant. "mu" is for
# tests.
VARIANTS: dict[str, dict[str, Any]] = {
  "mu": dict(width=32, depth=1, mlp_dim=128, num_heads=2),
  "Ti": dict(width=192, depth=12, mlp_dim=768, num_heads=3),
  "S": dict(width=384, depth=12, mlp_dim=1536, num_heads=6),
  "M": dict(width=512, depth=12, mlp_dim=2048, num_heads=8),
  "B": dict(width=768, depth=12, mlp_dim=3072, num_heads=12),
  "L": dict(width=1024, depth=24, mlp_dim=4096, num_heads=16),
  "So400m": dict(width=1152, depth=27, mlp_dim=4304, num_heads=16),
  "H": dict(width=1280, depth=32, mlp_dim=5120, num_heads=16),
  "g": dict(width=1408, depth=40, mlp_dim=6144, num_heads=16),
  "G": dict(width=1664, depth=48, mlp_dim=8192, num_heads=16),
  # MLP-Mixer, https://arxiv.org/abs/2105.01601, table 1. The number of heads is
  # unused: an MLP over the patches takes the place of attention.
  "Mixer-mu": dict(
    width=32, depth=1, mlp_dim=128, num_heads=1, token_mlp_dim=16
  ),
  "Mixer-S": dict(
    width=512, depth=8, mlp_dim=2048, num_heads=1, token_mlp_dim=256
  ),
  "Mixer-B": dict(
    width=768, depth=12, mlp_dim=3072, num_heads=1, token_mlp_dim=384
  ),
  "Mixer-L": dict(
    width=1024, depth=24, mlp_dim=4096, num_heads=1, token_mlp_dim=512
  ),
  "Mixer-H": dict(
    width=1280, depth=32, mlp_dim=5120, num_heads=1, token_mlp_dim=640
  ),
}
SIZES = ("width", "depth", "mlp_dim", "num_heads")
POSEMBS = ("learn", "sincos2d", "none")
POOL_TYPES = ("gap", "map", "tok", "tok_gap", "none")
MLPS = ("gelu", "gelu_erf", "gelu_quick", "swiglu")
RELATIVE_BIASES = (None, "layer", "shared")
SITES = ("qkv", "qv", "out", "mlp", "patch")


class Model(encoder.Fields):
  """ViT. After construction no size is None."""

  num_classes: int | None = None  # C; None for a model without a head.
  # Height and width of a patch in pixels, or one number for both.
  patch_size: int | Sequence[int] | None = None
  # Rows and columns of patches into which an image of any size is cut; the
  # patch kernel is resized (FlexiViT, https://arxiv.org/abs/2212.08013). None
  # for patches of patch_size.
  seqhw: int | None = None
  token_mlp_dim: int | None = None  # See encoder.Encoder; "Mixer-B" has one.
  class_token: bool | None = None  # By default, whether it is pooled.
  # Number of learned tokens after the class token that only attention uses
  # (https://arxiv.org/abs/2309.16588).
  registers: int = 0
  posemb: str = "learn"  # "learn", "sincos2d" or "none", as in a Mixer.
  posemb_class: bool = False  # Whether the class token has one, the first.
  # Rows and columns of the learned embeddings, which are resized to the grid of
  # each image; None if all images have the same grid.
  posemb_grid: Sequence[int] | None = None
  rope: Any = None  # Options of `Rope`: rotary positions of the patches.
  # "layer" or "shared", BEiT's bias of the attention scores by the offset of
  # two patches, of each layer or of all; None for none. Needs a class token.
  relative_bias: str | None = None
  # "gap" global average, "map" attention, "tok" class token, "tok_gap" class
  # token and average concatenated, "none" for a head on each patch.
  pool_type: str = "gap"
  # Number of blocks before "encoded", which has then no last norm; the others
  # keep their parameters. Several numbers, as in VipLLaVA, join the features
  # after each. None for all blocks, and the norm.
  feature_layer: int | Sequence[int] | None = None
  norm_eps: float = 1e-6  # Added to the variance in norms.
  pre_norm: bool = False  # Whether a norm precedes the blocks, as in CLIP.
  norm_pooled: bool = False  # Whether the last norm follows pooling, as BEiT's.
  final_norm: bool = True  # Whether there is a last norm, unlike in InternVL.
  # Whether all projections have biases, or those that do: "qkv" (or "qv"),
  # "out", "mlp", "patch".
  use_bias: Any = True
  layer_scale: float | None = None  # See encoder.Encoder.
  rep_size: bool | int = False  # Of a tanh layer before the head; True for D.
  head_zeroinit: bool = True  # Whether the head's kernel starts at zero.
  head_bias: bool = True  # Whether the head has a bias.
  head_bias_init: float = 0.0  # log(1 / C) suits sigmoid losses.
  # Whether a learned token can replace patches, see `masked_BP` of __call__.
  mask_token: bool = False

  def __post_init__(self) -> None:
    values = sizes(self, ("patch_size", *SIZES, "token_mlp_dim"), "B/16")
    if values["token_mlp_dim"]:
      values["posemb"] = "none"
    values["patch_size"] = _two("patch_size", values["patch_size"])
    if self.posemb_grid is not None:
      values["posemb_grid"] = _two("posemb_grid", self.posemb_grid)
    options.set_fields(self, values)
    options.check_sizes(self, SIZES)
    options.check_fields(
      self,
      "dropout",
      "drop_path",
      posemb=POSEMBS,
      pool_type=POOL_TYPES,
      mlp=MLPS,
      relative_bias=RELATIVE_BIASES,
    )
    check_number("config.model.registers", self.registers, least=0, whole=True)
    self._check_feature_layer()
    if self.layer_scale is not None:
      check_number("config.model.layer_scale", self.layer_scale)
    pools_class = self.pool_type in ("tok", "tok_gap")
    if self.class_token is None:
      options.set_fields(self, {"class_token": pools_class})
    if not self.class_token and (pools_class or self.relative_bias):
      field = "pool_type" if pools_class else "relative_bias"
      raise ConfigError(
        f"config.model.class_token: {field}={getattr(self, field)!r} needs a "
        "class token."
      )
    if self.seqhw is not None:
      check_number("config.model.seqhw", self.seqhw, least=1, whole=True)
      if self.posemb == "learn" and self.posemb_grid is None:
        raise ConfigError(
          f"config.model.posemb_grid: missing; seqhw={self.seqhw} needs it."
        )
    if self.relative_bias and self.registers:
      raise ConfigError(
        f"config.model.registers={self.registers}: expected none with "
        f"relative_bias={self.relative_bias!r}, which has no bias for them."
      )
    options.set_fields(
      self, {"rope": _rope(self), "use_bias": _bias_sites(self.use_bias)}
    )
    super().__post_init__()

  def _check_feature_layer(self) -> None:
    given: Any = self.feature_layer
    if given is None:
      return
    several = isinstance(given, list | tuple)
    if several and not given:
      raise ConfigError(
        "config.model.feature_layer: expected a number or several, got none."
      )
    for layer in given if several else [given]:
      check_number(
        "config.model.feature_layer",
        layer,
        least=0,
        most=self.depth,
        whole=True,
      )
    if several:
      options.set_fields(self, {"feature_layer": tuple(given)})

  @nn.compact
  def __call__(
    self,
    image: jax.Array,
    *,
    shapes: jax.Array | None = None,
    kept_BK: jax.Array | None = None,
    real_BK: jax.Array | None = None,
    masked_BP: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Classifies images (B, height, width, channels).

    Args:
      image: images, or ready-made patches (B, P, height * width * channels of a
        patch), row by row, for images of several shapes (NaFlex).
      shapes: int (B, 2), numbers of rows and columns of ready-made patches;
        further patches are padding.
      kept_BK: int (B, K), the patches to see, as in MAE; by default all.
      real_BK: bool (B, K), False for entries of `kept_BK` that are padding.
      masked_BP: bool (B, P), patches that the mask token replaces, as in BEiT.

    Returns:
      (float32 logits (B, C), or the head's input without a head; a dict of
      "encoded" (B, P, E); "real" bool (B, P), if some of these may be padding;
      with feature_layer also "prefix", the same for class token and registers;
      "head_input" (B, D), pooled; and "pre_logits" (B, D) or (B, rep_size)).
      With pool_type "none" the last two and the logits are per patch: (B, P,
      ...).
    """
    x_BPD, grid = PatchEmbedding(
      self.width,
      self.patch_size,
      self.dtype,
      use_bias="patch" in self.use_bias,
      seqhw=self.seqhw,
      name="embedding",
    )(image)
    _, P, D = x_BPD.shape
    if grid is None:
      self._check_patches(shapes)
    if self.mask_token:
      x_BPD = self._masked(x_BPD, masked_BP)
    posemb, of_class_11D = self._posemb(P, grid, shapes)
    if posemb is not None:
      x_BPD += posemb.astype(x_BPD.dtype)
    if kept_BK is not None:
      self._check_kept()
      x_BPD = jnp.take_along_axis(x_BPD, kept_BK[..., None], axis=1)
      P, grid = kept_BK.shape[1], None
    x_BLD = self._with_prefix(x_BPD, of_class_11D)
    x_BLD = nn.Dropout(self.dropout)(x_BLD, deterministic=not train)
    norm = functools.partial(nn.LayerNorm, epsilon=self.norm_eps)
    if self.pre_norm:
      x_BLD = norm(dtype=self.dtype, name="pre_norm")(x_BLD)
    prefix = x_BLD.shape[1] - P
    real_BP = real_BK if shapes is None else patches.real(shapes, P)
    x_BLD, features_BLE = self._encode(x_BLD, grid, prefix, real_BP, train)

    out = {"encoded": features_BLE[:, prefix:]}
    if real_BP is not None:
      out["real"] = real_BP
    if prefix and self.feature_layer is not None:
      out["prefix"] = features_BLE[:, :prefix]
    x = self._pool(x_BLD, prefix, real_BP).astype(jnp.float32)
    if self.norm_pooled:
      x = norm(name="pooled_norm")(x)
    out["head_input"] = x
    if self.rep_size:
      rep_size = D if self.rep_size is True else self.rep_size
      x = nn.tanh(nn.Dense(rep_size, name="pre_logits")(x))
    out["pre_logits"] = x
    return self._classified(x), out

  def _classified(self, x: jax.Array) -> jax.Array:
    if not self.num_classes:
      return x
    zeros, lecun = nn.initializers.zeros, nn.initializers.lecun_normal()
    return nn.Dense(
      self.num_classes,
      name="head",
      use_bias=self.head_bias,
      kernel_init=zeros if self.head_zeroinit else lecun,
      bias_init=nn.initializers.constant(self.head_bias_init),
    )(x)

  def _encode(
    self,
    x_BLD: jax.Array,
    grid: tuple[int, int] | None,
    prefix: int,
    real_BP: jax.Array | None,
    train: bool,
  ) -> tuple[jax.Array, jax.Array]:
    """The stream, and what `feature_layer` takes of it, (B, L, E)."""
    mask = masks.Mask()
    if real_BP is not None:
      before = ((0, 0), (prefix, 0))
      mask = masks.Mask(real_BS=jnp.pad(real_BP, before, constant_values=True))
    bias_1HLL = None
    if self.relative_bias == "shared":
      assert grid is not None
      bias_1HLL = positions.GridBias(
        self.num_heads, grid, name="relative_bias"
      )()
    layers = self.feature_layer
    joined = layers if isinstance(layers, tuple) else ()
    taps = tuple(sorted({n - 1 for n in joined if n}))  # Numbers of blocks.
    transformer = encoder.of_fields(
      self,
      "Transformer",
      final_norm=self.final_norm and not self.norm_pooled,
      taps=taps,
      num_active=max(joined) if joined else layers,
      bias=self.use_bias,
      relative_grid=grid if self.relative_bias == "layer" else None,
    )
    result = transformer(
      x_BLD,
      rope=self._rotation(grid, prefix, train),
      mask=mask,
      bias_1HLS=bias_1HLL,
      train=train,
    )
    if not joined:
      return result, result
    taps_BNLD: Any
    y_BLD, taps_BNLD = result if taps else (result, None)
    first_BLD = x_BLD.astype(y_BLD.dtype)
    features = [
      taps_BNLD[:, taps.index(n - 1)] if n else first_BLD for n in joined
    ]
    return y_BLD, jnp.concatenate(features, axis=-1)

  def _masked(self, x_BPD: jax.Array, masked_BP: jax.Array | None) -> jax.Array:
    init = nn.initializers.normal(0.02)
    token_11D = self.param("mask_token", init, (1, 1, x_BPD.shape[-1]))
    if masked_BP is None:
      return x_BPD
    return jnp.where(masked_BP[..., None], token_11D.astype(x_BPD.dtype), x_BPD)

  def _check_kept(self) -> None:
    """Raises ConfigError if the model needs the grid of all patches."""
    for name in ("rope", "relative_bias", "token_mlp_dim"):
      if getattr(self, name):
        raise ConfigError(
          f"config.model.{name}={getattr(self, name)!r}: expected none in a "
          "model that sees some of the patches."
        )

  def _check_patches(self, shapes: jax.Array | None) -> None:
    if shapes is None:
      raise ConfigError(
        "config.input: ready patches, 'image' of [B, P, ...], need 'shapes'."
      )
    if self.posemb == "learn" and self.posemb_grid is None:
      raise ConfigError(
        "config.model.posemb_grid: missing; images of several shapes need it."
      )
    needs_a_grid = dict(
      posemb=self.posemb == "sincos2d",
      rope=self.rope is not None,
      relative_bias=bool(self.relative_bias),
      token_mlp_dim=bool(self.token_mlp_dim),
    )
    for name, is_used in needs_a_grid.items():
      if is_used:
        raise ConfigError(
          f"config.model.{name}={getattr(self, name)!r}: expected images of "
          "one shape."
        )

  def _posemb(
    self, P: int, grid: tuple[int, int] | None, shapes: jax.Array | None
  ) -> tuple[jax.Array | None, jax.Array | None]:
    """Embeddings (1 or B, P, D) of patches and (1, 1, D) of the class token."""
    D = self.width
    if self.posemb == "none":
      return None, None
    if self.posemb == "sincos2d":
      assert grid is not None
      return jnp.asarray(positions.sincos_2d(grid, D)), None
    num_patches = math.prod(self.posemb_grid) if self.posemb_grid else P
    num_class = int(self.posemb_class)
    table = self.param(
      "pos_embedding",
      nn.initializers.normal(D**-0.5),
      (1, num_class + num_patches, D),
    )
    of_class_11D = table[:, :1] if self.posemb_class else None
    posemb_1PD = table[:, num_class:]
    if self.posemb_grid is None:
      return posemb_1PD, of_class_11D
    if shapes is None:
      shapes = jnp.asarray([grid])
    table_hwD = posemb_1PD.reshape(*self.posemb_grid, D)
    return positions.resized_grid(table_hwD, shapes, P), of_class_11D

  def _with_prefix(
    self, x_BPD: jax.Array, of_class_11D: jax.Array | None
  ) -> jax.Array:
    """Puts the class token and the registers before the patches."""
    B, _, D = x_BPD.shape
    prefix = []
    if self.class_token:
      cls_11D = self.param("cls", nn.initializers.zeros, (1, 1, D))
      if of_class_11D is not None:
        cls_11D = cls_11D + of_class_11D
      prefix.append(cls_11D)
    if self.registers:
      init = nn.initializers.normal(0.02)
      prefix.append(self.param("registers", init, (1, self.registers, D)))
    if not prefix:
      return x_BPD
    of_all = [
      jnp.broadcast_to(x.astype(x_BPD.dtype), (B, *x.shape[1:])) for x in prefix
    ]
    return jnp.concatenate([*of_all, x_BPD], axis=1)

  def _rotation(
    self, grid: tuple[int, int] | None, prefix: int, train: bool
  ) -> positions.Rotation | None:
    if self.rope is None:
      return None
    assert grid is not None
    factor_2: Any = 1.0
    shift_2: Any = 0.0
    if train and (self.rope.shift or self.rope.jitter or self.rope.rescale):
      keys = jax.random.split(self.make_rng("dropout"), 3)

      def draw(key: jax.Array, n: int, most: float) -> jax.Array:
        return jax.random.uniform(key, (n,), minval=-most, maxval=most)

      shift_2 = draw(keys[0], 2, self.rope.shift)
      log_jitter_2 = draw(keys[1], 2, math.log(self.rope.jitter or 1.0))
      log_rescale_1 = draw(keys[2], 1, math.log(self.rope.rescale or 1.0))
      factor_2 = jnp.exp(log_jitter_2 + log_rescale_1)
    return positions.grid_rotation(
      grid,
      self.width // self.num_heads,
      self.rope.theta,
      prefix,
      factor_2,
      shift_2,
    )

  def _pool(
    self, x_BLD: jax.Array, prefix: int, real_BP: jax.Array | None
  ) -> jax.Array:
    x_BPD = x_BLD[:, prefix:]
    if self.pool_type == "map":
      return pooling.map_head(self)(x_BPD, masks.Mask(real_BS=real_BP))[:, 0]
    if self.pool_type == "tok":
      return x_BLD[:, 0]
    if self.pool_type == "none":
      return x_BPD
    mean_BD = jnp.mean(
      x_BPD,
      axis=1,
      dtype=jnp.float32,
      where=None if real_BP is None else real_BP[..., None],
    )
    if self.pool_type == "gap":
      return mean_BD
    return jnp.concatenate([x_BLD[:, 0], mean_BD], axis=-1)


class Rope(NamedTuple):
  """config.model.rope, see positions.grid_rotation.

  All options but `theta` change the patches' coordinates in training, by random
  numbers drawn for each step.
  """

  theta: float = 100.0  # Base of the wavelengths.
  shift: float = 0.0  # Largest shift, of an image that is 2 wide.
  # Largest factor, or divisor, of each axis by itself; None for none.
  jitter: float | None = None
  rescale: float | None = None  # The same of both axes together.


def _rope(model: Model) -> Rope | None:
  key = "config.model.rope"
  rope = options.read_tuple(
    Rope,
    model.rope,
    key,
    theta=dict(above=0),
    shift=dict(least=0),
    jitter=dict(least=1),
    rescale=dict(least=1),
  )
  if rope is not None and model.width // model.num_heads % 4:
    raise ConfigError(
      f"{key}: the width of a head must be a multiple of 4, got "
      f"{model.width // model.num_heads}."
    )
  return rope


def _bias_sites(given: bool | Sequence[str]) -> tuple[str, ...]:
  if isinstance(given, bool):
    return ("qkv", "out", "mlp", "patch") if given else ()
  return options.read_names("config.model.use_bias", given, SITES)


class PatchEmbedding(nn.Module):
  """A linear layer over the pixels of each patch.

  The parameters are a convolution's; a product over patches is faster.
  """

  width: int
  patch_size: Any
  dtype: str
  use_bias: bool = True
  seqhw: int | None = None

  @nn.compact
  def __call__(
    self, image: jax.Array
  ) -> tuple[jax.Array, tuple[int, int] | None]:
    """Returns embeddings (B, P, D), and the grid's rows and columns.

    Ready-made patches have no grid: None.
    """
    p, q = self.patch_size
    if image.ndim == 3:
      channels, rest = divmod(image.shape[-1], p * q)
      if rest or not channels:
        raise ConfigError(
          f"config.model.patch_size: patches of {image.shape[-1]} values are "
          f"not of {p}x{q} pixels."
        )
      return self._project(jnp.asarray(image, self.dtype), channels), None
    B, height, width, channels = image.shape
    if self.seqhw is not None:
      p, q = (max(1, side // self.seqhw) for side in (height, width))
    h, w = height // p, width // q
    wrong = self.seqhw is not None and (h, w) != (self.seqhw, self.seqhw)
    if height % p or width % q or wrong:
      key = "patch_size" if self.seqhw is None else "seqhw"
      nearest = ""
      if self.seqhw is None:
        sizes = nearest_divisors(p, math.gcd(height, width))
        nearest = f"; the nearest sizes that do: {sizes}"
      raise ConfigError(
        f"config.model.{key}: patches of {p}x{q} pixels do not tile an image "
        f"of {height}x{width}{nearest}."
      )
    x = patches.cut(jnp.asarray(image, self.dtype), (p, q))
    x = x.reshape(B, h * w, -1)
    return self._project(x, channels, (p, q)), (h, w)

  def _project(
    self, x: jax.Array, channels: int, size: tuple[int, int] | None = None
  ) -> jax.Array:
    kernel = self.param(
      "kernel",
      nn.initializers.lecun_normal(),
      (*self.patch_size, channels, self.width),
    )
    if size and size != tuple(self.patch_size):
      kernel = _resized_kernel(kernel, size)
    y = x @ kernel.reshape(-1, self.width).astype(self.dtype)
    if not self.use_bias:
      return y
    bias_D = self.param("bias", nn.initializers.zeros, (self.width,))
    return y + bias_D.astype(self.dtype)


def _resized_kernel(kernel: jax.Array, size: tuple[int, int]) -> jax.Array:
  """A kernel for resized patches: the pseudo-inverse of the bilinear resize."""

  def inverse(old: int, new: int) -> np.ndarray:
    places = (np.arange(new) + 0.5) * old / new - 0.5
    entries = [np.interp(places, np.arange(old), row) for row in np.eye(old)]
    return np.linalg.pinv(np.stack(entries)).astype(np.float32)

  rows, columns = map(inverse, kernel.shape, size)
  return jnp.einsum(
    "Hh,Ww,hwcd->HWcd", rows, columns, kernel, precision="highest"
  )


def sizes(model: Any, names: Sequence[str], example: str) -> dict[str, Any]:
  """The sizes of a model: from its fields, its variant, or other sizes."""
  known = {} if model.variant is None else variant_sizes(model.variant)
  for name in names:
    given = getattr(model, name)
    if given is not None:
      known[name] = given
  known.setdefault("token_mlp_dim", None)
  known.setdefault("mlp_dim", 4 * known.get("width", 0))
  for name in names:
    if name not in known:
      raise ConfigError(
        f"config.model.{name}: missing; give it, or a variant such as "
        f"{example!r}."
      )
  return {name: known[name] for name in names}


def _two(name: str, value: Any) -> tuple[int, int]:
  """A pair of numbers from one or two."""
  numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
  if len(numbers) == 1:
    numbers = numbers * 2
  whole = all(isinstance(n, int) and n > 0 for n in numbers)
  if not whole or len(numbers) != 2:
    raise ConfigError(
      f"config.model.{name}: expected a positive whole number or two, got "
      f"{value!r}."
    )
  return numbers


def variant_sizes(variant: str) -> dict[str, Any]:
  """The sizes of a variant such as "B", or "B/16" with patches."""
  name, slash, patch = str(variant).partition("/")
  choices = [known + slash + patch for known in VARIANTS]
  check_choice("config.model.variant", variant, choices)
  values = dict(VARIANTS[name])
  if slash:
    if not patch.isdigit():
      raise ConfigError(
        "config.model.variant: expected a patch size in pixels after the "
        f"slash, such as '{name}/16', got {variant!r}."
      )
    values["patch_size"] = int(patch)
  return values


def from_published(
  flat: Mapping[str, np.ndarray],
  like: Mapping[str, jax.ShapeDtypeStruct],
  *,
  posemb_align: str = "centers",
) -> dict[str, Any]:
  """Reads the AugReg and big_vision releases, and vit_families.py's layouts.

  If the shape of the head differs, as after fine-tuning, a pre-logits layer
  that the model lacks is dropped. Otherwise it is returned, so that the caller
  can list it.
  """
  flat = conversions.normalise(flat)
  converted = vit_families.load(flat, like, DIMS)
  if converted is not None:
    return converted
  flat = _rename(flat)

  if "pos_embedding" in flat and "pos_embedding" in like:
    _fit_posemb(flat, like["pos_embedding"].shape, posemb_align)
  result: dict[str, Any] = blocks.restack_blocks(flat, like)

  their_head, our_head = result.get("head/kernel"), like.get("head/kernel")
  same_head = getattr(their_head, "shape", None) == getattr(
    our_head, "shape", None
  )
  if "pre_logits/kernel" not in like and not same_head:
    names = {"pre_logits/kernel", "pre_logits/bias"} & set(result)
    for name in names:
      del result[name]
    if names:
      reason = "kernel and bias: the model's head reads the encoder's output"
      result["pre_logits"] = conversions.Remark("dropped", reason)
  return result


def _fit_posemb(
  flat: dict[str, np.ndarray], shape: tuple[int, int, int], align: str
) -> None:
  """Resamples the position embeddings in `flat` to the grid of a shape."""
  posemb_1PD = flat["pos_embedding"]
  if posemb_1PD.shape == shape or posemb_1PD.shape[::2] != shape[::2]:
    return
  # Older files have a position embedding of the class token too; the model
  # only has their sum.
  P = posemb_1PD.shape[1]
  grid_of = conversions.square_grid
  if "cls" in flat and not grid_of(P) and grid_of(P - 1):
    flat["cls"] = flat["cls"] + posemb_1PD[:, :1]
    posemb_1PD = posemb_1PD[:, 1:]
  old, new = grid_of(posemb_1PD.shape[1]), grid_of(shape[1])
  if old and new:
    posemb_1PD = conversions.resample_posemb(posemb_1PD, old, new, align)
  flat["pos_embedding"] = posemb_1PD


def _rename(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Renames parameters of older releases to the model's names."""
  kinds = ("LayerNorm", "MultiHeadDotProductAttention", "MlpBlock")
  renamed = {}
  for name, value in flat.items():
    name = conversions.renamed("mixer", name)
    if re.fullmatch(r"Transformer/(posembed_input/)?pos_embedding", name):
      name = "pos_embedding"
    elif "probe" in flat and name.startswith(("probe", *kinds)):
      name = "MAPHead_0/" + name
    renamed[name] = value

  # Older files number all layers of a block; the model numbers each kind.
  layer = re.compile(
    rf"(.*\bencoderblock[^/]*/|MAPHead_0/)({'|'.join(kinds)})_(\d+)(/.+)"
  )
  numbers: dict[tuple[str, str], set[int]] = {}
  for name in renamed:
    match = layer.fullmatch(name)
    if match:
      block, kind, number, _ = match.groups()
      numbers.setdefault((block, kind), set()).add(int(number))

  def renumber(name: str) -> str:
    match = layer.fullmatch(name)
    if not match:
      return name
    block, kind, number, parameter = match.groups()
    index = sorted(numbers[block, kind]).index(int(number))
    return f"{block}{kind}_{index}{parameter}"

  return {renumber(name): value for name, value in renamed.items()}


DIMS: dict[str, str] = {
  r"embedding/kernel": "height width channels -> D",
  r"pos_embedding": "1 patches -> D",
  r"cls|MAPHead_0/probe": "1 1 D",
  r"registers": "1 positions -> D",
  r"mask_token": "1 1 D",
  r"(.*/)?relative_bias/table": "positions -> H",
  r"pre_logits/kernel": "D -> D",
  r"head/kernel": "D -> V",
  r"head/bias": "V",
  **layer_dims.LAYERS,
}
param_dims = dims.of_all(DIMS)
to_published = functools.partial(vit_families.PUBLISHED.export, DIMS)
published_fields = vit_families.PUBLISHED.fields
