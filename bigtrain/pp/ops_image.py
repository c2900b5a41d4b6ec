"""Image ops that need tensorflow: decoding and resizing.

`decode` followed by a crop becomes one op, which decodes only the part of a
JPEG that the crop needs and gives the same pixels. Images are RGB, [H, W, C],
top row first.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_number
from bigtrain.files import paths
from bigtrain.pp import (
  ops_basic,
  picture_files,
  pillow,
  registry,
  sized_pictures,
  xp,
)
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.ops_basic import Size, central_window, pair, random_window
from bigtrain.pp.registry import Op
from bigtrain.text import picture_layouts

Method = Literal[
  "bilinear",
  "area",
  "nearest",
  "bicubic",
  "lanczos3",
  "lanczos5",
  "gaussian",
  "mitchellcubic",
]
# Kernels with negative lobes: results can leave the range of the input.
_OVERSHOOTING = ("bicubic", "lanczos3", "lanczos5", "mitchellcubic")

_ACCURATE = "INTEGER_ACCURATE"

Arguments = dict[str, Any]
# (height, width, u) -> (top, left, height, width), all integers or scalars.
Window = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any]]


class Decoding(NamedTuple):
  """Arguments of `decode`, without the names of features."""

  channels: int = 3
  precise: bool = True
  exif: bool = False
  background: int | None = None

  @classmethod
  def of(cls, arguments: Arguments) -> "Decoding":
    return cls(**{name: arguments[name] for name in cls._fields})


@registry.register("decode")
def decode(
  channels: Literal[1, 3] = 3,
  precise: bool = True,
  key: str = "image",
  key_result: str | None = None,
  exif: bool = False,
  background: int | None = None,
) -> Op:
  """Decodes bytes (JPEG, PNG, GIF, BMP, WebP) to uint8 [H, W, channels].

  Pillow decodes TIFF, AVIF and, with pillow-heif, HEIC. Grey and CMYK images
  become RGB, transparency is dropped, and only the first frame of an animation
  is used.

  Args:
    channels: 3 for RGB, 1 for grey.
    precise: whether JPEGs have exactly the pixels of Pillow, which torchvision,
      timm and transformers see. False is the fast transform of
      tensorflow, which big_vision uses: of two photographs, its pixels differ
      by 1.0 and 1.3 levels of 255 on average, and by 18 at most.
    exif: whether to rotate pictures as their EXIF data say. A TIFF is always
      rotated, as in Pillow.
    background: grey level behind what is transparent in a PNG, WebP or TIFF,
      255 for the white of transformers; None drops transparency. Only with
      three channels.
  """
  if background is not None:
    check_number(
      "argument 'background'", background, least=0, most=255, whole=True
    )
  decoding = Decoding(channels, precise, exif, background)

  def fn(encoded, u):
    _require_encoded(encoded)
    return decoded(encoded, decoding)

  return registry.on_feature(
    fn, key, key_result, tensorflow=True, ignores_exif=not exif
  )


def _require_encoded(encoded: Any) -> None:
  xp.require_kind(encoded, "OSU", "decode", "encoded bytes")
  if xp.rank(encoded):
    raise ConfigError(
      "preprocessing op 'decode' expects the bytes of one image, got shape "
      f"{tuple(encoded.shape)}."
    )


def decoded(encoded: Any, decoding: Decoding) -> Any:
  """The pixels of a picture, a tensor uint8 [H, W, channels]."""
  image = _as_stored(encoded, decoding)
  return _turned(image, _turn(encoded)) if decoding.exif else image


def _as_stored(encoded: Any, decoding: Decoding) -> Any:
  """Decodes a picture without rotating it, except where Pillow decodes it."""
  channels, precise, exif, background = decoding

  def by_pillow(data: bytes) -> tuple[np.ndarray, bytes]:
    # tensorflow would put the traceback of a Python error into its message.
    try:
      return picture_files.decode(data, channels, exif, background), b""
    except (DataError, ConfigError) as e:
      return np.zeros((0, 0, channels), np.uint8), str(e).rstrip(".").encode()

  def other_format():
    image, problem = tf.numpy_function(
      by_pillow, [encoded], [tf.uint8, tf.string]
    )
    image = tf.ensure_shape(image, [None, None, channels])
    return xp.checked(image, tf.equal(problem, b""), "decode", problem)

  def known_format():
    return tf.io.decode_image(
      encoded, channels=channels, expand_animations=False
    )

  def on_background_webp():
    # With the channels of the file; palettes become colours.
    image = tf.io.decode_image(encoded, channels=0, expand_animations=False)
    return tf.cond(
      tf.equal(tf.shape(image)[-1], 4),
      lambda: _blended(image, background),
      known_format,
    )

  def on_background_png():
    image = tf.io.decode_png(encoded, channels=4)
    return _blended(image, background)

  def maybe_transparent():
    if background is None or channels == 1:
      return known_format()
    return tf.case(
      [
        (_begins(encoded, r"\CPNG\C*"), on_background_png),
        (_begins(encoded, r"RIFF\C{4}WEBP"), on_background_webp),
      ],
      default=known_format,
    )

  def no_jpeg():
    return tf.cond(_is_for_pillow(encoded), other_format, maybe_transparent)

  def jpeg():
    return tf.io.decode_jpeg(
      encoded, channels=channels, dct_method=_ACCURATE if precise else ""
    )

  image = tf.cond(tf.io.is_jpeg(encoded), jpeg, no_jpeg)
  return tf.ensure_shape(image, [None, None, channels])


def _begins(encoded: Any, pattern: str) -> Any:
  start = tf.strings.substr(encoded, 0, 12)
  return tf.strings.regex_full_match(start, pattern)


def _blended(image: Any, background: int | None) -> Any:
  """An image with transparency on a grey background, as Pillow rounds."""
  image = tf.cast(image, tf.int32)
  color, alpha = image[..., :3], image[..., 3:]
  total = (color * alpha + background * (255 - alpha)) * 128 + (128 << 7)
  total = tf.bitwise.right_shift(total, 8) + total
  return tf.cast(tf.bitwise.right_shift(total, 15), tf.uint8)


def _is_for_pillow(encoded: Any) -> Any:
  # As picture_files.pillow_format, but in the graph, where it costs less.
  is_tiff = tf.equal(tf.strings.substr(encoded, 0, 4), picture_files.TIFF)
  is_media = tf.strings.regex_full_match(
    tf.strings.substr(encoded, 0, 8), r"\C\C\C\Cftyp"
  )
  return tf.reduce_any(is_tiff) | is_media


def _turn(encoded: Any) -> Any:
  """Bools [3] of picture_files.TURNS; Pillow's formats are turned already."""

  def read(data: bytes) -> np.ndarray:
    if picture_files.pillow_format(data):
      return np.array(picture_files.TURNS[0])
    return np.array(picture_files.TURNS[picture_files.orientation(data) - 1])

  return tf.ensure_shape(tf.numpy_function(read, [encoded], tf.bool), [3])


