"""Attention masks: which positions each query attends to.

Axes: B batch, L length, S length attended to.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
  # Int, number of each token's group, 0 for none. Only with `causal`: queries
  # also see the later positions of their group, and those before the window.
  groups_BL: jax.Array | None = None
  groups_BS: jax.Array | None = None
  # Whether positions before the window are hidden in groups too.
  window_in_groups: bool = struct.field(pytree_node=False, default=False)
  # Whether layers without a window ignore the groups.
  groups_need_window: bool = struct.field(pytree_node=False, default=False)
  # Int, number of each query's document, which the positions must share.
  segments_BL: jax.Array | None = None
  segments_BS: jax.Array | None = None
  # Bool, False for positions that no query attends to.
  real_BS: jax.Array | None = None

  @property
  def has_arrays(self) -> bool:
    arrays = (self.prefix_B, self.groups_BL, self.segments_BL, self.real_BS)
    return any(x is not None for x in arrays)

  @property
  def in_order(self) -> bool:
    """Whether queries never attend to later positions."""
    return self.causal and self.prefix_B is None and self.groups_BL is None

  def reach(self, length: int) -> int:
    """Number of positions that model FLOPs count for a query.

    As usual, a causal order does not halve it, but a window limits it.
    """
    return min(self.window or length, length) if self.causal else length

  def map_queries(self, fn: Callable[[jax.Array], jax.Array]) -> "Mask":
    """Applies a function, such as a slice, to the arrays over L."""
    values = {"groups_BL": self.groups_BL, "segments_BL": self.segments_BL}
    return dataclasses.replace(self, **_map(fn, values))

  def map_positions(self, fn: Callable[[jax.Array], jax.Array]) -> "Mask":
    """Applies a function to the arrays over S."""
    values = {
      "groups_BS": self.groups_BS,
      "segments_BS": self.segments_BS,
      "real_BS": self.real_BS,
    }
    return dataclasses.replace(self, **_map(fn, values))

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
      in_window_LS = j_1S > i_L1 - self.window if self.window else True
      if not self.window_in_groups:
        part_LS = part_LS & in_window_LS
      if self.prefix_B is not None:
        part_LS = part_LS | (j_S < self.prefix_B[:, None, None])
      if self.groups_BL is not None and self.groups_BS is not None:
        i_BL1, j_B1S = self.groups_BL[:, :, None], self.groups_BS[:, None]
        part_LS = part_LS | (i_BL1 == j_B1S) & (i_BL1 != 0)
      if self.window_in_groups:
        part_LS = part_LS & in_window_LS
      parts.append(part_LS)
    if self.segments_BL is not None and self.segments_BS is not None:
      parts.append(self.segments_BL[:, :, None] == self.segments_BS[:, None])
    if self.real_BS is not None:
      parts.append(self.real_BS[:, None])
    if not parts:
      return None
    matrix = functools.reduce(operator.and_, parts)
    return matrix if matrix.ndim == 3 else matrix[None]


class Groups(NamedTuple):
  """Tokens that also see later tokens of their group; see Mask."""

  of_BL: jax.Array
  of_BS: jax.Array
  window_in_groups: bool = False
  need_window: bool = False

  def added(self, mask: Mask) -> Mask:
    return dataclasses.replace(
      mask,
      groups_BL=self.of_BL,
      groups_BS=self.of_BS,
      window_in_groups=self.window_in_groups,
      groups_need_window=self.need_window,
    )


def of_layer(mask: Mask, window: int | None) -> Mask:
  """The mask of a layer with this window."""
  mask = dataclasses.replace(mask, window=window)
  if mask.groups_need_window and window is None:
    mask = dataclasses.replace(mask, groups_BL=None, groups_BS=None)
  return mask


def in_chunks(
  mask: Mask,
  chunk: int,
  queries: jax.Array,
  num_positions: int,
  start: Any,
  first: Any,
) -> Mask:
  """A mask that keeps attention within chunks of each document.

  Args:
    queries: of shape [B, L, ...].
    start: number of the first query in its text.
    first: the first query's index among the positions that it may attend to;
      None if both begin together. See kv_cache.View.
  """
  B, L = queries.shape[:2]
  if first is not None and not mask.causal:
    # A ring of one chunk, whose places before and at `start` are of its chunk.
    assert L == 1
    own_S = jnp.arange(num_positions) <= start % chunk
    return dataclasses.replace(mask, real_BS=mask.real_BS & own_S)
  if first is not None:
    number_1L = (start + jnp.arange(L))[None] // chunk
    number_1S = (start - first + jnp.arange(num_positions))[None] // chunk
    return dataclasses.replace(
      mask, window=chunk, segments_BL=number_1L, segments_BS=number_1S
    )
  if L <= chunk:
    return mask
  segments_BL = mask.segments_BL
  if segments_BL is None:
    segments_BL = jnp.ones((B, L), jnp.int32)
  place_BL = places_in_documents(segments_BL)
  number_BL = jnp.cumsum(place_BL % chunk == 0, axis=1, dtype=jnp.int32)
  number_BL = jnp.where(segments_BL == 0, 0, number_BL)  # Padding.
  # The window follows from the chunks: it tells kernels which blocks are empty.
  return dataclasses.replace(
    mask, window=chunk, segments_BL=number_BL, segments_BS=number_BL
  )


def num_real(L: int, real_BL: jax.Array | None) -> Any:
  """Number of tokens of each text up to the last that is no padding, (B,)."""
  if real_BL is None:
    return L
  return jnp.max(jnp.where(real_BL, jnp.arange(L) + 1, 0), axis=1)


def places_in_documents(segments_BL: jax.Array) -> jax.Array:
  """The number of each position within its document."""
  index_L = jnp.arange(segments_BL.shape[1])
  differs_BL = segments_BL[:, 1:] != segments_BL[:, :-1]
  starts_BL = jnp.where(jnp.pad(differs_BL, ((0, 0), (1, 0))), index_L, 0)
  return index_L - jax.lax.cummax(starts_BL, axis=1)


def positions_of(
  L: int, start: jax.Array | int, segments_BL: jax.Array | None
) -> jax.Array:
  """Position of each token in its document, (B or 1, L).

  Args:
    start: number of the first token of the call in its text.
  """
  if segments_BL is None:
    return start + jnp.arange(L)[None]
  return start + places_in_documents(segments_BL)


def _map(
  fn: Callable[[jax.Array], jax.Array], values: Mapping[str, jax.Array | None]
) -> dict[str, Any]:
  return {name: fn(x) for name, x in values.items() if x is not None}


def within_documents(segments_BL: jax.Array, *, causal: bool) -> Mask:
  return Mask(causal=causal, segments_BL=segments_BL, segments_BS=segments_BL)
