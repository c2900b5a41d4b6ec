"""Position embeddings on other grids."""

import numpy as np

from bigtrain.models.published import arrays


def test_position_embeddings_are_resampled_bilinearly():
  rng = np.random.default_rng(0)
  posemb = rng.normal(size=(1, 12, 5)).astype(np.float32)
  assert arrays.resample_posemb(posemb, (3, 4), (3, 4)) is posemb
  # A ramp over columns stays a ramp, except half a patch from the edges.
  ramp = np.tile(np.arange(4.0, dtype=np.float32), 3).reshape(1, 12, 1)
  finer = arrays.resample_posemb(ramp, (3, 4), (6, 8))
  assert finer.shape == (1, 48, 1)
  row = finer.reshape(6, 8)[2]
  np.testing.assert_allclose(row[1:-1], np.arange(0.25, 3, 0.5), rtol=1e-5)
  constant = np.ones((1, 12, 2), np.float32)
  for grid in ((2, 2), (5, 7)):
    np.testing.assert_allclose(
      arrays.resample_posemb(constant, (3, 4), grid), 1, rtol=1e-6
    )
