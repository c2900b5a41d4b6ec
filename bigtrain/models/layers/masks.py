"""Which positions a query of an attention sees.

Axes: B batch, L length, S length attended to.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Mask:
  """Conditions under which a query sees a position; all of them must hold.

  Masks of L x S booleans are never arguments of attention: kernels work on
  blocks and compute the part of a mask that a block needs.

  A query that sees nothing, such as padding, has a finite output without a
  meaning.

  Attributes:
    causal: whether a query sees no later positions.
    window: number of positions that a causal query sees, itself included; all
      earlier ones if None.
    prefix_B: int, number of the first positions that each query sees, later
      ones included; only with `causal`.
    segments_BL: int, number of the document of each query.
    segments_BS: int, number of the document of each position; a query sees its
      own document.
    real_BS: bool, False for positions that no query sees.
  """

  causal: bool = struct.field(pytree_node=False, default=False)
  window: int | None = struct.field(pytree_node=False, default=None)
  prefix_B: jax.Array | None = None
  segments_BL: jax.Array | None = None
  segments_BS: jax.Array | None = None
  real_BS: jax.Array | None = None

  @property
  def selects(self) -> bool:
    """Whether what a query sees depends on arrays."""
    return any(
      x is not None for x in (self.prefix_B, self.segments_BL, self.real_BS)
    )

  def reach(self, length: int) -> int:
    """Largest number of positions, of `length`, that a query sees.

    Model FLOPs count as many. Causal attention counts as the full square.
    """
    return min(self.window or length, length) if self.causal else length

  def matrix(
    self, queries: int, positions: int, start: Any = 0
  ) -> jax.Array | None:
    """Returns bool (B or 1, L or 1, S), or None if a query sees everything."""
    i_L, j_S = start + jnp.arange(queries), jnp.arange(positions)
    return self.block(
      i_L, j_S, self.segments_BL, self.segments_BS, self.real_BS
    )

  def block(
    self,
    i_L: jax.Array,
    j_S: jax.Array,
    segments_BL: jax.Array | None,
    segments_BS: jax.Array | None,
    real_BS: jax.Array | None,
  ) -> jax.Array | None:
    """Returns the mask of some queries and positions, as `matrix` does."""
    masks = []
    if self.causal:
      mask_LS = in_order(i_L, j_S, self.window)
      if self.prefix_B is not None:
        mask_LS = mask_LS | (j_S < self.prefix_B[:, None, None])
      masks.append(mask_LS)
    if segments_BL is not None:
      masks.append(segments_BL[:, :, None] == segments_BS[:, None])
    if real_BS is not None:
      masks.append(real_BS[:, None])
    if not masks:
      return None
    mask = masks[0]
    for other in masks[1:]:
      mask = mask & other
    return mask if mask.ndim == 3 else mask[None]


def in_order(i_L: jax.Array, j_S: jax.Array, window: int | None) -> jax.Array:
  """Bool (L, S): whether query i sees position j by their order alone."""
  i, j = i_L[:, None], j_S[None]
  return (j <= i) & (j > i - window) if window else j <= i


def within_documents(segments_BL: jax.Array, *, causal: bool) -> Mask:
  """Returns what positions see that stay within their document."""
  return Mask(causal=causal, segments_BL=segments_BL, segments_BS=segments_BL)