def _turned(image: Any, turn: Any) -> Any:
  transposed, rows, columns = tf.unstack(turn)
  image = tf.cond(
    transposed, lambda: tf.transpose(image, [1, 0, 2]), lambda: image
  )
  axes = tf.boolean_mask([0, 1], tf.stack([rows, columns]))
  return tf.reverse(image, axes)


def _decode_window(
  encoded: Any, decoding: Decoding, window: Window, u: Any
) -> Any:
  """Decodes the part of a picture that a crop needs."""
  turn = _turn(encoded) if decoding.exif else None

  def part():
    height, width = tf.unstack(tf.io.extract_jpeg_shape(encoded)[:2])
    top, left, h, w = _window_as_stored(window, height, width, u, turn)
    # Colour is stored at half resolution and interpolated. At the edge of the
    # window the decoder does not know the next column. Decoding one more column
    # on each side gives the same pixels as decoding the whole image.
    start = tf.maximum(left - 1, 0)
    stop = tf.minimum(left + w + 1, width)
    image = tf.io.decode_and_crop_jpeg(
      encoded,
      tf.stack([top, start, h, stop - start]),
      channels=decoding.channels,
      dct_method=_ACCURATE if decoding.precise else "",
    )
    image = xp.cut(image, 0, left - start, h, w)
    return image if turn is None else _turned(image, turn)

  def whole():
    image = decoded(encoded, decoding)
    height, width = xp.image_size(image)
    return xp.cut(image, *window(height, width, u))

  # In real data sets, some files with the suffix .jpg have other formats.
  return tf.cond(tf.io.is_jpeg(encoded), part, whole)


