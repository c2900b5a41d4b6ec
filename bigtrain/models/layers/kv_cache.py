"""The key-value cache of decoding.

A Cache holds the keys and values of all positions. A Ring, for layers with a
window, holds only the last S of them. Both have `extend`, which writes the keys
and values of a call and returns a View, to which its queries attend. Caches is
the cache of the whole model: a Cache or Ring for each kind of layer, or for
recurrent layers the States of recurrent_cache.py.

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
from bigtrain.models.layers import masks, recurrent_cache


class View(NamedTuple):
  """Keys and values that a call's queries attend to."""

  k_BSGK: jax.Array
  v_BSGK: jax.Array
  mask: Any  # A masks.Mask.
  # Number of the first query among these positions; None if both begin
  # together, as in a first call.
  start: Any

  def layer(self, layer: Any) -> tuple[jax.Array, jax.Array]:
    """The keys and values of another layer, as a cache that is not extended."""
    del layer
    return self.k_BSGK, self.v_BSGK


class Cache(NamedTuple):
  """Keys and values of all positions, and layers: a loop updates the arrays."""

  k_BNSGK: jax.Array
  v_BNSGK: jax.Array
  # As in Ring; None if no layer has a Ring or a recurrent state, and tokens may
  # be written again.
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
    """Writes the positions from `start` on; None for a first call."""
    is_new_B = None
    if self.read_B is not None and k_BLGK.shape[1] == 1:
      is_new_B = start >= self.read_B
    first = 0 if start is None else start
    k_BNSGK = _put(self.k_BNSGK, k_BLGK, layer, first, is_new_B)
    v_BNSGK = _put(self.v_BNSGK, v_BLGK, layer, first, is_new_B)
    new = Cache(k_BNSGK, v_BNSGK, self.read_B)
    if start is None:
      return new, View(k_BLGK, v_BLGK, mask, None)
    return new, View(*new.layer(layer), mask, start)

  def layer(self, layer: Any) -> tuple[jax.Array, jax.Array]:
    return _layer(self.k_BNSGK, layer), _layer(self.v_BNSGK, layer)


class Ring(NamedTuple):
  """Keys and values of the last S positions; p is in place p modulo S.

  One call reads the prompts of a batch. The calls after it read one token of
  every text, starting at the end of the shortest prompt. Tokens of longer
  prompts, those before `read_B`, have been read already and are not written
  again.
  """

  k_BNSGK: jax.Array
  v_BNSGK: jax.Array
  # Number of positions of each text that were read by calls with several.
  read_B: jax.Array

  def extend(
    self,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    mask: masks.Mask,
    layer: Any,
    start: Any,
  ) -> tuple["Ring", View]:
    """Writes the positions from `start` on; None for a first call."""
    if k_BLGK.shape[1] == 1:
      return self._extend_by_one(k_BLGK, v_BLGK, layer, start)
    S, L = self.k_BNSGK.shape[2], k_BLGK.shape[1]
    B = k_BLGK.shape[0]
    is_first = start is None
    start = 0 if start is None else start
    last_S = start - S + jnp.arange(S)  # The S positions before the call.
    real_BS = jnp.broadcast_to(
      jnp.pad(last_S >= 0, (0, L), constant_values=True), (B, S + L)
    )
    # Which of the call's positions each place gets; negative to keep the old.
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

  def _extend_by_one(
    self, k_B1GK: jax.Array, v_B1GK: jax.Array, layer: Any, start: Any
  ) -> tuple["Ring", View]:
    S = self.k_BNSGK.shape[2]
    is_new_B = start >= self.read_B
    k_BNSGK = _put(self.k_BNSGK, k_B1GK, layer, start % S, is_new_B)
    v_BNSGK = _put(self.v_BNSGK, v_B1GK, layer, start % S, is_new_B)
    new = Ring(k_BNSGK, v_BNSGK, self.read_B)
    position_BS = new._positions(jnp.maximum(self.read_B, start + 1))
    seen_BS = (position_BS >= 0) & (position_BS <= start)
    k_BSGK, v_BSGK = _layer(k_BNSGK, layer), _layer(v_BNSGK, layer)
    return new, View(k_BSGK, v_BSGK, masks.Mask(real_BS=seen_BS), start)

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
  is_new_B: jax.Array | None = None,
) -> jax.Array:
  """Writes a layer's keys or values where `is_new_B` is True."""
  new = new_BLGK[:, None].astype(all_BNSGK.dtype)
  at = (0, layer, start, 0, 0)
  if is_new_B is not None:
    old = jax.lax.dynamic_slice(all_BNSGK, at, new.shape)
    new = jnp.where(is_new_B[:, None, None, None, None], new, old)
  return jax.lax.dynamic_update_slice(all_BNSGK, new, at)


def _layer(all_BNSGK: jax.Array, layer: Any) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(all_BNSGK, layer, axis=1, keepdims=False)


class WithView(NamedTuple):
  """A cache, or none, with the View of its last call: other layers read it."""

  cache: Cache | Ring | None
  view: View | None = None

  def extend(
    self,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    mask: masks.Mask,
    layer: Any,
    start: Any,
  ) -> tuple["WithView", View]:
    if self.cache is None:
      view = View(k_BLGK, v_BLGK, mask, None)
      return WithView(None, view), view
    cache, view = self.cache.extend(k_BLGK, v_BLGK, mask, layer, start)
    return WithView(cache, view), view


