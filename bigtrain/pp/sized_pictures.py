"""Pixels of pictures whose size decides what a model sees.

text/picture_layouts.py computes the sizes, and a `Processor` makes the pixels
for one of its layouts. `Square` is the processor of DeepSeek-VL, whose pictures
all have one size. Both are read from the preprocessor_config.json of a
published model. Pixels equal those of Hugging Face's transformers, bit for bit:
with Pillow, or with torchvision where transformers has nothing else.

Axes: H height, W width, P patches, C channels, T frames.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bigtrain.arrays import tile_grids
from bigtrain.config.errors import ConfigError
from bigtrain.pp import pillow, torch_resizing
from bigtrain.text import picture_layouts

_NORM = ("image_mean", "image_std")
_RESAMPLES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # By PIL's numbers.
# Means and standard deviations of OpenAI's CLIP.
CLIP = (
  (0.48145466, 0.4578275, 0.40821073),
  (0.26862954, 0.26130258, 0.27577711),
)

# Layouts in which a model sees one grid of patches.
_PatchLayout = (
  picture_layouts.Native | picture_layouts.Bounded | picture_layouts.Fitted
)


class Processor(NamedTuple):
  """Converts a picture to the input of a model."""

  layout: picture_layouts.Layout
  method: str  # Of resizing.
  unit: float  # Factor of bytes.
  mean: tuple[float, ...]  # By channel, after that factor.
  std: tuple[float, ...]
  frames: int = 2  # T, of a patch.
  # Whether the picture is one of several in a row, for a layout of `Views`.
  several: bool = False
  by_torch: bool = False  # Whether pixels are torchvision's and not Pillow's.

  def __call__(self, image_HWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (pixels, int32 [2] or [4]).

    Pixels are [P, values] with rows and columns of patches, or [tiles, H, W, C]
    with rows and columns of tiles. Of `Views`, pixels are [views, H, W, C] with
    Views.shape.
    """
    layout = self.layout
    height, width = image_HWC.shape[:2]
    if isinstance(layout, picture_layouts.Views):
      number = 2 if self.several else 1
      shape = layout.shape(height, width, number)
      return self._views(image_HWC, layout), np.asarray(shape, np.int32)
    grid = layout.grid(height, width)
    if isinstance(layout, picture_layouts.Tiles):
      for size in layout.sizes(height, width):
        image_HWC = self._resized(image_HWC, size)
      tile = (layout.tile, layout.tile)
      pixels = self._tiles(image_HWC, image_HWC, tile, grid)
    elif isinstance(layout, picture_layouts.Canvas):
      sides = [n * side for n, side in zip(grid, layout.tile)]
      canvas = self._resized(image_HWC, sides) if all(grid) else image_HWC
      pixels = self._tiles(image_HWC, canvas, layout.tile, grid)
    else:
      image_HWC = self._resized(image_HWC, layout.size(height, width))
      pixels = self._patches(self._normalized(image_HWC), grid, layout)
    return pixels, np.asarray(grid, np.int32)

  def _resized(self, image_HWC: np.ndarray, size: Any) -> np.ndarray:
    resize = torch_resizing.resize if self.by_torch else pillow.resize
    return resize(image_HWC, size, self.method)

  def _normalized(self, image: np.ndarray) -> np.ndarray:
    mean, std = (np.asarray(x, np.float32) for x in (self.mean, self.std))
    if self.by_torch:
      level = np.float32(1.0 / self.unit)
      return (image.astype(np.float32) - mean * level) / (std * level)
    scaled = (image.astype(np.float64) * self.unit).astype(np.float32)
    return (scaled - mean) / std

  def _patches(
    self,
    image_HWC: np.ndarray,
    grid: tuple[int, int],
    layout: _PatchLayout,
  ) -> np.ndarray:
    """[P, values], row by row or square by square, as models.native_vit."""
    rows, columns = grid
    side, C = layout.patch_size, image_HWC.shape[2]
    # [rows, columns, side, side, C].
    patches = image_HWC.reshape(rows, side, columns, side, C).swapaxes(1, 2)
    if isinstance(layout, picture_layouts.Fitted):
      return patches.reshape(rows * columns, -1)
    # The values of a patch are in the order (C, T, side, side).
    patches = patches.transpose(0, 1, 4, 2, 3)[:, :, :, None]
    if isinstance(layout, picture_layouts.Native):
      # A picture is a film whose frames are all the same.
      patches = np.repeat(patches, self.frames, axis=3)
    return _by_squares(patches.reshape(rows, columns, -1), layout.merge)

  def _tiles(
    self,
    image_HWC: np.ndarray,
    canvas_HWC: np.ndarray,
    tile: tuple[int, int],
    grid: tuple[int, int],
  ) -> np.ndarray:
    """The tiles of the canvas, if any, and the whole picture."""
    rows, columns = grid
    h, w = tile
    tiles = [
      canvas_HWC[row * h :, column * w :][:h, :w]
      for row in range(rows)
      for column in range(columns)
    ]
    tiles.append(self._resized(image_HWC, tile))
    return self._normalized(np.stack(tiles))

  def _views(
    self, image_HWC: np.ndarray, layout: picture_layouts.Views
  ) -> np.ndarray:
    """The whole picture and its tiles, if any; without tiles it is padded."""
    tile = layout.tile
    height, width = image_HWC.shape[:2]
    if not layout.has_tiles(2 if self.several else 1):
      color = np.asarray([int(x * 255) for x in self.mean], np.uint8)
      side = max(height, width)
      padded = _padded(image_HWC, (side, side), color)
      return self._normalized(self._resized(padded, (tile, tile))[None])
    size = tile_grids.best_size(height, width, layout.sizes)
    inner = tile_grids.inside(height, width, size)
    padded = _padded(self._resized(image_HWC, inner), size, 0)
    views = [self._resized(image_HWC, (tile, tile))]
    views += [
      padded[y : y + tile, x : x + tile]
      for y in range(0, size[0], tile)
      for x in range(0, size[1], tile)
    ]
    return self._normalized(np.stack(views))


