"""The blocks of blockwise attention, and the scores of a pair of blocks.

Axes: B batch, L length, S length attended to, G heads of keys and values, R
query heads of each, K head width; N blocks of A queries, M blocks of C
positions; T distances.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.models.layers import masks

# Not -inf: the difference of two of them must not be NaN.
MASKED = -1e30


class Static(NamedTuple):
  """What the compiled program depends on."""

  scale: float
  softcap: float | None
  block_q: int
  block_k: int


class Order(NamedTuple):
  """Blocks that begin anywhere in an example, see attention_split.py.

  All blocks are whole.

  Attributes:
    rows_N: int, number of the first query of each block.
    columns_M: int, number of the first position of each block.
    pairs: int (pairs, 2), as in Blocks.
    length: length of the example, from which a bias counts distances.
    counted: as in Blocks, of all devices and pairs.
    computed: as in Blocks, of all devices and pairs.
  """

  rows_N: jax.Array
  columns_M: jax.Array
  pairs: jax.Array
  length: int
  counted: int
  computed: int


class Blocks:
  """Blocks of queries and positions, and the scores of a pair of them.

  Attributes:
    static: see there.
    pairs: int (pairs, 2), numbers of the blocks of queries and of positions
      whose scores are not all hidden by the causal order.
    computed: number of scores of a head that these blocks have.
    counted: number of scores of a head that model FLOPs count.
  """

  def __init__(
    self,
    static: Static,
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
    mask: masks.Mask,
    order: Order | None = None,
  ):
    """See `_attend`; without `order` the blocks count from 0."""
    self.static, self._mask, self._order = static, mask, order
    _, self._L, self._G, self._R, _ = q.shape
    self._S = k.shape[1]
    A, C = static.block_q, static.block_k
    self._N, self._M = math.ceil(self._L / A), math.ceil(self._S / C)
    self.pairs: Any
    if order is None:
      self.pairs = visible_pairs(
        np.arange(self._N) * A, np.arange(self._M) * C, static, mask
      )
      self.counted = self._L * mask.reach(self._S)
      self.computed = len(self.pairs) * A * C
    else:
      self.pairs = order.pairs
      self.counted, self.computed = order.counted, order.computed
    pad = lambda x, size: jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    split = lambda x, size: (
      None if x is None else _to_blocks(pad(x, size), size)
    )
    self._segments_NBA = split(mask.segments_BL, A)
    self._segments_MBC = split(mask.segments_BS, C)
    self._real_MBC = split(mask.real_BS, C)
    self._bias = None
    if bias is not None and order is not None:
      self._bias = bias
    elif bias is not None:  # The padding also needs distances.
      more = self._N * A - self._L, self._M * C - self._S
      self._bias = jnp.pad(bias, ((0, 0), (0, 0), more))

  def of_queries(self, x: jax.Array) -> jax.Array:
    """(B, L, G, R, K) as blocks (N, B, G, R, A, K)."""
    rows = -self._L % self.static.block_q
    x = jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, 0), (0, 0)))
    return jnp.moveaxis(_to_blocks(x, self.static.block_q), 2, 4)

  def to_queries(self, x_N: jax.Array, like: jax.Array) -> jax.Array:
    """The reverse, with the shape and dtype of `like`."""
    x = jnp.moveaxis(jnp.moveaxis(x_N, 4, 2), 0, 1)
    x = x.reshape(like.shape[0], -1, *like.shape[2:])
    return x[:, : self._L].astype(like.dtype)

  def of_keys(self, x: jax.Array) -> jax.Array:
    """(B, S, G, K) as blocks (M, B, G, C, K)."""
    rows = -self._S % self.static.block_k
    x = jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, 0)))
    return jnp.moveaxis(_to_blocks(x, self.static.block_k), 2, 3)

  def to_keys(self, x_M: jax.Array, like: jax.Array) -> jax.Array:
    """The reverse, with the shape and dtype of `like`."""
    x = jnp.moveaxis(jnp.moveaxis(x_M, 3, 2), 0, 1)
    x = x.reshape(like.shape[0], -1, *like.shape[2:])
    return x[:, : self._S].astype(like.dtype)

  def scores(
    self, q: jax.Array, k: jax.Array, n: Any, m: Any
  ) -> tuple[jax.Array, jax.Array | None]:
    """Float32 scores (B, G, R, A, C) of a pair of blocks, and their mask."""
    static = self.static
    scores = jnp.einsum(
      "bgrak,bgck->bgrac", q, k, preferred_element_type=jnp.float32
    )
    scores *= static.scale
    if self._bias is not None:
      scores += _by_pair(self._distances(self._bias, n, m), static)
    if static.softcap is not None:
      scores = static.softcap * jnp.tanh(scores / static.softcap)
    mask = self._mask_of(n, m)
    if mask is not None:
      mask = mask[:, None, None]
      scores = jnp.where(mask, scores, MASKED)
    return scores, mask

  def _mask_of(self, n: Any, m: Any) -> jax.Array | None:
    """Bool (B or 1, A or 1, C) of a pair of blocks; None if all is visible."""
    static = self.static
    of_block = lambda x, i: None if x is None else pick(x, i)
    if self._order is None:
      column_C = m * static.block_k + jnp.arange(static.block_k)
      row_A = n * static.block_q + jnp.arange(static.block_q)
    else:
      column_C = self._order.columns_M[m] + jnp.arange(static.block_k)
      row_A = self._order.rows_N[n] + jnp.arange(static.block_q)
    mask = self._mask.block(
      row_A,
      column_C,
      of_block(self._segments_NBA, n),
      of_block(self._segments_MBC, m),
      of_block(self._real_MBC, m),
    )
    # Causal queries do not see the padding after them.
    if self._S % static.block_k and not (
      self._mask.causal and self._mask.prefix_B is None
    ):
      exists = (column_C < self._S)[None, None]
      mask = exists if mask is None else mask & exists
    return mask

  def _start(self, n: Any, m: Any) -> Any:
    """Index in the bias of a pair of blocks' least distance."""
    static = self.static
    if self._order is not None:
      first = self._order.length - static.block_q
      return self._order.columns_M[m] - self._order.rows_N[n] + first
    return m * static.block_k + (self._N - 1 - n) * static.block_q

  def _distances(self, bias: jax.Array, n: Any, m: Any) -> jax.Array:
    """Entries of the bias for the A + C - 1 distances in a pair of blocks."""
    num = self.static.block_q + self.static.block_k - 1
    return jax.lax.dynamic_slice_in_dim(bias, self._start(n, m), num, axis=2)

  def no_bias_gradient(self) -> jax.Array | None:
    """Zeros to which `add_to_bias` adds, or None without a bias."""
    return None if self._bias is None else jnp.zeros_like(self._bias)

  def add_to_bias(
    self, dbias: jax.Array, dscores_GRAC: jax.Array, n: Any, m: Any
  ) -> jax.Array:
    """Adds the gradients of a pair's scores to the gradients by distance."""
    old = self._distances(dbias, n, m)
    expand = functools.partial(_by_pair, static=self.static)
    (new,) = jax.linear_transpose(expand, old)(dscores_GRAC)
    return jax.lax.dynamic_update_slice_in_dim(
      dbias, old + new, self._start(n, m), axis=2
    )

  def without_padding(self, dbias: jax.Array) -> jax.Array:
    """Entries of the distances of real queries and positions."""
    first = self._N * self.static.block_q - self._L
    return dbias[:, :, first : first + self._L + self._S - 1]