def _window_as_stored(
  window: Window, height: Any, width: Any, u: Any, turn: Any
) -> tuple[Any, Any, Any, Any]:
  """The window of a turned picture, in the picture as it is stored."""
  if turn is None:
    return window(height, width, u)
  transposed, rows, columns = tf.unstack(turn)

  def exchanged(x: Any, y: Any) -> tuple[Any, Any]:
    return tf.where(transposed, y, x), tf.where(transposed, x, y)

  height, width = exchanged(height, width)
  top, left, h, w = window(height, width, u)
  top = tf.where(rows, height - top - h, top)
  left = tf.where(columns, width - left - w, left)
  top, left = exchanged(top, left)
  h, w = exchanged(h, w)
  return top, left, h, w


@registry.register("resize")
def resize(
  size: Size,
  method: Method = "bilinear",
  antialias: bool = False,
  key: str = "image",
  key_result: str | None = None,
  cut_off: bool = False,
) -> Op:
  """Resizes an image [H, W, C] and keeps its dtype.

  Args:
    size: one number for both sides, or (height, width).
    method: interpolation method.
    antialias: whether to widen the kernel when the image shrinks; `area` and
      `nearest` ignore it.
    cut_off: whether integers are truncated, as in big_vision, which makes
      images half a level darker on average. By default they are rounded.
  """
  target = pair(size)

  def fn(image, u):
    xp.require_image(image, u, "resize")
    return _resize(image, target, method, antialias, cut_off)

  return registry.on_feature(fn, key, key_result, tensorflow=True)


def _resize(
  image: Any, size: Any, method: str, antialias: bool, cut_off: bool = False
) -> Any:
  dtype = tf.as_dtype(image.dtype)
  image = tf.image.resize(image, size, method=method, antialias=antialias)
  if dtype.is_floating or image.dtype == dtype:
    return tf.cast(image, dtype)
  image = image if cut_off else tf.round(image)
  if method in _OVERSHOOTING:
    return tf.saturate_cast(image, dtype)
  return tf.cast(image, dtype)


@registry.register("resize_small")
def resize_small(
  size: int,
  method: Method = "area",
  antialias: bool = False,
  key: str = "image",
  key_result: str | None = None,
  cut_off: bool = False,
) -> Op:
  """Resizes an image so that its shorter side has `size` pixels.

  Args:
    size: pixels of the shorter side; the other one keeps the aspect ratio.
    method, antialias, cut_off: see `resize`.
  """
  check_number("argument 'size'", size, least=1, whole=True)

  def fn(image, u):
    xp.require_image(image, u, "resize_small")
    sides = tf.shape(image)[:2]
    factor = size / tf.cast(tf.reduce_min(sides), tf.float64)
    target = tf.cast(tf.round(tf.cast(sides, tf.float64) * factor), tf.int32)
    return _resize(image, target, method, antialias, cut_off)

  return registry.on_feature(fn, key, key_result, tensorflow=True)


_RESAMPLES = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # By PIL's numbers.


def _of_timm(values: Mapping[str, Any]) -> dict[str, Any]:
  """Converts timm's pretrained_cfg to the keys of preprocessor_config.json."""
  height, width = values["input_size"][-2:]
  share = values.get("crop_pct") or 0.875
  whole = [math.floor(n / share) for n in (height, width)]
  size: Any = dict(height=whole[0], width=whole[1])
  crop_mode = values.get("crop_mode") or "center"
  if crop_mode == "center" and height == width:
    size = dict(shortest_edge=whole[0])
  elif crop_mode != "squash":
    size = "longest_edge"  # `published` refuses it.
  named = {name: number for number, name in _RESAMPLES.items()}
  return dict(
    size=size,
    resample=named.get(values.get("interpolation") or "bicubic", -1),
    do_center_crop=True,
    crop_size=dict(height=height, width=width),
    image_mean=values["mean"],
    image_std=values["std"],
  )


@registry.register("published")
def published(
  folder: str,
  key: str = "image",
  precise: bool = False,
  min_pixels: int | None = None,
  max_pixels: int | None = None,
  several: bool = False,
) -> Op:
  """Resizes, crops and normalizes as a published model's folder says.

  The pixels equal those of Hugging Face's transformers for a folder with
  preprocessor_config.json or processor_config.json, and those of timm for a
  config.json with pretrained_cfg. `decode` comes before.

  Args:
    precise: whether resized pixels equal Pillow's bit for bit; otherwise some
      differ by one level of 255.
    min_pixels, max_pixels: area of pictures, in place of the folder's, for
      models that see pictures in roughly their own size. Such models get
      patches, and the rows and columns of patches as the feature "shapes";
      models that see tiles get tiles.
    several: whether the row has several pictures; LLaVA-OneVision does not cut
      these into tiles.
  """
  values, path = _read_published(paths.absolute(folder))
  model = _model_beside(path)
  processor = sized_pictures.of_published(
    values, model, path, min_pixels, max_pixels, several
  )
  if processor is not None:
    return _sized(processor, key)
  if min_pixels or max_pixels:
    raise ConfigError(
      f"{path}: expected no min_pixels and max_pixels for pictures of one size."
    )
  return _of_one_size(_with_defaults(values), path, key, precise)