def _by_squares(patches: np.ndarray, side: int) -> np.ndarray:
  """Patches [rows, columns, values] as [P, values], square by square.

  Patches that fill no square come last: those on the right, row by row, and
  then those at the bottom.
  """
  rows, columns, values = patches.shape
  R, K = rows // side, columns // side  # Rows and columns of squares.
  bottom, right = R * side, K * side
  squares = patches[:bottom, :right].reshape(R, side, K, side, values)
  parts = [
    squares.swapaxes(1, 2),
    patches[:, right:],
    patches[bottom:, :right],
  ]
  return np.concatenate([part.reshape(-1, values) for part in parts])


def _padded(image_HWC: np.ndarray, size: Any, color: Any) -> np.ndarray:
  """The image, centred in a larger one."""
  H, W = image_HWC.shape[:2]
  result = np.empty((*size, image_HWC.shape[2]), image_HWC.dtype)
  result[:] = color
  y, x = (size[0] - H) // 2, (size[1] - W) // 2
  result[y : y + H, x : x + W] = image_HWC
  return result


def of_published(
  values: Mapping[str, Any],
  model: Mapping[str, Any],
  path: str,
  min_pixels: int | None,
  max_pixels: int | None,
  several: bool = False,
) -> Processor | None:
  """The processor of a preprocessor_config.json; None if sizes are fixed.

  Args:
    model: contents of the config.json beside it, {} without one.
  """
  options = picture_layouts.of_processor(values, model, min_pixels, max_pixels)
  if options is None:
    return None
  # Keys that are null have their default.
  values = {name: x for name, x in values.items() if x is not None}
  is_tiles = options["kind"] == "tiles"
  is_fitted = options["kind"] == "fitted"
  by_torch = options.get("choice") == "scale"
  methods = dict(_RESAMPLES)
  if by_torch:
    del methods[1]  # torchvision has no Lanczos filter.
  method = methods.get(values.get("resample", 1 if is_tiles else 3))
  # Steps that may not be turned off, because their sizes or pixels would
  # differ.
  flags = ["do_rescale"]
  if not is_fitted:
    flags.append("do_normalize")
  if not is_tiles:
    flags.append("do_resize")
  off = [flag for flag in flags if not values.get(flag, True)]
  if off or method is None:
    raise ConfigError(
      f"{path}: expected resample of {[*methods]}, and true for "
      f"{', '.join(flags)}."
    )
  # Means and standard deviations that a file leaves out.
  mean, std = CLIP
  if is_tiles:
    mean, std = (0.5,) * 3, (0.5,) * 3
  if is_fitted:
    mean, std = (0.0,) * 3, (1.0,) * 3
    if not values.get("do_normalize", False):
      # The file may have them nevertheless.
      values |= dict.fromkeys(_NORM)
  return Processor(
    picture_layouts.read(options, path),
    method,
    values.get("rescale_factor", 1 / 255),
    tuple(values.get("image_mean") or mean),
    tuple(values.get("image_std") or std),
    values.get("temporal_patch_size", 2),
    several,
    by_torch,
  )


class Square(NamedTuple):
  """DeepSeek-VL's processor: the longer side fills a padded square."""

  side: int  # In pixels.
  least: int  # The shorter side's pixels, if the proportions allow fewer.
  method: str  # Of resizing.
  color: tuple[int, ...]  # Of the padding.

  def __call__(self, image_HWC: np.ndarray) -> np.ndarray:
    """Returns uint8 [side, side, C], before a normalization."""
    scale = self.side / max(image_HWC.shape[:2])
    size = [max(round(n * scale), self.least) for n in image_HWC.shape[:2]]
    resized = pillow.resize(image_HWC, (size[0], size[1]), self.method)
    return _padded(resized, (max(size),) * 2, np.asarray(self.color, np.uint8))


def square_of_published(values: Mapping[str, Any], path: str) -> Square | None:
  """The `Square` of a preprocessor_config.json, if it has one."""
  kind = str(values.get("image_processor_type", ""))
  if not kind.startswith("DeepseekVLImageProcessor"):
    return None
  size = values.get("size") or 384
  sides = [*size.values()] if isinstance(size, Mapping) else [size]
  method = _RESAMPLES.get(values["resample"])
  if len({*sides}) > 1 or not values.get("do_pad", True) or not method:
    raise ConfigError(
      f"{path}: expected a size with the same height and width, do_pad=true "
      f"and resample of {[*_RESAMPLES]}."
    )
  color = tuple(int(x * 255) for x in values["image_mean"])
  return Square(sides[0], values.get("min_size", 14), method, color)
