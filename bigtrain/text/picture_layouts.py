"""Pictures whose size decides what the model sees, and how many image tokens.

`Native`: Qwen's models see a picture in roughly its own size, as a grid of
patches. `Bounded`: Pixtral's tower does too, but its bound is a longest side.
`Fitted`: Gemma 4 also sees a grid of patches, as large as a number of tokens
allows. `Tiles`: Idefics 3 and SmolVLM cut a large picture into tiles, and also
see the whole picture in the size of a tile. `Canvas`: InternVL and Cohere's
models do the same, with a grid of tiles in about the picture's proportions.
`Views`: LLaVA-NeXT and OneVision put tiles behind the whole picture, which is
resized to one of a few sizes. pp/sized_pictures.py makes the pixels.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
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


class Canvas(NamedTuple):
  """Tiles that fill a grid, followed by the whole picture if there are several.

  The grid has about the picture's proportions, and at most `max_tiles`.
  """

  tile: tuple[int, int]  # Height and width of a tile in pixels.
  tokens: int  # Image tokens of a tile.
  split: bool = True  # Whether there are tiles, or only the whole picture.
  min_tiles: int = 1
  max_tiles: int = 12
  # "proportions" takes the grid whose proportions are the nearest, as InternVL;
  # "scale" the one that enlarges the picture the least, as Command A Vision.
  choice: str = "proportions"
  # What stands around all of a picture's tokens.
  before: str = ""
  after: str = ""
  # What stands before the tokens of a tile, with its {number}; before those of
  # the whole picture; and behind either.
  before_tile: str = ""
  before_whole: str = ""
  after_tile: str = ""

  def grid(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles; zeros if there is only the whole picture."""
    if not self.split or self.max_tiles < 2:
      return 0, 0
    args = height, width, self.tile
    if self.choice == "scale":
      rows, columns = tile_grids.least_enlarging(*args, self.max_tiles)
    else:
      rows, columns = tile_grids.most_similar(
        *args, self.min_tiles, self.max_tiles
      )
    return (rows, columns) if rows * columns > 1 else (0, 0)

  def text(self, token: str, height: int, width: int, number: int = 1) -> str:
    rows, columns = self.grid(height, width)
    own = token * self.tokens + self.after_tile
    tiles = [
      self.before_tile.format(number=i) + own
      for i in range(1, rows * columns + 1)
    ]
    whole = self.before_whole + own
    return f"{self.before}{''.join(tiles)}{whole}{self.after}"


