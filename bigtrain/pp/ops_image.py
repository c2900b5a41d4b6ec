"""Ops on images that need tensorflow: decoding and resizing.

They run in tf.data's threads, on tensors. tensorflow is imported when an op
first runs, so parsing a spec does not load it.

`decode` followed by a crop becomes one op, which decodes no more of a JPEG
than the crop needs; the pixels are the same.

Images are HWC, channels RGB, top row first. An EXIF orientation is ignored, as
it was for the published recipes.
"""

from collections.abc import Callable
from typing import Any, Literal

from bigtrain.pp import arrays, registry
from bigtrain.pp.ops_basic import Size, central_window, pair, random_window
from bigtrain.pp.registry import Op
from bigtrain.settings import ConfigError

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
# Their kernels have negative lobes: results can leave the range of the input.
_OVERSHOOTING = ("bicubic", "lanczos3", "lanczos5", "mitchellcubic")

_ACCURATE = "INTEGER_ACCURATE"

# (height, width, u) -> (top, left, height, width), all integers or scalars.
Window = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any]]


@registry.register("decode")
def decode(
  channels: Literal[1, 3] = 3,
  precise: bool = False,
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """Encoded bytes (JPEG, PNG, GIF, BMP) as a uint8 image [H, W, channels].

  Grey and CMYK images become RGB, transparency is dropped, and of an animation
  the first frame is taken.

  Args:
    channels: 3 for RGB, 1 for grey.
    precise: whether JPEGs go through the accurate cosine transform, which
      gives the very pixels that Pillow (hence PyTorch) does; the fast one is
      off by up to about 4 of 255.
    key: the feature, a scalar of bytes.
    key_result: where the result goes, if not back to `key`.
  """

  def fn(encoded, u):
    _require_encoded(encoded)
    return _decode(encoded, channels, precise)

  return registry.on_feature(fn, key, key_result, tensorflow=True)


def _require_encoded(encoded: Any) -> None:
  arrays.require_kind(encoded, "OSU", "decode", "encoded bytes")
  if arrays.rank(encoded):
    raise ConfigError(
      "preprocessing op 'decode' expects the bytes of one image, got shape "
      f"{tuple(encoded.shape)}."
    )


def _decode(encoded: Any, channels: int, precise: bool) -> Any:
  import tensorflow as tf

  def any_format():
    return tf.io.decode_image(
      encoded, channels=channels, expand_animations=False
    )

  def jpeg():
    return tf.io.decode_jpeg(encoded, channels=channels, dct_method=_ACCURATE)

  if precise:
    image = tf.cond(tf.io.is_jpeg(encoded), jpeg, any_format)
  else:
    image = any_format()
  return tf.ensure_shape(image, [None, None, channels])


def _decode_window(
  encoded: Any, channels: int, precise: bool, window: Window, u: Any
) -> Any:
  """Decodes the part of an image that `window` chooses."""
  import tensorflow as tf

  def part():
    height, width = tf.unstack(tf.io.extract_jpeg_shape(encoded)[:2])
    top, left, h, w = window(height, width, u)
    # Colour is stored at half the resolution and interpolated, and what the
    # decoder takes for the neighbours of a column at the window's edge is made
    # up. One more column on each side makes the pixels those of the image.
    start = tf.maximum(left - 1, 0)
    stop = tf.minimum(left + w + 1, width)
    image = tf.io.decode_and_crop_jpeg(
      encoded,
      tf.stack([top, start, h, stop - start]),
      channels=channels,
      dct_method=_ACCURATE if precise else "",
    )
    return arrays.cut(image, 0, left - start, h, w)

  def whole():
    image = _decode(encoded, channels, precise)
    height, width = arrays.image_size(image)
    return arrays.cut(image, *window(height, width, u))

  # Real collections hold images of other formats under a JPEG's name.
  return tf.cond(tf.io.is_jpeg(encoded), part, whole)


@registry.register("resize")
def resize(
  size: Size,
  method: Method = "bilinear",
  antialias: bool = False,
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """The image [H, W, C] at another size, of the same dtype.

  Integer images are rounded, and clipped where the method overshoots.

  Args:
    size: one number for both sides, or (height, width).
    method: of interpolation.
    antialias: whether the kernel widens when the image shrinks; `area` and
      `nearest` know no such thing.
    key: the feature.
    key_result: where the result goes, if not back to `key`.
  """
  target = pair(size)

  def fn(image, u):
    arrays.require_image(image, u, "resize")
    return _resize(image, target, method, antialias)

  return registry.on_feature(fn, key, key_result, tensorflow=True)


def _resize(image: Any, size: Any, method: str, antialias: bool) -> Any:
  import tensorflow as tf

  dtype = tf.as_dtype(image.dtype)
  image = tf.image.resize(image, size, method=method, antialias=antialias)
  if dtype.is_floating or image.dtype == dtype:
    return tf.cast(image, dtype)
  image = tf.round(image)
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
) -> Op:
  """The image resized so that its shorter side has `size` pixels.

  The other side keeps the ratio, rounded to a whole number of pixels.

  Args:
    size: of the shorter side.
    method: see `resize`.
    antialias: see `resize`.
    key: the feature.
    key_result: where the result goes, if not back to `key`.
  """
  pair(size)

  def fn(image, u):
    import tensorflow as tf

    arrays.require_image(image, u, "resize_small")
    sides = tf.shape(image)[:2]
    factor = size / tf.cast(tf.reduce_min(sides), tf.float64)
    target = tf.cast(tf.round(tf.cast(sides, tf.float64) * factor), tf.int32)
    return _resize(image, target, method, antialias)

  return registry.on_feature(fn, key, key_result, tensorflow=True)


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
  """A window of random area, shape and position, resized to `size`.

  The augmentation of Szegedy et al. 2014 (https://arxiv.org/abs/1409.4842),
  with the law of the kernel that the published recipes ran,
  tf.image.sample_distorted_bounding_box: the ratio width / height is uniform,
  then the height is uniform among those that keep the area within its bounds
  and the window within the image, then the position is uniform. After 100
  ratios for which there is no such height, as can happen only with an image
  far from square or narrow bounds, the window is the whole image.

  Args:
    size: of the result, one number or (height, width); None keeps the
      window's own.
    area_min: of the window, in percent of the image's.
    area_max: of the window, in percent of the image's.
    ratio_min: of width to height.
    ratio_max: of width to height.
    method: see `resize`.
    antialias: see `resize`.
    key: the feature.
    key_result: where the result goes, if not back to `key`.
  """
  window, finish = _inception(
    size, area_min, area_max, ratio_min, ratio_max, method, antialias
  )

  def fn(image, u):
    arrays.require_image(image, u, "inception_crop")
    image = _tensor(image)
    height, width = arrays.image_size(image)
    return finish(arrays.cut(image, *window(height, width, u)))

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
  """What chooses the window, and what is done to its pixels."""
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
    import tensorflow as tf

    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
      tf.stack([height, width, 1]),
      tf.zeros([0, 0, 4], tf.float32),
      # The kernel draws from a stream of its own; u names which one.
      seed=tf.cast(u[:2] * 2**24, tf.int32),
      area_range=(area_min / 100, area_max / 100),
      aspect_ratio_range=(ratio_min, ratio_max),
      min_object_covered=0,
      max_attempts=100,
      use_image_if_no_bounding_boxes=True,
    )
    return begin[0], begin[1], extent[0], extent[1]

  def finish(image):
    if target is None:
      return image
    return _resize(image, target, method, antialias)

  return window, finish


