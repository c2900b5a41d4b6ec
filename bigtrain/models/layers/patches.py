"""Images in patches that do not overlap.

Axes: B batch, H rows, W columns, C channels.
"""

from typing import Any

import flax.linen as nn
import jax


def cut(x_BHWC: jax.Array, size: tuple[int, ...]) -> jax.Array:
  """Whole patches (B, rows, columns, pixels x C); what is left over is lost."""
  B, H, W, C = x_BHWC.shape
  p, q = size
  h, w = H // p, W // q
  x = x_BHWC[:, : h * p, : w * q].reshape(B, h, p, w, q, C)
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, h, w, p * q * C)


def conv(width: int, side: int, **options: Any) -> nn.Conv:
  """A convolution of patches, as one matrix product.

  XLA's own convolution takes twice as long on CPUs.
  """
  size = (side, side)
  product = lambda x, kernel, *_, **__: cut(x, size) @ kernel.reshape(-1, width)
  options |= dict(padding="VALID", conv_general_dilated=product)
  return nn.Conv(width, size, size, **options)
