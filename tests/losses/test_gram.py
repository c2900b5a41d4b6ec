"""Gram anchoring against formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.losses import gram

RNG = np.random.default_rng(0)


def gram_matrix(x):
  x = x / np.linalg.norm(x, axis=-1, keepdims=True)
  return x @ x.T


def test_the_loss_is_the_mean_square_of_the_matrices_difference():
  student, teacher = RNG.normal(size=(2, 3, 7, 5))
  loss_N = gram.loss(jnp.float32(student), jnp.float32(teacher))
  expected = [
    np.mean((gram_matrix(s) - gram_matrix(t)) ** 2)
    for s, t in zip(student, teacher)
  ]
  np.testing.assert_allclose(loss_N, expected, rtol=1e-5)


def test_only_similarities_count():
  student = RNG.normal(size=(1, 7, 5))
  turned = student @ np.linalg.qr(RNG.normal(size=(5, 5)))[0]
  scaled = turned * RNG.uniform(0.5, 2.0, size=(1, 7, 1))
  loss_N = gram.loss(jnp.float32(student), jnp.float32(scaled))
  assert loss_N[0] < 1e-11
  zeros = jnp.zeros((1, 7, 5))
  grads = jax.grad(lambda x: gram.loss(x, jnp.float32(turned)).sum())(zeros)
  assert np.isfinite(grads).all()


def test_half_the_grid_has_the_bicubic_mean_of_four_places():
  x = RNG.normal(size=(2, 8, 8, 3))
  got = gram.resized(jnp.float32(x.reshape(2, 64, 3)), (8, 8), (4, 4))
  weights = np.array([-1, 9, 9, -1]) / 16
  rows = np.einsum("i,nirc->nrc", weights, x[:, 1:5])  # The second of four.
  expected = np.einsum("j,njc->nc", weights, rows[:, 3:7])  # The third.
  np.testing.assert_allclose(
    got.reshape(2, 4, 4, 3)[:, 1, 2], expected, rtol=1e-4, atol=1e-5
  )
  same = jnp.zeros((1, 6, 2))
  assert gram.resized(same, (2, 3), (2, 3)) is same


@pytest.mark.parametrize("grid", [(4, 6), (6, 4)])
def test_a_constant_stays_constant(grid):
  ones = jnp.ones((1, grid[0] * grid[1], 2))
  np.testing.assert_allclose(gram.resized(ones, grid, (2, 3)), 1.0, rtol=1e-5)
