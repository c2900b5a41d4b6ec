"""Resizing against Pillow itself: every pixel is equal."""

import numpy as np
import PIL.Image
import pytest

from bigtrain.pp import pillow

METHODS = {
  "bilinear": PIL.Image.Resampling.BILINEAR,
  "bicubic": PIL.Image.Resampling.BICUBIC,
  "lanczos": PIL.Image.Resampling.LANCZOS,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(40))
def test_every_pixel_is_that_of_pillow(method, seed):
  rng = np.random.default_rng(seed)
  height, width, *new = rng.integers(4, 60, 4).tolist()
  if seed % 4 == 0:  # On the border between the two orders of the passes.
    new = [max(height - 2 * (width // 5), 1), width - width // 5]
  image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
  image[: height // 2] = rng.choice([0, 255], (height // 2, width, 3))
  expected = PIL.Image.fromarray(image).resize(new[::-1], METHODS[method])
  actual = pillow.resize(image, new, method)
  np.testing.assert_array_equal(actual, np.asarray(expected))
