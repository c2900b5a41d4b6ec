"""Augmentations besides RandAugment.

The ones that change colours need uint8 RGB images, before `value_range`.
"""

import functools
import math
import pathlib
from typing import Any

from bigtrain.config.errors import ConfigError, check_number
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


def blur(
  image: Any, sigma: Any, kernel: int = 13, edges: str = "continued"
) -> Any:
  """Blurs bytes with a Gaussian of width `sigma`, in pixels.

  Args:
    kernel: number of pixels that it averages in each direction, odd.
    edges: whether edges are "continued" or "mirrored" outside the image.
  """
  offset = tf.range(kernel) - kernel // 2
  weight = tf.exp(-((tf.cast(offset, tf.float32) / sigma) ** 2) / 2)
  x = tf.cast(image, tf.float32)
  for axis in (0, 1):
    last = tf.shape(image)[axis] - 1
    places = tf.range(last + 1) + offset[:, None]
    if edges == "mirrored":
      places = last - abs(last - abs(places))
    places = tf.clip_by_value(places, 0, last)
    shifted = tf.gather(x, places, axis=axis)
    x = tf.tensordot(weight / tf.reduce_sum(weight), shifted, [[0], [axis]])
  return tf.cast(tf.round(x), tf.uint8)


@registry.register("color_jitter")
def color_jitter(
  strength: float = 0.3,
  key: str = "image",
  key_result: str | None = None,
  contrast: float | None = None,
  saturation: float | None = None,
  hue: float = 0.0,
  prob: float = 1.0,
) -> Op:
  """Changes brightness, contrast, saturation and hue in a random order.

  Each change uses the formula of torchvision's ColorJitter, whose arguments are
  the first three strengths and `hue`.

  Args:
    strength: the factor of the brightness is between 1 - strength and
      1 + strength.
    contrast, saturation: the same for these; by default `strength`.
    hue: largest shift of the hue, in turns of the colour wheel.
    prob: probability that an image is changed.
  """
  strengths = [
    strength,
    strength if contrast is None else contrast,
    strength if saturation is None else saturation,
  ]
  for name, value in zip(("strength", "contrast", "saturation"), strengths):
    check_number(f"argument {name!r}", value, least=0, most=1)
  check_number("argument 'hue'", hue, least=0, most=0.5)
  check_number("argument 'prob'", prob, least=0, most=1)
  # Draws: how much of each, the order, and whether at all.
  number = 4 if hue else 3

  def change(image: Any, u: Any) -> Any:
    amount = 2 * u[:number] - 1
    factors = [1 + strengths[i] * amount[i] for i in range(3)]
    for which in tf.unstack(tf.argsort(u[number : 2 * number])):
      branches = [
        functools.partial(randaug.blend, 0, image, factors[0]),
        functools.partial(_contrast, image, factors[1]),
        functools.partial(randaug.color, image, factors[2]),
      ]
      if hue:
        branches.append(functools.partial(_turned, image, hue * amount[3]))
      image = tf.switch_case(which, branches)
    return image

  draws = 2 * number
  if prob == 1:
    return randaug.on_bytes("color_jitter", change, draws, key, key_result)
  maybe = _with_probability(prob, change, draws)
  return randaug.on_bytes("color_jitter", maybe, draws + 1, key, key_result)


def _with_probability(
  prob: float, change: randaug.Operator, draws: int
) -> randaug.Operator:
  """Changes an image with a probability; an additional draw decides."""

  def maybe(image: Any, u: Any) -> Any:
    return tf.cond(u[draws] < prob, lambda: change(image, u), lambda: image)

  return maybe


def _contrast(image: Any, factor: Any) -> Any:
  grey = tf.cast(tf.image.rgb_to_grayscale(image), tf.float32)
  return randaug.blend(tf.reduce_mean(grey), image, factor)


def _turned(image: Any, turns: Any) -> Any:
  """Shifts the hue."""
  x = tf.image.adjust_hue(tf.cast(image, tf.float32) / 255, turns)
  # As torchvision: intervals of equal length for all 256 values.
  return tf.cast(tf.clip_by_value(x, 0, 1) * 255.999, tf.uint8)


@registry.register("random_grayscale")
def random_grayscale(
  prob: float = 0.2, key: str = "image", key_result: str | None = None
) -> Op:
  """Turns an image grey with a probability; the values are Pillow's.

  Args:
    prob: probability that an image is changed.
  """
  check_number("argument 'prob'", prob, least=0, most=1)

  def grey(image: Any, u: Any) -> Any:
    x = tf.cast(image, tf.int32)
    sums = 19595 * x[..., :1] + 38470 * x[..., 1:2] + 7471 * x[..., 2:]
    luma = tf.cast((sums + 32768) // 65536, tf.uint8)
    return tf.tile(luma, [1, 1, 3])

  change = _with_probability(prob, grey, 0)
  return randaug.on_bytes("random_grayscale", change, 1, key, key_result)


@registry.register("gaussian_blur")
def gaussian_blur(
  prob: float = 0.5,
  sigma: tuple[float, float] = (0.1, 2.0),
  kernel: int = 9,
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """Blurs an image with a probability, as torchvision's GaussianBlur.

  Args:
    prob: probability that an image is blurred.
    sigma: smallest and largest width of the Gaussian, in pixels.
    kernel: height and width of the window that it averages, odd.
  """
  check_number("argument 'prob'", prob, least=0, most=1)
  least, most = sigma
  check_number("argument 'sigma'", least, above=0, most=most)
  check_number("argument 'kernel'", kernel, least=1, whole=True)
  if kernel % 2 == 0:
    raise ConfigError(f"argument 'kernel' is {kernel}, expected an odd number.")

  def blurred(image: Any, u: Any) -> Any:
    width = least + (most - least) * u[0]
    return blur(image, width, kernel, "mirrored")

  change = _with_probability(prob, blurred, 1)
  return randaug.on_bytes("gaussian_blur", change, 2, key, key_result)


@registry.register("solarize")
def solarize(
  prob: float = 0.2,
  threshold: int = 128,
  key: str = "image",
  key_result: str | None = None,
) -> Op:
  """With a probability, inverts all bytes that are at least a threshold.

  Args:
    prob: probability that an image is changed.
    threshold: smallest value that is inverted.
  """
  check_number("argument 'prob'", prob, least=0, most=1)
  check_number("argument 'threshold'", threshold, least=0, most=256, whole=True)

  def inverted(image: Any, u: Any) -> Any:
    return tf.where(tf.cast(image, tf.int32) < threshold, image, 255 - image)

  change = _with_probability(prob, inverted, 0)
  return randaug.on_bytes("solarize", change, 1, key, key_result)


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
