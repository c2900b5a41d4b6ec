"""Pictures in a text: the embeddings, masks and positions of image tokens.

A text contains T image tokens for each of its pictures. The decoder reads the
embeddings of the pictures in their place (`Pictures.in_text`). Tokens of a
picture may also see each other in both directions (`groups_of_pictures`), and
may have rotary positions by row and column (`with_axes`).

Axes: B batch, N pictures of an example, T image tokens of a picture, L length,
S length attended to, D width of the decoder.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.models.layers import kv_cache, masks, tiled_pictures


class InText(NamedTuple):
  """Arguments of a decoder that has image tokens among its tokens."""

  # Embeddings (B, L, D), and where they replace those of the tokens.
  inserted: tuple[jax.Array, jax.Array]
  # What is added after the first n layers, (B, n, L, D); None for nothing.
  added_BnLD: jax.Array | None = None


class Pictures(NamedTuple):
  """The pictures of a batch, as embeddings of the decoder."""

  x_BND: jax.Array  # (B, N T, D).
  # Rows and columns of each picture's tokens, (B or 1, N, 2). The tokens of a
  # picture beyond them are padding.
  grids_BN2: jax.Array
  # Whether all pictures have the same grid, and none has padding.
  is_uniform: bool
  # What is added after the first n layers, (B, n, N T, D).
  added_BnMD: jax.Array | None
  # Of pictures with tiles, and the layout (B, N, 4) if the batch has one.
  views: tiled_pictures.Views | None = None
  layout_BN4: jax.Array | None = None

  def repeated(self, number: int) -> "Pictures":
    """Each example's pictures `number` times in a row."""
    repeat = functools.partial(jnp.repeat, repeats=number, axis=0)
    grids, added = self.grids_BN2, self.added_BnMD
    views, layout = self.views, self.layout_BN4
    return self._replace(
      x_BND=repeat(self.x_BND),
      grids_BN2=repeat(grids) if len(grids) > 1 else grids,
      added_BnMD=None if added is None else repeat(added),
      views=views and views._replace(x_BND=repeat(views.x_BND)),
      layout_BN4=None if layout is None else repeat(layout),
    )

  def in_text(self, is_image_BL: jax.Array) -> InText:
    """Puts each embedding in the place of its image token."""
    if self.views is not None:
      x_BLD = self.views.in_text(self.layout_BN4, is_image_BL)
      return InText((x_BLD, is_image_BL))
    # The index of each image token's embedding among the N T of its example.
    if self.is_uniform:
      number_BL = jnp.cumsum(is_image_BL, axis=1) - 1
      index_BL = jnp.clip(number_BL, 0, self.x_BND.shape[1] - 1)
    else:
      place = _places(self.grids_BN2, is_image_BL)
      T = self.x_BND.shape[1] // self.grids_BN2.shape[1]
      index_BL = place.picture_BL * T + jnp.clip(place.token_BL, 0, T - 1)

    def pick(x: jax.Array) -> jax.Array:
      return jnp.take_along_axis(x, index_BL[..., None], axis=1)

    inserted = pick(self.x_BND), is_image_BL
    if self.added_BnMD is None:
      return InText(inserted)
    added_BnLD = jax.vmap(pick, in_axes=1, out_axes=1)(self.added_BnMD)
    added_BnLD = jnp.where(is_image_BL[:, None, :, None], added_BnLD, 0)
    return InText(inserted, added_BnLD)


class _Places(NamedTuple):
  """Picture and token numbers of image tokens; meaningless at other tokens."""

  picture_BL: jax.Array  # Number of the picture.
  token_BL: jax.Array  # Number of the token in the picture.


def _places(grids_BN2: jax.Array, is_image_BL: jax.Array) -> _Places:
  number_BL = jnp.cumsum(is_image_BL, axis=1) - 1
  ends_BN = jnp.cumsum(jnp.prod(grids_BN2, axis=-1), axis=1)
  picture_BL = jnp.sum(number_BL[..., None] >= ends_BN[:, None], axis=-1)
  picture_BL = jnp.clip(picture_BL, 0, grids_BN2.shape[1] - 1)
  starts_BN = jnp.pad(ends_BN, ((0, 0), (1, 0)))[:, :-1]
  starts_BN = jnp.broadcast_to(starts_BN, (len(number_BL), starts_BN.shape[1]))
  start_BL = jnp.take_along_axis(starts_BN, picture_BL, axis=1)
  return _Places(picture_BL, number_BL - start_BL)


