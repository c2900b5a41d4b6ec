"""The arrays that every backend of attention receives.

Axes: B batch, L length, S length attended to, H heads, G heads of keys and
values, R query heads of each, K head width; T distances.
"""

from typing import Any, NamedTuple

import jax

from bigtrain.models.layers import masks


class Inputs(NamedTuple):
  """The arguments of an attention backend, as a tree of arrays."""

  q: jax.Array  # (B, L, G, R, K).
  k_BSGK: jax.Array
  v_BSGK: jax.Array
  mask: masks.Mask
  # Added to scaled scores: an array (1, H, L, S); a positions.BiasByDistance;
  # or its biases (G, R, T), where blocks of scores are computed.
  bias: Any = None
  # A score without a value in each head's softmax, neither scaled nor capped.
  sinks_GR: jax.Array | None = None