class Kind(NamedTuple):
  """Shape of a layer's cache. Layers of one kind share a cache."""

  num_heads: int  # G.
  head_dim: int  # K.
  window: int | None  # Number of positions that queries see.
  # Whether the keys are latents, see latent_attention.py: of one head that all
  # query heads share, without values.
  latent: bool = False
  in_chunks: bool = False  # Whether the window is a chunk.


@struct.dataclass
class Text:
  """The text so far, for rotary embeddings that depend on its length."""

  tokens_BS: jax.Array
  length_B: jax.Array
  # Lengths above which all tokens have other frequencies, in ascending order.
  # The keys and values of a text that grows longer must be computed anew.
  switches: tuple[int, ...] = struct.field(pytree_node=False, default=())

  def read(self, tokens_BL: jax.Array, start: Any, count_B: Any) -> "Text":
    """Adds the tokens of a call, of which each text has the first `count_B`."""
    tokens_BS = jax.lax.dynamic_update_slice_in_dim(
      self.tokens_BS, tokens_BL.astype(jnp.int32), start, axis=1
    )
    end_B = jnp.asarray(start + count_B, jnp.int32)
    return dataclasses.replace(
      self, tokens_BS=tokens_BS, length_B=jnp.maximum(self.length_B, end_B)
    )


# Of a kind of layer.
Group = Cache | Ring | recurrent_cache.States


@struct.dataclass
class Caches:
  """The caches of a model."""

  groups: tuple[Group, ...]  # One for each kind of layer.
  # Index of each layer among those of its kind.
  places_N: tuple[int, ...] = struct.field(pytree_node=False)
  length: int = struct.field(pytree_node=False)  # Most positions of a text.
  # Whether the present call is the first one, from position 0 on.
  is_first: bool = struct.field(pytree_node=False, default=False)
  # Difference of rotary positions and numbers of tokens, where pictures have
  # positions by row and column; None for none.
  shift_B: jax.Array | None = None
  # None if rotary embeddings do not depend on the length of a text.
  text: Text | None = None

  def place(self, layer: Any) -> jax.Array:
    return jnp.asarray(self.places_N)[layer]

  def with_group(self, number: int, cache: Group) -> "Caches":
    groups = list(self.groups)
    groups[number] = cache
    return dataclasses.replace(self, groups=tuple(groups))

  def reading(self, start: Any, L: int, real_BL: jax.Array | None) -> "Caches":
    """Before a call: notes how far it reads each text.

    That is up to the last True in `real_BL`, or by default all L positions.
    """
    if L == 1:
      return self
    count_B = masks.num_real(L, real_BL)
    groups = []
    for cache in self.groups:
      if cache.read_B is not None:
        # The product keeps the shape, [B], where the rest is a number.
        read_B = 0 * cache.read_B + start + count_B
        cache = cache._replace(read_B=read_B)
      groups.append(cache)
    is_first = isinstance(start, int) and start == 0
    return dataclasses.replace(self, groups=tuple(groups), is_first=is_first)

  def with_tokens(
    self, tokens_BL: jax.Array, start: Any, real_BL: jax.Array | None
  ) -> "Caches":
    """Before a call: `reading`, and adds its tokens to any `text`."""
    L = tokens_BL.shape[1]
    caches = self.reading(start, L, real_BL)
    if caches.text is None:
      return caches
    text = caches.text.read(tokens_BL, start, masks.num_real(L, real_BL))
    return dataclasses.replace(caches, text=text)

  def after_call(self) -> "Caches":
    return dataclasses.replace(self, is_first=False)


def of_layers(
  batch_size: int,
  length: int,
  kinds: Sequence[Kind | recurrent_cache.Kind],
  kind_N: Sequence[int | None],
  dtype: str,
  write_once: bool = False,
  whole: bool = False,
) -> Caches:
  """Returns empty caches.

  Args:
    kind_N: index of each layer's kind; None for layers without a cache.
    write_once: whether prompt tokens that are read again, one by one, are left
      as they are.
    whole: whether layers with a window keep all positions too.
  """

  def size_of(kind: Kind | recurrent_cache.Kind) -> int:
    """Number of positions that a cache of this kind keeps."""
    if whole or isinstance(kind, recurrent_cache.Kind) or not kind.window:
      return length
    return min(kind.window, length)

  sizes = [size_of(kind) for kind in kinds]
  # Whether some layers cannot read a token again.
  has_rings = any(
    size < length or isinstance(kind, recurrent_cache.Kind)
    for kind, size in zip(kinds, sizes)
  )
  groups: list[Group] = []
  for index, (kind, size) in enumerate(zip(kinds, sizes)):
    depth = kind_N.count(index)
    if isinstance(kind, recurrent_cache.Kind):
      groups.append(kind.empty(batch_size, depth, dtype))
      continue
    make = empty_latents if kind.latent else empty
    cache = make(batch_size, depth, size, kind.num_heads, kind.head_dim, dtype)
    read_B = jnp.zeros(batch_size, jnp.int32)
    if size < length:
      groups.append(Ring(cache.k_BNSGK, cache.v_BNSGK, read_B))
    elif has_rings or write_once:
      groups.append(cache._replace(read_B=read_B))
    else:
      groups.append(cache)
  places_N = tuple(kind_N[:i].count(index) for i, index in enumerate(kind_N))
  return Caches(tuple(groups), places_N, length)


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


def empty_latents(
  batch_size: int,
  depth: int,
  length: int,
  num_heads: int,
  width: int,
  dtype: str,
) -> Cache:
  zeros = jnp.zeros((batch_size, depth, length, num_heads, width), dtype)
  return Cache(sharding.over_batch(zeros), zeros[..., :0])
