"""The key-value cache of decoding.

Axes: B batch, L length, S positions in a cache, N layers, G heads of keys and
values, K head width.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from bigtrain import sharding
from bigtrain.models.layers import masks


class View(NamedTuple):
  """Keys and values that queries attend to, and the number of the first one."""

  k_BSGK: jax.Array
  v_BSGK: jax.Array
  mask: masks.Mask
  start: Any


class Cache(NamedTuple):
  """Keys and values of all layers, so that a loop updates them in place."""

  k_BNSGK: jax.Array
  v_BNSGK: jax.Array
  # As in Ring; None if no layer has a Ring.
  read_B: jax.Array | None = None

  @property
  def length(self) -> int:
    return self.k_BNSGK.shape[2]

  def extend(
    self,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    mask: masks.Mask,
    layer: Any,
    start: Any,
  ) -> tuple["Cache", View]:
    """Writes the positions from `start`; if None, they see no earlier ones."""
    late_B, at = None, 0 if start is None else start
    if self.read_B is not None and k_BLGK.shape[1] == 1:
      late_B = start >= self.read_B
    k_BNSGK = _put(self.k_BNSGK, k_BLGK, layer, at, late_B)
    v_BNSGK = _put(self.v_BNSGK, v_BLGK, layer, at, late_B)
    new = Cache(k_BNSGK, v_BNSGK, self.read_B)
    if start is None:
      return new, View(k_BLGK, v_BLGK, mask, None)
    return new, View(*new.layer(layer), mask, start)

  def layer(self, layer: Any) -> tuple[jax.Array, jax.Array]:
    return _layer(self.k_BNSGK, layer), _layer(self.v_BNSGK, layer)


class Ring(NamedTuple):
  """Keys and values of the last S positions, p in place p modulo S.

  One call reads the prompts of a batch; the calls after it read all rows token
  by token from the end of the shortest prompt. A row ignores the tokens before
  `read_B` among these, which it has read already.
  """

  k_BNSGK: jax.Array
  v_BNSGK: jax.Array
  # How many positions of each row were read by calls with several positions.
  read_B: jax.Array

  def extend(
    self,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    mask: masks.Mask,
    layer: Any,
    start: Any,
  ) -> tuple["Ring", View]:
    """Writes keys and values; with a start, queries see earlier ones too."""
    S, L = self.k_BNSGK.shape[2], k_BLGK.shape[1]
    if L == 1:
      late_B = start >= self.read_B
      k_BNSGK = _put(self.k_BNSGK, k_BLGK, layer, start % S, late_B)
      v_BNSGK = _put(self.v_BNSGK, v_BLGK, layer, start % S, late_B)
      new = Ring(k_BNSGK, v_BNSGK, self.read_B)
      position_BS = new._positions(jnp.maximum(self.read_B, start + 1))
      seen_BS = (position_BS >= 0) & (position_BS <= start)
      k_BSGK, v_BSGK = _layer(k_BNSGK, layer), _layer(v_BNSGK, layer)
      return new, View(k_BSGK, v_BSGK, masks.Mask(real_BS=seen_BS), start)

    B = k_BLGK.shape[0]
    is_first, start = start is None, 0 if start is None else start
    last_S = start - S + jnp.arange(S)  # The S positions before the call.
    real_BS = jnp.broadcast_to(
      jnp.pad(last_S >= 0, (0, L), constant_values=True), (B, S + L)
    )
    number_BS = self._positions(self.read_B) - start

    def join(all_BNSGK: jax.Array, x_BLGK: jax.Array) -> Any:
      """Returns the new ring, and its old and new values in order."""
      old_BSGK = _layer(all_BNSGK, layer)
      x_BLGK = x_BLGK.astype(old_BSGK.dtype)
      in_order = jnp.take(old_BSGK, last_S % S, axis=1)
      new_BSGK = jnp.take_along_axis(
        x_BLGK, jnp.clip(number_BS, 0, L - 1)[:, :, None, None], axis=1
      )
      kept = (number_BS >= 0)[:, :, None, None]
      ring_BSGK = jnp.where(kept, new_BSGK, old_BSGK)
      ring = _put(all_BNSGK, ring_BSGK, layer, 0)
      return ring, jnp.concatenate([in_order, x_BLGK], axis=1)

    k_BNSGK, k_BSGK = join(self.k_BNSGK, k_BLGK)
    v_BNSGK, v_BSGK = join(self.v_BNSGK, v_BLGK)
    new = Ring(k_BNSGK, v_BNSGK, self.read_B)
    if is_first:
      return new, View(k_BLGK, v_BLGK, mask, None)
    mask = dataclasses.replace(mask, real_BS=real_BS)
    return new, View(k_BSGK, v_BSGK, mask, S)

  def _positions(self, end_B: jax.Array) -> jax.Array:
    """The last position before `end_B` in each place; negative if none."""
    S = self.k_BNSGK.shape[2]
    last_B1 = end_B[:, None] - 1
    return last_B1 - (last_B1 - jnp.arange(S)) % S


def _put(
  all_BNSGK: jax.Array,
  new_BLGK: jax.Array,
  layer: Any,
  start: Any,
  rows_B: jax.Array | None = None,
) -> jax.Array:
  new = new_BLGK[:, None].astype(all_BNSGK.dtype)
  at = (0, layer, start, 0, 0)
  if rows_B is not None:
    old = jax.lax.dynamic_slice(all_BNSGK, at, new.shape)
    new = jnp.where(rows_B[:, None, None, None, None], new, old)
  return jax.lax.dynamic_update_slice(all_BNSGK, new, at)


def _layer(all_BNSGK: jax.Array, layer: Any) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(all_BNSGK, layer, axis=1, keepdims=False)


class Kind(NamedTuple):
  """Heads of keys and values, their width, and the positions they see."""

  num_heads: int
  head_dim: int
  window: int | None


@struct.dataclass
class Caches:
  """Caches of layers that differ in heads or windows."""

  groups: tuple[Cache | Ring, ...]  # One cache for each kind of layer.
  places_N: tuple[int, ...] = struct.field(pytree_node=False)  # In the group.
  length: int = struct.field(pytree_node=False)
  is_first: bool = struct.field(pytree_node=False, default=False)

  def place(self, layer: Any) -> jax.Array:
    return jnp.asarray(self.places_N)[layer]

  def with_group(self, number: int, cache: Cache | Ring) -> "Caches":
    groups = list(self.groups)
    groups[number] = cache
    return dataclasses.replace(self, groups=tuple(groups))

  def reading(self, start: Any, L: int, real_BL: jax.Array | None) -> "Caches":
    """Notes how much of each row is read: up to the last True, by default L."""
    if L == 1:
      return self
    count_B: Any = L
    if real_BL is not None:
      count_B = jnp.max(jnp.where(real_BL, jnp.arange(L) + 1, 0), axis=1)
    read = lambda x: x._replace(read_B=0 * x.read_B + start + count_B)
    groups = [x if x.read_B is None else read(x) for x in self.groups]
    is_first = isinstance(start, int) and start == 0
    return Caches(tuple(groups), self.places_N, self.length, is_first)

  def after_call(self) -> "Caches":
    return dataclasses.replace(self, is_first=False)


def of_layers(
  batch_size: int,
  length: int,
  kinds: Sequence[Kind],
  kind_N: Sequence[int],
  dtype: str,
) -> Caches:
  """Returns empty caches; `kind_N` has the number of each layer's kind."""
  sizes = [min(kind.window or length, length) for kind in kinds]
  rings = any(size < length for size in sizes)
  groups: list[Cache | Ring] = []
  for number, (kind, size) in enumerate(zip(kinds, sizes)):
    heads, width = kind.num_heads, kind.head_dim
    depth = kind_N.count(number)
    k, v, _ = empty(batch_size, depth, size, heads, width, dtype)
    read_B = jnp.zeros(batch_size, jnp.int32)
    if size < length:
      groups.append(Ring(k, v, read_B))
    else:
      groups.append(Cache(k, v, read_B if rings else None))
  places = tuple(kind_N[:i].count(number) for i, number in enumerate(kind_N))
  return Caches(tuple(groups), places, length)


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
