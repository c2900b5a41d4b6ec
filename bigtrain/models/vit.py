"""Vision Transformer, https://arxiv.org/abs/2010.11929.

With average pooling by default, 2D sine-cosine position embeddings
(https://arxiv.org/abs/2205.01580), attention pooling and larger sizes
(https://arxiv.org/abs/2106.04560), So400m (https://arxiv.org/abs/2305.13035).

Axes: B batch, P patches, L length (P, or P + 1 with a class token), D model
width, C classes.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import dims, settings
from bigtrain.models.layers import (
  encoder,
  layer_dims,
  options,
  pooling,
  positions,
)
from bigtrain.models.published import blocks, conversions


class Size(NamedTuple):
  """The sizes of a variant."""

  width: int
  depth: int
  mlp_dim: int
  num_heads: int


VARIANTS = {
  "mu": Size(32, 1, 128, 2),
  "Ti": Size(192, 12, 768, 3),
  "S": Size(384, 12, 1536, 6),
  "M": Size(512, 12, 2048, 8),
  "B": Size(768, 12, 3072, 12),
  "L": Size(1024, 24, 4096, 16),
  "So400m": Size(1152, 27, 4304, 16),
  "H": Size(1280, 32, 5120, 16),
  "g": Size(1408, 40, 6144, 16),
  "G": Size(1664, 48, 8192, 16),
}

SIZES = ("width", "depth", "mlp_dim", "num_heads")
POSEMBS = ("learn", "sincos2d")
POOL_TYPES = ("gap", "map", "tok", "none")


class Model(nn.Module):
  """ViT. After construction no size is None.

  Attributes:
    num_classes: C; None for a model without a head.
    variant: name of sizes in VARIANTS, with or without a patch size, such as
      "B/16" or "B"; the defaults of the next five fields.
    patch_size: height and width of a patch in pixels, or one number for both.
    width: D.
    depth: number of blocks.
    mlp_dim: hidden width of the MLPs; 4 D if neither it nor a variant is given.
    num_heads: number of attention heads; must divide D.
    posemb: "learn", or "sincos2d", which has no parameters.
    pool_type: "gap" global average, "map" attention, "tok" class token,
      "none" for a head on each patch.
    rep_size: size of a tanh layer before the head; True for D.
    head_zeroinit: whether the head's kernel starts at zero.
    head_bias_init: initial bias of the head: log(1 / C) for sigmoid losses.
    dropout: rate after the embedding, in the MLPs and on residual branches.
    drop_path: rate of stochastic depth in the last block, 0 in the first.
    scan: whether to compile one block and loop over stacked parameters.
    attention, remat_policy: names in attention_backends.NAMES, remat.POLICIES.
    dtype: dtype of the computation; parameters, the pooled features and the
      head are float32.
  """

  num_classes: int | None = None
  variant: str | None = None
  patch_size: int | Sequence[int] | None = None
  width: int = options.DERIVED
  depth: int = options.DERIVED
  mlp_dim: int = options.DERIVED
  num_heads: int = options.DERIVED
  posemb: str = "learn"
  pool_type: str = "gap"
  rep_size: bool | int = False
  head_zeroinit: bool = True
  head_bias_init: float = 0.0
  dropout: float = 0.0
  drop_path: float = 0.0
  scan: bool = False
  attention: str = "auto"
  remat_policy: str = "none"
  dtype: str = "float32"

  def __post_init__(self) -> None:
    values = sizes(self, ("patch_size", *SIZES), "B/16")
    values["patch_size"] = _patch_size(values["patch_size"])
    options.set_fields(self, values)
    options.check_sizes(self, SIZES)
    options.check_fields(
      self, "dropout", "drop_path", posemb=POSEMBS, pool_type=POOL_TYPES
    )
    super().__post_init__()

  @nn.compact
  def __call__(
    self, image: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Classifies images (B, height, width, channels).

    Returns:
      (float32 logits (B, C), or the head's input without a head; a dict of
      "encoded" (B, P, D), without class token; "head_input" (B, D), pooled;
      and "pre_logits" (B, D) or (B, rep_size)). With pool_type "none" the
      last two and the logits are per patch: (B, P, ...).
    """
    x_BPD, grid = PatchEmbedding(
      self.width, self.patch_size, self.dtype, name="embedding"
    )(image)
    B, P, D = x_BPD.shape
    if self.posemb == "learn":
      init = nn.initializers.normal(D**-0.5)
      posemb_1PD = self.param("pos_embedding", init, (1, P, D))
    else:
      posemb_1PD = jnp.asarray(positions.sincos_2d(grid, D))
    x_BLD = x_BPD + posemb_1PD.astype(x_BPD.dtype)

    if self.pool_type == "tok":
      cls_11D = self.param("cls", nn.initializers.zeros, (1, 1, D))
      cls_B1D = jnp.broadcast_to(cls_11D.astype(x_BLD.dtype), (B, 1, D))
      x_BLD = jnp.concatenate([cls_B1D, x_BLD], axis=1)
    x_BLD = nn.Dropout(self.dropout)(x_BLD, deterministic=not train)

    x_BLD = encoder.Encoder(
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      dropout=self.dropout,
      drop_path=self.drop_path,
      scan=self.scan,
      attention=self.attention,
      remat_policy=self.remat_policy,
      dtype=self.dtype,
      name="Transformer",
    )(x_BLD, train=train)

    out = {"encoded": x_BLD[:, -P:]}
    x = out["head_input"] = self._pool(x_BLD).astype(jnp.float32)
    if self.rep_size:
      rep_size = D if self.rep_size is True else self.rep_size
      x = nn.tanh(nn.Dense(rep_size, name="pre_logits")(x))
    out["pre_logits"] = x
    if self.num_classes:
      zeros, lecun = nn.initializers.zeros, nn.initializers.lecun_normal()
      x = nn.Dense(
        self.num_classes,
        name="head",
        kernel_init=zeros if self.head_zeroinit else lecun,
        bias_init=nn.initializers.constant(self.head_bias_init),
      )(x)
    return x, out

  def _pool(self, x_BLD: jax.Array) -> jax.Array:
    if self.pool_type == "gap":
      return jnp.mean(x_BLD, axis=1, dtype=jnp.float32)
    if self.pool_type == "map":
      return pooling.MAPHead(
        self.mlp_dim, self.num_heads, self.dtype, name="MAPHead_0"
      )(x_BLD)
    if self.pool_type == "tok":
      return x_BLD[:, 0]
    return x_BLD


