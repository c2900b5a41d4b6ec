"""Inverses of triangular matrices."""

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


@unit_inverse.defjvp
def _unit_inverse_jvp(primals: Any, tangents: Any) -> Any:
  inverse = unit_inverse(*primals)
  return inverse, -_product(_product(inverse, tangents[0]), inverse)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
  # Errors of an inverse would be in all outputs of the chunk.
  return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
