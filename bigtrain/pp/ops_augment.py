"""Augmentations besides RandAugment.

The ones that change colours need uint8 RGB images, before `value_range`.
"""

import functools
import math
import pathlib
from typing import Any

from bigtrain.config.errors import check_number
from bigtrain.pp import randaug, registry, xp
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.registry import Op

# The policies of the authors' TensorFlow implementation. Each line has two
# operations, each with its probability in tenths and its magnitude.
_IMAGENET = pathlib.Path(__file__).with_name("autoaugment.txt")


@registry.register("autoaugment")
def autoaugment(key: str = "image", key_result: str | None = None) -> Op:
  """Applies one of 25 pairs of operations (https://arxiv.org/abs/1805.09501)."""

  # Random numbers: the policy, three that are unused, and four for each of its
  # two operations.
  def change(image: Any, u: Any) -> Any:
    branches = [
      functools.partial(_apply_policy, image, policy, u)
      for policy in _IMAGENET.read_text().splitlines()
    ]
    return tf.switch_case(tf.cast(u[0] * len(branches), tf.int32), branches)

  return randaug.on_bytes("autoaugment", change, 12, key, key_result)


def _apply_policy(image: Any, policy: str, u: Any) -> Any:
  name_1, tenths_1, magnitude_1, name_2, tenths_2, magnitude_2 = policy.split()
  image = _maybe(image, name_1, int(tenths_1), int(magnitude_1), u[4:8])
  return _maybe(image, name_2, int(tenths_2), int(magnitude_2), u[8:12])


def _maybe(image: Any, name: str, tenths: int, magnitude: int, u: Any) -> Any:
  """Applies an operation with a probability in tenths."""
  # AutoAugment moves images further than RandAugment does.
  operation = randaug.operations(magnitude, most_pixels=250)[name]
  sign = tf.where(u[1] < 0.5, -1.0, 1.0)
  return tf.cond(
    u[0] * 10 < tenths,
    lambda: operation(image, sign, u[2:4]),
    lambda: image,
  )


@registry.register("three_augment")
def three_augment(key: str = "image", key_result: str | None = None) -> Op:
  """Turns an image grey, solarizes it, or blurs it by up to 2 pixels.

  The augmentation of DeiT III (https://arxiv.org/abs/2204.07118), which has
  color_jitter() after it.
  """

  def change(image: Any, u: Any) -> Any:
    def grey() -> Any:
      return randaug.color(image, 0.0)

    def solarized() -> Any:
      return randaug.operations(5)["Solarize"](image, 1.0, u)

    def blurred() -> Any:
      return blur(image, 0.1 + 1.9 * u[1])

    which = tf.cast(u[0] * 3, tf.int32)
    return tf.switch_case(which, [grey, solarized, blurred])

  return randaug.on_bytes("three_augment", change, 2, key, key_result)


def blur(image: Any, sigma: Any) -> Any:
  """Blurs with a Gaussian of width `sigma`, at most 2 pixels.

  Outside of the image, its edge continues.
  """
  offset = tf.range(-6, 7)
  weight = tf.exp(-((tf.cast(offset, tf.float32) / sigma) ** 2) / 2)
  x = tf.cast(image, tf.float32)
  for axis in (0, 1):
    last = tf.shape(image)[axis] - 1
    places = tf.clip_by_value(tf.range(last + 1) + offset[:, None], 0, last)
    shifted = tf.gather(x, places, axis=axis)
    x = tf.tensordot(weight / tf.reduce_sum(weight), shifted, [[0], [axis]])
  return tf.cast(tf.round(x), tf.uint8)


@registry.register("color_jitter")
def color_jitter(
  strength: float = 0.3, key: str = "image", key_result: str | None = None
) -> Op:
  """Changes brightness, contrast and saturation in a random order.

  Args:
    strength: the factor of each is between 1 - strength and 1 + strength.
  """
  check_number("argument 'strength'", strength, least=0, most=1)

  def contrast(x: Any, factor: Any) -> Any:
    grey = tf.cast(tf.image.rgb_to_grayscale(x), tf.float32)
    return randaug.blend(tf.reduce_mean(grey), x, factor)

  def change(image: Any, u: Any) -> Any:
    factors = 1 + strength * (2 * u[:3] - 1)
    for which in tf.unstack(tf.argsort(u[3:])):
      branches = [
        functools.partial(randaug.blend, 0, image, factors[0]),
        functools.partial(contrast, image, factors[1]),
        functools.partial(randaug.color, image, factors[2]),
      ]
      image = tf.switch_case(which, branches)
    return image

  return randaug.on_bytes("color_jitter", change, 6, key, key_result)


@registry.register("random_erasing")
def random_erasing(
  prob: float = 0.25, key: str = "image", key_result: str | None = None
) -> Op:
  """Sets a box with 2 to 33% of the area to 0 (arXiv 1708.04896).

  Args:
    prob: probability that an image gets a box.
  """
  check_number("argument 'prob'", prob, least=0, most=1)

  def fn(image: Any, u: Any) -> Any:
    xp.require_image(image, u, "random_erasing")
    image = tf.convert_to_tensor(image)
    height, width = (tf.cast(n, tf.float32) for n in xp.image_size(image))
    # Ten boxes, of which the first that fits into the image is used.
    area, ratio, y, x = tf.unstack(tf.reshape(u[1:], (4, 10)))
    area = (0.02 + area * 0.31) * height * width
    ratio = tf.exp((2 * ratio - 1) * math.log(0.3))
    h, w = tf.round(tf.sqrt(area * ratio)), tf.round(tf.sqrt(area / ratio))
    fits = (h < height) & (w < width)
    k = tf.argmax(tf.cast(fits, tf.int32))

    def inside(size: Any, extent: Any, place: Any) -> Any:
      offset = tf.range(size) - tf.floor(place * (size - extent + 1))
      return (offset >= 0) & (offset < extent)

    hole = inside(height, h[k], y[k])[:, None] & inside(width, w[k], x[k])
    hole &= fits[k] & (u[0] < prob)
    erased = tf.where(hole[..., None], tf.zeros_like(image), image)
    return tf.ensure_shape(erased, image.shape)

  return registry.on_feature(fn, key, key_result, draws=41, tensorflow=True)
