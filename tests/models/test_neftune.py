"""Noise on a decoder's embeddings, by NEFTune's definition."""

import jax
import numpy as np
import pytest

from bigtrain.models import decoder

V, D, L = 11, 64, 40


@pytest.mark.slow
def test_the_noise_is_uniform_and_smaller_for_longer_texts():
  options = dict(variant="llama", vocab_size=V, width=D, depth=1, num_heads=2)
  model = decoder.Model(**options, neftune=5.0)
  tokens = np.ones((2, L), np.int32)
  real = np.arange(L) < np.array([[L], [10]])
  variables = model.init(jax.random.key(0), tokens)
  noise = model.apply(
    variables,
    np.zeros((2, L, D), np.float32),
    real,
    method=decoder.Model._with_noise,
    rngs={"dropout": jax.random.key(1)},
  )
  for row, length in zip(np.asarray(noise), (L, 10)):
    bound = 5.0 / np.sqrt(length * D)
    assert 0.99 * bound < np.abs(row).max() <= bound
    np.testing.assert_allclose(row.std(), bound / np.sqrt(3), rtol=0.05)
    assert abs(row.mean()) < 0.05 * bound
  run = lambda train, model: model.apply(
    variables, tokens, train=train, rngs={"dropout": jax.random.key(1)}
  )[0]
  plain = decoder.Model(**options)
  np.testing.assert_array_equal(run(False, model), run(False, plain))
  assert np.abs(run(True, model) - run(True, plain)).max() > 1e-3