_STANDARD = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
_MEAN, _STD = sized_pictures.CLIP
_OF_CLIP = dict(resample=3, image_mean=_MEAN, image_std=_STD)
_CROPPED = dict(
  **_OF_CLIP,
  size={"shortest_edge": 224},
  crop_size=224,
  do_center_crop=True,
)
# {start of an image processor's name: values that its file may leave out}.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
  "CLIP": _CROPPED,
  "Llava": _CROPPED,
  "Deepseek": _OF_CLIP,
  "Siglip": dict(**_STANDARD, resample=3),
  "Gemma3": _STANDARD,
  "ViT": _STANDARD,
}


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
  kind = str(values.get("image_processor_type", ""))
  defaults: dict[str, Any] = {"size": 224, "resample": 2}
  for start, own in _DEFAULTS.items():
    if kind.startswith(start):
      defaults |= own
  return defaults | {x: y for x, y in values.items() if y is not None}


def _of_one_size(
  values: Mapping[str, Any], path: str, key: str, precise: bool
) -> Op:
  """The op for pictures that all get the same size."""
  square = sized_pictures.square_of_published(values, path)
  method = _RESAMPLES.get(values["resample"], "")
  size = values["size"]
  if not method or "crop_pct" in values or "longest_edge" in str(size):
    raise ConfigError(
      f"{path}: expected resample of {[*_RESAMPLES]}, a size without a "
      "longest_edge, and no crop_pct."
    )
  shorter = size.get("shortest_edge") if isinstance(size, dict) else None

  def sides(size: Any) -> Size:
    return size if isinstance(size, int) else (size["height"], size["width"])

  def fn(image, u):
    xp.require_image(image, u, "published")
    now = tf.shape(image)[:2]
    new = now * shorter // tf.reduce_min(now) if shorter else pair(sides(size))
    if precise and method in ("bilinear", "bicubic"):
      resize = functools.partial(pillow.resize, method=method)
      resized = tf.numpy_function(resize, [image, new], tf.uint8)
      return tf.ensure_shape(resized, (None, None, image.shape[2]))
    # As in Pillow and torchvision: first the width, then the height, and after
    # each the values are rounded to bytes.
    image = _resize(image, (now[0], new[1]), method, True)
    return _resize(image, new, method, True)

  def in_square(image, u):
    xp.require_image(image, u, "published")
    padded = tf.numpy_function(square, [image], tf.uint8)
    return tf.ensure_shape(padded, (None, None, image.shape[2]))

  ops = []
  if values.get("do_resize", True):
    resizing = fn if square is None else in_square
    ops.append(registry.on_feature(resizing, key, tensorflow=True))
  if values.get("do_center_crop"):
    crop = sides(values.get("crop_size", 224))
    ops.append(ops_basic.central_crop(crop, key))
  unit = 1.0
  if values.get("do_rescale", True):
    unit = values.get("rescale_factor", 1 / 255)
  mean, std = [0.0] * 3, [1.0] * 3
  if values.get("do_normalize", True):
    mean, std = values["image_mean"], values["image_std"]
  # (unit * image - mean) / std, on the scale of bytes.
  normalize = ops_basic.vgg_value_range(
    mean=tuple(x / unit for x in mean),
    std=tuple(x / unit for x in std),
    key=key,
  )
  return registry.compose([*ops, normalize])


_OF_PATCHES = (
  picture_layouts.Native,
  picture_layouts.Bounded,
  picture_layouts.Fitted,
)


def _sized(processor: sized_pictures.Processor, key: str) -> Op:
  """Patches and their shapes, or tiles."""

  def fn(features, u):
    image = features[key]
    xp.require_image(image, u, "published")
    pixels, grid = tf.numpy_function(processor, [image], (tf.float32, tf.int32))
    layout = processor.layout
    if isinstance(layout, _OF_PATCHES):
      pixels = tf.ensure_shape(pixels, (None, None))
      return {**features, key: pixels, "shapes": tf.ensure_shape(grid, (2,))}
    if isinstance(layout, picture_layouts.Views):
      features = {**features, "shapes": tf.ensure_shape(grid, (4,))}
    return {**features, key: tf.ensure_shape(pixels, (None, None, None, 3))}

  origins: dict[str, str | None] = {key: None}
  if isinstance(processor.layout, (*_OF_PATCHES, picture_layouts.Views)):
    origins["shapes"] = None
  return Op(fn, reads=(key,), origins=origins, tensorflow=True)


