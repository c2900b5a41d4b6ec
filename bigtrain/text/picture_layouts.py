"""Pictures whose size decides what the model sees, and how many image tokens.

`Native`: Qwen's models see a picture in roughly its own size, as a grid of
patches. `Fitted`: Gemma 4 also sees a grid of patches, as large as a number of
tokens allows. `Tiles`: Idefics 3 and SmolVLM cut a large picture into tiles,
and also see the whole picture in the size of a tile. `Views`: LLaVA-NeXT and
OneVision do the same, after resizing the picture to one of a few sizes.
pp/sized_pictures.py makes the pixels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.arrays import tile_grids
from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  check_kwargs,
)

# Largest side of a picture that is cut into tiles, in pixels.
_LARGEST_SIDE = 4096
# Largest ratio of a picture's sides, as in Qwen's processor.
_MAX_RATIO = 200


class Native(NamedTuple):
  """A grid of patches, resized to whole squares of them."""

  patch_size: int  # Of one patch, in pixels.
  merge: int  # Side of the squares of patches that become a token.
  min_pixels: int  # Area of a picture.
  max_pixels: int

  def size(self, height: int, width: int) -> tuple[int, int]:
    """The size after resizing, which keeps the proportions if it can."""
    short, long = sorted((height, width))
    if not short or long / short > _MAX_RATIO:
      raise DataError(
        f"a picture of {height}x{width} pixels: expected sides whose ratio is "
        f"at most {_MAX_RATIO}."
      )
    side = self.patch_size * self.merge
    new = [round(n / side) * side for n in (height, width)]
    if new[0] * new[1] > self.max_pixels:
      ratio = math.sqrt(height * width / self.max_pixels)
      new = [
        max(side, math.floor(n / ratio / side) * side) for n in (height, width)
      ]
    elif new[0] * new[1] < self.min_pixels:
      ratio = math.sqrt(self.min_pixels / (height * width))
      new = [math.ceil(n * ratio / side) * side for n in (height, width)]
    return new[0], new[1]

  def grid(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches."""
    rows, columns = self.size(height, width)
    return rows // self.patch_size, columns // self.patch_size

  def text(self, token: str, height: int, width: int, number: int = 1) -> str:
    rows, columns = self.grid(height, width)
    return token * (rows * columns // self.merge**2)


class Tiles(NamedTuple):
  """Square tiles in rows, followed by the whole picture."""

  longest_edge: int | None  # To which the picture is resized first.
  tile: int  # Side of a tile in pixels.
  tokens: int  # Image tokens of a tile.
  split: bool = True  # Whether there are tiles, or only the whole picture.

  def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
    """The sizes to which the picture is resized, one after the other."""
    sizes = []
    if self.longest_edge is not None:
      height, width = self._to_edge(height, width)
      sizes.append((height, width))
    if not self.split:
      return [*sizes, (self.tile, self.tile)]
    # Up to whole tiles: the longer side first, which the shorter one follows.
    if width >= height:
      columns = math.ceil(width / self.tile)
      rows = math.ceil(int(columns * self.tile / (width / height)) / self.tile)
    else:
      rows = math.ceil(height / self.tile)
      columns = math.ceil(int(rows * self.tile * (width / height)) / self.tile)
    return [*sizes, (rows * self.tile, columns * self.tile)]

  def _to_edge(self, height: int, width: int) -> tuple[int, int]:
    """The longer side becomes the longest edge, the shorter one even."""
    assert self.longest_edge is not None
    ratio = width / height
    if width >= height:
      width = self.longest_edge
      height = int(width / ratio)
      height += height % 2
    else:
      height = self.longest_edge
      width = int(height * ratio)
      width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LARGEST_SIDE:
      height, width = int(_LARGEST_SIDE / ratio), _LARGEST_SIDE
    elif height > _LARGEST_SIDE:
      height, width = _LARGEST_SIDE, int(_LARGEST_SIDE * ratio)
    return max(height, 1), max(width, 1)

  def grid(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles; zeros if there is only the whole picture."""
    rows, columns = (n // self.tile for n in self.sizes(height, width)[-1])
    return (rows, columns) if rows * columns > 1 else (0, 0)

  def text(self, token: str, height: int, width: int, number: int = 1) -> str:
    edge = "<fake_token_around_image>"
    own = token * self.tokens
    rows, columns = self.grid(height, width)
    lines = [
      "".join(
        f"{edge}<row_{row}_col_{column}>{own}"
        for column in range(1, columns + 1)
      )
      + "\n"
      for row in range(1, rows + 1)
    ]
    tiles = "".join(lines) + "\n" if lines else ""
    return f"{tiles}{edge}<global-img>{own}{edge}"


class Fitted(NamedTuple):
  """A grid of patches that keeps proportions within a number of tokens."""

  patch_size: int  # Of one patch, in pixels.
  merge: int  # Side of the squares of patches that become a token.
  max_tokens: int
  # What stands around the image tokens.
  before: str = ""
  after: str = ""

  def size(self, height: int, width: int) -> tuple[int, int]:
    side = self.patch_size * self.merge
    area = self.max_tokens * side**2
    factor = math.sqrt(area / (height * width))
    new = [math.floor(factor * n / side) * side for n in (height, width)]
    if not any(new):
      raise DataError(
        f"a picture of {height}x{width} pixels: expected room for a token in "
        f"max_tokens={self.max_tokens}."
      )
    longest = self.max_tokens * side
    if not new[0]:
      new = [side, min(width // height * side, longest)]
    elif not new[1]:
      new = [min(height // width * side, longest), side]
    return new[0], new[1]

  def grid(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches."""
    rows, columns = self.size(height, width)
    return rows // self.patch_size, columns // self.patch_size

  def text(self, token: str, height: int, width: int, number: int = 1) -> str:
    rows, columns = self.grid(height, width)
    own = token * (rows * columns // self.merge**2)
    return self.before + own + self.after


class Views(NamedTuple):
  """The whole picture, and tiles of it in the size that fits best."""

  sizes: Sequence[tuple[int, int]]  # In pixels, whole tiles.
  tile: int  # Side of a tile in pixels.
  side: int  # Rows of image tokens of a tile.
  limit: int | None = None  # See tile_grids.shrunk.
  # Whether pictures have tiles beside others in the same row.
  splits_several: bool = True

  def has_tiles(self, number: int) -> bool:
    """Whether pictures have tiles if their row has `number` of them."""
    return number == 1 or self.splits_several

  def grid(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles."""
    best = tile_grids.best_size(height, width, self.sizes)
    return best[0] // self.tile, best[1] // self.tile

  def shape(
    self, height: int, width: int, number: int
  ) -> tuple[int, int, int, int]:
    """Rows and columns of tiles, and of their patches without padding."""
    if not self.has_tiles(number):
      return 0, 0, self.side, self.side
    rows, columns = self.grid(height, width)
    kept = tile_grids.without_padding(
      height, width, rows * self.side, columns * self.side
    )
    return rows, columns, *kept

  def text(self, token: str, height: int, width: int, number: int = 1) -> str:
    tiles, _, *kept = self.shape(height, width, number)
    rows, columns = tile_grids.shrunk(kept[0], kept[1], self.side, self.limit)
    after = rows * (columns + 1) if tiles else 1
    return token * (self.side**2 + after)


Layout = Native | Fitted | Tiles | Views
KINDS: Mapping[str, Any] = {
  "native": Native,
  "fitted": Fitted,
  "tiles": Tiles,
  "views": Views,
}
# Those of patches, not of pixels.
OF_PATCHES = ("native", "fitted")


def read(given: Mapping[str, Any], key: str) -> Layout:
  """Reads dict(kind="native", ...), with the fields of its class."""
  options = dict(given)
  kind = check_choice(f"{key}.kind", options.pop("kind", None), KINDS)
  check_kwargs(KINDS[kind], options, key)
  return KINDS[kind](**options)


def of_processor(
  values: Mapping[str, Any], min_pixels: int | None, max_pixels: int | None
) -> dict[str, Any] | None:
  """The layout of a published image processor; None if sizes are fixed.

  Args:
    values: contents of preprocessor_config.json.
    min_pixels, max_pixels: values in place of the processor's, for native
      sizes.
  """
  kind = str(values.get("image_processor_type", ""))
  size = values.get("size") or {}
  if kind.startswith("Qwen2VLImageProcessor"):
    least = values.get("min_pixels") or size.get("shortest_edge", 56 * 56)
    most = values.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)
    return dict(
      kind="native",
      patch_size=values.get("patch_size", 14),
      merge=values.get("merge_size", 2),
      min_pixels=min_pixels or least,
      max_pixels=max_pixels or most,
    )
  if kind.startswith(("Idefics3ImageProcessor", "SmolVLMImageProcessor")):
    tile = values.get("max_image_size") or {"longest_edge": 364}
    edge = size.get("longest_edge", 4 * 364)
    return dict(
      kind="tiles",
      longest_edge=edge if values.get("do_resize", True) else None,
      tile=tile["longest_edge"],
      split=values.get("do_image_splitting", True),
    )
  result = _of_fixed_area(kind, values)
  if result is not None and (min_pixels or max_pixels):
    raise ConfigError(
      f"{kind}: expected no min_pixels and max_pixels for its pictures."
    )
  return result


def _of_fixed_area(
  kind: str, values: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Gemma 4's layout, and those of LLaVA-NeXT and OneVision."""
  size = values.get("size") or {}
  if kind.startswith("Gemma4ImageProcessor"):
    return dict(
      kind="fitted",
      patch_size=values.get("patch_size", 16),
      merge=values.get("pooling_kernel_size", 3),
      max_tokens=values.get("max_soft_tokens", 280),
    )
  if kind.startswith(("LlavaNextImageProcessor", "LlavaOnevisionImageProc")):
    is_next = kind.startswith("LlavaNext")
    side = size.get("height") or size.get("shortest_edge")
    side = side or (224 if is_next else 384)
    pairs = values.get("image_grid_pinpoints") or (
      tile_grids.NEXT_SIZES if is_next else tile_grids.ONEVISION_SIZES
    )
    return dict(
      kind="views",
      sizes=tuple((h, w) for h, w in pairs),
      tile=side,
      side=values.get("side", 0),  # From the model's config.
      splits_several=is_next,
    )
  return None