class PatchEmbedding(nn.Module):
  """A linear layer over the pixels of each patch.

  The parameters are a convolution's; a product over patches is faster.
  """

  width: int
  patch_size: Any
  dtype: str

  @nn.compact
  def __call__(self, image: jax.Array) -> tuple[jax.Array, tuple[int, int]]:
    """Returns embeddings (B, P, D) and the grid's rows and columns."""
    B, height, width, channels = image.shape
    p, q = self.patch_size
    if height % p or width % q:
      raise settings.ConfigError(
        f"config.model.patch_size: patches of {p}x{q} pixels do not tile an "
        f"image of {height}x{width}."
      )
    h, w = height // p, width // q
    x = jnp.asarray(image, self.dtype)
    x = x.reshape(B, h, p, w, q, channels).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(B, h * w, p * q * channels)
    kernel = self.param(
      "kernel", nn.initializers.lecun_normal(), (p, q, channels, self.width)
    )
    bias_D = self.param("bias", nn.initializers.zeros, (self.width,))
    kernel = kernel.reshape(-1, self.width).astype(self.dtype)
    return x @ kernel + bias_D.astype(self.dtype), (h, w)


def sizes(model: Any, names: Sequence[str], example: str) -> dict[str, Any]:
  known = {} if model.variant is None else variant_sizes(model.variant)
  given = {name: getattr(model, name) for name in names}
  known |= {name: value for name, value in given.items() if value is not None}
  known.setdefault("mlp_dim", 4 * known.get("width", 0))
  for name in names:
    if name not in known:
      raise settings.ConfigError(
        f"config.model.{name}: missing; give it, or a variant such as "
        f"{example!r}."
      )
  return {name: known[name] for name in names}


def _patch_size(value: Any) -> tuple[int, int]:
  numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
  numbers = numbers * 2 if len(numbers) == 1 else numbers
  whole = all(isinstance(n, int) and n > 0 for n in numbers)
  if not whole or len(numbers) != 2:
    raise settings.ConfigError(
      "config.model.patch_size: expected a positive whole number or two, got "
      f"{value!r}."
    )
  return numbers


def variant_sizes(variant: str) -> dict[str, Any]:
  name, slash, patch = str(variant).partition("/")
  choices = [known + slash + patch for known in VARIANTS]
  settings.check_choice("config.model.variant", variant, choices)
  values: dict[str, Any] = VARIANTS[name]._asdict()
  if slash:
    if not patch.isdigit():
      raise settings.ConfigError(
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
  """Converts the AugReg and big_vision releases, blocks stacked or not.

  If the head's shape differs as well, as after fine-tuning, a pre-logits layer
  that the model lacks is dropped. Otherwise it stays, for the caller to list.
  """
  flat = conversions.normalise(flat)
  flat = _rename(flat)

  if "pos_embedding" in flat and "pos_embedding" in like:
    _fit_posemb(flat, like["pos_embedding"].shape, posemb_align)
  result: dict[str, Any] = blocks.restack_blocks(flat, like)

  heads = [params.get("head/kernel") for params in (result, like)]
  shapes = [getattr(head, "shape", None) for head in heads]
  if "pre_logits/kernel" not in like and shapes[0] != shapes[1]:
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
  posemb_1PD = flat["pos_embedding"]
  if posemb_1PD.shape == shape or posemb_1PD.shape[::2] != shape[::2]:
    return
  # Older files have a position embedding of the class token too; the model
  # only has their sum.
  P = posemb_1PD.shape[1]
  square = conversions.square_grid
  if "cls" in flat and not square(P) and square(P - 1):
    flat["cls"] = flat["cls"] + posemb_1PD[:, :1]
    posemb_1PD = posemb_1PD[:, 1:]
  old, new = square(posemb_1PD.shape[1]), square(shape[1])
  if old and new:
    posemb_1PD = conversions.resample_posemb(posemb_1PD, old, new, align)
  flat["pos_embedding"] = posemb_1PD


def _rename(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  kinds = ("LayerNorm", "MultiHeadDotProductAttention", "MlpBlock")
  renamed = {}
  for name, value in flat.items():
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
    if m := layer.fullmatch(name):
      numbers.setdefault((m[1], m[2]), set()).add(int(m[3]))

  def renumber(name: str) -> str:
    if not (m := layer.fullmatch(name)):
      return name
    number = sorted(numbers[m[1], m[2]]).index(int(m[3]))
    return f"{m[1]}{m[2]}_{number}{m[4]}"

  return {renumber(name): value for name, value in renamed.items()}


def param_dims(model: Model) -> dims.Table:
  del model
  return {
    "embedding/kernel": "height width channels -> D",
    "pos_embedding": "1 patches -> D",
    "cls|MAPHead_0/probe": "1 1 D",
    "pre_logits/kernel": "D -> D",
    **layer_dims.head("head"),
    **layer_dims.LAYERS,
  }
