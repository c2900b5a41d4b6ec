"""Positions: sine-cosine embeddings, rotary embeddings, relative biases.

In this order: fixed embeddings of a grid (`sincos_2d`); rotary embeddings and
their options (`Rope`, `frequencies`, `read_scaling`, `rotate`); scales of
queries that grow with the position (`QueryScale`); T5's biases of attention
scores by distance (`RelativeBias`) and BEiT's by the offset of two patches
(`GridBias`); rotary and learned embeddings of grids of patches.

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
from flax import struct
from flax.core import FrozenDict

from bigtrain.arrays.rope_scalings import ROPE_SCALINGS
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_number,
  did_you_mean,
)
from bigtrain.models.layers import options


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
  """Sine and cosine position embeddings of a grid: (1, rows * columns, D).

  As in MoCo v3, https://arxiv.org/abs/2104.02057: a quarter of D each for
  sin(x), cos(x), sin(y), cos(y), with wavelengths from 2 pi to 20,000 pi.
  """
  if width % 4 or width < 8:
    raise ConfigError(
      "config.model.width: sincos2d position embeddings need a multiple of 4 "
      f"that is at least 8, got {width}; the nearest is "
      f"{max(8, round(width / 4) * 4)}."
    )
  y_P, x_P = (axis.reshape(-1) for axis in np.mgrid[: grid[0], : grid[1]])
  omega_Q = 10_000.0 ** -np.linspace(0, 1, width // 4)
  x_PQ, y_PQ = np.outer(x_P, omega_Q), np.outer(y_P, omega_Q)
  parts = [np.sin(x_PQ), np.cos(x_PQ), np.sin(y_PQ), np.cos(y_PQ)]
  return np.concatenate(parts, axis=1)[None].astype(np.float32)


class Rope(NamedTuple):
  """Rotary embeddings (https://arxiv.org/abs/2104.09864) of a layer."""

  dims: int  # Number of features of a head that rotate, the first ones.
  theta: float  # Base of the wavelengths, from 2 pi to almost 2 pi theta.
  # From `read_scaling`, so that every key is there.
  scaling: Mapping[str, Any] | None = None
  # Whether the pairs are (2 i, 2 i + 1) and not (i, i + dims / 2).
  interleaved: bool = False
  reversed: bool = False  # Whether angles are negative.
  # Which of three positions, in time, row and column, each frequency follows.
  axis_Q: tuple[int, ...] | None = None

  def by_length(self) -> int | None:
    """Length above which texts have different frequencies, if there is one."""
    if self.scaling and self.scaling["type"] in ("dynamic", "longrope"):
      return self.scaling["original_len"]
    return None

  def switch(self) -> int | None:
    """Length above which all tokens of a text have other frequencies.

    With "dynamic", the frequencies change with every token. As in transformers,
    generation does not rotate earlier tokens again.
    """
    has_two_sets = self.scaling and self.scaling["type"] == "longrope"
    return self.by_length() if has_two_sets else None

  def rotation(
    self, positions_BL: jax.Array, length: jax.Array | int
  ) -> "Rotation":
    """Sines and cosines of tokens' positions.

    Args:
      positions_BL: or (B, L, 3), if there are three axes.
      length: one for each token's text (B, L), or one for all texts.
    """
    omega_Q = self.frequencies(length)
    if positions_BL.ndim == 3:
      position_BL1Q = positions_BL[:, :, None, np.asarray(self.axis_Q)]
    else:
      position_BL1Q = positions_BL[:, :, None, None]
    angle_BL1Q = position_BL1Q.astype(jnp.float32) * omega_Q
    sin_BL1Q, cos_BL1Q = jnp.sin(angle_BL1Q), jnp.cos(angle_BL1Q)
    if self.reversed:
      sin_BL1Q = -sin_BL1Q
    factor = magnitude(self.scaling)
    if factor != 1:
      sin_BL1Q, cos_BL1Q = factor * sin_BL1Q, factor * cos_BL1Q
    return Rotation(sin_BL1Q, cos_BL1Q, self.interleaved)

  def frequencies(self, length: jax.Array | int) -> jax.Array | np.ndarray:
    """Angles per position in texts of this length: (Q,) or (B, L, 1, Q)."""
    omega_Q = frequencies(self.dims, self.theta, self.scaling)
    longest = self.by_length()
    if longest is None:
      return omega_Q
    assert self.scaling is not None
    length = jnp.asarray(length)[..., None, None]
    if self.scaling["type"] == "longrope":
      long_Q = frequencies(self.dims, self.theta, self.scaling, long=True)
      return jnp.where(length > longest, long_Q, omega_Q)
    # The lowest frequency is divided by this, the highest one stays.
    divisor = 1 + self.scaling["factor"] * jnp.maximum(length / longest - 1, 0)
    exponents_Q = np.arange(0, self.dims, 2) / (self.dims - 2)
    return omega_Q / divisor ** exponents_Q.astype(np.float32)


@struct.dataclass
class Rotation:
  """Sines and cosines of rotary embeddings, with an axis for the heads."""

  sin_BL1Q: jax.Array
  cos_BL1Q: jax.Array
  interleaved: bool = struct.field(pytree_node=False, default=False)
  # Number of parts of a head that rotate each by itself, one after the other.
  parts: int = struct.field(pytree_node=False, default=1)


def frequencies(
  dims: int,
  theta: float,
  scaling: Mapping[str, Any] | None = None,
  *,
  long: bool = False,
) -> np.ndarray:
  """Angles per position (dims / 2) by which rotary embeddings rotate features.

  Lower frequencies let a model read longer texts than it was trained on.
  "linear" (https://arxiv.org/abs/2306.15595) divides all frequencies by a
  factor. "llama3" (https://arxiv.org/abs/2407.21783) and "yarn"
  (https://arxiv.org/abs/2309.00071) divide those with few rotations in
  `original_len` positions. "longrope" (https://arxiv.org/abs/2402.13753) has a
  divisor for each frequency, and different ones for `long` texts. "dynamic"
  leaves them as they are, except for long texts, see Rope.frequencies.
  "proportional" (Gemma 4) sets all but the highest frequencies to zero.
  """
  omega_Q = theta ** -(np.arange(0, dims, 2) / dims)
  kept_Q = np.zeros_like(omega_Q)  # 1 where the frequency stays as it is.
  factor: Any = 1.0
  if scaling:
    kind = scaling["type"]
    factor = scaling.get("factor")
    if kind == "longrope":
      factor = np.asarray(scaling["long_factor" if long else "short_factor"])
    elif kind == "llama3":
      rotations_Q = scaling["original_len"] * omega_Q / (2 * math.pi)
      low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
      if low == high:  # As in Llama 4 Scout: nothing is in between.
        kept_Q = (rotations_Q > low).astype(omega_Q.dtype)
      else:
        kept_Q = np.clip((rotations_Q - low) / (high - low), 0, 1)
    elif kind == "yarn":
      kept_Q = _kept_by_yarn(dims, theta, scaling)
    elif kind == "dynamic":
      factor = 1.0
    elif kind == "proportional":
      omega_Q[int(scaling["fraction"] * dims // 2) :] = 0
  omega_Q = kept_Q * omega_Q + (1 - kept_Q) * omega_Q / factor
  return omega_Q.astype(np.float32)


def _kept_by_yarn(
  dims: int, theta: float, scaling: Mapping[str, Any]
) -> np.ndarray:
  """Weight of each original frequency: 1 up to an index, then falling to 0."""

  def index(rotations: float) -> float:
    """Index of the frequency that rotates this often in `original_len`."""
    wavelength = scaling["original_len"] / (rotations * 2 * math.pi)
    return dims * math.log(wavelength) / (2 * math.log(theta))

  low, high = index(scaling["beta_fast"]), index(scaling["beta_slow"])
  if scaling["truncate"]:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dims - 1)
  width = high - low or 1e-3  # 1e-3 as in other implementations: no 0 / 0.
  return 1 - np.clip((np.arange(dims // 2) - low) / width, 0, 1)


def magnitude(scaling: Mapping[str, Any] | None) -> float:
  """Factor of rotated queries and keys, which sharpens attention."""
  if not scaling or scaling["type"] not in ("yarn", "longrope"):
    return 1.0
  if scaling["attention_factor"] is not None:
    return scaling["attention_factor"]
  factor = scaling["factor"]
  if factor <= 1:
    return 1.0
  if scaling["type"] == "longrope":
    return math.sqrt(1 + math.log(factor) / math.log(scaling["original_len"]))

  def yarn(weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1

  mscale, mscale_all_dim = scaling["mscale"], scaling["mscale_all_dim"]
  if mscale and mscale_all_dim:  # As in DeepSeek's models.
    return yarn(mscale) / yarn(mscale_all_dim)
  return yarn(1.0)


def read_scaling(
  given: Any, key: str, dims: int, max_len: int | None
) -> Mapping[str, Any] | None:
  """Checks `rope_scaling` and adds the values of absent keys; hashable."""
  if given is None:
    return None
  kind = given.get("type") if isinstance(given, Mapping) else None
  kind = check_choice(key, kind, ROPE_SCALINGS, "unknown type")
  known = ROPE_SCALINGS[kind]
  for name in given:
    if name not in ("type", *known.names):
      hint = did_you_mean(name, known.names)
      raise ConfigError(f"{key}.{name}: unknown key of type {kind!r}.{hint}")
  missing = [name for name in known.required if name not in given]
  if missing:
    raise ConfigError(
      f"{key}: type {kind!r} needs {', '.join(known.required)}; missing: "
      f"{', '.join(missing)}."
    )
  scaling = dict.fromkeys(known.optional) | dict(known.defaults) | dict(given)
  if kind == "longrope":
    _complete_longrope(scaling, key, dims, max_len)
  if kind == "dynamic" and dims == 2:
    raise ConfigError(
      f"{key}: type 'dynamic' needs at least 4 features that rotate, got 2."
    )
  for name, value in scaling.items():
    if name in ("type", "truncate") or value is None:
      continue
    for number in value if isinstance(value, tuple) else [value]:
      check_number(f"{key}.{name}", number, above=0)
  if kind == "proportional":
    check_number(f"{key}.fraction", scaling["fraction"], above=0, most=1)
  return FrozenDict(scaling)


def _complete_longrope(
  scaling: dict[str, Any], key: str, dims: int, max_len: int | None
) -> None:
  for name in ("short_factor", "long_factor"):
    scaling[name] = tuple(scaling[name])
    if len(scaling[name]) != dims // 2:
      raise ConfigError(
        f"{key}.{name}: expected {dims // 2} numbers, half of the features "
        f"that rotate, got {len(scaling[name])}."
      )
  if scaling["factor"] is None:
    if max_len is None:
      raise ConfigError(
        f"{key}.factor: missing; without it, config.model.max_len gives it."
      )
    scaling["factor"] = max_len / scaling["original_len"]


class Axes(NamedTuple):
  """config.model.rope_axes: rotary positions in time, row and column."""

  # Number of frequencies that follow each of the three axes, as in Qwen2-VL
  # (https://arxiv.org/abs/2409.12191).
  sections: tuple[int, int, int]
  # Whether the axes' features alternate, the last ones following only time, as
  # in Qwen3-VL (https://arxiv.org/abs/2511.21631), instead of forming blocks.
  interleaved: bool = False

  def of_frequencies(self, number: int) -> tuple[int, ...]:
    """The axis of each frequency."""
    if not self.interleaved:
      return tuple(np.repeat(np.arange(3), self.sections).tolist())
    result = [0] * number
    for axis in (1, 2):
      end = min(3 * self.sections[axis], number)
      for i in range(axis, end, 3):
        result[i] = axis
    return tuple(result)


def read_axes(given: Any, key: str, dims: int) -> Axes | None:
  """Checks `rope_axes` for `dims` features that rotate."""
  axes = options.read_tuple(Axes, given, key)
  if axes is None:
    return None
  sections = tuple(axes.sections)
  is_whole = all(isinstance(n, int) and n >= 0 for n in sections)
  if len(sections) != 3 or not is_whole or sum(sections) != dims // 2:
    raise ConfigError(
      f"{key}.sections={[*sections]}: expected three numbers whose sum is "
      f"{dims // 2}, half of the features that rotate."
    )
  return axes._replace(sections=sections)


class QueryScale(NamedTuple):
  """Factor of queries, which grows beyond the length used in training."""

  beta: float  # Growth per natural logarithm of the length.
  original_len: int  # Length of training, in tokens.
  log: str = "log"  # Or "log1p": positions count from 1, as in Llama 4.

  def factors(self, positions_BL: jax.Array) -> jax.Array:
    """1 + beta * log(1 + floor(position / original_len)), as in Ministral 3."""
    first = 1.0 if self.log == "log1p" else 0.0
    passed_BL = (positions_BL.astype(jnp.float32) + first) / self.original_len
    return 1.0 + self.beta * jnp.log1p(jnp.floor(passed_BL))


def read_query_scale(given: Any, key: str) -> QueryScale | None:
  scale = options.read_tuple(
    QueryScale, given, key, beta={}, original_len=dict(least=1, whole=True)
  )
  if scale is not None:
    check_choice(f"{key}.log", scale.log, ("log", "log1p"))
  return scale


def rotate(x_BLHK: jax.Array, by: Rotation) -> jax.Array:
  """Rotates pairs of the first features of each head, in float32."""
  sin, cos = by.sin_BL1Q, by.cos_BL1Q
  dims = 2 * sin.shape[-1]
  features = x_BLHK[..., :dims].astype(jnp.float32)
  if by.parts > 1:
    # The first and second members of the pairs of each part.
    halves = features.reshape(*features.shape[:-1], by.parts, 2, -1)
    shape = (*features.shape[:-1], dims // 2)
    x, y = (halves[..., i, :].reshape(shape) for i in range(2))
  elif by.interleaved:
    x, y = features[..., ::2], features[..., 1::2]
  else:
    x, y = jnp.split(features, 2, axis=-1)
  pair = [x * cos - y * sin, y * cos + x * sin]
  if by.parts > 1:
    pair = [z.reshape(halves[..., 0, :].shape) for z in pair]
    rotated = jnp.stack(pair, axis=-2).reshape(features.shape)
  elif by.interleaved:
    rotated = jnp.stack(pair, axis=-1).reshape(features.shape)
  else:
    rotated = jnp.concatenate(pair, axis=-1)
  rotated = rotated.astype(x_BLHK.dtype)
  if dims == x_BLHK.shape[-1]:
    return rotated
  return jnp.concatenate([rotated, x_BLHK[..., dims:]], axis=-1)


def distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
  """Bucket of each distance from 0 to max_distance, as in T5.

  The buckets of the first half have one distance each; the others grow
  exponentially.
  """
  exact = num_buckets // 2
  distance = np.arange(max_distance + 1)
  relative = np.float32(np.maximum(distance, 1)) / np.float32(exact)
  share = np.log(relative) / np.float32(math.log(max_distance / exact))
  wide = exact + (share * np.float32(num_buckets - exact)).astype(np.int32)
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
    init = nn.initializers.normal(self.init_std)
    table = self.param("embedding", init, (self.num_buckets, self.num_heads))
    if by_distance:
      L, S = len(query_positions_L), len(key_positions_S)
      offset = jnp.arange(1 - L, S, dtype=jnp.int32)
      return BiasByDistance(table[self._bucket(offset)].T)
    offset_LS = key_positions_S[None, :] - query_positions_L[:, None]
    return jnp.moveaxis(table[self._bucket(offset_LS)], -1, 0)[None]

  def _bucket(self, offset: jax.Array) -> jax.Array:
    num_buckets = self.num_buckets // (2 if self.two_sided else 1)
    bucket_of = jnp.asarray(distance_buckets(num_buckets, self.max_distance))
    distance = jnp.abs(offset) if self.two_sided else jnp.maximum(-offset, 0)
    bucket = bucket_of[jnp.minimum(distance, self.max_distance)]
    return bucket + num_buckets * (offset > 0) if self.two_sided else bucket


class GridBias(nn.Module):
  """BEiT's learned bias by the offset of two patches in a grid.

  https://arxiv.org/abs/2106.08254. Three more entries are for the class token:
  as a query, as a key, and with itself. The parameter "table" is (T, H).
  """

  num_heads: int
  grid: tuple[int, int]

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns (1, H, L, L) for the class token and the patches."""
    h, w = self.grid
    T = (2 * h - 1) * (2 * w - 1) + 3
    table = self.param("table", nn.initializers.zeros, (T, self.num_heads))
    y_P, x_P = (axis.reshape(-1) for axis in np.mgrid[:h, :w])
    rows_PP = y_P[:, None] - y_P + h - 1
    columns_PP = x_P[:, None] - x_P + w - 1
    index_LL = np.pad(rows_PP * (2 * w - 1) + columns_PP, ((1, 0), (1, 0)))
    index_LL[0] = T - 3  # The class token as a query,
    index_LL[1:, 0] = T - 2  # as a key,
    index_LL[0, 0] = T - 1  # and to itself.
    return jnp.moveaxis(table[index_LL], -1, 0)[None]


def grid_rotation(
  grid: tuple[int, int],
  head_dim: int,
  theta: float,
  prefix: int,
  factor_2: jax.Array | float = 1.0,
  shift_2: jax.Array | float = 0.0,
) -> Rotation:
  """Rotary embeddings of a grid of patches, as in DINOv3 (arXiv 2508.10104).

  Half of the angles depend on the row, half on the column. Coordinates go from
  -1 to 1 over the image; in training, `factor_2` and `shift_2` change them. The
  `prefix` tokens before the patches are not rotated.
  """
  centers = [(np.arange(n) + 0.5) / n * 2 - 1 for n in grid]
  coordinates = np.stack(np.meshgrid(*centers, indexing="ij"), axis=-1)
  coordinates_P2 = (coordinates.reshape(-1, 2) + shift_2) * factor_2
  omega = theta ** -np.arange(0, 1, 4 / head_dim)
  angle_P2 = 2 * math.pi * coordinates_P2[..., None] * omega
  angle_PQ = jnp.asarray(angle_P2, jnp.float32).reshape(-1, head_dim // 2)
  angle_LQ = jnp.pad(angle_PQ, ((prefix, 0), (0, 0)))
  angle_1L1Q = angle_LQ[None, :, None]
  return Rotation(jnp.sin(angle_1L1Q), jnp.cos(angle_1L1Q))


def axial_rotation(
  grid: tuple[int, int], head_dim: int, theta: float, prefix: int
) -> Rotation:
  """Rotary embeddings of a grid of patches, as in EVA-02 (arXiv 2303.11331).

  The first half of a head's features depend on the row, the other half on the
  column, with wavelengths from 2 pi to almost 2 pi theta patches. The `prefix`
  tokens before the patches are not rotated.
  """
  omega = theta ** -np.arange(0, 1, 4 / head_dim)
  rows_P, columns_P = (x.reshape(-1) for x in np.mgrid[: grid[0], : grid[1]])
  angles = [np.outer(rows_P, omega), np.outer(columns_P, omega)]
  angle_PQ = np.concatenate(angles, axis=1)
  angle_LQ = np.pad(angle_PQ, ((prefix, 0), (0, 0)))
  angle_1L1Q = jnp.asarray(angle_LQ, jnp.float32)[None, :, None]
  sin_1L1Q, cos_1L1Q = jnp.sin(angle_1L1Q), jnp.cos(angle_1L1Q)
  return Rotation(sin_1L1Q, cos_1L1Q, interleaved=True)


def resized_grid(
  table_hwD: jax.Array, shapes_B2: jax.Array, length: int
) -> jax.Array:
  """A grid of embeddings, resized bilinearly for each image: (B, P, D)."""

  def weights(places_BP: jax.Array, sizes_B: jax.Array, n: int) -> jax.Array:
    """Weight of each of n entries in each place: (B, P, n)."""
    scale_B11 = (n / sizes_B)[:, None, None]
    centers_BP1 = (places_BP[..., None] + 0.5) * scale_B11 - 0.5
    distance_BPn = jnp.abs(centers_BP1 - jnp.arange(n))
    width_B11 = jnp.maximum(scale_B11, 1.0)
    weight_BPn = jnp.maximum(0.0, 1 - distance_BPn / width_B11)
    total_BP1 = jnp.sum(weight_BPn, axis=-1, keepdims=True)
    return weight_BPn / jnp.maximum(total_BP1, 1e-9)

  h, w, _ = table_hwD.shape
  rows_B, columns_B = shapes_B2[:, 0], shapes_B2[:, 1]
  place_P = jnp.arange(length)
  rows_BPh = weights(place_P // columns_B[:, None], rows_B, h)
  columns_BPw = weights(place_P % columns_B[:, None], columns_B, w)
  return jnp.einsum("bph,bpw,hwd->bpd", rows_BPh, columns_BPw, table_hwD)
