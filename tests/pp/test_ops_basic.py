"""Basic ops: known values, and equal results on arrays, batches and tensors."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import parse, registry

NO_DRAWS = np.zeros(0, np.float32)


def run(spec, image, u=NO_DRAWS, key="image"):
  """The feature after the op, on numpy."""
  op = registry.compose(parse.parse(spec))
  return op.fn({key: image}, np.asarray(u, np.float32))[key]


def graph(spec, features, u):
  """All features after the op, in a tf.data graph with unknown sizes."""
  import tensorflow as tf

  op = registry.compose(parse.parse(spec))
  shapes = {k: (None,) * np.ndim(v) for k, v in features.items()}
  for name, value in features.items():
    if np.ndim(value) == 3:
      shapes[name] = (None, None, value.shape[-1])
  dataset = tf.data.Dataset.from_generator(
    lambda: iter([(features, np.asarray(u, np.float32))]),
    output_signature=(
      {
        name: tf.TensorSpec(shapes[name], tf.as_dtype(np.asarray(v).dtype))
        for name, v in features.items()
      },
      tf.TensorSpec([op.draws], tf.float32),
    ),
  )
  (out,) = dataset.map(
    tf.autograph.experimental.do_not_convert(op.fn)
  ).as_numpy_iterator()
  return out


def picture(h, w, c=3):
  return np.arange(h * w * c, dtype=np.uint8).reshape(h, w, c)


def assert_same(a, b):
  assert sorted(a) == sorted(b)
  for name in a:
    assert np.asarray(a[name]).dtype == np.asarray(b[name]).dtype, name
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(
  "spec",
  [
    "value_range",
    "value_range(0, 1)",
    "value_range(-2, 3, 7, 91, clip=True)",
    "value_range(0, 1, 0, 16, key='image', key_result='scaled')",
    "vgg_value_range",
    "flip_lr",
    "central_crop",
    "central_crop(3)",
    "central_crop((2, 5))",
    "random_crop(3)",
    "random_crop((2, 5))",
    "random_crop(6, pad=1)",
    "random_crop((5, 6), pad=3, pad_mode='edge')",
    "random_crop((5, 6), pad=3, pad_mode='reflect')",
    "reshape((-1, 2))",
    "cast('float32')|cast('int32')",
    "onehot(12, key='label', key_result='labels')",
    "onehot(12, key='many', on=0.9, off=0.1)",
    "onehot(12, key='many', multi=False)",
    "lookup({7: 3, 2: 1, 9: 0}, key='label')",
    "keep('image', 'label')",
    "drop('many')",
    "copy('label', 'again')",
    "random_background(200)",
    "copy('image', 'b')|flip_lr(key='b')|stack('image','b',key_result='both')",
    "flip_lr|random_crop(3, pad=1)|value_range|drop('many', 'label')",
  ],
)
def test_numpy_batches_and_tensors_agree(spec):
  rng = np.random.default_rng(0)
  op = registry.compose(parse.parse(spec))
  assert op.batched and not op.tensorflow
  size = 12
  batch = {
    "image": rng.integers(0, 256, (size, 5, 6, 3), np.uint8),
    "label": rng.choice([7, 2, 9], size),
    "many": rng.integers(-1, 10, (size, 4)),
  }
  u = rng.random((size, op.draws), np.float32)
  kept = {name: value.copy() for name, value in batch.items()}
  examples = [
    op.fn({k: v[i] for k, v in batch.items()}, u[i]) for i in range(size)
  ]
  stacked = {k: np.stack([e[k] for e in examples]) for k in examples[0]}
  assert_same(op.fn(batch, u), stacked)
  assert_same(batch, kept)  # No op writes in place.
  for i in range(0, size, 4):
    example = {k: v[i] for k, v in batch.items()}
    assert_same(graph(spec, example, u[i]), examples[i])


def test_value_range_gives_both_ends_exactly():
  byte = np.array([0, 255], np.uint8)
  for vmin, vmax in [(-1, 1), (0, 1), (-0.5, 0.5), (0, 255)]:
    out = run(f"value_range({vmin}, {vmax})", byte)
    assert out.dtype == np.float32
    assert out.tolist() == [vmin, vmax]


def test_value_range_is_linear_and_clips_on_request():
  x = np.array([-8.0, 0, 4, 16, 24])
  assert run("value_range(-1, 1, 0, 16)", x).tolist() == [-2, -1, -0.5, 1, 2]
  spec = "value_range(-1, 1, 0, 16, clip=True)"
  assert run(spec, x).tolist() == [-1, -1, -0.5, 1, 1]


def test_vgg_value_range_uses_the_statistics_of_imagenet():
  image = np.full((2, 2, 3), 255, np.uint8)
  expected = [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]
  out = run("vgg_value_range", image)
  np.testing.assert_allclose(out[1, 0], expected, rtol=1e-6)
  spec = "vgg_value_range(mean=(5,), std=(10,))"
  assert run(spec, np.full((1, 1, 1), 25)).tolist() == [[[2]]]
  with pytest.raises(ConfigError, match="3 means, but 'image' has 1 channels"):
    run("vgg_value_range", np.zeros((2, 2, 1)))


def test_flip_lr_mirrors_for_half_of_the_draws():
  image = picture(2, 3)
  np.testing.assert_array_equal(run("flip_lr", image, [0.49]), image[:, ::-1])
  np.testing.assert_array_equal(run("flip_lr", image, [0.5]), image)


def test_central_crop():
  image = picture(5, 8)
  np.testing.assert_array_equal(run("central_crop(3)", image), image[1:4, 2:5])
  np.testing.assert_array_equal(
    run("central_crop((4, 3))", image), image[:4, 2:5]
  )
  np.testing.assert_array_equal(run("central_crop", image), image[:, 1:6])


@hypothesis.settings(deadline=None)
@hypothesis.given(
  st.integers(1, 9),
  st.integers(1, 9),
  st.integers(0, 4),
  st.sampled_from(["constant", "edge", "reflect"]),
  st.tuples(*[st.floats(0, 1, exclude_max=True, width=32)] * 2),
  st.data(),
)
def test_random_crop_is_a_window_of_numpys_pad(h, w, pad, mode, u, data):
  if mode == "reflect":
    hypothesis.assume(pad < min(h, w))
  ch = data.draw(st.integers(1, h + 2 * pad))
  cw = data.draw(st.integers(1, w + 2 * pad))
  image = picture(h, w) + np.uint8(1)
  padded = np.pad(image, [(pad, pad), (pad, pad), (0, 0)], mode)
  top = int(np.float32(u[0]) * np.float32(h + 2 * pad - ch + 1))
  left = int(np.float32(u[1]) * np.float32(w + 2 * pad - cw + 1))
  np.testing.assert_array_equal(
    run(f"random_crop(({ch}, {cw}), {pad}, {mode!r})", image, u),
    padded[top : top + ch, left : left + cw],
  )


def test_random_crop_reaches_all_positions_equally():
  image = np.arange(30).reshape(5, 6, 1)
  u = np.random.default_rng(0).random((12000, 2), np.float32)
  op = parse.parse("random_crop((3, 2))")[0]
  crops = op.fn({"image": np.broadcast_to(image, (12000, 5, 6, 1))}, u)
  corners, counts = np.unique(crops["image"][:, 0, 0, 0], return_counts=True)
  expected = [6 * y + x for y in range(3) for x in range(5)]
  assert corners.tolist() == expected
  assert abs(counts / 800 - 1).max() < 0.15  # Five standard deviations.


def test_the_largest_draw_stays_inside_the_image():
  image = picture(7, 9)
  top = np.nextafter(np.float32(1), np.float32(0))
  np.testing.assert_array_equal(
    run("random_crop(2)", image, [top, top]), image[5:, 7:]
  )
  wide = np.broadcast_to(np.uint8(0), (1, 1 << 20, 1))
  assert run("random_crop(1)", wide, [top, top]).shape == (1, 1, 1)


@pytest.mark.parametrize(
  "spec, what",
  [
    ("random_crop(6)", "random_crop cannot cut 6x6"),
    ("central_crop((3, 7))", "central_crop cannot cut 3x7"),
    ("random_crop(5, 5, 'reflect')", "random_crop cannot reflect 5 pixels"),
  ],
)
def test_an_image_that_is_too_small_is_an_error(spec, what):
  import tensorflow as tf

  image = picture(5, 6)
  u = np.zeros(parse.parse(spec)[0].draws)
  with pytest.raises(DataError, match=f"{what}.* height and width: 5, 6"):
    run(spec, image, u)
  with pytest.raises(tf.errors.InvalidArgumentError) as e:
    graph(spec, {"image": image}, u)
  assert what in str(e.value) and "[5] [6]" in str(e.value)


@pytest.mark.parametrize(
  "spec", ["flip_lr", "central_crop(2)", "random_crop(2)", "vgg_value_range"]
)
def test_features_that_are_not_images_are_refused(spec):
  u = np.zeros(parse.parse(spec)[0].draws)
  with pytest.raises(ConfigError, match=r"\[height, width, channels\], got sh"):
    run(spec, np.zeros((8, 8)), u)
  with pytest.raises(ConfigError, match="expects an image of numbers"):
    run(spec, b"\xff\xd8\xff", u)


def test_value_range_of_undecoded_bytes_is_refused_while_tracing():
  with pytest.raises(ConfigError, match="after 'decode'"):
    run("value_range", b"\xff\xd8\xff")
  with pytest.raises(ConfigError, match="after 'decode'"):
    graph("value_range", {"image": b"\xff\xd8\xff"}, [])


def test_reshape():
  flat = np.arange(12)
  assert run("reshape((2, -1, 1))", flat).shape == (2, 6, 1)
  with pytest.raises(ConfigError, match=r"'image' of shape \(12,\) into \(5,"):
    run("reshape((5, 2))", flat)


def test_cast():
  assert run("cast('int32')", np.array([1.9])).tolist() == [1]
  assert run("cast('float16')", np.array([1])).dtype == np.float16
  with pytest.raises(ConfigError, match="'cast' expects numbers"):
    run("cast('int32')", np.array("3"))


def test_a_random_background_is_uniform_and_behind_the_image():
  (op,) = parse.parse("random_background(16)")
  rng = np.random.default_rng(0)
  black = np.zeros((500, 8, 8, 1), np.uint8)
  u = rng.random((500, op.draws), np.float32)
  noise = op.fn({"image": black}, u)["image"]
  counts, _ = np.histogram(noise, bins=16, range=(0, 16))
  # Twice the standard deviation of a count is 87.
  np.testing.assert_allclose(counts, 2000, atol=200)
  pixels = noise.reshape(500, 64)
  correlation = np.corrcoef(pixels.T) - np.eye(64)
  assert abs(correlation).max() < 0.25 and abs(correlation.mean()) < 0.01
  digit = black + np.uint8(9)
  np.testing.assert_array_equal(
    op.fn({"image": digit}, u)["image"], np.maximum(noise, 9)
  )


def test_keep_drop_and_copy():
  features = {"a": 1, "b": b"x", "c": "y"}

  def out(spec):
    return registry.compose(parse.parse(spec)).fn(features, NO_DRAWS)

  assert out("keep('a', 'c')") == {"a": 1, "c": "y"}
  assert out("drop('a', 'c')") == {"b": b"x"}
  assert out("copy('b', 'd')") == {**features, "d": b"x"}
  stacked = out("copy('a', 'd')|stack('a', 'd', key_result='e')")
  assert stacked.pop("e").tolist() == [1, 1]
  assert stacked == {"b": b"x", "c": "y"}
  for spec in ("keep('a', 'd')", "drop('d')", "copy('d', 'a')"):
    with pytest.raises(ConfigError, match="'d'; there are: a, b, c"):
      out(spec)
