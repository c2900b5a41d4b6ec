"""Augmentations against torchvision, Pillow and timm, and their draws."""

import importlib.util
import pathlib

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.pp import ops_augment, parse

tf = pytest.importorskip("tensorflow")

_PATH = pathlib.Path(__file__).parents[1] / "golden" / "make_augment.py"
_SPEC = importlib.util.spec_from_file_location("make_augment", _PATH)
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)
EXPECTED = dict(np.load(golden.GOLDEN / "augment.npz"))
IMAGE = golden.picture()


def apply(spec, u, image=IMAGE):
  (op,) = parse.parse(spec)
  u = np.asarray(u, np.float32)
  assert u.shape == (op.draws,)
  out = op.fn({"image": tf.constant(image)}, tf.constant(u))["image"].numpy()
  assert out.dtype == image.dtype and out.shape == image.shape
  return out


def assert_within(a, b, most):
  assert np.abs(a.astype(float) - b).max() <= most


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("factor", golden.FACTORS)
def test_colours_equal_torchvision(k, factor):
  name = ("brightness", "contrast", "saturation")[k]
  u = [0.5, 0.5, 0.5, 0.3, 0.1, 0.2]
  u[k] = (factor - 1) / 0.5 / 2 + 0.5
  out = apply("color_jitter(0.5)", u)
  assert_within(out, EXPECTED[f"{name}/{factor}"], 1)


def test_the_order_of_colours_is_drawn():
  factors = [0.9, 0.1, 0.9]
  orders = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.3, 0.1)]
  outs = [apply("color_jitter()", [*factors, *order]) for order in orders]
  assert not (outs[0] == outs[1]).all() and not (outs[1] == outs[2]).all()


@pytest.mark.parametrize("sigma", golden.SIGMAS)
def test_the_blur_equals_torchvision(sigma):
  out = ops_augment.blur(tf.constant(IMAGE), sigma).numpy()
  inner = (slice(6, -6), slice(6, -6))  # Edges are mirrored there.
  assert_within(out[inner], EXPECTED[f"blur/{sigma}"][inner], 0.51)
  # Pillow approximates the Gaussian, and continues edges as we do.
  assert_within(out, EXPECTED[f"pillow_blur/{sigma}"], 6)


@pytest.mark.parametrize("turns", golden.TURNS)
def test_the_hue_equals_torchvision(turns):
  rest = [0.5, 0.5, 0.5]
  u = [*rest, turns / 0.5 / 2 + 0.5, 0.1, 0.2, 0.3, 0.4]
  out = apply("color_jitter(0.4,hue=0.5)", u)
  assert_within(out, EXPECTED[f"hue/{turns}"], 1)


def test_each_colour_has_its_strength():
  """The strengths of DINO, at their largest; the hue has its own draw."""
  spec = "color_jitter(0.4,saturation=0.2,hue=0.1,prob=0.8)"
  order, most = [0.1, 0.2, 0.3, 0.4], 1 - 1e-7
  for k, factor in enumerate([1.4, 1.4, 1.2]):
    u = [0.5, 0.5, 0.5, 0.5, *order, 0.79]
    u[k] = most
    alone = apply(
      "color_jitter(0.5)", [*u[:k], (factor - 0.5), *u[k + 1 : 3], *order[:3]]
    )
    assert_within(apply(spec, u), alone, 1)
    np.testing.assert_array_equal(apply(spec, [*u[:-1], 0.81]), IMAGE)
  u = [0.5, 0.5, 0.5, most, *order, 0.0]
  assert_within(apply(spec, u), EXPECTED["hue/0.1"], 1)


@pytest.mark.parametrize("sigma", golden.SIGMAS)
def test_a_random_blur_equals_torchvision(sigma):
  spec = f"gaussian_blur(0.3,({sigma / 2},{sigma * 1.5}),9)"
  out = apply(spec, [0.5, 0.29])
  expected = EXPECTED[f"mirrored_blur/{sigma}"]
  # Few numbers are so near to a half that they are rounded otherwise.
  assert_within(out, expected, 1)
  assert (out == expected).mean() > 0.99
  np.testing.assert_array_equal(apply(spec, [0.5, 0.31]), IMAGE)


def test_random_grayscale_is_pillows():
  grey = apply("random_grayscale(0.2)", [0.19])
  np.testing.assert_array_equal(grey, np.stack([EXPECTED["grey"]] * 3, -1))
  np.testing.assert_array_equal(apply("random_grayscale()", [0.21]), IMAGE)


def test_solarize_is_pillows():
  out = apply("solarize(0.2)", [0.19])
  np.testing.assert_array_equal(out, EXPECTED["solarize"])
  np.testing.assert_array_equal(apply("solarize(0.2)", [0.21]), IMAGE)
  np.testing.assert_array_equal(apply("solarize(1,0)", [0.5]), 255 - IMAGE)


def test_three_augment_draws_one_of_three():
  grey = apply("three_augment()", [0.1, 0])
  assert_within(grey, EXPECTED["grey"][..., None], 1)
  solarized = apply("three_augment()", [0.5, 0])
  np.testing.assert_array_equal(solarized, EXPECTED["solarize"])
  blurred = apply("three_augment()", [0.9, 0.9 / 1.9])
  assert_within(blurred, ops_augment.blur(tf.constant(IMAGE), 1.0).numpy(), 1)


