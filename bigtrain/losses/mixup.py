"""Mixup: blends of two examples of a batch."""

import jax
import jax.numpy as jnp


def mixup(
  rng: jax.Array, image: jax.Array, alpha: float
) -> tuple[jax.Array, jax.Array]:
  """Blends each image with the previous one of the batch (arXiv 1710.09412).

  A (micro)batch has one weight, at least one half, as in the AugReg recipes
  (arXiv 2106.10270).

  Args:
    rng: a key.
    image: [B, ...] floats.
    alpha: parameter of the weight's beta distribution.

  Returns:
    (weight * image + (1 - weight) * previous image, weight).
  """
  weight = jax.random.beta(rng, alpha, alpha)
  weight = jnp.maximum(weight, 1 - weight)
  mixed = weight * image + (1 - weight) * jnp.roll(image, 1, axis=0)
  return mixed.astype(image.dtype), weight
