"""RandAugment (Cubuk et al. 2019, https://arxiv.org/abs/1909.13719).

The sixteen operations, their strengths and their order are those of the
TensorFlow implementation that the published ViT and EfficientNet recipes ran,
oddities included (they are marked), because the recipes' magnitudes were tuned
on it. All of them take and return uint8 RGB images [H, W, 3].
"""

import math
from collections.abc import Callable
from typing import Any

from bigtrain.pp import arrays, registry
from bigtrain.pp.registry import Op
from bigtrain.settings import ConfigError

# What shows where an image was moved away, or cut out.
_GREY = 128
_DRAWS_PER_LAYER = 4  # Which operation, its sign, and where cutout is.
_MAX_MAGNITUDE = 30

# (image, sign, u [2]) -> image
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
    num_layers: how many; each is drawn from all sixteen.
    magnitude: their strength, 0 to 30; 10 is what the operations call full.
    key: the feature, a uint8 RGB image [H, W, 3].
    key_result: where the result goes, if not back to `key`.
  """
  if num_layers < 1:
    raise ConfigError(
      f"argument 'num_layers' is {num_layers}, expected at least 1."
    )
  if not 0 <= magnitude <= _MAX_MAGNITUDE:
    raise ConfigError(
      f"argument 'magnitude' is {magnitude}, expected 0 to {_MAX_MAGNITUDE}."
    )
  choices = list(operations(magnitude).values())

  def fn(image, u):
    import tensorflow as tf

    arrays.require_image(image, u, "randaug")
    if image.shape[-1] != 3 or image.dtype != "uint8":
      raise ConfigError(
        "preprocessing op 'randaug' expects a uint8 RGB image, got "
        f"{tf.as_dtype(image.dtype).name} {tuple(image.shape)}; it goes before "
        "'value_range'."
      )
    result = tf.convert_to_tensor(image)
    for layer in range(num_layers):
      u_layer = u[layer * _DRAWS_PER_LAYER : (layer + 1) * _DRAWS_PER_LAYER]
      result = _layer(result, u_layer, choices)
    return tf.ensure_shape(result, image.shape)

  return registry.on_feature(
    fn,
    key,
    key_result,
    draws=num_layers * _DRAWS_PER_LAYER,
    tensorflow=True,
  )


def _layer(image: Any, u: Any, choices: list[Operation]) -> Any:
  import tensorflow as tf

  sign = tf.where(u[1] < 0.5, -1.0, 1.0)
  return tf.switch_case(
    tf.cast(u[0] * len(choices), tf.int32),
    # The default argument binds this round's operation.
    [lambda run=run: run(image, sign, u[2:]) for run in choices],
  )


def operations(magnitude: float) -> dict[str, Operation]:
  """The operations by name, at a strength, in the order that is drawn from.

  Each takes (image, sign -1.0 or 1.0, u [2]); only those that move an image
  heed the sign, and only cutout heeds u.
  """
  level = magnitude / 10
  factor = level * 1.8 + 0.1
  # Oddity: beyond a byte this wraps around, as numpy wrapped it there, so that
  # 10 inverts the image and 15 has the usual 128.
  threshold = int(level * 256) % 256
  # Oddity: the more magnitude, the more bits stay.
  bits = min(max(int(level * 4), 1), 8)
  addition = int(level * 110)
  pad = int(level * 40)
  degrees, shear, pixels = level * 30, level * 0.3, level * 100
  return {
    "AutoContrast": lambda image, sign, u: autocontrast(image),
    "Equalize": lambda image, sign, u: equalize(image),
    "Invert": lambda image, sign, u: 255 - image,
    "Rotate": lambda image, sign, u: rotate(image, sign * degrees),
    "Posterize": lambda image, sign, u: posterize(image, bits),
    "Solarize": lambda image, sign, u: solarize(image, threshold),
    "Color": lambda image, sign, u: color(image, factor),
    "Contrast": lambda image, sign, u: contrast(image, factor),
    "Brightness": lambda image, sign, u: brightness(image, factor),
    "Sharpness": lambda image, sign, u: sharpness(image, factor),
    "ShearX": lambda image, sign, u: _warp(
      image, [1, sign * shear, 0, 0, 1, 0]
    ),
    "ShearY": lambda image, sign, u: _warp(
      image, [1, 0, 0, sign * shear, 1, 0]
    ),
    "TranslateX": lambda image, sign, u: _warp(
      image, [1, 0, sign * pixels, 0, 1, 0]
    ),
    "TranslateY": lambda image, sign, u: _warp(
      image, [1, 0, 0, 0, 1, sign * pixels]
    ),
    "Cutout": lambda image, sign, u: cutout(image, pad, u),
    "SolarizeAdd": lambda image, sign, u: solarize_add(image, addition),
  }


def _blend(plain: Any, image: Any, factor: float) -> Any:
  """plain + factor * (image - plain), clipped and truncated to bytes."""
  import tensorflow as tf

  plain = tf.cast(plain, tf.float32)
  mixed = plain + factor * (tf.cast(image, tf.float32) - plain)
  return tf.cast(tf.clip_by_value(mixed, 0, 255), tf.uint8)


def autocontrast(image: Any) -> Any:
  """Stretches each channel so that it reaches from 0 to 255."""
  import tensorflow as tf

  x = tf.cast(image, tf.float32)
  low = tf.reduce_min(x, axis=[0, 1])
  high = tf.reduce_max(x, axis=[0, 1])
  scale = 255 / tf.maximum(high - low, 1)
  stretched = tf.clip_by_value(x * scale - low * scale, 0, 255)
  return tf.where(high > low, tf.cast(stretched, tf.uint8), image)


def equalize(image: Any) -> Any:
  """Makes the histogram of each channel flat."""
  import tensorflow as tf

  # One histogram of 3 x 256 bins: those of channel c start at 256 c.
  bins = tf.cast(image, tf.int32) + [0, 256, 512]
  counts = tf.reshape(
    tf.math.bincount(tf.reshape(bins, [-1]), minlength=768, maxlength=768),
    [3, 256],
  )
  brightest = tf.cast(tf.reduce_max(image, axis=[0, 1]), tf.int32)
  last = tf.gather(counts, brightest, batch_dims=1)
  step = ((tf.reduce_sum(counts, axis=1) - last) // 255)[:, None]
  below = tf.cumsum(counts, axis=1, exclusive=True)
  table = (below + step // 2) // tf.maximum(step, 1)
  # A channel with next to nothing but its brightest value stays as it is.
  table = tf.where(step == 0, tf.range(256), tf.minimum(table, 255))
  return tf.gather(tf.reshape(tf.cast(table, tf.uint8), [-1]), bins)


def rotate(image: Any, degrees: Any) -> Any:
  """Turns the image about its centre, counterclockwise for positive degrees."""
  import tensorflow as tf

  angle = degrees * (math.pi / 180)
  cos, sin = tf.cos(angle), tf.sin(angle)
  size = tf.cast(tf.shape(image)[:2], tf.float32) - 1
  y, x = size[0] / 2, size[1] / 2
  return _warp(
    image, [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y]
  )


def _warp(image: Any, matrix: list[Any]) -> Any:
  """result[y, x] = image[d x + e y + f, a x + b y + c], or grey outside.

  Args:
    image: [H, W, 3].
    matrix: [a, b, c, d, e, f]; positions are rounded to the nearest pixel.
  """
  import tensorflow as tf

  rows = tf.stack([tf.cast(m, tf.float32) for m in (*matrix, 0, 0)])
  return tf.raw_ops.ImageProjectiveTransformV3(
    images=image[None],
    transforms=rows[None],
    output_shape=tf.shape(image)[:2],
    fill_value=tf.constant(_GREY, tf.float32),
    interpolation="NEAREST",
    fill_mode="CONSTANT",
  )[0]


def posterize(image: Any, bits: int) -> Any:
  """Keeps the highest bits of each byte."""
  return image & (256 - 2 ** (8 - bits))


def solarize(image: Any, threshold: int) -> Any:
  """Inverts the values of at least `threshold`."""
  import tensorflow as tf

  return tf.where(image < threshold, image, 255 - image)


def solarize_add(image: Any, addition: int) -> Any:
  """Adds to the values below 128."""
  import tensorflow as tf

  raised = tf.minimum(tf.cast(image, tf.int32) + addition, 255)
  return tf.where(image < 128, tf.cast(raised, tf.uint8), image)


def color(image: Any, factor: float) -> Any:
  """Blends from grey (0) to the image (1) and beyond."""
  import tensorflow as tf

  return _blend(tf.image.rgb_to_grayscale(image), image, factor)


def contrast(image: Any, factor: float) -> Any:
  """Blends from a uniform grey (0) to the image (1) and beyond."""
  import tensorflow as tf

  # Oddity: that grey is the mean of the histogram's counts, which depends on
  # the image's size only, and not the mean of its pixels.
  grey = tf.minimum(tf.size(image) // (3 * 256), 255)
  return _blend(grey, image, factor)


def brightness(image: Any, factor: float) -> Any:
  """Blends from black (0) to the image (1) and beyond."""
  return _blend(0, image, factor)


def sharpness(image: Any, factor: float) -> Any:
  """Blends from a smoothed image (0) to the image (1) and beyond."""
  import tensorflow as tf

  kernel = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], tf.float32) / 13
  smooth = tf.nn.depthwise_conv2d(
    tf.cast(image, tf.float32)[None],
    tf.tile(kernel[:, :, None, None], [1, 1, 3, 1]),
    strides=[1, 1, 1, 1],
    padding="VALID",
  )[0]
  inner = tf.pad(tf.ones_like(smooth, tf.bool), [[1, 1], [1, 1], [0, 0]])
  smooth = tf.pad(tf.cast(smooth, tf.uint8), [[1, 1], [1, 1], [0, 0]])
  return _blend(tf.where(inner, smooth, image), image, factor)


def cutout(image: Any, pad: int, u: Any) -> Any:
  """Greys a square of side 2 pad about a random pixel (arXiv 1708.04552)."""
  import tensorflow as tf

  def covered(length, u):
    centre = tf.cast(u * tf.cast(length, tf.float32), tf.int32)
    i = tf.range(length)
    return (i >= centre - pad) & (i < centre + pad)

  height, width = arrays.image_size(image)
  rows, columns = covered(height, u[0]), covered(width, u[1])
  square = (rows[:, None] & columns)[..., None]
  return tf.where(square, tf.constant(_GREY, tf.uint8), image)
