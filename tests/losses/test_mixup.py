"""Weights of mixup against the published distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.losses import mixup


@pytest.mark.parametrize("alpha", [0.1, 0.4, 1.0, 3.0])
def test_weights_are_jaxs_draws_of_beta(alpha):
  keys = jax.random.split(jax.random.key(0), 500)
  draw = jax.vmap(lambda k: mixup.draw(k, alpha, 0, 0).share)
  beta = jax.vmap(lambda k: jax.random.beta(k, alpha, alpha))
  want = beta(keys)
  weights = jax.jit(draw)(keys)
  # jax draws logarithms: exponentials of numbers up to tens.
  np.testing.assert_allclose(weights, np.maximum(want, 1 - want), rtol=1e-5)


def test_the_batch_is_blended_with_its_roll():
  image = jnp.arange(4.0)[:, None]
  mix = mixup.draw(jax.random.key(1), 0.4, 0, 0)
  mixed, weight = mix.images(image), mix.share
  want = weight * image + (1 - weight) * image[np.array([3, 0, 1, 2])]
  assert 0.5 <= weight < 1
  np.testing.assert_allclose(mixed, want, rtol=1e-6)


# CutMix.

ROLL = np.array([2, 0, 1])


def cut(seed, sizes, alpha=1.0):
  """Images of each size, numbered by pixel, blended by the same draw."""
  mix = mixup.draw(jax.random.key(seed), 0, alpha, 0)
  images = [np.arange(3 * h * w).reshape(3, h, w, 1) for h, w in sizes]
  return mix, images, [np.asarray(mix.images(jnp.asarray(x))) for x in images]


@pytest.mark.parametrize("seed", range(6))
def test_cutmix_puts_a_box_of_the_neighbour(seed):
  mix, (image,), (mixed,) = cut(seed, [(20, 30)])
  ours, theirs = mixed == image, mixed == image[ROLL]
  assert (ours ^ theirs).all()
  rows, columns = np.nonzero(theirs[0, :, :, 0])
  if not len(rows):
    return
  # The published box: its sides are sqrt(1 - share) of the image's, and what
  # is outside of the image is cut off.
  y, x = np.asarray(mix.center_2) * (20, 30)
  half = np.sqrt(1 - float(mix.share)) / 2
  box = np.array([y - half * 20, x - half * 30, y + half * 20, x + half * 30])
  box = np.clip(box, 0, (20, 30, 20, 30))
  found = [rows.min(), columns.min(), rows.max() + 1, columns.max() + 1]
  np.testing.assert_allclose(found, box, atol=0.51)
  assert theirs[0].sum() == (found[2] - found[0]) * (found[3] - found[1])
  share = np.mean(np.asarray(mix.weights(image)))
  assert share == pytest.approx(ours[0].mean(), abs=1e-6)


def test_cutmix_is_consistent_at_another_resolution():
  for seed in range(6):
    _, _, (small, large) = cut(seed, [(16, 16), (64, 64)])
    theirs = [
      np.asarray(x[0, :, :, 0]) >= x.shape[1] ** 2 for x in (small, large)
    ]
    assert abs(theirs[0].mean() - theirs[1].mean()) < 0.1


def test_cutmix_shares_follow_beta():
  draw = jax.vmap(lambda k: mixup.draw(k, 0, 0.5, 0).share)
  shares = draw(jax.random.split(jax.random.key(0), 3000))
  assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
  assert np.var(shares) == pytest.approx(1 / 8, abs=0.01)  # Of Beta(1/2, 1/2).
