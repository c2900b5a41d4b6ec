"""Weights of mixup against the published distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.losses import mixup


@pytest.mark.parametrize("alpha", [0.1, 0.4, 1.0, 3.0])
def test_weights_are_jaxs_draws_of_beta(alpha):
  keys = jax.random.split(jax.random.key(0), 500)
  images = jnp.zeros((500, 2, 1))
  draw = jax.vmap(lambda k, x: mixup.mixup(k, x, alpha)[1])
  beta = jax.vmap(lambda k: jax.random.beta(k, alpha, alpha))
  want = beta(keys)
  weights = jax.jit(draw)(keys, images)
  np.testing.assert_allclose(weights, np.maximum(want, 1 - want), rtol=1e-6)


def test_the_batch_is_blended_with_its_roll():
  image = jnp.arange(4.0)[:, None]
  mixed, weight = mixup.mixup(jax.random.key(1), image, 0.4)
  want = weight * image + (1 - weight) * image[np.array([3, 0, 1, 2])]
  assert 0.5 <= weight < 1
  np.testing.assert_allclose(mixed, want, rtol=1e-6)
