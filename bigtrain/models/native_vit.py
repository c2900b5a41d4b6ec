"""A Vision Transformer for pictures of any size: Qwen-VL, Gemma 4, Pixtral.

Qwen2-VL (https://arxiv.org/abs/2409.12191), Qwen2.5-VL (2502.13923) and
Qwen3-VL (2511.21631). Pictures are cut into patches of several frames; a still
picture repeats its only frame. The patches are in order of squares of `merge` x
`merge`, so that a projector can join or average the features of a square by a
reshape. Positions are rotary in two axes, by rows and columns. In addition,
Qwen3-VL interpolates a table (`posemb_grid`), and Gemma 4 adds an embedding of
the row and one of the column (`posemb_sides`). Blocks are in layers/encoder.py.

Axes: B pictures, P patches, D model width, H heads, K head width, C channels,
T frames of a patch, h and w rows and columns of the table.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.models.layers import (
  encoder,
  layer_dims,
  masks,
  options,
  patches,
  positions,
)
from bigtrain.models.published import layer_patterns

_SIZES = ("width", "depth", "mlp_dim", "num_heads", "patch_size")
_SITES = ("qkv", "out", "mlp")
_MLPS = ("gelu", "gelu_erf", "gelu_quick", "swiglu", "geglu", "geglu_erf")
# Ready patches: square by square, with values in the order (C, T, height,
# width), as Qwen's processor makes them; or row by row, with (height, width,
# C), as Gemma 4's does.
READY = ("squares", "rows")


class Model(encoder.Fields):
  """The tower. It has no head: it returns features of patches."""

  patch_size: int = 16  # Height and width of a patch in pixels.
  frames: int = 2  # T.
  channels: int = 3  # C.
  merge: int = 2  # Side of the squares of patches that follow each other.
  # Whether pictures may have rows and columns of patches that fill no square.
  # These come after all squares; a projector leaves them out.
  partial_squares: bool = False
  # Rows and columns of a learned table of positions, which is interpolated for
  # each picture; None without one.
  posemb_grid: Sequence[int] | None = None
  # Number of embeddings of rows, and of columns, which are added; None without.
  posemb_sides: int | None = None
  rope_theta: float = 1e4  # Base of the rotary wavelengths.
  # Whether the first half of a head rotates by columns and the second one by
  # rows, each by itself; else the first half of the pairs rotates by rows.
  rope_by_halves: bool = False
  # Whether frequencies of rows and columns take turns, as in Pixtral; else both
  # have the same.
  rope_alternates: bool = False
  ready: str = "squares"  # A name in READY.
  centred: bool = False  # Whether pixels in [0, 1] are first mapped to [-1, 1].
  norm: str = "layernorm"  # A name in encoder.NORMS.
  norm_eps: float = 1e-6  # Added to the variance in norms.
  patch_bias: bool = True  # Whether the embedding of patches has a bias.
  pre_norm: bool = False  # Whether a norm precedes the blocks.
  use_bias: Sequence[str] = _SITES  # Linear layers of blocks with biases.
  head_dim: int | None = None  # Width of a head; None for width / num_heads.
  num_kv_heads: int | None = None  # Of keys and values; None for num_heads.
  qk_norm: str | None = None  # Norm of queries and keys, as in decoders.
  v_norm: bool = False  # Whether values are normed, without a scale.
  attention_scale: float | None = None  # Of the logits; None for 1 / sqrt(K).
  branch_norm: bool = False  # Whether each branch ends with another norm.
  clipped: bool = False  # Whether linear layers have bounds, see clipping.py.
  # Whether features are multiplied by the root of their width at the end.
  root_scale: bool = False
  # Whether a published mean is then subtracted and the result scaled.
  standardize: bool = False
  # Side of the windows, in patches, in which patches see each other; None if
  # all patches of a picture do.
  window: int | None = None
  # Numbers of the layers whose patches see the whole picture anyway.
  whole_layers: Sequence[int] = ()
  # Numbers of the layers whose outputs are in "taps".
  taps: Sequence[int] = ()

  def __post_init__(self) -> None:
    mlp_dim = 4 * self.width if self.mlp_dim is None else self.mlp_dim
    options.set_fields(self, {"mlp_dim": mlp_dim})
    options.check_sizes(self, (*_SIZES, "frames", "channels", "merge"))
    check_choice("config.model.ready", self.ready, READY)
    for site in self.use_bias:
      check_choice("config.model.use_bias", site, _SITES)
    options.check_fields(
      self, "dropout", "drop_path", mlp=_MLPS, norm=encoder.NORMS
    )
    if self.head_dim is not None:
      check_number("config.model.head_dim", self.head_dim, least=4, whole=True)
      if self.head_dim % 4:
        raise ConfigError(
          f"config.model.head_dim={self.head_dim}: expected a multiple of 4."
        )
    elif self.width % (4 * self.num_heads):
      raise ConfigError(
        f"config.model.width={self.width}: expected a multiple of "
        f"{4 * self.num_heads}, four times num_heads."
      )
    if self.window is not None:
      check_number("config.model.window", self.window, least=1, whole=True)
      if self.window % self.merge:
        raise ConfigError(
          f"config.model.window={self.window}: expected a multiple of merge="
          f"{self.merge}."
        )
    grid = None
    if self.posemb_grid is not None:
      rows, columns = self.posemb_grid
      grid = int(rows), int(columns)
    layers = {}
    for field in ("whole_layers", "taps"):
      layers[field] = tuple(int(i) for i in getattr(self, field))
      for i in layers[field]:
        check_number(
          f"config.model.{field}", i, least=0, below=self.depth, whole=True
        )
    options.set_fields(self, {"posemb_grid": grid, **layers})
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    image: jax.Array,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Returns (features (B, P, D), {"encoded": the same, "taps": ...}).

    Args:
      image: float (B, height, width, C), or ready-made patches (B, P, values)
        like those of transformers' processor, see READY; one frame is enough.
      shapes: int (B, 2), numbers of rows and columns of ready-made patches;
        further patches are padding.

    The features are ordered square by square too; "taps" is (B, layers, P, D).
    """
    grid = None
    num_kept = None  # Of patches, of which others fill no square.
    if image.ndim == 4 and self.partial_squares:
      image, shapes, num_kept = self._with_partial_squares(image)
    elif image.ndim == 4:
      grid = self._grid(image)
      shapes = jnp.asarray([grid])
    elif shapes is None:
      raise ConfigError(
        "config.input: ready patches, 'image' of [..., patches, values], need "
        "'shapes'."
      )
    elif self.ready == "rows":
      image = _in_squares(image, shapes, self.merge, self.partial_squares)
    if self.centred:
      image = 2 * (image - 0.5)
    embedding = _PatchEmbedding(
      self.width,
      (self.frames, self.patch_size, self.patch_size, self.channels),
      self.merge,
      self.patch_bias,
      self.ready == "rows",
      self.dtype,
      name="patch_embedding",
    )
    x_BPD = embedding(image)
    P = x_BPD.shape[1]
    if P % self.merge**2:
      raise ConfigError(
        f"config.input: 'image': expected a multiple of {self.merge**2} "
        f"patches with padding, which are whole squares, got {P}."
      )
    place = _places(shapes, P, self.merge, self.partial_squares)
    if self.posemb_grid is not None:
      h, w = self.posemb_grid
      table_hwD = self.param(
        "pos_embedding",
        nn.initializers.normal(self.width**-0.5),
        (1, h * w, self.width),
      ).reshape(h, w, -1)
      posemb_BPD = _interpolated(table_hwD, shapes, place)
      x_BPD += posemb_BPD.astype(x_BPD.dtype)
    if self.posemb_sides is not None:
      x_BPD += self._side_embeddings(place).astype(x_BPD.dtype)
    if self.pre_norm:
      x_BPD = encoder.norm(self._layer(), self.width, "pre_norm")(x_BPD)
    real_BP = patches.real(shapes, P) if grid is None else None
    result = self._encode(x_BPD, place, real_BP, train)
    x_BPD, taps = result if self.taps else (result, None)
    x_BPD = self._standardized(x_BPD)
    if num_kept is not None:
      x_BPD = x_BPD[:, :num_kept]
      taps = None if taps is None else taps[:, :, :num_kept]
    return x_BPD, {"encoded": x_BPD, "taps": taps}

  def _grid(self, image: jax.Array) -> tuple[int, int]:
    height, width = image.shape[1:3]
    side = self.patch_size * self.merge
    if height % side or width % side:
      raise ConfigError(
        f"config.model.patch_size: squares of {side}x{side} pixels, which are "
        f"{self.merge}x{self.merge} patches, do not tile an image of "
        f"{height}x{width}."
      )
    grid = height // self.patch_size, width // self.patch_size
    if self.posemb_sides is not None and max(grid) > self.posemb_sides:
      raise ConfigError(
        f"config.model.posemb_sides={self.posemb_sides}: an image of "
        f"{height}x{width} has {grid[0]} x {grid[1]} patches."
      )
    return grid

  def _with_partial_squares(
    self, image: jax.Array
  ) -> tuple[jax.Array, jax.Array, int]:
    """Ready patches of pixels, shapes, and how many patches fill squares."""
    p, m = self.patch_size, self.merge
    height, width = (n // p * p for n in image.shape[1:3])
    x = patches.cut(image[:, :height, :width], (p, p))
    B, rows, columns, _ = x.shape
    x = x.reshape(B, rows * columns, p, p, self.channels)
    if self.ready == "squares":
      x = x.transpose(0, 1, 4, 2, 3)
    x = x.reshape(B, rows * columns, -1)
    x = jnp.pad(x, ((0, 0), (0, -rows * columns % m**2), (0, 0)))
    shapes = jnp.broadcast_to(jnp.asarray([[rows, columns]]), (B, 2))
    x = _in_squares(x, shapes, m, partial=True)
    return x, shapes, (rows // m) * (columns // m) * m**2

  def _side_embeddings(self, place: "_Places") -> jax.Array:
    table_2ND = self.param(
      "side_embedding",
      nn.initializers.normal(self.width**-0.5),
      (2, self.posemb_sides, self.width),
    )
    return table_2ND[0][place.column_BP] + table_2ND[1][place.row_BP]

  def _standardized(self, x_BPD: jax.Array) -> jax.Array:
    """Features at the end, in float32 until they are small again."""
    y_BPD = x_BPD.astype(jnp.float32)
    if self.root_scale:
      y_BPD *= self.width**0.5
    if self.standardize:  # Constants, which are not trained.
      zeros, ones = nn.initializers.zeros, nn.initializers.ones
      mean_D = self.param("standard_mean", zeros, (self.width,))
      scale_D = self.param("standard_scale", ones, (self.width,))
      mean_D, scale_D = jax.lax.stop_gradient((mean_D, scale_D))
      y_BPD = (y_BPD - mean_D) * scale_D
    return y_BPD.astype(x_BPD.dtype)

  def _layer(self) -> encoder.Options:
    return encoder.layer_options(self, bias=tuple(self.use_bias))

  def _encode(
    self,
    x_BPD: jax.Array,
    place: "_Places",
    real_BP: jax.Array | None,
    train: bool,
  ) -> Any:
    mask = masks.Mask(real_BS=real_BP)
    layers = [self._layer()]
    if self.window is not None:
      # Windows begin at the upper left corner; those at the edges are smaller.
      row_BP, column_BP = place.row_BP, place.column_BP
      # More than the number of windows beside each other.
      stride = x_BPD.shape[1]
      window_BP = row_BP // self.window * stride + column_BP // self.window
      window_BP = jnp.broadcast_to(window_BP, x_BPD.shape[:2])
      mask = masks.Mask(
        segments_BL=window_BP, segments_BS=window_BP, real_BS=real_BP
      )
      windowed, whole = layers[0], layers[0]._replace(ignores_segments=True)
      numbers = range(self.depth)
      names = ["whole" if i in self.whole_layers else "" for i in numbers]
      first, period = layer_patterns.periodic(names)
      names = names if first else period
      layers = [whole if name else windowed for name in names]
    transformer = encoder.Encoder(
      layers[0],
      depth=self.depth,
      drop_path=self.drop_path,
      final_norm=False,
      scan=self.scan,
      remat_policy=self.remat_policy,
      period=tuple(layers),
      taps=tuple(self.taps),
      name="Transformer",
    )
    K = self.head_dim or self.width // self.num_heads
    rope = _rotation(
      place, K, self.rope_theta, self.rope_by_halves, self.rope_alternates
    )
    return transformer(x_BPD, rope=rope, mask=mask, train=train)


class _Places(NamedTuple):
  """Row and column of each patch in its picture, (B or 1, P)."""

  row_BP: jax.Array
  column_BP: jax.Array


def _places(
  shapes_B2: jax.Array, P: int, merge: int, partial: bool = False
) -> _Places:
  number_P = jnp.arange(P)
  squares_B1 = jnp.maximum(shapes_B2[:, 1:] // merge, 1)  # In a row of squares.
  square_P, inner_P = number_P // merge**2, number_P % merge**2
  in_squares = _Places(
    square_P // squares_B1 * merge + inner_P // merge,
    square_P % squares_B1 * merge + inner_P % merge,
  )
  if not partial:
    return in_squares
  # Behind the squares: first whole columns, then the rest of the last rows.
  rows_B1, columns_B1 = shapes_B2[:, :1], shapes_B2[:, 1:]
  whole = _Places(rows_B1 // merge * merge, columns_B1 // merge * merge)
  rest_BP = number_P - whole.row_BP * whole.column_BP
  extra_B1 = columns_B1 - whole.column_BP
  below_BP = rest_BP - rows_B1 * extra_B1
  divisor_B1 = jnp.maximum(extra_B1, 1)
  beside = _Places(
    rest_BP // divisor_B1, whole.column_BP + rest_BP % divisor_B1
  )
  divisor_B1 = jnp.maximum(whole.column_BP, 1)
  below = _Places(whole.row_BP + below_BP // divisor_B1, below_BP % divisor_B1)
  return _Places(
    *(
      jnp.where(rest_BP < 0, x, jnp.where(below_BP < 0, y, z))
      for x, y, z in zip(in_squares, beside, below)
    )
  )


def _interpolated(
  table_hwD: jax.Array, shapes_B2: jax.Array, place: _Places
) -> jax.Array:
  """A table's entries, bilinear between its corners: (B or 1, P, D)."""

  def ends(
    places_BP: jax.Array, sizes_B: jax.Array, n: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The entries before and after each place, and the weight of the second."""
    step_B1 = (n - 1) / jnp.maximum(sizes_B - 1, 1)[:, None]
    at_BP = places_BP * step_B1
    first_BP = jnp.clip(jnp.floor(at_BP).astype(jnp.int32), 0, n - 1)
    return first_BP, jnp.minimum(first_BP + 1, n - 1), at_BP - first_BP

  h, w, D = table_hwD.shape
  rows = ends(place.row_BP, shapes_B2[:, 0], h)
  columns = ends(place.column_BP, shapes_B2[:, 1], w)
  table_XD = table_hwD.reshape(h * w, D)
  total: Any = 0.0
  for row_BP, row_share_BP in ((rows[0], 1 - rows[2]), (rows[1], rows[2])):
    for column_BP, column_share_BP in (
      (columns[0], 1 - columns[2]),
      (columns[1], columns[2]),
    ):
      share_BP1 = (row_share_BP * column_share_BP)[..., None]
      total += share_BP1 * table_XD[row_BP * w + column_BP]
  return total


def _rotation(
  place: _Places, K: int, theta: float, by_halves: bool, alternates: bool
) -> positions.Rotation:
  """Half of the angles follow the rows, half the columns."""
  if alternates:
    all_omega = positions.frequencies(K, theta)
    omegas = [all_omega[::2], all_omega[1::2]]
  else:
    omegas = [positions.frequencies(K // 2, theta)] * 2
  angles = [
    x.astype(jnp.float32)[..., None] * omega_Q
    for x, omega_Q in zip(place, omegas)
  ]
  if by_halves:
    angles = angles[::-1]
  angle_BP1Q = jnp.concatenate(angles, axis=-1)[:, :, None]
  return positions.Rotation(
    jnp.sin(angle_BP1Q), jnp.cos(angle_BP1Q), parts=2 if by_halves else 1
  )


def _in_squares(
  image_BPV: jax.Array,
  shapes_B2: jax.Array,
  merge: int,
  partial: bool = False,
) -> jax.Array:
  """Reorders patches from row by row to square by square; padding may move."""
  P = image_BPV.shape[1]
  place = _places(shapes_B2, P, merge, partial)
  number_BP = place.row_BP * shapes_B2[:, 1:] + place.column_BP
  number_BP = jnp.clip(number_BP, 0, P - 1)
  return jnp.take_along_axis(image_BPV, number_BP[..., None], axis=1)


class _PatchEmbedding(nn.Module):
  """A linear layer over the pixels of each patch, with kernel (T, p, q, C, D).

  A still picture repeats its frame, so only the kernel's sum over T is needed.
  """

  width: int
  size: tuple[int, int, int, int]  # T, p, q, C.
  merge: int
  use_bias: bool
  channels_last: bool  # In ready patches.
  dtype: str

  @nn.compact
  def __call__(self, image: jax.Array) -> jax.Array:
    """Returns (B, P, D), square by square."""
    T, p, q, C = self.size
    kernel = self.param(
      "kernel", nn.initializers.lecun_normal(), (*self.size, self.width)
    )
    x = jnp.asarray(image, self.dtype)
    if x.ndim == 4:
      x = self._squares(patches.cut(x, (p, q)))
      kernel_VD = jnp.sum(kernel, axis=0).reshape(-1, self.width)
    else:
      kernel_VD = kernel
      if not self.channels_last:  # As in convolutions of torch: (C, T, p, q).
        kernel_VD = kernel.transpose(3, 0, 1, 2, 4)
      if x.shape[-1] == C * p * q:
        kernel_VD = jnp.sum(kernel_VD, axis=0 if self.channels_last else 1)
      elif x.shape[-1] != T * C * p * q:
        raise ConfigError(
          f"config.model.patch_size: patches of {x.shape[-1]} values are not "
          f"of {T} frames of {p}x{q} pixels and {C} channels, or of one."
        )
      kernel_VD = kernel_VD.reshape(-1, self.width)
    y_BPD = x @ kernel_VD.astype(self.dtype)
    if not self.use_bias:
      return y_BPD
    bias_D = self.param("bias", nn.initializers.zeros, (self.width,))
    return y_BPD + bias_D.astype(self.dtype)

  def _squares(self, x: jax.Array) -> jax.Array:
    """Patches (B, rows, columns, values), square by square."""
    B, rows, columns, V = x.shape
    m = self.merge
    x = x.reshape(B, rows // m, m, columns // m, m, V)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * columns, V)


DIMS: dict[str, str] = {
  r"pre_norm/(scale|bias)": "D",
  r"patch_embedding/kernel": "frames height width channels -> D",
  r"pos_embedding": "1 patches -> D",
  r"side_embedding": "axes; patches -> D",
  r"standard_(mean|scale)": "D",
  **layer_dims.LAYERS,
}
param_dims = dims.of_all(DIMS)
