"""Sinkhorn-Knopp, KoLeo and signs of a collapse, against float64 formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.losses import prototypes, random_views

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(24, 5))
WEIGHT = (np.arange(24) % 5 > 0).astype(np.float64)


def sinkhorn(scores):
  """As DINOv2's code: columns, then rows, three times."""
  q_KN = np.exp(scores).T
  q_KN /= q_KN.sum()
  K, N = q_KN.shape
  for _ in range(3):
    q_KN /= q_KN.sum(1, keepdims=True) * K
    q_KN /= q_KN.sum(0, keepdims=True) * N
  return (q_KN * N).T


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_sinkhorn_is_that_of_the_formula(temperature):
  real = WEIGHT > 0
  q_NK = prototypes.sinkhorn(jnp.float32(SCORES / temperature), WEIGHT)
  expected = sinkhorn(SCORES[real] / temperature)
  np.testing.assert_allclose(q_NK[real], expected, rtol=1e-4, atol=1e-6)
  assert np.isfinite(q_NK).all()


def test_sinkhorn_does_not_overflow_and_takes_a_batch_of_padding():
  q_NK = prototypes.sinkhorn(jnp.float32(SCORES * 1e3), jnp.ones(24))
  np.testing.assert_allclose(q_NK.sum(1), 1.0, rtol=1e-5)
  assert np.isfinite(prototypes.sinkhorn(SCORES, jnp.zeros(24))).all()


def test_sinkhorn_is_exact_on_any_mesh():
  expected = prototypes.sinkhorn(jnp.float32(SCORES * 5), jnp.float32(WEIGHT))
  mesh = sharding.make_mesh(2, 4)
  placed = jax.device_put(
    (jnp.float32(SCORES * 5), jnp.float32(WEIGHT)), sharding.batch(mesh)
  )
  q_NK = jax.jit(prototypes.sinkhorn)(*placed)
  np.testing.assert_allclose(q_NK, expected, rtol=1e-5, atol=1e-7)


def test_koleo_is_minus_the_log_of_the_nearest_distance():
  x = RNG.normal(size=(24, 7))
  loss_N = prototypes.koleo(jnp.float32(x), jnp.float32(WEIGHT))
  unit = x / np.linalg.norm(x, axis=1, keepdims=True)
  distance = np.linalg.norm(unit[:, None] - unit[None], axis=-1)
  distance[:, WEIGHT == 0] = np.inf  # Padding is nobody's neighbour.
  np.fill_diagonal(distance, np.inf)
  expected = -np.log(distance.min(1))
  real = WEIGHT > 0
  np.testing.assert_allclose(loss_N[real], expected[real], rtol=1e-4)
  same = jnp.ones((4, 3))
  assert np.isfinite(
    jax.grad(lambda x: prototypes.koleo(x, jnp.ones(4)).sum())(same)
  ).all()


def test_the_effective_rank_and_the_prototypes_in_use():
  directions = np.linalg.qr(RNG.normal(size=(9, 9)))[0][:4]
  signs = np.concatenate([np.eye(4), -np.eye(4)])
  flat = prototypes.effective_rank(jnp.float32(signs @ directions), jnp.ones(8))
  assert flat == pytest.approx(4.0, rel=1e-5)
  values = np.array([1.0, 0.5, 0.25, 0.0])
  p = values[:3] / values.sum()
  expected = np.exp(-(p * np.log(p)).sum())
  scaled = jnp.float32((signs * values) @ directions)
  rank = prototypes.effective_rank(scaled, jnp.ones(8))
  assert rank == pytest.approx(expected, rel=1e-5)
  one_hot = jnp.eye(6)[jnp.array([0, 1, 1, 0, 5])]
  weight = jnp.array([1.0, 1.0, 1.0, 1.0, 0.0])
  assert prototypes.used(one_hot, weight) == pytest.approx(2.0, rel=1e-5)
  assert prototypes.entropy(jnp.full(6, 1 / 6)) == pytest.approx(np.log(6))


def test_crops_are_parts_of_the_image_and_depend_on_the_key_alone():
  rows, columns = np.mgrid[:16, :16] / 15.0
  image = jnp.float32(np.stack([rows, columns], -1))[None].repeat(3, 0)
  keys = jax.vmap(jax.random.key)(np.arange(3))
  make = lambda keys, image, **o: random_views.crops(
    keys, image, 4, 8, (0.25, 0.25), aspect=(1.0, 1.0), **{"contrast": 0.0} | o
  )
  crops = make(keys, image, flip=False)
  assert crops.shape == (3, 4, 8, 8, 2)
  assert crops.min() > -0.1 and crops.max() < 1.1
  # A quarter of the area: half of each side, in a smooth ramp.
  inner = np.asarray(crops)[..., 1:-1, 1:-1, :]
  steps = np.diff(inner[..., 0], axis=2).mean((2, 3))
  np.testing.assert_allclose(steps, 1 / 15, rtol=0.05)
  np.testing.assert_array_equal(
    make(keys[1:], image[1:], flip=False), crops[1:]
  )
  assert not np.allclose(crops[0], crops[1])
  mirrored = np.asarray(make(keys, image))
  falls = np.diff(mirrored[..., 1], axis=3).mean((2, 3)) < 0
  assert 0 < falls.sum() < falls.size
  changed = make(keys, image, flip=False, contrast=0.5)
  assert not np.allclose(changed, crops)
