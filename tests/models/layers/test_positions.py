"""Positions: values of sine-cosine embeddings, buckets of distances."""

import numpy as np
import pytest

from bigtrain import settings
from bigtrain.models.layers import positions


def test_sincos_embeddings_have_the_known_values():
  posemb = positions.sincos_2d((2, 3), 8)
  assert posemb.shape == (1, 6, 8)
  np.testing.assert_allclose(posemb[0, 0], [0, 0, 1, 1, 0, 0, 1, 1])
  # Row 1, column 2, with frequencies 1 and 1e-4.
  x, y = np.array([2, 2e-4]), np.array([1, 1e-4])
  expected = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)])
  np.testing.assert_allclose(posemb[0, 5], expected, rtol=1e-6)
  with pytest.raises(settings.ConfigError, match="multiple of 4"):
    positions.sincos_2d((2, 3), 10)


def test_buckets_of_distances_are_the_published_ones():
  """The 32 one-sided and two-sided buckets of Mesh TensorFlow."""
  one_sided = positions.distance_buckets(32, 128)
  assert [*one_sided[:17]] == [*range(17)] and one_sided[-1] == 31
  assert np.all(np.diff(one_sided) >= 0) and len(one_sided) == 129
  two_sided = positions.distance_buckets(16, 128)
  starts = [int(np.argmax(two_sided == b)) for b in range(16)]
  assert starts == [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
