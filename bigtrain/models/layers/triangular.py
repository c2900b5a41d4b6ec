"""Inverses of triangular matrices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_jvp
def unit_inverse(lower: jax.Array) -> jax.Array:
  """The inverse of I + lower, matrices with zeros on and above the diagonal.

  By blocks: the inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']], with
  the inverses A' and B'. No intermediate number is large unless the result is.
  The product of all I + (-lower)^(2^i) takes as few steps, but if all keys of a
  chunk are equal, its powers are as large as 1e18 and cancel each other.
  """
  size = lower.shape[-1]
  identity = jnp.eye(size, dtype=lower.dtype)
  if size <= 2:
    return identity - lower
  half = size // 2
  a, b = lower[..., :half, :half], lower[..., half:, half:]
  inverses = unit_inverse(jnp.stack([a, b]))
  c = lower[..., half:, :half]
  left = -_product(_product(inverses[1], c), inverses[0])
  top = jnp.pad(inverses[0], [(0, 0)] * (lower.ndim - 1) + [(0, half)])
  return jnp.concatenate(
    [top, jnp.concatenate([left, inverses[1]], axis=-1)], axis=-2
  )


@jax.custom_jvp
def unit_inverse_by_masks(lower: jax.Array) -> jax.Array:
  """The same of a power of two of rows, by products of whole matrices.

  For kernels of TPUs, in which a product of small blocks takes as long as one
  of whole matrices, and parts of a vector register are slow to move. If X has
  the inverses of the blocks on the diagonal, and Y what lies between two of
  them, X - X Y X has the inverses of blocks of twice the size.
  """
  size = lower.shape[-1]
  row, column = (
    jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1)
  )
  identity = jnp.where(row == column, 1.0, 0.0).astype(lower.dtype)
  inverse = jnp.broadcast_to(identity, lower.shape)
  for level in range(size.bit_length() - 1):
    # Both are in the same block of the next size, but not of this one.
    between = (row >> level != column >> level) & (
      row >> (level + 1) == column >> (level + 1)
    )
    new = jnp.where(between, lower, 0)
    if level:  # Blocks of one row are their own inverses.
      new = _product(_product(inverse, new), inverse)
    inverse -= new
  return inverse


def _jvp(function: Any, primals: Any, tangents: Any) -> Any:
  inverse = function(*primals)
  return inverse, -_product(_product(inverse, tangents[0]), inverse)


unit_inverse.defjvp(functools.partial(_jvp, unit_inverse))
unit_inverse_by_masks.defjvp(functools.partial(_jvp, unit_inverse_by_masks))


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
  # Errors of an inverse would be in all outputs of the chunk.
  return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
