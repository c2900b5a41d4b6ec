"""Positions: sine-cosine embeddings, rotary embeddings, relative biases.

Axes: B batch, L length, S length attended to, P patches, D model width, H
heads, K head width, Q = K / 2.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import settings

# The keys of `rope_scaling`, by its "type".
_SCALINGS = {
  "linear": ("factor",),
  "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_len"),
}


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
  """Sine and cosine position embeddings of a grid: (1, rows * columns, D).

  As in MoCo v3, https://arxiv.org/abs/2104.02057: a quarter of the width each
  for sin(x), cos(x), sin(y), cos(y), with wavelengths from 2 pi to 20,000 pi.
  """
  if width % 4 or width < 8:
    raise settings.ConfigError(
      "config.model.width: sincos2d position embeddings need a multiple of 4 "
      f"that is at least 8, got {width}; the nearest is "
      f"{max(8, round(width / 4) * 4)}."
    )
  y_P, x_P = (axis.reshape(-1) for axis in np.mgrid[: grid[0], : grid[1]])
  omega_Q = 10_000.0 ** -np.linspace(0, 1, width // 4)
  x_PQ, y_PQ = np.outer(x_P, omega_Q), np.outer(y_P, omega_Q)
  parts = [np.sin(x_PQ), np.cos(x_PQ), np.sin(y_PQ), np.cos(y_PQ)]
  return np.concatenate(parts, axis=1)[None].astype(np.float32)


class Rotation(NamedTuple):
  """Sines and cosines of rotary embeddings, with an axis for the heads."""

  sin_BL1Q: jax.Array
  cos_BL1Q: jax.Array


def frequencies(
  head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> np.ndarray:
  """Angles per position (K / 2) by which rotary embeddings rotate features.

  https://arxiv.org/abs/2104.09864. Lower frequencies let a model read longer
  texts than it was trained on: either all frequencies are divided by a factor
  ("linear", https://arxiv.org/abs/2306.15595), or only those with less than a
  few rotations in `original_len` positions ("llama3",
  https://arxiv.org/abs/2407.21783).
  """
  omega_Q = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  if not scaling:
    return omega_Q.astype(np.float32)
  kind = scaling["type"]
  if kind == "llama3":
    rotations_Q = scaling["original_len"] * omega_Q / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept_Q = np.clip((rotations_Q - low) / (high - low), 0, 1)
  else:
    kept_Q = np.zeros_like(omega_Q)
  omega_Q = kept_Q * omega_Q + (1 - kept_Q) * omega_Q / scaling["factor"]
  return omega_Q.astype(np.float32)


def check_scaling(scaling: Any, key: str) -> None:
  if scaling is None:
    return
  kind = scaling.get("type") if isinstance(scaling, Mapping) else None
  if kind not in _SCALINGS:
    hint = settings.did_you_mean(str(kind), _SCALINGS)
    raise settings.ConfigError(f"{key}: unknown type in {scaling!r}.{hint}")
  expected_keys = {"type", *_SCALINGS[kind]}
  if set(scaling) != expected_keys:
    raise settings.ConfigError(
      f"{key}: type {kind!r} takes {sorted(expected_keys)}, got "
      f"{sorted(scaling)}."
    )


def rotation(positions_BL: jax.Array, omega_Q: np.ndarray) -> Rotation:
  angle = positions_BL.astype(jnp.float32)[:, :, None, None] * omega_Q
  return Rotation(jnp.sin(angle), jnp.cos(angle))


def rotate(x_BLHK: jax.Array, by: Rotation) -> jax.Array:
  """Rotates the pairs of features (i, i + K / 2) of each head, in float32."""
  x, y = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  sin, cos = by
  rotated = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)
  return rotated.astype(x_BLHK.dtype)


def query_scale(
  positions_BL: jax.Array, beta: float, original_len: int, log: str = "log"
) -> jax.Array:
  """Factors by which queries grow beyond the length of a model's training.

  1 + beta * log(1 + floor(position / original_len)), as in Ministral 3. With
  `log` "log1p" positions count from 1, as in Llama 4.
  """
  first = 1.0 if log == "log1p" else 0.0
  passed_BL = (positions_BL.astype(jnp.float32) + first) / original_len
  return 1.0 + beta * jnp.log1p(jnp.floor(passed_BL))


def distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
  """Bucket of each distance up to `max_distance`, in float32 as T5's.

  Half of the buckets hold one distance each, the others widen logarithmically.
  """
  exact = num_buckets // 2
  distance = np.arange(max_distance + 1)
  relative = np.float32(np.maximum(distance, 1)) / np.float32(exact)
  wide = exact + (
    np.log(relative)
    / np.float32(math.log(max_distance / exact))
    * np.float32(num_buckets - exact)
  ).astype(np.int32)
  wide = np.minimum(wide, num_buckets - 1)
  return np.where(distance < exact, distance, wide).astype(np.int32)


class BiasByDistance(NamedTuple):
  """Biases of scores for each distance from -(L - 1) to S - 1."""

  bias_HT: jax.Array

  def matrix(self, queries: int, num_positions: int) -> jax.Array:
    """Returns (1, H, L, S) for the first L queries and S positions."""
    i_L, j_S = np.arange(queries), np.arange(num_positions)
    return self.bias_HT[:, j_S + queries - 1 - i_L[:, None]][None]

  def by_group(self, num_groups: int) -> jax.Array:
    H, T = self.bias_HT.shape
    return self.bias_HT.reshape(num_groups, H // num_groups, T)


class RelativeBias(nn.Module):
  """T5's learned bias (https://arxiv.org/abs/1910.10683) by buckets."""

  num_heads: int
  num_buckets: int
  max_distance: int
  two_sided: bool
  init_std: float

  @nn.compact
  def __call__(
    self,
    query_positions_L: jax.Array,
    key_positions_S: jax.Array,
    *,
    by_distance: bool = False,
  ) -> jax.Array | BiasByDistance:
    """Returns float32 biases (1, H, L, S), or by distance from position 0."""
    table = self.param(
      "embedding",
      nn.initializers.normal(self.init_std),
      (self.num_buckets, self.num_heads),
    )
    if by_distance:
      offset = jnp.arange(
        1 - len(query_positions_L), len(key_positions_S), dtype=jnp.int32
      )
      return BiasByDistance(table[self._bucket(offset)].T)
    offset_LS = key_positions_S[None, :] - query_positions_L[:, None]
    return jnp.moveaxis(table[self._bucket(offset_LS)], -1, 0)[None]

  def _bucket(self, offset: jax.Array) -> jax.Array:
    num_buckets = self.num_buckets // (2 if self.two_sided else 1)
    bucket_of = jnp.asarray(distance_buckets(num_buckets, self.max_distance))
    if self.two_sided:
      distance = jnp.abs(offset)
    else:
      distance = jnp.maximum(-offset, 0)
    bucket = bucket_of[jnp.minimum(distance, self.max_distance)]
    if self.two_sided:
      bucket += num_buckets * (offset > 0)
    return bucket
