"""The delta rule with a decay for each channel of a key, within chunks.

https://arxiv.org/abs/2510.26692 calls it Kimi Delta Attention. delta_rule.py
has the recurrence, and the loop over chunks.

Between two positions i and j of a chunk, the product of two keys has a
different decay in each channel:

  sum over k of x[i, k] y[j, k] exp(s[i, k] - s[j, k])

where s has the sums of the logarithms of decays. An array of all i, j and k
would be too large, and exp(-s[j, k]) alone overflows. So the chunk is halved
repeatedly. Let m be the last position of the first half. If i is after m and j
is not, then exp(s[i] - s[m]) and exp(s[m] - s[j]) are at most 1, and a product
of two matrices does the rest.

Axes: as in delta_rule.py.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.models.layers import triangular


class Chunks(NamedTuple):
  """Inputs of the loop over chunks; the first axis of all arrays is N."""

  q_BGRCK: jax.Array  # With the decay since the chunk's start.
  k_BGRCK: jax.Array  # With the decay up to the chunk's end.
  # Updates of the state if it is empty, and how they change with the state.
  u_BGRCV: jax.Array
  w_BGRCK: jax.Array
  # Weight of each update in the chunk's outputs.
  scores_BGRCJ: jax.Array
  # Share of the incoming state that is left at the chunk's end.
  kept_BGRK: jax.Array

  def read(self, state_BGRKV: jax.Array) -> jax.Array:
    """Reads the state before the chunk by the queries: [B, G, R, C, V]."""
    return self.q_BGRCK @ state_BGRKV

  def next_state(self, state_BGRKV: jax.Array, u: jax.Array) -> jax.Array:
    """The state after the chunk with the updates u."""
    kept = self.kept_BGRK[..., None] * state_BGRKV
    return kept + jnp.swapaxes(self.k_BGRCK, -1, -2) @ u


def split(size: int, x: jax.Array) -> jax.Array:
  """[B, N C, ...] to [N, B, C, ...]."""
  B, L, *rest = x.shape
  return jnp.moveaxis(x.reshape(B, L // size, size, *rest), 1, 0)


def within_chunks(inputs: Any, size: int) -> Chunks:
  """Everything that does not depend on the state, for all chunks at once."""
  in_chunks = functools.partial(split, size)
  q, k = (
    jnp.moveaxis(in_chunks(x), 2, 3)[:, :, :, None]
    for x in (inputs.q_BLGK, inputs.k_BLGK)
  )
  v, log_decay, beta = (
    jnp.moveaxis(in_chunks(x), 2, 4)
    for x in (inputs.v_BLGRV, inputs.log_decay, inputs.beta_BLGR)
  )
  sums_CK = jnp.cumsum(log_decay, axis=-2)
  kept_CK = jnp.exp(sums_CK)
  left_CK = jnp.exp(sums_CK[..., -1:, :] - sums_CK)
  # Of queries and of keys, with the keys.
  arrays = ([q, k], [k, k], [sums_CK, sums_CK])
  products = decayed_products(*map(jnp.concatenate, arrays))
  scores_CJ, by_keys_CJ = jnp.split(products, 2)
  if inputs.starts_BL is not None:
    # Number of documents that have begun in the chunk.
    number_C = jnp.cumsum(in_chunks(inputs.starts_BL), axis=-1)[
      :, :, None, None
    ]
    same_CJ = number_C[..., :, None] == number_C[..., None, :]
    scores_CJ = jnp.where(same_CJ, scores_CJ, 0)
    by_keys_CJ = jnp.where(same_CJ, by_keys_CJ, 0)
    kept_CK = jnp.where((number_C == 0)[..., None], kept_CK, 0)
    left_CK = jnp.where(same_CJ[..., -1, :, None], left_CK, 0)

  system_CJ = jnp.tril(beta[..., None] * by_keys_CJ, -1)
  inverse_CJ = triangular.unit_inverse(system_CJ) * beta[..., None, :]
  return Chunks(
    q_BGRCK=q * kept_CK,
    k_BGRCK=k * left_CK,
    u_BGRCV=inverse_CJ @ v,
    w_BGRCK=inverse_CJ @ (k * kept_CK),
    scores_BGRCJ=scores_CJ,
    kept_BGRK=kept_CK[..., -1, :],
  )


def decayed_products(x: jax.Array, y: jax.Array, sums: jax.Array) -> jax.Array:
  """Products [N, ..., C, J] of x and y, [N, ..., C, K], with the decay between.

  Zero where j is after i. C is a power of two.
  """
  size = x.shape[-2]
  if size == 1:
    products = jnp.sum(x * y, axis=-1, keepdims=True)
    return jnp.broadcast_to(products, (*sums.shape[:-1], 1))
  half = size // 2
  halves = [(z[..., :half, :], z[..., half:, :]) for z in (x, y, sums)]
  # The first axis takes both halves, so that one call serves them: XLA limits
  # the number of axes, and a mesh splits the others.
  within = decayed_products(*[jnp.concatenate(pair) for pair in halves])
  (_, x_after), (y_before, _), (sums_before, sums_after) = halves
  middle = sums_before[..., -1:, :]
  after = x_after * jnp.exp(sums_after - middle)
  before = y_before * jnp.exp(middle - sums_before)
  across = after @ jnp.swapaxes(before, -1, -2)
  first, second = jnp.split(within, 2)
  top = jnp.pad(first, [(0, 0)] * (across.ndim - 1) + [(0, half)])
  return jnp.concatenate(
    [top, jnp.concatenate([across, second], axis=-1)], axis=-2
  )
