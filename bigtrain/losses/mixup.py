"""Mixup: blends of two examples of a batch."""

import jax
import jax.numpy as jnp


def mixup(
  rng: jax.Array, image: jax.Array, alpha: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
  """Blends each image with the previous one of the batch (arXiv 1710.09412).

  A (micro)batch has one weight, at least one half, as in the AugReg recipes
  (arXiv 2106.10270).

  Args:
    image: [B, ...] floats.

  Returns:
    (weight * image + (1 - weight) * previous image, weight).
  """
  weight = jnp.max(_beta(rng, alpha))
  mixed = weight * image + (1 - weight) * jnp.roll(image, 1, axis=0)
  return mixed.astype(image.dtype), weight


def _beta(rng: jax.Array, alpha: jax.Array | float) -> jax.Array:
  """Draws x from Beta(alpha, alpha); returns x and 1 - x.

  They are the shares of two draws from Gamma(alpha). jax.random.beta draws the
  same, with a program of its own for each of the two: 1,300 instructions more.
  """
  draw = lambda key: jax.random.loggamma(key, alpha)
  return jax.nn.softmax(jax.vmap(draw)(jax.random.split(rng)))