def _model_beside(path: str) -> dict[str, Any]:
  """The contents of config.json beside a file, {} without one."""
  beside = os.path.join(os.path.dirname(path), "config.json")
  if not os.path.isfile(beside):
    return {}
  return dict(json.loads(paths.read_bytes(beside)))


def _read_published(folder: str) -> tuple[dict[str, Any], str]:
  """Returns the values of a folder's preprocessing, and the file with them."""
  path = os.path.join(folder, "preprocessor_config.json")
  whole = os.path.join(folder, "processor_config.json")
  if not os.path.isfile(path) and os.path.isfile(whole):
    path = whole
  timm_path = os.path.join(folder, "config.json")
  if not os.path.isfile(path) and os.path.isfile(timm_path):
    path = timm_path
  try:
    values = json.loads(paths.read_bytes(path))
    # Models that read texts too have one file for both processors.
    values = values.get("image_processor", values)
    if "architecture" in values:
      return _of_timm(values.get("pretrained_cfg", values)), path
    if path == timm_path:
      raise FileNotFoundError(
        "neither preprocessor_config.json, nor timm's pretrained_cfg"
      )
  except (OSError, ValueError) as e:
    raise ConfigError(f"{path}: cannot be read: {e}") from e
  return values, path


@registry.register("naflex")
def naflex(
  patch_size: int,
  max_patches: int,
  method: Method = "bilinear",
  antialias: bool = True,
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """Resizes an image to at most `max_patches` patches, and cuts it into them.

  The image keeps its aspect ratio, up to whole patches, as in NaFlex (SigLIP 2,
  https://arxiv.org/abs/2502.14786). The result is [max_patches, values of a
  patch], row by row, padded with zeros; the feature "shapes" has the numbers of
  rows and columns of patches. Both are arguments of the model.
  """
  check_number("argument 'patch_size'", patch_size, least=1, whole=True)
  check_number("argument 'max_patches'", max_patches, least=1, whole=True)

  def fn(features, u):
    image = features[key]
    xp.require_image(image, u, "naflex")
    sides = tf.cast(tf.shape(image)[:2], tf.float64)
    grid = _largest_grid(sides, patch_size, max_patches)
    image = _resize(image, grid * patch_size, method, antialias)
    rows, columns = tf.unstack(grid)
    channels = tf.shape(image)[2]
    p, depth = patch_size, image.shape[2]
    patches = tf.reshape(image, (rows, p, columns, p, channels))
    patches = tf.transpose(patches, (0, 2, 1, 3, 4))
    patches = tf.reshape(patches, (rows * columns, p * p * channels))
    patches = tf.pad(patches, ((0, max_patches - rows * columns), (0, 0)))
    size = None if depth is None else p * p * depth
    patches = tf.ensure_shape(patches, (max_patches, size))
    name = key if key_result is None else key_result
    return {**features, name: patches, "shapes": grid}

  result = key if key_result is None else key_result
  origins: dict[str, str | None] = {result: None, "shapes": None}
  return Op(fn, reads=(key,), origins=origins, tensorflow=True)


def _largest_grid(sides: Any, patch_size: int, max_patches: int) -> Any:
  """Returns the rows and columns of patches at the largest possible scale."""

  def grid_at(scale: Any) -> Any:
    patches = tf.math.ceil(sides * scale / patch_size)
    return tf.maximum(1, tf.cast(patches, tf.int32))

  low, high = tf.constant(1e-6, tf.float64), tf.constant(100.0, tf.float64)
  # Bisection, until the scale is known to 1e-5.
  for _ in range(24):
    middle = (low + high) / 2
    fits = tf.reduce_prod(grid_at(middle)) <= max_patches
    low, high = tf.where(fits, middle, low), tf.where(fits, high, middle)
  return grid_at(low)


@registry.register("inception_crop")
def inception_crop(
  size: Size | None = None,
  area_min: float = 5,
  area_max: float = 100,
  ratio_min: float = 0.75,
  ratio_max: float = 1.33,
  method: Method = "bilinear",
  antialias: bool = False,
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """Cuts out a window of random area, shape and position, and resizes it.

  The augmentation of Szegedy et al. 2014 (https://arxiv.org/abs/1409.4842), as
  tf.image.sample_distorted_bounding_box draws it: first the ratio width /
  height, which is uniform; then the height, among those that keep the window
  within its bounds and the image; then the position. After 100 failures, the
  window is the whole image.

  Args:
    size: size of the result, one number or (height, width); None keeps the
      size of the window.
    area_min, area_max: bounds of the window's area, in percent of the image.
    ratio_min, ratio_max: bounds of the ratio of width to height.
  """
  window, finish = _inception(
    size, area_min, area_max, ratio_min, ratio_max, method, antialias
  )

  def fn(image, u):
    xp.require_image(image, u, "inception_crop")
    image = tf.convert_to_tensor(image)
    height, width = xp.image_size(image)
    return finish(xp.cut(image, *window(height, width, u)))

  return registry.on_feature(fn, key, key_result, draws=2, tensorflow=True)


def _inception(
  size: Size | None,
  area_min: float,
  area_max: float,
  ratio_min: float,
  ratio_max: float,
  method: str,
  antialias: bool,
) -> tuple[Window, Callable[[Any], Any]]:
  """Returns the functions that draw the window, and that resize its pixels."""
  if not 0 < area_min <= area_max <= 100:
    raise ConfigError(
      "expected 0 < area_min <= area_max <= 100 (percent), got "
      f"area_min={area_min}, area_max={area_max}."
    )
  if not 0 < ratio_min <= ratio_max:
    raise ConfigError(
      f"expected 0 < ratio_min <= ratio_max, got ratio_min={ratio_min}, "
      f"ratio_max={ratio_max}."
    )
  target = None if size is None else pair(size)

  def window(height, width, u):
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
      tf.stack([height, width, 1]),
      tf.zeros([0, 0, 4], tf.float32),
      # The kernel has its own random generator; u seeds it.
      seed=tf.cast(u[:2] * 2**24, tf.int32),
      area_range=(area_min / 100, area_max / 100),
      aspect_ratio_range=(ratio_min, ratio_max),
      min_object_covered=0,
      max_attempts=100,
      use_image_if_no_bounding_boxes=True,
    )
    return begin[0], begin[1], extent[0], extent[1]

  def finish(image):
    return _resize(image, target, method, antialias) if target else image

  return window, finish


def _fuse(
  decoding: Arguments,
  crop: Arguments,
  window: Window,
  draws: int = 0,
  finish: Callable[[Any], Any] = lambda image: image,
) -> Op | None:
  """Makes one op of `decode` and a crop, or None to keep both.

  Args:
    decoding, crop: arguments of both ops.
    window: returns the window of the crop.
    draws: uniform numbers that `window` uses.
    finish: maps the pixels of the window to the result.
  """
  feature = decoding["key_result"] or decoding["key"]
  result = crop["key_result"] or crop["key"]
  if crop["key"] != feature or result != feature:
    return None  # The spec needs the whole image too.
  options = Decoding.of(decoding)

  def fn(encoded, u):
    _require_encoded(encoded)
    return finish(_decode_window(encoded, options, window, u))

  return registry.on_feature(
    fn,
    decoding["key"],
    feature,
    draws=draws,
    tensorflow=True,
    ignores_exif=not options.exif,
  )


def _decode_inception_crop(decoding: Arguments, crop: Arguments) -> Op | None:
  options = {k: v for k, v in crop.items() if k not in ("key", "key_result")}
  window, finish = _inception(**options)
  return _fuse(decoding, crop, window, draws=2, finish=finish)


def _decode_random_crop(decoding: Arguments, crop: Arguments) -> Op | None:
  if crop["pad"]:
    return None  # The window may be partly outside the image.
  size = pair(crop["size"])

  def window(height: Any, width: Any, u: Any) -> tuple[Any, Any, Any, Any]:
    return random_window(height, width, size, u)

  return _fuse(decoding, crop, window, draws=2)


def _decode_central_crop(decoding: Arguments, crop: Arguments) -> Op | None:
  size = None if crop["size"] is None else pair(crop["size"])

  def window(height: Any, width: Any, u: Any) -> tuple[Any, Any, Any, Any]:
    return central_window(height, width, size)

  return _fuse(decoding, crop, window)


registry.fusions |= {
  ("decode", "inception_crop"): _decode_inception_crop,
  ("decode", "random_crop"): _decode_random_crop,
  ("decode", "central_crop"): _decode_central_crop,
}