def groups_of_pictures(
  is_image_BL: jax.Array, *, need_window: bool
) -> masks.Groups:
  """A group for each picture, whose tokens see each other.

  Args:
    need_window: whether layers without a window ignore the groups.
  """
  # A picture begins at each image token that follows another kind of token.
  before_BL = jnp.pad(is_image_BL, ((0, 0), (1, 0)))[:, :-1]
  number_BL = jnp.cumsum(is_image_BL & ~before_BL, axis=1)
  number_BL = jnp.where(is_image_BL, number_BL, 0)
  return masks.Groups(
    number_BL, number_BL, window_in_groups=True, need_window=need_window
  )


def group_of_prefix(
  prefix: jax.Array,
  L: int,
  cache: kv_cache.Caches | None,
  start: jax.Array | int,
) -> masks.Groups:
  """One group of the tokens in the prefix, which see each other.

  Args:
    prefix: int (B,), number of leading tokens, or bool (B, L).
    start: number of the first token of the call.
  """
  if prefix.ndim == 2:
    in_prefix_BL = (prefix != 0).astype(jnp.int32)
    return masks.Groups(in_prefix_BL, in_prefix_BL)

  def is_inside(number: jax.Array) -> jax.Array:
    return (number < prefix[:, None]).astype(jnp.int32)

  # A first call attends to its own tokens, a later one to the whole cache.
  is_first = isinstance(start, int) and start == 0
  S = L if cache is None or is_first else cache.length
  return masks.Groups(
    is_inside(start + jnp.arange(L)), is_inside(jnp.arange(S))
  )


def with_axes(
  grids_BN2: jax.Array,
  is_image_BL: jax.Array,
  positions_BL: jax.Array | None,
  segments_BL: jax.Array | None,
  cache: kv_cache.Caches | None,
) -> tuple[jax.Array, kv_cache.Caches | None]:
  """Positions (B, L, 3) in time, row and column, and the cache's shift.

  As in Qwen2-VL (https://arxiv.org/abs/2409.12191): all tokens of a picture
  have the time of its first one, and what follows begins after the larger of
  its numbers of rows and columns.
  """
  B, L = is_image_BL.shape
  grids_BN2 = jnp.broadcast_to(grids_BN2, (B, *grids_BN2.shape[1:]))
  place = _places(grids_BN2, is_image_BL)
  grid_BL2 = jnp.take_along_axis(grids_BN2, place.picture_BL[..., None], axis=1)

  # Time advances by 1 with each word, and with the first token of a picture by
  # the picture's whole extent.
  extent_BL = jnp.max(grid_BL2, axis=-1)
  is_first_BL = is_image_BL & (place.token_BL == 0)
  step_BL = jnp.where(is_image_BL, is_first_BL * extent_BL, 1)
  end_BL = jnp.cumsum(step_BL, axis=1)
  # A picture's tokens share the position before it.
  time_BL = end_BL - jnp.where(is_image_BL, extent_BL, 1)

  # Positions count from the first token of each document.
  if positions_BL is None:
    positions_BL = masks.positions_of(L, 0, segments_BL)
  first_index_BL = jnp.broadcast_to(jnp.arange(L) - positions_BL, (B, L))
  time_BL = time_BL - jnp.take_along_axis(time_BL, first_index_BL, axis=1)

  columns_BL = jnp.maximum(grid_BL2[..., 1], 1)
  row_BL, column_BL = jnp.divmod(place.token_BL, columns_BL)
  axes = [time_BL, time_BL + row_BL, time_BL + column_BL]
  result = [jnp.where(is_image_BL, axis, time_BL) for axis in axes]
  if cache is not None:
    # Tokens that follow in generation have smaller positions than indices.
    shift_B = jnp.sum(step_BL, axis=1) - L
    cache = dataclasses.replace(cache, shift_B=shift_B)
  return jnp.stack(result, axis=-1), cache
