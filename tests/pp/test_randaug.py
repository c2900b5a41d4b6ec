"""RandAugment: operations against Pillow or arithmetic, and their choice."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from bigtrain.config.errors import ConfigError
from bigtrain.pp import parse, randaug

tf = pytest.importorskip("tensorflow")

NAMES = [
  "AutoContrast Equalize Invert Rotate Posterize Solarize Color Contrast "
  "Brightness Sharpness ShearX ShearY TranslateX TranslateY Cutout SolarizeAdd"
][0].split()


def photo(h=40, w=56):
  """An image of smooth colours over the whole range, with some noise."""
  rng = np.random.default_rng(0)
  coarse = rng.integers(0, 256, (6, 8, 3), np.uint8)
  smooth = Image.fromarray(coarse).resize((w, h), Image.Resampling.BICUBIC)
  noisy = np.asarray(smooth).astype(int) + rng.integers(-9, 10, (h, w, 3))
  return np.clip(noisy, 10, 250).astype(np.uint8)


def apply(name, image, magnitude=9, sign=1.0, u=(0.5, 0.5)):
  run = randaug.operations(magnitude)[name]
  u = tf.constant(u, tf.float32)
  out = run(tf.constant(image), tf.constant(sign, tf.float32), u)
  assert out.dtype == tf.uint8 and out.shape == image.shape
  return out.numpy()


def distance(a, b):
  return np.abs(np.asarray(a).astype(int) - np.asarray(b)).max()


def test_the_sixteen_operations_are_in_order():
  assert list(randaug.operations(5)) == NAMES


@pytest.mark.parametrize("magnitude", [0, 3.3, 9, 10, 15, 20, 30])
def test_every_operation_runs_at_every_magnitude(magnitude):
  for name in NAMES:
    apply(name, photo(), magnitude)


@pytest.mark.parametrize(
  "name, expected",
  [
    ("AutoContrast", ImageOps.autocontrast),
    ("Equalize", ImageOps.equalize),
    ("Invert", ImageOps.invert),
    ("Posterize", lambda image: ImageOps.posterize(image, 3)),
    ("Solarize", lambda image: ImageOps.solarize(image, 230)),
    ("Color", lambda image: ImageEnhance.Color(image).enhance(1.72)),
    ("Brightness", lambda image: ImageEnhance.Brightness(image).enhance(1.72)),
    ("Sharpness", lambda image: ImageEnhance.Sharpness(image).enhance(1.72)),
  ],
)
def test_operations_match_pillow(name, expected):
  image = photo()
  result = apply(name, image, magnitude=9)
  assert distance(result, image) > 5  # The image changes.
  # Pillow rounds where these two truncate.
  allowed = 1 if name in ("Color", "Sharpness") else 0
  assert distance(result, expected(Image.fromarray(image))) <= allowed


def test_colour_of_weak_magnitude_is_nearly_grey():
  result = apply("Color", photo(), magnitude=0).astype(int)
  grey = np.asarray(Image.fromarray(photo()).convert("L"))[..., None]
  assert distance(result, grey + 0.1 * (photo() - grey.astype(int))) <= 2


def test_autocontrast_and_equalize_keep_uniform_images():
  image = np.full((8, 9, 3), (3, 200, 255), np.uint8)
  for name in ("AutoContrast", "Equalize"):
    np.testing.assert_array_equal(apply(name, image), image)


def test_solarize_wraps_its_threshold_and_solarize_add_clips():
  image = photo()
  np.testing.assert_array_equal(apply("Solarize", image, 10), 255 - image)
  np.testing.assert_array_equal(
    apply("Solarize", image, 15),
    np.asarray(ImageOps.solarize(Image.fromarray(image), 128)),
  )
  np.testing.assert_array_equal(
    apply("SolarizeAdd", image, 15),
    np.where(image < 128, np.minimum(image.astype(int) + 165, 255), image),
  )


def test_posterize_keeps_one_to_eight_bits():
  image = photo()
  np.testing.assert_array_equal(apply("Posterize", image, 0), image & 128)
  np.testing.assert_array_equal(apply("Posterize", image, 30), image)


def test_the_grey_of_contrast_depends_on_the_size():
  image = photo(40, 56)  # 2240 / 256 = 8
  expected = np.clip(8 + 1.72 * (image.astype(float) - 8), 0, 255)
  assert distance(apply("Contrast", image), expected.astype(int)) <= 1


@pytest.mark.parametrize("sign", [-1, 1])
def test_translations(sign):
  image = photo()
  shift = 20 * sign  # Magnitude 2, in pixels.
  padded = np.pad(image, [(20, 20), (20, 20), (0, 0)], constant_values=128)
  np.testing.assert_array_equal(
    apply("TranslateX", image, 2, sign),
    padded[20:60, 20 + shift : 76 + shift],
  )
  np.testing.assert_array_equal(
    apply("TranslateY", image, 2, sign),
    padded[20 + shift : 60 + shift, 20:76],
  )


@pytest.mark.parametrize("sign", [-1, 1])
def test_shears(sign):
  image = photo()
  h, w, _ = image.shape
  y, x = np.mgrid[:h, :w]
  slope = np.float32(0.27 * sign)

  def sampled(rows, columns):
    inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
    picked = image[rows.clip(0, h - 1), columns.clip(0, w - 1)]
    return np.where(inside[..., None], picked, 128)

  # A few pixels differ, because ties are rounded differently.
  for name, expected in (
    ("ShearX", sampled(y, np.round(x + slope * y).astype(int))),
    ("ShearY", sampled(np.round(y + slope * x).astype(int), x)),
  ):
    result = apply(name, image, 9, sign)
    assert (result != expected).any(-1).mean() < 0.02


def test_rotation_is_around_the_centre():
  image = photo(41, 41)
  for magnitude, sign in ((9, 1), (9, -1), (30, 1)):
    result = apply("Rotate", image, magnitude, sign)
    expected = Image.fromarray(image).rotate(
      3 * magnitude * sign, Image.Resampling.NEAREST, fillcolor=(128,) * 3
    )
    assert (distance_of_pixels(result, expected) > 12).mean() < 0.05
  # A right angle maps pixels to pixels exactly.
  np.testing.assert_array_equal(apply("Rotate", image, 30), np.rot90(image, 1))


def distance_of_pixels(a, b):
  return np.abs(a.astype(int) - np.asarray(b)).max(-1)


def test_cutout_is_a_clipped_square_around_a_pixel():
  image = photo(40, 56)
  expected = image.copy()
  expected[20 - 8 : 20 + 8, 14 - 8 : 14 + 8] = 128
  result = apply("Cutout", image, 2, u=(0.5, 0.25))
  np.testing.assert_array_equal(result, expected)
  expected = image.copy()
  expected[:8, 55 - 8 :] = 128
  result = apply("Cutout", image, 2, u=(0, 0.999))
  np.testing.assert_array_equal(result, expected)


def test_the_first_number_of_a_layer_chooses_the_operation():
  (op,) = parse.parse("randaug(1, 9)")
  assert op.draws == 4 and op.tensorflow
  image = photo()
  for i, name in enumerate(NAMES):
    for sign, u_sign in ((-1.0, 0.2), (1.0, 0.7)):
      u = tf.constant([(i + 0.5) / 16, u_sign, 0.1, 0.6])
      result = op.fn({"image": tf.constant(image)}, u)["image"]
      np.testing.assert_array_equal(
        result, apply(name, image, 9, sign, (0.1, 0.6)), err_msg=name
      )


def test_layers_are_applied_in_sequence():
  (two,) = parse.parse("randaug(2, 9)")
  (one,) = parse.parse("randaug(1, 9)")
  u = tf.constant(np.random.default_rng(0).random((20, 8)), tf.float32)
  for u_both in u:
    first = one.fn({"image": tf.constant(photo())}, u_both[:4])
    np.testing.assert_array_equal(
      two.fn({"image": tf.constant(photo())}, u_both)["image"],
      one.fn(first, u_both[4:])["image"],
    )


def test_images_of_another_type_are_refused():
  (op,) = parse.parse("randaug")
  u = tf.zeros([8])
  for image in (tf.zeros([4, 4, 3]), tf.zeros([4, 4, 1], tf.uint8)):
    with pytest.raises(ConfigError, match="expects a uint8 RGB image, got"):
      op.fn({"image": image}, u)
