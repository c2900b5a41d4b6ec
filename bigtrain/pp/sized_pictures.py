"""Pixels of pictures whose size decides what a model sees.

text/picture_layouts.py computes the sizes. Pixels equal those of Hugging Face's
transformers with Pillow, bit for bit.

Axes: H height, W width, P patches, C channels, T frames.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bigtrain.arrays import tile_grids
from bigtrain.config.errors import ConfigError
from bigtrain.pp import pillow
from bigtrain.text import picture_layouts

_NORM = ("image_mean", "image_std")
_RESAMPLES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # By PIL's numbers.


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

  def __call__(self, image_HWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (pixels, int32 [2] or [4]).

    Pixels are [P, values] with rows and columns of patches, or [tiles, H, W, C]
    with rows and columns of tiles. Of `Views`, pixels are [views, H, W, C] with
    Views.shape.
    """
    height, width = image_HWC.shape[:2]
    if isinstance(self.layout, picture_layouts.Views):
      number = 2 if self.several else 1
      shape = self.layout.shape(height, width, number)
      return self._views(image_HWC, self.layout), np.asarray(shape, np.int32)
    grid = self.layout.grid(height, width)
    if isinstance(self.layout, picture_layouts.Fitted):
      image_HWC = self._resized(image_HWC, self.layout.size(height, width))
      p = self.layout.patch_size
      x = self._normalized(image_HWC).reshape(grid[0], p, grid[1], p, -1)
      pixels = x.swapaxes(1, 2).reshape(grid[0] * grid[1], -1)
      return pixels, np.asarray(grid, np.int32)
    if isinstance(self.layout, picture_layouts.Native):
      image_HWC = self._resized(image_HWC, self.layout.size(height, width))
      pixels = self._patches(self._normalized(image_HWC), self.layout)
    else:
      for size in self.layout.sizes(height, width):
        image_HWC = self._resized(image_HWC, size)
      pixels = self._tiles(image_HWC, self.layout.tile, grid)
    return pixels, np.asarray(grid, np.int32)

  def _resized(self, image_HWC: np.ndarray, size: Any) -> np.ndarray:
    return pillow.resize(image_HWC, size, self.method)

  def _normalized(self, image: np.ndarray) -> np.ndarray:
    scaled = (image.astype(np.float64) * self.unit).astype(np.float32)
    mean, std = (np.asarray(x, np.float32) for x in (self.mean, self.std))
    return (scaled - mean) / std

  def _patches(
    self, image_HWC: np.ndarray, layout: picture_layouts.Native
  ) -> np.ndarray:
    """Square by square, each patch as (C, T, rows, columns)."""
    H, W, C = image_HWC.shape
    p, m = layout.patch_size, layout.merge
    x = image_HWC.reshape(H // p // m, m, p, W // p // m, m, p, C)
    x = x.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    x = np.repeat(x, self.frames, axis=5)
    return x.reshape(-1, C * self.frames * p * p)

  def _tiles(
    self, image_HWC: np.ndarray, tile: int, grid: tuple[int, int]
  ) -> np.ndarray:
    rows, columns = grid
    tiles = [
      image_HWC[row * tile :, column * tile :][:tile, :tile]
      for row in range(rows)
      for column in range(columns)
    ]
    tiles.append(self._resized(image_HWC, (tile, tile)))
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
  path: str,
  min_pixels: int | None,
  max_pixels: int | None,
  several: bool = False,
) -> Processor | None:
  """The processor of a preprocessor_config.json; None if sizes are fixed."""
  options = picture_layouts.of_processor(values, min_pixels, max_pixels)
  if options is None:
    return None
  is_tiles = options["kind"] == "tiles"
  is_fitted = options["kind"] == "fitted"
  if is_tiles:
    options["tokens"] = 0  # Only texts need their number.
  method = _RESAMPLES.get(values.get("resample", 1 if is_tiles else 3))
  flags = ["do_rescale"] if is_fitted else ["do_rescale", "do_normalize"]
  flags += [] if is_tiles else ["do_resize"]
  off = [flag for flag in flags if not values.get(flag, True)]
  if off or method is None:
    raise ConfigError(
      f"{path}: expected resample of {[*_RESAMPLES]}, and true for "
      f"{', '.join(flags)}."
    )
  clip = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
  )
  mean, std = ((0.5,) * 3, (0.5,) * 3) if is_tiles else clip
  if is_fitted:
    mean, std = (0.0,) * 3, (1.0,) * 3
    normalizes = values.get("do_normalize", False)
    values = {**values, **({} if normalizes else dict.fromkeys(_NORM))}
  return Processor(
    picture_layouts.read(options, path),
    method,
    values.get("rescale_factor", 1 / 255),
    tuple(values.get("image_mean") or mean),
    tuple(values.get("image_std") or std),
    values.get("temporal_patch_size", 2),
    several,
  )
