"""Images in patches that do not overlap.

Axes: B batch, H rows, W columns, C channels.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def cut(x_BHWC: jax.Array, size: tuple[int, ...]) -> jax.Array:
  """Cuts images into whole patches (B, rows, columns, pixels x C).

  Pixels at the right and the bottom that do not fill a patch are left out.
  """
  B, H, W, C = x_BHWC.shape
  p, q = size
  h, w = H // p, W // q
  x = x_BHWC[:, : h * p, : w * q].reshape(B, h, p, w, q, C)
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, h, w, p * q * C)


def join(x_BhwV: jax.Array, size: tuple[int, int]) -> jax.Array:
  """The inverse of `cut`: patches (B, rows, columns, pixels x C) as images."""
  B, h, w, V = x_BhwV.shape
  p, q = size
  x = x_BhwV.reshape(B, h, w, p, q, V // (p * q)).transpose(0, 1, 3, 2, 4, 5)
  return x.reshape(B, h * p, w * q, -1)


def real(shapes_B2: jax.Array, num_patches: int) -> jax.Array:
  """Which patches are not padding, bool (B, patches).

  `shapes_B2` are the numbers of rows and columns of each image's patches.
  """
  return jnp.arange(num_patches) < jnp.prod(shapes_B2, axis=1, keepdims=True)


def conv(width: int, side: int, **options: Any) -> nn.Conv:
  """A convolution over patches, as a single matrix product.

  XLA's own convolution takes twice as long on CPUs.
  """
  size = (side, side)

  def product(x: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return cut(x, size) @ kernel.reshape(-1, width)

  return nn.Conv(
    width,
    kernel_size=size,
    strides=size,
    padding="VALID",
    conv_general_dilated=product,
    **options,
  )
