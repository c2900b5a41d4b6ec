"""A depthwise causal convolution over the last few positions of a text.

Axes: B batch, L length, W positions of the convolution; channels have any axes.
"""

from typing import Any

import jax
import jax.numpy as jnp


def convolved(
  joined: jax.Array, kernel: jax.Array, places_BL: jax.Array | None
) -> jax.Array:
  """[B, L, ...], in the dtype of the product.

  Args:
    joined: the inputs [B, W - 1 + L, ...], which include the W - 1 before them.
    kernel: [W, ...].
    places_BL: position within the document, so that documents do not see each
      other; None for one document.
  """
  W = kernel.shape[0]
  L = joined.shape[1] - (W - 1)
  channels = (1,) * (joined.ndim - 2)
  result: Any = 0
  for w in range(W):
    x = joined[:, w : w + L] * kernel[w]
    distance = W - 1 - w
    if places_BL is not None and distance:
      sees_BL = places_BL >= distance
      x = jnp.where(sees_BL.reshape(*sees_BL.shape, *channels), x, 0)
    result += x
  return result


def with_last_inputs(
  inputs: jax.Array,
  last: jax.Array,
  real_BL: jax.Array | None,
  read_B: jax.Array,
  start: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Joins inputs with the ones before them, which are in a cache.

  Args:
    inputs: [B, L, ...], from position `start` on.
    last: the W inputs before them [B, W, ...].
    read_B: number of positions of each text that calls with several tokens have
      read; a call with one token does not read these again.

  Returns:
    (inputs with the W - 1 before them; the new last inputs; for a call with one
    token, whether the token is new in each text).
  """
  W, L = last.shape[1], inputs.shape[1]
  ones = (1,) * (last.ndim - 2)
  joined = jnp.concatenate([last, inputs.astype(last.dtype)], axis=1)
  if L == 1:
    is_new_B = start >= read_B
    if real_BL is not None:
      is_new_B &= real_BL[:, 0]
    last = jnp.where(is_new_B.reshape(-1, 1, *ones), joined[:, 1:], last)
    return last, last, is_new_B
  # Texts may be shorter than the call: up to their last real position.
  ends_BW = jnp.clip((read_B - start)[:, None] + jnp.arange(W), 0, W + L - 1)
  last = jnp.take_along_axis(joined, ends_BW.reshape(-1, W, *ones), axis=1)
  return joined[:, 1:], last, None
