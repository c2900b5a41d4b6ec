"""Image ops, against Pillow and against arithmetic."""

import io
import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image
from support import cases

from bigtrain.config.errors import ConfigError
from bigtrain.pp import ops_image, parse, registry

tf = pytest.importorskip("tensorflow")
uniform = st.floats(0, 1, exclude_max=True, width=32)


def photo(h, w, mode="RGB", seed=0):
  """A PIL image with smooth colours and some noise."""
  rng = np.random.default_rng(seed)
  coarse = rng.integers(0, 256, (h // 8 + 2, w // 8 + 2, 3), np.uint8)
  smooth = Image.fromarray(coarse).resize((w, h), Image.Resampling.BICUBIC)
  noisy = np.asarray(smooth).astype(int) + rng.integers(-20, 20, (h, w, 3))
  return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).convert(mode)


def encode(image, kind="JPEG", **options):
  out = io.BytesIO()
  image.save(out, kind, **options)
  return out.getvalue()


def run(spec, image, u=()):
  """The feature "image" after the ops."""
  op = registry.compose(parse.parse(spec))
  image = tf.constant(image)
  return op.fn({"image": image}, tf.constant(u, tf.float32))["image"].numpy()


def exif(orientation):
  tags = Image.Exif()
  tags[0x0112] = orientation
  return tags.tobytes()


JPEGS = {
  "4:4:4": encode(photo(61, 83), subsampling=0),
  "4:2:2": encode(photo(61, 83), subsampling=1),
  "4:2:0": encode(photo(61, 83), subsampling=2),
  "4:2:0, large": encode(photo(375, 500), subsampling=2),
  "progressive": encode(photo(61, 83), progressive=True),
  "grey": encode(photo(61, 83, "L")),
  "CMYK": encode(photo(61, 83, "CMYK")),
  "turned by EXIF": encode(photo(61, 83), exif=exif(6)),
}
OTHERS = {
  "PNG": encode(photo(40, 50), "PNG"),
  "grey PNG": encode(photo(40, 50, "L"), "PNG"),
  "palette PNG": encode(photo(40, 50, "P"), "PNG"),
  "transparent PNG": encode(photo(40, 50, "RGBA"), "PNG"),
  "GIF": encode(photo(40, 50, "P"), "GIF"),
  "BMP": encode(photo(40, 50), "BMP"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_decode_of_lossless_formats_is_exact(kind):
  out = run("decode", OTHERS[kind])
  expected = np.asarray(Image.open(io.BytesIO(OTHERS[kind])).convert("RGB"))
  assert out.dtype == np.uint8
  np.testing.assert_array_equal(out, expected)


def transparent(mode, kind, **options):
  """A file whose alphas are random, and its pixels on white by Pillow."""
  image = photo(40, 50, "RGBA")
  alphas = np.random.default_rng(0).integers(0, 256, (40, 50), np.uint8)
  image.putalpha(Image.fromarray(alphas))
  encoded = encode(image.convert(mode), kind, **options)
  stored = Image.open(io.BytesIO(encoded)).convert("RGBA")
  white = Image.new("RGBA", stored.size, "white")
  pixels = np.asarray(Image.alpha_composite(white, stored).convert("RGB"))
  return encoded, pixels


@pytest.mark.parametrize(
  "file",
  [
    transparent("RGBA", "PNG"),
    transparent("LA", "PNG"),
    transparent("P", "PNG", transparency=3),
    transparent("RGBA", "WebP", lossless=True),
    transparent("RGB", "WebP", lossless=True),
    transparent("RGB", "PNG"),
    transparent("P", "GIF"),
  ],
  ids=[
    *("PNG", "grey PNG", "palette PNG", "WebP"),
    *("opaque WebP", "opaque PNG", "opaque GIF"),
  ],
)
def test_decode_on_a_background(file):
  encoded, expected = file
  np.testing.assert_array_equal(
    run("decode(background=255)", encoded), expected
  )


def test_decode_without_a_background_drops_transparency():
  encoded, expected = transparent("RGBA", "PNG")
  assert (run("decode", encoded) != expected).any()


@pytest.mark.parametrize("kind", JPEGS)
def test_decode_of_jpegs(kind):
  expected = np.asarray(Image.open(io.BytesIO(JPEGS[kind])).convert("RGB"))
  np.testing.assert_array_equal(run("decode", JPEGS[kind]), expected)
  fast = run("decode(precise=False)", JPEGS[kind]).astype(int)
  assert 0 < abs(fast - expected).mean() < 1.5
  assert abs(fast - expected).max() <= 6


def test_fast_decoding_of_photographs_differs_as_documented():
  """Two photographs of scikit-learn; docs/truth.md has these numbers."""
  datasets = pytest.importorskip("sklearn.datasets")
  folder = pathlib.Path(datasets.__file__).parent / "images"
  means, largest = [], 0
  for path in sorted(folder.glob("*.jpg")):
    encoded = path.read_bytes()
    expected = np.asarray(Image.open(path).convert("RGB")).astype(int)
    np.testing.assert_array_equal(run("decode", encoded), expected)
    distance = abs(run("decode(precise=False)", encoded) - expected)
    means.append(distance.mean())
    largest = max(largest, distance.max())
  assert 1.0 <= min(means) and max(means) <= 1.35 and largest == 18
  np.testing.assert_allclose(sorted(means), [1.0, 1.3], atol=0.05)


def test_fast_decoding_supports_other_formats():
  np.testing.assert_array_equal(
    run("decode(precise=False)", OTHERS["GIF"]), run("decode", OTHERS["GIF"])
  )


def test_decode_gives_the_first_frame_of_an_animation():
  frames = [photo(20, 30, "P", seed) for seed in range(3)]
  gif = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
  np.testing.assert_array_equal(
    run("decode", gif), np.asarray(Image.open(io.BytesIO(gif)).convert("RGB"))
  )


def test_decode_to_grey():
  out = run("decode(channels=1)", OTHERS["grey PNG"])
  assert out.shape == (40, 50, 1)
  np.testing.assert_array_equal(out[..., 0], np.asarray(photo(40, 50, "L")))


def test_decode_refuses_anything_but_an_encoded_image():
  for data in (b"", b"no image", JPEGS["4:2:0"][:500]):
    for spec in ("decode", "decode|central_crop(8)"):
      with pytest.raises(tf.errors.InvalidArgumentError):
        run(spec, data)
  for spec in ("decode", "decode|central_crop(8)"):
    with pytest.raises(ConfigError, match="'decode' expects encoded bytes"):
      run(spec, np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="bytes of one image, got shape"):
      run(spec, [b"x", b"y"])


@pytest.mark.parametrize("kind", [*JPEGS, *OTHERS])
@pytest.mark.parametrize(
  "crop",
  [
    "inception_crop",
    "inception_crop(32)",
    "inception_crop((17, 40), 20, 60, antialias=True)",
    "random_crop(32)",
    "random_crop((40, 3))",
    "central_crop",
    "central_crop((9, 40))",
  ],
)
@pytest.mark.parametrize(
  "decode", cases.quick(["decode", "decode(precise=False)"], "decode")
)
def test_decoding_a_crop_equals_cropping_the_decoded_image(decode, crop, kind):
  data = {**JPEGS, **OTHERS}[kind]
  assert len(parse.parse(f"{decode}|{crop}")) == 1
  draws = parse.parse(crop)[0].draws
  rng = np.random.default_rng(0)
  for u in rng.random((5 if draws else 1, draws), np.float32):
    np.testing.assert_array_equal(
      run(f"{decode}|{crop}", data, u), run(crop, run(decode, data), u)
    )


@pytest.mark.parametrize("kind", ["4:2:2", "4:2:0"])
def test_decoding_a_crop_is_exact_at_every_column(kind):
  whole = run("decode", JPEGS[kind])
  for left in range(83 - 20 + 1):  # Some start at a block.
    u = [0.5, (left + 0.5) / (83 - 20 + 1)]
    np.testing.assert_array_equal(
      run("decode|random_crop(20)", JPEGS[kind], u),
      whole[21:41, left : left + 20],
    )


def test_only_the_window_of_a_jpeg_is_decoded(monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError("decoded the whole image")

  monkeypatch.setattr(tf.io, "decode_image", refuse)
  assert run("decode|central_crop(8)", JPEGS["4:2:0"]).shape == (8, 8, 3)
  with pytest.raises(AssertionError):
    run("decode|central_crop(8)", OTHERS["PNG"])


def test_decoding_a_crop_larger_than_the_image_is_an_error():
  with pytest.raises(tf.errors.InvalidArgumentError, match="cannot cut 64x64"):
    run("decode|random_crop(64)", JPEGS["4:2:0"], [0, 0])


@pytest.mark.parametrize(
  "method, filter",
  [
    ("bilinear", Image.Resampling.BILINEAR),
    ("bicubic", Image.Resampling.BICUBIC),
    ("lanczos3", Image.Resampling.LANCZOS),
  ],
)
@pytest.mark.parametrize("size", [(24, 40), (80, 90)])
def test_resize_with_antialias_matches_pillow(method, filter, size):
  image = np.asarray(photo(48, 64), np.float32)
  spec = f"resize({size}, {method!r}, antialias=True)"
  channels = [Image.fromarray(c) for c in image.transpose(2, 0, 1)]
  expected = np.stack([c.resize(size[::-1], filter) for c in channels], -1)
  np.testing.assert_allclose(run(spec, image), expected, atol=2e-3)
  out = run(spec, image.astype(np.uint8))
  assert out.dtype == np.uint8
  assert abs(out - np.clip(expected, 0, 255)).max() <= 0.502


def test_resize_without_antialias_interpolates_the_four_nearest():
  image = np.asarray(photo(48, 64))
  x = image.astype(float)
  expected = (x[1::4, 1::4] + x[1::4, 2::4] + x[2::4, 1::4] + x[2::4, 2::4]) / 4
  out = run("resize((12, 16))", image)
  assert abs(out - expected).max() <= 0.5


def test_resize_by_area_and_nearest():
  image = np.asarray(photo(48, 64))
  blocks = image.reshape(12, 4, 16, 4, 3).astype(float).mean((1, 3))
  assert abs(run("resize((12, 16), 'area')", image) - blocks).max() <= 0.5
  np.testing.assert_array_equal(
    run("resize((96, 128), 'nearest')", image),
    image.repeat(2, 0).repeat(2, 1),
  )
  assert run("resize(5, 'nearest')", image).shape == (5, 5, 3)


@pytest.mark.parametrize("method", ["bicubic", "lanczos3", "lanczos5"])
def test_resize_of_bytes_does_not_wrap_around(method):
  # Few pixels, because the vectorized conversion to bytes clips by itself.
  row = np.uint8([0, 0, 0, 0, 255, 255, 255, 255]).reshape(1, 8, 1)
  spec = f"resize((1, 15), {method!r})"
  exact = run(spec, row.astype(np.float32))
  assert exact.min() < -1 and exact.max() > 256
  np.testing.assert_array_equal(run(spec, row), exact.clip(0, 255).round())


@pytest.mark.parametrize("op", ["resize((12, 17)", "resize_small(12"])
def test_integers_are_cut_off_as_in_big_vision(op):
  image = np.asarray(photo(48, 64))
  spec = f"{op}, method='bicubic', antialias=True"
  exact = run(f"{spec})", image.astype(np.float32))
  cut = run(f"{spec}, cut_off=True)", image)
  np.testing.assert_array_equal(cut, exact.clip(0, 255).astype(np.uint8))
  darker = run(f"{spec})", image).astype(float).mean() - cut.mean()
  assert 0.4 < darker < 0.6


def test_resize_keeps_floats():
  image = np.float32([[[0], [1]], [[0], [1]]])
  out = run("resize((2, 4))", image)
  assert out.dtype == np.float32
  np.testing.assert_allclose(out[0, :, 0], [0, 0.25, 0.75, 1])
  same = np.asarray(photo(8, 8))
  np.testing.assert_array_equal(run("resize(8)", same), same)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_resize_small_keeps_the_ratio(h, w, size):
  out = run(f"resize_small({size})", np.zeros((h, w, 3), np.uint8))
  assert min(out.shape[:2]) == size
  assert abs(out.shape[0] - h * size / min(h, w)) <= 0.5
  assert abs(out.shape[1] - w * size / min(h, w)) <= 0.5


def coordinates(h, w):
  """An image whose pixels are their own coordinates."""
  return np.stack(np.mgrid[:h, :w], -1).astype(np.int32)


def windows(spec, h, w, us):
  """(top, left, height, width) of the crop for each of `us`."""
  op = registry.compose(parse.parse(spec))
  image = tf.constant(coordinates(h, w))

  @tf.function(autograph=False)
  def window(u):
    crop = op.fn({"image": image}, u)["image"]
    return tf.concat([crop[0, 0], tf.shape(crop)[:2]], 0)

  dataset = tf.data.Dataset.from_tensor_slices(tf.constant(us, tf.float32))
  return np.stack(list(dataset.map(window).as_numpy_iterator()))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  st.integers(16, 300),
  st.integers(16, 300),
  st.floats(4, 60),
  st.floats(1.3, 1.6),
  st.tuples(uniform, uniform),
)
def test_inception_windows_keep_their_bounds(h, w, area_min, span, u):
  area_max = min(area_min * span, 100)
  spec = f"inception_crop(None, {area_min}, {area_max}, 0.7, 1.4)"
  crop = run(spec, coordinates(h, w), u)
  ch, cw = crop.shape[:2]
  top, left = crop[0, 0]
  # It is a window of the image ...
  np.testing.assert_array_equal(
    crop, coordinates(h, w)[top : top + ch, left : left + cw]
  )
  if (ch, cw) == (h, w):
    # ... the whole image only if (roughly) no window fits ...
    fits = [
      (a, b)
      for a in range(1, h + 1)
      for b in (round(a * r) for r in np.linspace(0.72, 1.38, 9))
      if b <= w and area_min * 1.1 <= 100 * a * b / h / w <= area_max * 0.9
    ]
    assert len(fits) < 3 or area_max > 90
    return
  # ... and its area and aspect ratio are in range.
  assert area_min - 1e-3 <= 100 * ch * cw / h / w <= area_max + 1e-3
  assert 0.7 - 0.5 / ch - 1e-4 <= cw / ch <= 1.4 + 0.5 / ch + 1e-4


def published_distribution(h, w, area, ratio, count, rng):
  """Areas and ratios of windows, sampled as the docstring describes."""
  ratios = rng.uniform(*ratio, count)
  low = np.sqrt(area[0] * h * w / ratios)
  high = np.minimum(
    np.sqrt(area[1] * h * w / ratios), np.minimum(h, w / ratios)
  )
  heights = rng.uniform(low, high)
  return heights**2 * ratios / (h * w), ratios


def test_inception_windows_follow_the_published_distribution():
  import scipy.stats  # It takes a second.

  h, w = 375, 500
  rng = np.random.default_rng(0)
  samples = windows("inception_crop", h, w, rng.random((4000, 2)))
  top, left, ch, cw = samples.T
  area, ratio = published_distribution(
    h, w, (0.05, 1), (0.75, 1.33), 100_000, rng
  )
  # 1.63 / sqrt(n) is the 1% point of the Kolmogorov-Smirnov distance.
  limit = 1.63 / np.sqrt(len(samples))
  assert scipy.stats.ks_2samp(ch * cw / (h * w), area).statistic < limit
  assert scipy.stats.ks_2samp(cw / ch, ratio).statistic < limit
  for start, room in ((top, h - ch), (left, w - cw)):
    at = start[room > 20] / room[room > 20]
    assert scipy.stats.kstest(at, "uniform").statistic < limit + 0.02


def test_inception_windows_depend_only_on_both_numbers():
  us = [(a, b) for a in (0, 0.3, 0.9) for b in (0, 0.3, 0.9)] * 2
  samples = windows("inception_crop", 100, 120, us)
  np.testing.assert_array_equal(samples[:9], samples[9:])
  assert len(np.unique(samples, axis=0)) == 9


def test_inception_crop_falls_back_to_the_whole_image():
  image = coordinates(10, 400)  # No window of ratio 4/3 has half the area.
  out = run("inception_crop(None, 50, 100)", image, [0.2, 0.7])
  np.testing.assert_array_equal(out, image)


def test_inception_crop_resizes_the_window():
  image, u = np.asarray(photo(48, 64)), [0.3, 0.8]
  window = run("inception_crop", image, u)
  np.testing.assert_array_equal(
    run("inception_crop((7, 9), method='area')", image, u),
    run("resize((7, 9), 'area')", window),
  )


def test_a_pipeline_of_jpegs_has_static_shapes_and_is_reproducible():
  op = registry.compose(
    parse.parse(
      "decode|inception_crop(16)|flip_lr|randaug(1, 9)|value_range(-1, 1)|"
      "onehot(5, key='label', key_result='labels')|keep('image', 'labels')"
    )
  )
  data = list(JPEGS.values()) + list(OTHERS.values())
  features = {"image": data, "label": np.arange(len(data)) % 5}
  u = np.random.default_rng(0).random((len(data), op.draws), np.float32)
  dataset = tf.data.Dataset.from_tensor_slices((features, u)).map(
    tf.autograph.experimental.do_not_convert(op.fn), num_parallel_calls=2
  )
  assert dataset.element_spec == {
    "image": tf.TensorSpec([16, 16, 3], tf.float32),
    "labels": tf.TensorSpec([5], tf.float32),
  }
  once, again = (list(dataset.as_numpy_iterator()) for _ in range(2))
  for a, b in zip(once, again):
    np.testing.assert_array_equal(a["image"], b["image"])
  assert once[0]["image"].min() >= -1 and once[0]["image"].max() <= 1
  assert once[3]["labels"].tolist() == [0, 0, 0, 1, 0]


# Sizes as transformers' Siglip2ImageProcessor chooses them, for patches of 16.
@pytest.mark.parametrize(
  ("height", "width", "most", "grid"),
  [
    (480, 640, 256, (14, 18)),
    (640, 480, 256, (18, 14)),
    (1, 1000, 64, (1, 64)),
    (37, 53, 64, (7, 9)),
    (333, 777, 100, (6, 14)),
    (512, 512, 256, (16, 16)),
    (2000, 30, 49, (49, 1)),
  ],
)
def test_naflex_keeps_the_shape_of_an_image(height, width, most, grid):
  image = np.asarray(photo(height, width))
  op = registry.compose(parse.parse(f"naflex(16, {most})"))
  features = op.fn({"image": tf.constant(image)}, tf.zeros(0))
  patches, (rows, columns) = features["image"].numpy(), grid
  assert tuple(features["shapes"].numpy()) == grid
  assert patches.shape == (most, 768) and patches.dtype == np.uint8
  assert not patches[rows * columns :].any()
  resized = run(f"resize(({rows * 16}, {columns * 16}), antialias=True)", image)
  for row, column in ((0, 0), (rows - 1, columns - 1), (rows // 2, 0)):
    window = resized[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
    np.testing.assert_array_equal(
      patches[row * columns + column], window.reshape(-1)
    )


def test_naflex_needs_room_for_a_patch():
  with pytest.raises(ConfigError, match="'max_patches': .* at least 1, got 0"):
    parse.parse("naflex(16, 0)")


def test_sequences_of_images_of_many_shapes_waste_few_tokens():
  """Of 256 patches, for sides from 32 to 2,000 pixels and ratios up to 4."""
  rng = np.random.default_rng(0)
  used = []
  for side, ratio in zip(rng.uniform(32, 2000, 40), rng.uniform(-2, 2, 40)):
    sides = np.array([side * 2 ** (ratio / 2), side / 2 ** (ratio / 2)])
    sides = np.maximum(np.round(sides), 1)
    rows, columns = ops_image._largest_grid(tf.constant(sides), 16, 256).numpy()
    used.append(rows * columns / 256)
    # The shape is kept, up to a patch.
    scale = np.array([rows, columns]) / sides
    assert abs(scale[0] - scale[1]) * sides.max() <= 1.01 * sides.max() / (
      sides.min()
    )
  assert 0.9 < np.mean(used) and max(used) <= 1
  assert 1 - np.mean(used) == pytest.approx(0.04, abs=0.02)
