"""RandAugment (Cubuk et al. 2019, https://arxiv.org/abs/1909.13719).

The sixteen operations, their strengths, order and oddities (marked below) match
the TensorFlow implementation of the published ViT and EfficientNet recipes. All
operations map uint8 RGB images [H, W, 3] to images of the same shape.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from bigtrain.config.errors import ConfigError, check_number
from bigtrain.pp import registry, xp
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.registry import Op

# Fills cutouts, and areas that a moved image leaves empty.
_GREY = 128
_DRAWS_PER_LAYER = 4  # Operation, sign, and the two coordinates of cutout.
_MAX_MAGNITUDE = 30

# (image, u) -> image.
Operator = Callable[[Any, Any], Any]
# (image, sign, u [2]) -> image; the sign is -1 or 1, for instance a direction.
Operation = Callable[[Any, Any, Any], Any]


@registry.register("randaug")
def randaug(
  num_layers: int = 2,
  magnitude: float = 10,
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """Applies random image operations one after the other.

  Args:
    num_layers: number of operations, each drawn from all sixteen.
    magnitude: strength, 0 to 30; at 10, the operations have full strength.
  """
  check_number("argument 'num_layers'", num_layers, least=1, whole=True)
  check_number("argument 'magnitude'", magnitude, least=0, most=_MAX_MAGNITUDE)
  choices = list(operations(magnitude).values())

  def change(image: Any, u: Any) -> Any:
    for first in range(0, draws, _DRAWS_PER_LAYER):
      image = _layer(image, u[first : first + _DRAWS_PER_LAYER], choices)
    return image

  draws = num_layers * _DRAWS_PER_LAYER
  return on_bytes("randaug", change, draws, key, key_result)


def on_bytes(name: str, change: Operator, draws: int, *keys: Any) -> Op:
  """Makes an op that maps uint8 RGB images by `change(image, u)`."""

  def fn(image, u):
    xp.require_image(image, u, name)
    if image.shape[-1] != 3 or image.dtype != "uint8":
      raise ConfigError(
        f"preprocessing op {name!r} expects a uint8 RGB image, got "
        f"{tf.as_dtype(image.dtype).name} {tuple(image.shape)}; put it before "
        "'value_range'."
      )
    return tf.ensure_shape(change(tf.convert_to_tensor(image), u), image.shape)

  return registry.on_feature(fn, *keys, draws=draws, tensorflow=True)


def _layer(image: Any, u: Any, choices: list[Operation]) -> Any:
  sign = tf.where(u[1] < 0.5, -1.0, 1.0)
  number = tf.cast(u[0] * len(choices), tf.int32)
  branches = [functools.partial(run, image, sign, u[2:]) for run in choices]
  return tf.switch_case(number, branches)


def operations(
  magnitude: float, most_pixels: int = 100
) -> dict[str, Operation]:
  """Returns all operations by name, with the strength of a magnitude.

  Args:
    magnitude: 0 to 30; 10 is full strength.
    most_pixels: translation at full strength.
  """
  level = magnitude / 10
  factor = level * 1.8 + 0.1
  # Oddity: wraps around beyond a byte, as numpy does in the reference, so that
  # magnitude 10 inverts the image and 15 has the usual threshold 128.
  threshold = int(level * 256) % 256
  # Oddity: a larger magnitude keeps more bits.
  bits = min(max(int(level * 4), 1), 8)
  addition = int(level * 110)
  pad = int(level * 40)
  degrees, shear, pixels = level * 30, level * 0.3, level * most_pixels
  return {
    "AutoContrast": lambda x, sign, u: autocontrast(x),
    "Equalize": lambda x, sign, u: equalize(x),
    "Invert": lambda x, sign, u: 255 - x,
    "Rotate": lambda x, sign, u: rotate(x, sign * degrees),
    "Posterize": lambda x, sign, u: x & (256 - 2 ** (8 - bits)),
    "Solarize": lambda x, sign, u: _select(x < threshold, x, 255 - x),
    "Color": lambda x, sign, u: color(x, factor),
    "Contrast": lambda x, sign, u: contrast(x, factor),
    "Brightness": lambda x, sign, u: blend(0, x, factor),
    "Sharpness": lambda x, sign, u: sharpness(x, factor),
    "ShearX": lambda x, sign, u: _warp(x, [1, sign * shear, 0, 0, 1, 0]),
    "ShearY": lambda x, sign, u: _warp(x, [1, 0, 0, sign * shear, 1, 0]),
    "TranslateX": lambda x, sign, u: translate(x, sign, pixels, axis=1),
    "TranslateY": lambda x, sign, u: translate(x, sign, pixels, axis=0),
    "Cutout": lambda x, sign, u: cutout(x, pad, u),
    "SolarizeAdd": lambda x, sign, u: solarize_add(x, addition),
  }


def blend(plain: Any, image: Any, factor: float) -> Any:
  """Returns `plain` for factor 0 and `image` for 1; others extrapolate."""
  plain = tf.cast(plain, tf.float32)
  mixed = plain + factor * (tf.cast(image, tf.float32) - plain)
  return tf.cast(tf.clip_by_value(mixed, 0, 255), tf.uint8)


def _flat(image: Any) -> Any:
  """Reshapes [H, W, 3] to [H, 3 W], over which operations are much faster."""
  return tf.reshape(image, [tf.shape(image)[0], -1])


def _row(values_3: Any, image: Any) -> Any:
  """Repeats a value of each channel for a row of a flat image, [3 W]."""
  return tf.tile(values_3, [tf.shape(image)[1]])


def _per_channel(reduce: Callable[..., Any], image: Any) -> Any:
  """Reduces an image to a value of each channel, [3]."""
  return reduce(tf.reshape(reduce(_flat(image), axis=0), [-1, 3]), axis=0)


def _select(condition: Any, image: Any, other: Any) -> Any:
  """Selects bytes like tf.where, ten times as fast."""
  mask = tf.constant(0, tf.uint8) - tf.cast(condition, tf.uint8)  # 0 or 255.
  return other ^ ((image ^ other) & mask)


def autocontrast(image: Any) -> Any:
  """Stretches each channel to the range 0 to 255."""
  low = tf.cast(_per_channel(tf.reduce_min, image), tf.float32)
  high = tf.cast(_per_channel(tf.reduce_max, image), tf.float32)
  varies = high > low
  scale = tf.where(varies, 255 / tf.maximum(high - low, 1), 1.0)
  offset = tf.where(varies, -low * scale, 0.0)
  x = tf.cast(_flat(image), tf.float32)
  x = tf.clip_by_value(x * _row(scale, image) + _row(offset, image), 0, 255)
  return tf.reshape(tf.cast(x, tf.uint8), tf.shape(image))


def equalize(image: Any) -> Any:
  """Makes the values of each channel equally frequent, as far as possible."""
  # One histogram of 3 x 256 bins; the bins of channel c start at 256 c.
  bins = tf.cast(_flat(image), tf.int32) + _row([0, 256, 512], image)
  counts = tf.math.bincount(
    tf.reshape(bins, [-1]), minlength=768, maxlength=768
  )
  counts = tf.reshape(counts, [3, 256])
  brightest = tf.cast(_per_channel(tf.reduce_max, image), tf.int32)
  last = tf.gather(counts, brightest, batch_dims=1)
  step = ((tf.reduce_sum(counts, axis=1) - last) // 255)[:, None]
  below = tf.cumsum(counts, axis=1, exclusive=True)
  table = (below + step // 2) // tf.maximum(step, 1)
  # A channel that is almost uniformly its brightest value is not changed.
  table = tf.where(step == 0, tf.range(256), tf.minimum(table, 255))
  table = tf.reshape(tf.cast(table, tf.uint8), [-1])
  return tf.reshape(tf.gather(table, bins), tf.shape(image))


def rotate(image: Any, degrees: Any) -> Any:
  """Rotates the image about its centre; positive is counterclockwise."""
  angle = degrees * (math.pi / 180)
  cos, sin = tf.cos(angle), tf.sin(angle)
  size = tf.cast(tf.shape(image)[:2], tf.float32) - 1
  y, x = size[0] / 2, size[1] / 2
  return _warp(
    image, [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y]
  )


def _warp(image: Any, matrix: list[Any]) -> Any:
  """Sets result[y, x] = image[d x + e y + f, a x + b y + c]; grey outside."""
  rows = tf.stack([tf.cast(m, tf.float32) for m in (*matrix, 0, 0)])
  return tf.raw_ops.ImageProjectiveTransformV3(
    images=image[None],
    transforms=rows[None],
    output_shape=tf.shape(image)[:2],
    fill_value=tf.constant(_GREY, tf.float32),
    interpolation="NEAREST",
    fill_mode="CONSTANT",
  )[0]


def translate(image: Any, sign: Any, pixels: float, axis: int) -> Any:
  """Shifts the image along an axis; a positive sign means to lower indices."""
  shift = int(pixels + 0.5)
  borders, begin = [[0, 0], [0, 0], [0, 0]], [0, 0, 0]
  borders[axis] = [shift, shift]
  grey = tf.constant(_GREY, tf.uint8)
  wide = tf.pad(image, borders, constant_values=grey)
  begin[axis] = shift + tf.cast(sign, tf.int32) * shift
  return tf.slice(wide, begin, tf.shape(image))


def solarize_add(image: Any, addition: int) -> Any:
  """Brightens the pixels below 128."""
  addition = min(addition, 255)
  raised = tf.minimum(image, 255 - addition) + addition
  return _select(image < 128, raised, image)


def color(image: Any, factor: float) -> Any:
  """Blends from a grey image (0) to the image (1)."""
  grey = tf.image.rgb_to_grayscale(image)
  return blend(tf.tile(grey, [1, 1, 3]), image, factor)


def contrast(image: Any, factor: float) -> Any:
  """Blends from a uniform grey (0) to the image (1)."""
  # Oddity: the grey is the mean of the histogram's counts, which depends only
  # on the size of the image, and not the mean of its pixels.
  grey = tf.minimum(tf.size(image) // (3 * 256), 255)
  return blend(grey, image, factor)


def sharpness(image: Any, factor: float) -> Any:
  """Blends from a smoothed image (0) to the image (1), except at the border."""
  height, width = xp.image_size(image)
  x = tf.cast(image, tf.float32)
  columns = x[:-2] + x[1:-1] + x[2:]
  sums = columns[:, :-2] + columns[:, 1:-1] + columns[:, 2:]
  inner = image[1:-1, 1:-1]
  # A 3 x 3 kernel in which the pixel itself has weight 5.
  smooth = (sums + 4 * tf.cast(inner, tf.float32)) / 13
  inner = blend(tf.cast(smooth, tf.uint8), inner, factor)
  right, bottom = tf.maximum(width - 1, 1), tf.maximum(height - 1, 1)
  rows = tf.concat([image[1:-1, :1], inner, image[1:-1, right:]], axis=1)
  return tf.concat([image[:1], rows, image[bottom:]], axis=0)


def cutout(image: Any, pad: int, u: Any) -> Any:
  """Greys a square of side 2 pad around a random pixel (arXiv 1708.04552)."""
  shape = tf.shape(image)
  sides = tf.cast(shape[:2], tf.float32)
  centre = tf.cast(u * sides, tf.int32)
  before = tf.maximum(centre - pad, 0)
  after = tf.maximum(shape[:2] - centre - pad, 0)
  hole = tf.zeros(tf.concat([shape[:2] - before - after, [3]], 0), tf.uint8)
  borders = tf.stack([before, after], axis=1)
  white = tf.constant(255, tf.uint8)
  keep = tf.pad(hole, tf.concat([borders, [[0, 0]]], 0), constant_values=white)
  return (image & keep) | (_GREY & ~keep)
