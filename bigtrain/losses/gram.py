"""Gram anchoring: keeps the similarities of patches like another model's.

From DINOv3, https://arxiv.org/abs/2508.10104, section 4. Late in training, the
features of patches become less local. A Gram matrix has the cosines of all
pairs of patches of an image. The loss pulls the student's matrix towards that
of an earlier teacher, while the features themselves may change.

Legend: N images, P patches, D width.
"""

import jax
import jax.numpy as jnp

_EPS = 1e-12


def loss(student_NPD: jax.Array, teacher_NPD: jax.Array) -> jax.Array:
  """Mean squared difference of the Gram matrices, [N]."""
  difference_NPP = _gram(student_NPD) - _gram(teacher_NPD)
  return jnp.mean(jnp.square(difference_NPP), axis=(1, 2))


def _gram(x_NPD: jax.Array) -> jax.Array:
  x_NPD = x_NPD.astype(jnp.float32)
  square_NP1 = jnp.sum(jnp.square(x_NPD), -1, keepdims=True)
  x_NPD = x_NPD * jax.lax.rsqrt(square_NP1 + _EPS)
  return jnp.einsum("npd,nqd->npq", x_NPD, x_NPD)


def resized(
  x_NPD: jax.Array, grid: tuple[int, int], new_grid: tuple[int, int]
) -> jax.Array:
  """Features of a grid of patches, resized to another grid (bicubic)."""
  if grid == new_grid:
    return x_NPD
  N, _, D = x_NPD.shape
  x = x_NPD.reshape(N, *grid, D).astype(jnp.float32)
  # Without antialiasing, as in DINOv3's code.
  x = jax.image.resize(x, (N, *new_grid, D), "cubic", antialias=False)
  return x.reshape(N, -1, D)