def _tensor(image: Any) -> Any:
  import tensorflow as tf

  return tf.convert_to_tensor(image)


def _fuse(
  decoding: dict[str, Any],
  crop: dict[str, Any],
  window: Window,
  draws: int = 0,
  finish: Callable[[Any], Any] = lambda image: image,
) -> Op | None:
  """`decode` and a crop as one op, if the crop takes what `decode` made.

  Args:
    decoding: arguments of decode.
    crop: arguments of the crop.
    window: what the crop cuts.
    draws: of the crop.
    finish: what the crop does with the pixels.
  """
  made = decoding["key_result"] or decoding["key"]
  result = crop["key_result"] or crop["key"]
  if crop["key"] != made or result != made:
    return None  # The whole image is wanted as well.
  channels, precise = decoding["channels"], decoding["precise"]

  def fn(encoded, u):
    _require_encoded(encoded)
    return finish(_decode_window(encoded, channels, precise, window, u))

  return registry.on_feature(
    fn, decoding["key"], made, draws=draws, tensorflow=True
  )


@registry.register_fusion("decode", "inception_crop")
def _decode_inception_crop(
  decoding: dict[str, Any], crop: dict[str, Any]
) -> Op | None:
  options = {k: v for k, v in crop.items() if k not in ("key", "key_result")}
  window, finish = _inception(**options)
  return _fuse(decoding, crop, window, draws=2, finish=finish)


@registry.register_fusion("decode", "random_crop")
def _decode_random_crop(
  decoding: dict[str, Any], crop: dict[str, Any]
) -> Op | None:
  if crop["pad"]:
    return None  # The window may be partly outside.
  size = pair(crop["size"])
  return _fuse(
    decoding, crop, lambda h, w, u: random_window(h, w, size, u), draws=2
  )


@registry.register_fusion("decode", "central_crop")
def _decode_central_crop(
  decoding: dict[str, Any], crop: dict[str, Any]
) -> Op | None:
  size = None if crop["size"] is None else pair(crop["size"])
  return _fuse(decoding, crop, lambda h, w, u: central_window(h, w, size))
