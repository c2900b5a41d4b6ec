"""Positions: sine-cosine, rotary, and buckets of distances."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import positions

pytestmark = pytest.mark.golden


def test_sincos_embeddings_have_the_known_values():
  posemb = positions.sincos_2d((2, 3), 8)
  assert posemb.shape == (1, 6, 8)
  np.testing.assert_allclose(posemb[0, 0], [0, 0, 1, 1, 0, 0, 1, 1])
  # Row 1, column 2, with frequencies 1 and 1e-4.
  x, y = np.array([2, 2e-4]), np.array([1, 1e-4])
  expected = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)])
  np.testing.assert_allclose(posemb[0, 5], expected, rtol=1e-6)
  with pytest.raises(ConfigError, match="multiple of 4"):
    positions.sincos_2d((2, 3), 10)


def test_buckets_of_distances_are_the_published_ones():
  """The 32 one-sided and two-sided buckets of Mesh TensorFlow."""
  one_sided = positions.distance_buckets(32, 128)
  assert [*one_sided[:17]] == [*range(17)] and one_sided[-1] == 31
  assert np.all(np.diff(one_sided) >= 0) and len(one_sided) == 129
  two_sided = positions.distance_buckets(16, 128)
  starts = [int(np.argmax(two_sided == b)) for b in range(16)]
  assert starts == [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]


GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "rope.json"


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=str)
def test_scaled_frequencies_are_those_of_transformers(case):
  dims = int(case["head_dim"] * case.get("fraction", 1.0))
  scaling = positions.read_scaling(
    case["scaling"], "key", dims, case.get("max_len")
  )
  rope = positions.Rope(dims, case["theta"], scaling)
  for length, name in ((1, "frequencies"), (200_000, "long_frequencies")):
    omega_Q = np.ravel(rope.frequencies(length))
    np.testing.assert_allclose(omega_Q, case[name], rtol=2e-6)
  assert positions.magnitude(scaling) == pytest.approx(case["magnitude"])


def rotated(x, **options):
  """The features of one token at position 3, rotated."""
  x = jnp.asarray(x, jnp.float32)[None, None, None]
  rope = positions.Rope(theta=100.0, **options)
  return positions.rotate(x, rope.rotation(jnp.asarray([[3]]), 1))[0, 0, 0]


def test_pairs_of_features_rotate():
  """By 3 and by 0.3: the second frequency is 100 ** -(1 / 2)."""
  x = np.arange(1, 7.0)
  turn = lambda x, y, by: (x * np.cos(by) - y * np.sin(by),
                           y * np.cos(by) + x * np.sin(by))  # fmt: skip
  (a, b), (c, d) = turn(1, 3, 3.0), turn(2, 4, 0.3)
  np.testing.assert_allclose(rotated(x, dims=4), [a, c, b, d, 5, 6], rtol=1e-6)
  (a, b), (c, d) = turn(1, 2, 3.0), turn(3, 4, 0.3)
  apart = rotated(x, dims=4, interleaved=True)
  np.testing.assert_allclose(apart, [a, b, c, d, 5, 6], rtol=1e-6)


def test_longrope_chooses_by_the_length_of_a_text():
  scaling = positions.read_scaling(
    dict(
      type="longrope",
      short_factor=(1.0, 2.0),
      long_factor=(4.0, 8.0),
      original_len=8,
      factor=4.0,
    ),
    "key",
    4,
    None,
  )
  rope = positions.Rope(4, 100.0, scaling)
  at = jnp.asarray([[3, 3]])
  size = np.sqrt(1 + np.log(4) / np.log(8))
  short, long = size * np.sin([3, 0.15]), size * np.sin([0.75, 0.0375])
  for length, expected in ((8, [short, short]), (9, [long, long])):
    sin = rope.rotation(at, length).sin_BL1Q[0, :, 0]
    np.testing.assert_allclose(sin, expected, rtol=1e-6)
  sin = rope.rotation(at, jnp.asarray([[8, 9]])).sin_BL1Q[0, :, 0]
  np.testing.assert_allclose(sin, [short, long], rtol=1e-6)


def test_queries_grow_beyond_the_length_of_the_training():
  at = jnp.asarray([[0, 15, 16, 40]])
  plain = positions.QueryScale(0.1, 16).factors(at)
  expected = 1 + 0.1 * np.log([1, 1, 2, 3])
  np.testing.assert_allclose(plain[0], expected, rtol=1e-6)
  shifted = positions.QueryScale(0.1, 16, "log1p").factors(at)
  np.testing.assert_allclose(shifted[0, 1], 1 + 0.1 * np.log(2), rtol=1e-6)