def visible_pairs(
  rows_N: np.ndarray,
  columns_M: np.ndarray,
  static: Static,
  mask: masks.Mask,
) -> np.ndarray:
  """Returns `pairs` of Blocks."""
  visible = np.ones((len(rows_N), len(columns_M)), bool)
  if mask.causal and mask.prefix_B is None:
    visible &= columns_M <= rows_N[:, None] + static.block_q - 1
    if mask.window:
      last = columns_M + static.block_k - 1
      visible &= last > rows_N[:, None] - mask.window
  return np.argwhere(visible).astype(np.int32)


def _to_blocks(x: jax.Array, size: int) -> jax.Array:
  """(B, L, ...) as (L / size, B, size, ...)."""
  return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


def _by_pair(bias_GRT: jax.Array, static: Static) -> jax.Array:
  """Biases (G, R, A, C) from the biases of the A + C - 1 distances c - a.

  Rows of a matrix whose rows are all `bias` shift by one if it is read with
  rows that are shorter by one.
  """
  A, C = static.block_q, static.block_k
  G, R, T = bias_GRT.shape
  if A == 1:
    return bias_GRT[:, :, None]
  rows = jnp.broadcast_to(bias_GRT[:, :, None], (G, R, A, T))
  flat = rows.reshape(G, R, A * T)[:, :, A - 1 : A - 1 + A * (T - 1)]
  return flat.reshape(G, R, A, T - 1)[..., :C]


def pick(x_N: jax.Array, n: Any) -> jax.Array:
  """Returns a block."""
  return jax.lax.dynamic_index_in_dim(x_N, n, 0, keepdims=False)


def put(x_N: jax.Array, n: Any, x: jax.Array) -> jax.Array:
  """Returns the blocks with one replaced."""
  return jax.lax.dynamic_update_index_in_dim(x_N, x, n, 0)
