"""Position embeddings on other grids."""

import pathlib

import numpy as np
import pytest
import scipy.ndimage

from bigtrain.config.errors import ConfigError
from bigtrain.models.published import conversions

pytestmark = pytest.mark.golden


def test_position_embeddings_are_resampled_bilinearly():
  rng = np.random.default_rng(0)
  posemb = rng.normal(size=(1, 12, 5)).astype(np.float32)
  assert conversions.resample_posemb(posemb, (3, 4), (3, 4)) is posemb
  # A ramp over columns stays a ramp, except half a patch from the edges.
  ramp = np.tile(np.arange(4.0, dtype=np.float32), 3).reshape(1, 12, 1)
  finer = conversions.resample_posemb(ramp, (3, 4), (6, 8))
  assert finer.shape == (1, 48, 1)
  row = finer.reshape(6, 8)[2]
  # Sums of numbers up to 3.
  np.testing.assert_allclose(row[1:-1], np.arange(0.25, 3, 0.5), atol=3e-6)
  constant = np.ones((1, 12, 2), np.float32)
  for grid in ((2, 2), (5, 7)):
    np.testing.assert_allclose(
      conversions.resample_posemb(constant, (3, 4), grid), 1, rtol=1e-6
    )


@pytest.mark.parametrize("new", [(5, 7), (2, 3), (6, 8), (3, 1)])
def test_aligned_corners_are_those_of_big_vision(new):
  """big_vision calls scipy.ndimage.zoom with order 1."""
  old = (3, 4)
  posemb = np.random.default_rng(0).normal(size=(1, 12, 5)).astype(np.float32)
  grid = posemb.reshape(*old, 5)
  zoom = (new[0] / old[0], new[1] / old[1], 1)
  expected = scipy.ndimage.zoom(grid, zoom, order=1).reshape(1, -1, 5)
  resampled = conversions.resample_posemb(posemb, old, new, "corners")
  np.testing.assert_allclose(resampled, expected, rtol=1e-5, atol=1e-6)
  assert resampled.dtype == np.float32
  with pytest.raises(ConfigError, match="posemb_align: unknown 'corner'. Did"):
    conversions.resample_posemb(posemb, old, new, "corner")


def test_bicubic_embeddings_are_those_of_torch():
  """tests/golden/make_posemb.py resamples the same ones."""
  golden = pathlib.Path(__file__).parents[2] / "golden" / "posemb.npz"
  posemb = np.random.default_rng(0).normal(size=(1, 20, 3)).astype(np.float32)
  for name, want in np.load(golden).items():
    align, size = name.split("/")
    new = tuple(map(int, size.split("x")))
    got = conversions.resample_posemb(posemb, (5, 4), new, align)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5, err_msg=name)
