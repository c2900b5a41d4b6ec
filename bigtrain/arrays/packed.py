"""Operations on token arrays [B, L], in which examples may pack documents."""

import jax
import jax.numpy as jnp


def ahead(
  x_BL: jax.Array, segments_BL: jax.Array | None, number: int
) -> jax.Array:
  """The values `number` positions ahead; 0 beyond the end of the document."""
  L = x_BL.shape[1]
  is_inside_BL = (jnp.arange(L) < L - number)[None]
  if segments_BL is not None:
    later_BL = jnp.roll(segments_BL, -number, axis=1)
    is_inside_BL = is_inside_BL & (later_BL == segments_BL)
  later_BL = jnp.roll(x_BL, -number, axis=1)
  return jnp.where(is_inside_BL, later_BL, jnp.zeros_like(later_BL))
