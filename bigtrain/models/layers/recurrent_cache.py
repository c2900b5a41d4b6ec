"""The cache of recurrent layers: their state, and the last inputs of a
convolution.

Keys and values have a place for each position, but a state cannot take a token
back. So a token of a longer prompt in the batch that was read already must not
be read again: see `read_B` in kv_cache.Ring.

Axes: B batch, N layers, W positions of a convolution, G heads of keys, R heads
of values for each, K width of keys, V width of values, C channels of a head of
keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import sharding


class States(NamedTuple):
  """States of all layers of a kind; a loop updates the arrays."""

  # The last W inputs of the convolution, the last token's included.
  inputs_BNWGC: jax.Array
  state_BNGRKV: jax.Array
  # Number of positions of each text that were read by calls with several.
  read_B: jax.Array

  def layer(self, layer: Any) -> tuple[jax.Array, jax.Array]:
    """(inputs [B, W, G, C], state [B, G, R, K, V]) of a layer."""
    inputs, state = (
      jax.lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False)
      for x in self[:2]
    )
    return inputs, state

  def with_layer(
    self, layer: Any, inputs_BWGC: jax.Array, state_BGRKV: jax.Array
  ) -> "States":
    def put(x: jax.Array, new: jax.Array) -> jax.Array:
      new = new.astype(x.dtype)
      return jax.lax.dynamic_update_index_in_dim(x, new, layer, axis=1)

    return self._replace(
      inputs_BNWGC=put(self.inputs_BNWGC, inputs_BWGC),
      state_BNGRKV=put(self.state_BNGRKV, state_BGRKV),
    )


class Kind(NamedTuple):
  """Shape of a layer's cache. Layers of one kind share a cache."""

  num_heads: int  # G.
  conv_width: int  # W.
  # Of each head: R, K and V.
  state: tuple[int, int, int]

  def empty(self, batch_size: int, depth: int, dtype: str) -> States:
    B, W, G = batch_size, self.conv_width, self.num_heads
    R, K, V = self.state
    inputs = jnp.zeros((B, depth, W, G, 2 * K + R * V), dtype)
    state = jnp.zeros((B, depth, G, R, K, V), jnp.float32)
    return States(
      sharding.by_heads(inputs, 3),
      sharding.by_heads(state, 2),
      jnp.zeros(B, jnp.int32),
    )
