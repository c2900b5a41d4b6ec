"""Embeddings of pictures that are cut into tiles: LLaVA-NeXT and OneVision.

A picture is several views: the whole picture in the size of a tile, followed by
the tiles, if there are any. The text has the tokens of the first view, followed
row by row by those of all tiles together, without the padding around the
picture and with a learned token at the end of each row. A picture without tiles
ends with one such token. See
https://llava-vl.github.io/blog/2024-01-30-llava-next and LLaVA- OneVision
(https://arxiv.org/abs/2408.03326).

A layout [B, N, 4] describes the N views of an example. For the first view of a
picture it has the rows and columns of tiles, and the rows and columns of the
tiles' patches that show the picture. It is zero for tiles, and where there is
no picture.

Axes: B batch, N views, T tokens of a view, L length, D width of the decoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import tile_grids
from bigtrain.config.errors import ConfigError, check_kwargs, check_number


class Options(NamedTuple):
  """config.model.tiles."""

  # Height and width of each size, in tiles, to which a picture may be resized.
  grids: Sequence[tuple[int, int]]
  # Number of tiles to which the features of larger pictures are resized; None
  # to keep all features.
  limit: int | None = None


def read(given: Any, key: str) -> Options | None:
  if given is None or isinstance(given, Options):
    return given
  if not isinstance(given, Mapping):
    raise ConfigError(f"{key}={given!r}: expected dict(grids=...).")
  check_kwargs(Options, given, key)
  grids = tuple((int(h), int(w)) for h, w in given["grids"])
  if not grids or min(map(min, grids)) < 1:
    raise ConfigError(
      f"{key}.grids={given['grids']!r}: expected pairs of numbers of tiles."
    )
  limit = given.get("limit")
  if limit is not None:
    check_number(f"{key}.limit", limit, least=1, whole=True)
  return Options(grids, limit)


class Newline(nn.Module):
  """The embedding at the end of a row, (D,)."""

  width: int  # D.

  @nn.compact
  def __call__(self) -> jax.Array:
    init = nn.initializers.normal(self.width**-0.5)
    return self.param("newline", init, (self.width,))


class Views(NamedTuple):
  """Views of all examples, as embeddings."""

  x_BND: jax.Array  # (B, N T, D).
  newline_D: jax.Array
  side: tuple[int, int]  # Rows and columns of patches of a view.
  options: Options

  def in_text(
    self, layout_BN4: jax.Array | None, is_image_BL: jax.Array
  ) -> jax.Array:
    """Features for the image tokens, (B, L, D); meaningless at other tokens."""
    h, w = self.side
    T = h * w
    if layout_BN4 is None:
      layout_BN4 = self._guessed(is_image_BL)
    size_BN2 = self._shrunk(layout_BN4[..., 2:])
    has_tiles_BN = layout_BN4[..., 0] > 0
    of_tiles_BN = size_BN2[..., 0] * (size_BN2[..., 1] + 1)
    length_BN = T + jnp.where(has_tiles_BN, of_tiles_BN, 1)
    length_BN = jnp.where(layout_BN4[..., 2] > 0, length_BN, 0)
    end_BN = jnp.cumsum(length_BN, axis=1)
    number_BL = jnp.cumsum(is_image_BL, axis=1) - 1
    view_BL = jnp.sum(number_BL[..., None] >= end_BN[:, None], axis=-1)
    view_BL = jnp.clip(view_BL, 0, end_BN.shape[1] - 1)

    def of_view(x: jax.Array) -> jax.Array:
      if x.ndim == 3:
        return jnp.take_along_axis(x, view_BL[..., None], axis=1)
      return jnp.take_along_axis(x, view_BL, axis=1)

    token_BL = number_BL - of_view(end_BN - length_BN)
    in_tiles_BL = token_BL >= T
    row_BL, column_BL = jnp.divmod(
      jnp.maximum(token_BL - T, 0), of_view(size_BN2[..., 1]) + 1
    )
    is_newline_BL = in_tiles_BL & (
      ~of_view(has_tiles_BN) | (column_BL == of_view(size_BN2[..., 1]))
    )
    first = view_BL * T + jnp.clip(token_BL, 0, T - 1)
    tiles = self._places(
      of_view(layout_BN4), of_view(size_BN2), row_BL, column_BL
    )
    total_BLD: Any = 0.0
    for index_BL, share_BL in tiles:
      index_BL = jnp.where(in_tiles_BL, (view_BL + 1) * T + index_BL, first)
      index_BL = jnp.clip(index_BL, 0, self.x_BND.shape[1] - 1)
      picked_BLD = jnp.take_along_axis(self.x_BND, index_BL[..., None], axis=1)
      total_BLD += share_BL[..., None].astype(picked_BLD.dtype) * picked_BLD
    newline_D = self.newline_D.astype(self.x_BND.dtype)
    return jnp.where(is_newline_BL[..., None], newline_D, total_BLD)

  def _places(
    self,
    layout_BL4: jax.Array,
    size_BL2: jax.Array,
    row_BL: jax.Array,
    column_BL: jax.Array,
  ) -> list[tuple[jax.Array, jax.Array]]:
    """Patches after the first view, and their weights in the interpolation."""
    h, w = self.side
    ends = []
    for axis, (number_BL, side) in enumerate(((row_BL, h), (column_BL, w))):
      tiles_BL, kept_BL = layout_BL4[..., axis], layout_BL4[..., 2 + axis]
      scale_BL = kept_BL / jnp.maximum(size_BL2[..., axis], 1)
      at_BL = jnp.maximum((number_BL + 0.5) * scale_BL - 0.5, 0)
      low_BL = jnp.floor(at_BL).astype(jnp.int32)
      high_BL = jnp.minimum(low_BL + 1, kept_BL - 1)
      share_BL = at_BL - low_BL
      padding_BL = (tiles_BL * side - kept_BL) // 2
      ends.append(
        [(low_BL + padding_BL, 1 - share_BL), (high_BL + padding_BL, share_BL)]
      )
    result = []
    is_whole = not self._interpolates()
    for y_BL, y_share_BL in ends[0][:1] if is_whole else ends[0]:
      for x_BL, x_share_BL in ends[1][:1] if is_whole else ends[1]:
        tile_BL = y_BL // h * layout_BL4[..., 1] + x_BL // w
        patch_BL = y_BL % h * w + x_BL % w
        share_BL = y_share_BL * x_share_BL
        result.append((tile_BL * h * w + patch_BL, share_BL))
    return result

  def _interpolates(self) -> bool:
    """Whether any picture may have more patches than the limit."""
    h, w = self.side
    return any(
      tile_grids.shrunk(rows * h, columns * w, h, self.options.limit)
      != (rows * h, columns * w)
      for rows, columns in self.options.grids
    )

  def _shrunk(self, kept_BN2: jax.Array) -> jax.Array:
    """Rows and columns after interpolation, by a table of all sizes."""
    if not self._interpolates():
      return kept_BN2
    h, w = self.side
    rows, columns = (max(x) for x in zip(*self.options.grids))
    table = np.zeros((rows * h + 1, columns * w + 1, 2), np.int32)
    for row, column in np.ndindex(*table.shape[:2]):
      if row and column:
        table[row, column] = tile_grids.shrunk(
          row, column, h, self.options.limit
        )
    return jnp.asarray(table)[kept_BN2[..., 0], kept_BN2[..., 1]]

  def _guessed(self, is_image_BL: jax.Array) -> jax.Array:
    """Layouts by the number of image tokens of each example.

    It is the first of these that fits: N pictures without tiles; one picture
    with N - 1 tiles; fewer pictures without tiles; one picture with fewer
    tiles.
    """
    h, w = self.side
    T = h * w
    N = self.x_BND.shape[1] // T
    tokens_B = jnp.sum(is_image_BL, axis=1)
    is_present_BN = jnp.arange(N) < tokens_B[:, None] // (T + 1)
    alone_BN4 = is_present_BN[..., None] * jnp.asarray([0, 0, h, w])
    candidates = []
    for rows, columns in self.options.grids:
      if rows * columns < N:
        H, W = rows * h, columns * w
        candidates += [(rows, columns, n, W) for n in range(H, 0, -2)]
        candidates += [(rows, columns, H, n) for n in range(W - 2, -1, -2)]
    if not candidates:
      return alone_BN4
    candidates.sort(key=lambda x: -x[0] * x[1])
    counts = []
    for _, _, kept_rows, kept_columns in candidates:
      rows, columns = tile_grids.shrunk(
        kept_rows, kept_columns, h, self.options.limit
      )
      counts.append(T + rows * (columns + 1))
    fits_BC = tokens_B[:, None] == jnp.asarray(counts)
    best_B4 = jnp.asarray(candidates)[jnp.argmax(fits_BC, axis=1)]
    tiled_BN4 = jnp.zeros_like(alone_BN4).at[:, 0].set(best_B4)
    uses_all_B = best_B4[:, 0] * best_B4[:, 1] == N - 1
    is_alone_B = (tokens_B == N * (T + 1)) | ~jnp.any(fits_BC, axis=1)
    is_alone_B |= (tokens_B % (T + 1) == 0) & ~uses_all_B
    return jnp.where(is_alone_B[:, None, None], alone_BN4, tiled_BN4)
