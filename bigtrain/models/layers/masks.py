"""Attention masks: which positions each query attends to.

Axes: B batch, L length, S length attended to.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Mask:
  """Conditions for a query to attend to a position; all of them must hold.

  There is no matrix of L x S booleans: kernels compute the part that a block
  needs. A query that attends to nothing has a finite but meaningless output.
  """

  causal: bool = struct.field(pytree_node=False, default=False)
  # Number of positions that a causal query attends to, itself included.
  window: int | None = struct.field(pytree_node=False, default=None)
  # Int, number of leading positions that all queries see; only with `causal`.
  prefix_B: jax.Array | None = None
  # Int, number of each query's document, which the positions must share.
  segments_BL: jax.Array | None = None
  segments_BS: jax.Array | None = None
  # Bool, False for positions that no query attends to.
  real_BS: jax.Array | None = None

  @property
  def has_arrays(self) -> bool:
    arrays = (self.prefix_B, self.segments_BL, self.real_BS)
    return any(x is not None for x in arrays)

  @property
  def in_order(self) -> bool:
    """Whether no query attends to any later position."""
    return self.causal and self.prefix_B is None

  def reach(self, length: int) -> int:
    """Number of positions that model FLOPs count for a query.

    A causal order does not halve it, as is usual; a window limits it.
    """
    return min(self.window or length, length) if self.causal else length

  def matrix(
    self, queries: int, positions: int, start: jax.Array | int = 0
  ) -> jax.Array | None:
    """Returns bool (B or 1, L or 1, S), or None if nothing is masked."""
    return self.block(start + jnp.arange(queries), jnp.arange(positions))

  def block(self, i_L: jax.Array, j_S: jax.Array) -> jax.Array | None:
    """Returns the part of the matrix for queries and positions by number."""
    parts: list[Any] = []
    if self.causal:
      i_L1, j_1S = i_L[:, None], j_S[None]
      part_LS = j_1S <= i_L1
      if self.window:
        part_LS = part_LS & (j_1S > i_L1 - self.window)
      if self.prefix_B is not None:
        part_LS = part_LS | (j_S < self.prefix_B[:, None, None])
      parts.append(part_LS)
    if self.segments_BL is not None and self.segments_BS is not None:
      parts.append(self.segments_BL[:, :, None] == self.segments_BS[:, None])
    if self.real_BS is not None:
      parts.append(self.real_BS[:, None])
    if not parts:
      return None
    matrix = functools.reduce(operator.and_, parts)
    return matrix if matrix.ndim == 3 else matrix[None]


def within_documents(segments_BL: jax.Array, *, causal: bool) -> Mask:
  return Mask(causal=causal, segments_BL=segments_BL, segments_BS=segments_BL)