class Bounded(NamedTuple):
  """A grid of patches in the picture's own size, or in one within bounds."""

  patch_size: int  # Of one patch, in pixels.
  merge: int  # Side of the squares of patches that become a token.
  height: int  # Bounds in pixels.
  width: int
  unit: int  # Sides in pixels are multiples of it.
  # What stands behind the tokens of each row of squares, and of the last one.
  after_row: str = ""
  after: str = ""

  def size(self, height: int, width: int) -> tuple[int, int]:
    ratio = max(height / self.height, width / self.width)
    new = [height, width]
    if ratio > 1:
      new = [math.floor(n / ratio) for n in new]
    new = [math.ceil(n / self.unit) * self.unit for n in new]
    side = self.patch_size * self.merge
    if min(new) < side:
      raise DataError(
        f"a picture of {height}x{width} pixels: expected at least {side}x"
        f"{side} pixels within {self.height}x{self.width}."
      )
    return new[0], new[1]

  def grid(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches; the last ones may fill no square."""
    rows, columns = self.size(height, width)
    return rows // self.patch_size, columns // self.patch_size

  def text(self, token: str, height: int, width: int, number: int = 1) -> str:
    rows, columns = (n // self.merge for n in self.grid(height, width))
    return self.after_row.join([token * columns] * rows) + self.after


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


Layout = Native | Bounded | Fitted | Tiles | Canvas | Views
KINDS: Mapping[str, Any] = {
  "native": Native,
  "bounded": Bounded,
  "fitted": Fitted,
  "tiles": Tiles,
  "canvas": Canvas,
  "views": Views,
}
# Those of patches, not of pixels.
OF_PATCHES = ("native", "bounded", "fitted")


def read(given: Mapping[str, Any], key: str) -> Layout:
  """Reads dict(kind="native", ...), with the fields of its class."""
  options = dict(given)
  kind = check_choice(f"{key}.kind", options.pop("kind", None), KINDS)
  check_kwargs(KINDS[kind], options, key)
  return KINDS[kind](**options)


def of_processor(
  values: Mapping[str, Any],
  model: Mapping[str, Any],
  min_pixels: int | None,
  max_pixels: int | None,
) -> dict[str, Any] | None:
  """The layout of a published image processor; None if sizes are fixed.

  Args:
    values: contents of preprocessor_config.json.
    model: contents of the model's config.json, {} without one.
    min_pixels, max_pixels: values in place of the processor's, for native
      sizes.
  """
  # The library replaces null by the default too.
  values = {name: x for name, x in values.items() if x is not None}
  kind = str(values.get("image_processor_type", ""))
  size = values.get("size", {})
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
  of_kind = [read for name, read in _OF_PROCESSORS if kind.startswith(name)]
  if not of_kind:
    return None
  if min_pixels or max_pixels:
    raise ConfigError(
      f"{kind}: expected no min_pixels and max_pixels for its pictures."
    )
  return of_kind[0](values, model)


def patches_of_side(vision: Mapping[str, Any]) -> int:
  """Rows of patches of a picture of one size, by `vision_config`."""

  def side(key: str) -> int:
    size = vision[key]
    return size[0] if isinstance(size, list | tuple) else size

  return side("image_size") // side("patch_size")


def _of_idefics(
  values: Mapping[str, Any], model: Mapping[str, Any]
) -> dict[str, Any]:
  edge = (values.get("size") or {}).get("longest_edge", 4 * 364)
  tile = (values.get("max_image_size") or {"longest_edge": 364})["longest_edge"]
  vision = {"patch_size": 32, **(model.get("vision_config") or {})}
  side = tile // vision["patch_size"]
  return dict(
    kind="tiles",
    longest_edge=edge if values.get("do_resize", True) else None,
    tile=tile,
    split=values.get("do_image_splitting", True),
    tokens=(side // model.get("scale_factor", 2)) ** 2,
  )


def _of_gemma4(
  values: Mapping[str, Any], model: Mapping[str, Any]
) -> dict[str, Any]:
  del model
  return dict(
    kind="fitted",
    patch_size=values.get("patch_size", 16),
    merge=values.get("pooling_kernel_size", 3),
    max_tokens=values.get("max_soft_tokens", 280),
  )


def _of_llava(
  values: Mapping[str, Any], model: Mapping[str, Any], is_next: bool
) -> dict[str, Any]:
  """Of LLaVA-NeXT, or of LLaVA-OneVision."""
  size = values.get("size") or {}
  side = size.get("height") or size.get("shortest_edge")
  side = side or (224 if is_next else 384)
  pairs = values.get("image_grid_pinpoints") or (
    tile_grids.NEXT_SIZES if is_next else tile_grids.ONEVISION_SIZES
  )
  vision = model.get("vision_config") or {}
  has_size = {"image_size", "patch_size"} <= {*vision}
  return dict(
    kind="views",
    sizes=tuple((h, w) for h, w in pairs),
    tile=side,
    side=patches_of_side(vision) if has_size else 0,
    splits_several=is_next,
  )


def _of_pixtral(
  values: Mapping[str, Any], model: Mapping[str, Any]
) -> dict[str, Any]:
  """Of Pixtral, Mistral 3 and LightOnOCR."""
  size = values.get("size") or {"longest_edge": 1024}
  edge = size.get("longest_edge")
  own = values.get("patch_size", 16)
  own = own["height"] if isinstance(own, Mapping) else own
  kind = model.get("model_type")
  merge = model.get("spatial_merge_size", 1 if kind in (None, "llava") else 2)
  vision = {"patch_size": own, **(model.get("vision_config") or {})}
  patch_size = vision["patch_size"]
  return dict(
    kind="bounded",
    patch_size=patch_size,
    merge=merge,
    height=edge or size["height"],
    width=edge or size["width"],
    # The others' processor replaces what the image processor's file says.
    unit=own if kind == "lighton_ocr" else patch_size * merge,
  )


def _of_canvas(
  values: Mapping[str, Any], model: Mapping[str, Any], choice: str
) -> dict[str, Any]:
  """Of InternVL and Aya Vision, or of Command A Vision."""
  side = 512 if choice == "scale" else 384
  size = values.get("size") or {"height": side, "width": side}
  kind = model.get("model_type")
  # The processors of texts and pictures split, whatever this file says.
  always = kind in ("internvl", "aya_vision")
  by_default = choice == "scale"
  return dict(
    kind="canvas",
    tile=(size["height"], size["width"]),
    tokens=0,  # By the model.
    split=always or values.get("crop_to_patches", by_default),
    min_tiles=values.get("min_patches", 1),
    max_tiles=values.get("max_patches", 12),
    choice=choice,
  )


# (start of an image processor's name, what reads its file).
_OF_PROCESSORS: Sequence[tuple[str, Callable[..., dict[str, Any]]]] = (
  ("Idefics3ImageProcessor", _of_idefics),
  ("SmolVLMImageProcessor", _of_idefics),
  ("Gemma4ImageProcessor", _of_gemma4),
  ("LlavaNextImageProcessor", functools.partial(_of_llava, is_next=True)),
  ("LlavaOnevisionImageProc", functools.partial(_of_llava, is_next=False)),
  ("PixtralImageProcessor", _of_pixtral),
  (
    "GotOcr2ImageProcessor",
    functools.partial(_of_canvas, choice="proportions"),
  ),
  ("Cohere2VisionImageProc", functools.partial(_of_canvas, choice="scale")),
)