def test_autoaugments_policies_are_timms():
  words = ops_augment._IMAGENET.read_text().split()
  ours = [words[i : i + 3] for i in range(0, len(words), 3)]
  pairs = [ours[i : i + 2] for i in range(0, len(ours), 2)]
  theirs = [str(x).replace("YRel", "Y").split() for x in EXPECTED["policies"]]
  theirs = [[n, str(round(float(p) * 10)), m] for n, p, m in theirs]
  theirs = [theirs[i : i + 2] for i in range(0, len(theirs), 2)]
  assert len(pairs) == 25 and sorted(pairs) == sorted(theirs)


def test_autoaugment_applies_each_operation_with_its_probability():
  from bigtrain.pp import randaug

  # The first policy: Equalize by 0.8, then ShearY by 0.8.
  first = [0.0, 0, 0, 0]
  none = [0.9, 0.9, 0.5, 0.5]
  both = apply("autoaugment()", [*first, 0.1, 0.9, 0, 0, 0.1, 0.9, 0, 0])
  half = apply("autoaugment()", [*first, 0.1, 0.9, 0, 0, *none])
  np.testing.assert_array_equal(
    apply("autoaugment()", [*first, *none, *none]), IMAGE
  )
  equal = randaug.equalize(tf.constant(IMAGE))
  np.testing.assert_array_equal(half, equal)
  sheared = randaug.operations(4)["ShearY"](equal, 1.0, None)
  np.testing.assert_array_equal(both, sheared)


def test_autoaugment_moves_by_the_authors_pixels():
  """By 250 times a tenth of the magnitude; RandAugment has 100 there."""
  image = np.arange(300 * 300 * 3, dtype=np.uint32).astype(np.uint8)
  image = image.reshape(300, 300, 3)
  # Policy 15 begins with Rotate of magnitude 7, by 21 degrees, always.
  from bigtrain.pp import randaug

  u = [15.5 / 25, 0, 0, 0, 0.1, 0.9, 0, 0, 0.1, 0.9, 0, 0]
  moved = apply("autoaugment()", u, image)
  turned = randaug.rotate(tf.constant(image), 21.0)
  np.testing.assert_array_equal(
    moved, randaug.translate(turned, 1.0, 225.0, axis=0)
  )


def test_every_policy_runs():
  rng = np.random.default_rng(0)
  for k in range(25):
    u = rng.random(12) * np.where(np.arange(12) % 4 == 0, 0.3, 1)
    u[0] = (k + 0.5) / 25  # The number of the policy.
    out = np.asarray(apply("autoaugment()", u))
    assert (out.shape, out.dtype) == (IMAGE.shape, IMAGE.dtype)


def boxes(number):
  rng = np.random.default_rng(0)
  image = np.ones((40, 50, 3), np.float32)
  for _ in range(number):
    out = apply("random_erasing(1.0)", rng.random(41), image)
    rows, columns = np.nonzero((out != 1).any(-1))
    box = out[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    yield box


def test_erased_boxes_have_the_published_areas_and_ratios():
  found = list(boxes(60))
  assert all((box == 0).all() for box in found)
  shares = np.array([box[..., 0].size / 2000 for box in found])
  ratios = np.array([box.shape[0] / box.shape[1] for box in found])
  assert 0.015 < shares.min() and shares.max() < 0.35
  # The ten tries leave out boxes that are too long.
  assert shares.mean() == pytest.approx((0.02 + 0.33) / 2, abs=0.04)
  assert 0.25 < ratios.min() and ratios.max() < 4
  assert abs(np.log(ratios).mean()) < 0.3


def test_the_probability_of_a_box_holds():
  rng = np.random.default_rng(1)
  image = np.ones((8, 8, 3), np.float32)
  erased = [apply("random_erasing()", rng.random(41), image) for _ in range(80)]
  assert np.mean([(x != 1).any() for x in erased]) == pytest.approx(
    0.25, abs=0.15
  )


@pytest.mark.parametrize(
  "spec, message",
  [
    ("color_jitter(2.0)", "argument 'strength'"),
    ("color_jitter(0.3,hue=0.6)", "argument 'hue'"),
    ("color_jitter(0.3,saturation=-1)", "argument 'saturation'"),
    ("random_erasing(2)", "argument 'prob'"),
    ("gaussian_blur(0.5,(2.0,0.1))", "argument 'sigma'"),
    ("gaussian_blur(0.5,kernel=8)", "argument 'kernel' is 8, expected an odd"),
    ("solarize(2)", "argument 'prob'"),
    ("solarize(0.2,300)", "argument 'threshold'"),
    ("random_grayscale(-1)", "argument 'prob'"),
  ],
)
def test_mistakes_are_told(spec, message):
  with pytest.raises(ConfigError, match=message):
    parse.parse(spec)


@pytest.mark.parametrize(
  "name",
  [
    "autoaugment",
    "three_augment",
    "color_jitter",
    "random_grayscale",
    "gaussian_blur",
    "solarize",
  ],
)
def test_images_of_floats_are_refused(name):
  (op,) = parse.parse(f"{name}()")
  with pytest.raises(ConfigError, match=f"{name!r} expects a uint8 RGB image"):
    op.fn({"image": np.zeros((8, 8, 3), np.float32)}, np.zeros(op.draws))
