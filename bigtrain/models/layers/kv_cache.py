"""The key-value cache of decoding.

Axes: B batch, L length, S length of the cache, N layers, G heads of keys and
values, K head width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from bigtrain import sharding


class Kind(NamedTuple):
  """Heads of keys and values, their width, and the positions they see."""

  num_heads: int
  head_dim: int
  window: int | None


class Cache(NamedTuple):
  """Keys and values of all layers, so that a loop updates them in place."""

  k_BNSGK: jax.Array
  v_BNSGK: jax.Array

  @property
  def length(self) -> int:
    return self.k_BNSGK.shape[2]

  def write(
    self, k_BLGK: jax.Array, v_BLGK: jax.Array, layer: Any, start: Any
  ) -> "Cache":

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
      new = new[:, None].astype(old.dtype)
      return jax.lax.dynamic_update_slice(old, new, (0, layer, start, 0, 0))

    return Cache(put(self.k_BNSGK, k_BLGK), put(self.v_BNSGK, v_BLGK))

  def layer(self, layer: Any) -> tuple[jax.Array, jax.Array]:
    pick = lambda x: jax.lax.dynamic_index_in_dim(
      x, layer, axis=1, keepdims=False
    )
    return pick(self.k_BNSGK), pick(self.v_BNSGK)


@struct.dataclass
class Caches:
  """Caches of layers that differ in heads or windows.

  Attributes:
    groups: one cache for each kind of layer.
    places_N: number of each layer in its group.
    length: number of positions of a text.
  """

  groups: tuple[Cache, ...]
  places_N: tuple[int, ...] = struct.field(pytree_node=False)
  length: int = struct.field(pytree_node=False)

  def place(self, layer: Any) -> jax.Array:
    return jnp.asarray(self.places_N)[layer]

  def with_group(self, number: int, cache: Cache) -> "Caches":
    groups = list(self.groups)
    groups[number] = cache
    return Caches(tuple(groups), self.places_N, self.length)


def of_layers(
  batch_size: int,
  length: int,
  kinds: Sequence[Kind],
  kind_N: Sequence[int],
  dtype: str,
) -> Caches:
  """Returns empty caches of layers that are of these kinds, by number."""
  groups = tuple(
    empty(
      batch_size,
      kind_N.count(number),
      length,
      kind.num_heads,
      kind.head_dim,
      dtype,
    )
    for number, kind in enumerate(kinds)
  )
  places = tuple(kind_N[:i].count(number) for i, number in enumerate(kind_N))
  return Caches(groups, places, length)


def empty(
  batch_size: int,
  depth: int,
  length: int,
  num_heads: int,
  head_dim: int,
  dtype: str,
) -> Cache:
  num_heads = sharding.heads_in_parts(num_heads, batch_size)
  shape = (batch_size, depth, length, num_heads, head_dim)
  zeros = sharding.by_heads(jnp.zeros(shape, dtype), 3)
  return Cache(zeros, zeros)
