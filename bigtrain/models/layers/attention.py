"""Causal self-attention of decoders: positions, masks, memory of the past.

Axes: B batch, L length, S length attended to, D model width, H heads, G heads
of keys and values, R = H / G, K head width, N layers.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import settings
from bigtrain.models.layers import common

# What `rope_scaling` needs, by its "type".
_SCALINGS = {
  "linear": ("factor",),
  "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_len"),
}


class Cache(NamedTuple):
  """Keys and values of the past, of all layers.

  One array for all: a loop over layers updates it in place. The batch comes
  first, as decoding.py wants it.
  """

  k_BNSGK: jax.Array
  v_BNSGK: jax.Array


class Rotation(NamedTuple):
  """Sines and cosines of rotary embeddings, with an axis for the heads."""

  sin_BL1Q: jax.Array  # Q = K / 2
  cos_BL1Q: jax.Array


def frequencies(
  head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> np.ndarray:
  """Angle by which rotary embeddings turn each pair of numbers, by position.

  https://arxiv.org/abs/2104.09864. Longer texts than a model was trained on
  are read by turning more slowly: all pairs alike ("linear",
  https://arxiv.org/abs/2306.15595), or only those that turn less than a few
  times in `original_len` positions ("llama3", https://arxiv.org/abs/2407.21783).

  Args:
    head_dim: K, even.
    theta: base of the wavelengths.
    scaling: dict(type="linear", factor=...), or dict(type="llama3", factor=...,
      low_freq_factor=..., high_freq_factor=..., original_len=...).

  Returns:
    float32 [K / 2], in radians.
  """
  omega_Q = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  if not scaling:
    return omega_Q.astype(np.float32)
  kind = scaling["type"]
  if kind == "llama3":
    turns_Q = scaling["original_len"] * omega_Q / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept_Q = np.clip((turns_Q - low) / (high - low), 0, 1)
  else:
    kept_Q = np.zeros_like(omega_Q)
  omega_Q = kept_Q * omega_Q + (1 - kept_Q) * omega_Q / scaling["factor"]
  return omega_Q.astype(np.float32)


def check_scaling(scaling: Any, key: str) -> None:
  """Raises ConfigError unless `frequencies` takes it."""
  if scaling is None:
    return
  kind = scaling.get("type") if isinstance(scaling, Mapping) else None
  if kind not in _SCALINGS:
    hint = settings.did_you_mean(str(kind), _SCALINGS)
    raise settings.ConfigError(f"{key}: unknown type in {scaling!r}.{hint}")
  wanted = {"type", *_SCALINGS[kind]}
  if set(scaling) != wanted:
    raise settings.ConfigError(
      f"{key}: type {kind!r} takes {sorted(wanted)}, got {sorted(scaling)}."
    )


def rotation(positions_BL: jax.Array, omega_Q: np.ndarray) -> Rotation:
  """Sines and cosines for positions."""
  angle = positions_BL.astype(jnp.float32)[:, :, None, None] * omega_Q
  return Rotation(jnp.sin(angle), jnp.cos(angle))


def rotate(x_BLHK: jax.Array, by: Rotation) -> jax.Array:
  """Turns the pairs (i, i + K / 2) of each head, in float32."""
  x, y = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  sin, cos = by
  turned = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)
  return turned.astype(x_BLHK.dtype)


def attend(
  q_BLHK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  *,
  mask_BLS: jax.Array | None = None,
  window: int | None = None,
  softcap: float | None = None,
) -> jax.Array:
  """Attention of the last L of S positions to those up to each.

  Args:
    q_BLHK: queries; heads h R, ..., h R + R - 1 share the h-th keys.
    k_BSGK: keys.
    v_BSGK: values.
    mask_BLS: what each query may see. Without it, S is L and each sees itself
      and what is before it.
    window: a query sees so many positions, itself among them.
    softcap: scores s become softcap * tanh(s / softcap).

  Returns:
    [B, L, H, K] in the dtype of the queries.
  """
  B, L, H, K = q_BLHK.shape
  G = k_BSGK.shape[2]
  implementation = common.attention_implementation(q_BLHK)
  if softcap is None and implementation == "cudnn":
    return jax.nn.dot_product_attention(
      q_BLHK,
      k_BSGK,
      v_BSGK,
      mask=None if mask_BLS is None else mask_BLS[:, None],
      is_causal=mask_BLS is None,
      local_window_size=(window - 1, 0)
      if window and mask_BLS is None
      else None,
      implementation="cudnn",
    )
  if mask_BLS is None:
    mask_BLS = causal_mask(L, window)[None]
  q = q_BLHK.reshape(B, L, G, H // G, K)
  scores = jnp.einsum(
    "blgrk,bsgk->bgrls", q, k_BSGK, preferred_element_type=jnp.float32
  ) / math.sqrt(K)
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  # Not -inf: a row of padding that sees nothing must not become NaN.
  scores = jnp.where(mask_BLS[:, None, None], scores, -1e30)
  shares = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  return jnp.einsum("bgrls,bsgk->blgrk", shares, v_BSGK).reshape(q_BLHK.shape)


def causal_mask(length: int, window: int | None = None) -> jax.Array:
  """bool [L, L]: what each position sees."""
  i, j = jnp.arange(length)[:, None], jnp.arange(length)[None]
  return _sees(i, j, window)


def document_mask(
  segments_BL: jax.Array, window: int | None = None
) -> jax.Array:
  """bool [B, L, L]: causal, and inside of a document only."""
  same = segments_BL[:, :, None] == segments_BL[:, None, :]
  return same & causal_mask(segments_BL.shape[1], window)


def _sees(i: jax.Array, j: jax.Array, window: int | None) -> jax.Array:
  return (j <= i) & (j > i - window) if window else j <= i


class Attention(nn.Module):
  """Causal self-attention with grouped queries.

  Grouped: https://arxiv.org/abs/2305.13245. Norms of queries and keys:
  https://arxiv.org/abs/2302.05442, here root mean squares.

  Parameters: query (D, H, K), key and value (D, G, K), out (H, K, D), each a
  kernel and maybe a bias; query_norm and key_norm with a scale (K,).

  Attributes:
    num_heads: H.
    num_kv_heads: G; divides H.
    head_dim: K.
    use_bias: whether the projections have biases.
    qk_norm: whether queries and keys are normalised.
    window: positions that each sees; all before it if None.
    softcap: of the scores, see `attend`.
    norm_eps: of the norms.
    init_std: of the kernels; that of `out` is out_init_std.
    dtype: of the computation.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  use_bias: bool
  qk_norm: bool
  window: int | None
  softcap: float | None
  norm_eps: float
  init_std: float
  out_init_std: float
  dtype: str

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    rope: Rotation | None,
    mask_BLL: jax.Array | None,
    cache: Cache | None = None,
    layer: Any = None,
    start: Any = None,
  ) -> tuple[jax.Array, Cache | None]:
    """Attends.

    Args:
      x_BLD: the normalised stream.
      rope: rotary embeddings of the positions; None for none.
      mask_BLL: what each position sees; causal if None.
      cache: of all layers; takes the keys and values of these positions.
      layer: which layer of the cache this is.
      start: the position in the cache of the first of x.

    Returns:
      ([B, L, D], the new cache).
    """
    H, G, K = self.num_heads, self.num_kv_heads, self.head_dim
    dense = functools.partial(
      nn.DenseGeneral,
      use_bias=self.use_bias,
      dtype=self.dtype,
      kernel_init=nn.initializers.normal(self.init_std),
    )
    q_BLHK = dense((H, K), name="query")(x_BLD)
    k_BLGK = dense((G, K), name="key")(x_BLD)
    v_BLGK = dense((G, K), name="value")(x_BLD)
    if self.qk_norm:
      norm = functools.partial(
        nn.RMSNorm, epsilon=self.norm_eps, dtype=self.dtype
      )
      q_BLHK = norm(name="query_norm")(q_BLHK)
      k_BLGK = norm(name="key_norm")(k_BLGK)
    if rope is not None:
      q_BLHK, k_BLGK = rotate(q_BLHK, rope), rotate(k_BLGK, rope)
    if cache is not None:
      cache, k_BLGK, v_BLGK, mask_BLL = self._recall(
        cache, k_BLGK, v_BLGK, layer, start
      )
    o_BLHK = attend(
      q_BLHK,
      k_BLGK,
      v_BLGK,
      mask_BLS=mask_BLL,
      window=self.window,
      softcap=self.softcap,
    )
    out = nn.DenseGeneral(
      x_BLD.shape[-1],
      axis=(-2, -1),
      use_bias=self.use_bias,
      dtype=self.dtype,
      kernel_init=nn.initializers.normal(self.out_init_std),
      name="out",
    )
    return out(o_BLHK), cache

  def _recall(
    self,
    cache: Cache,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    layer: Any,
    start: Any,
  ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
    """(cache with these positions, all keys, all values, who sees whom)."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
      new = new[:, None].astype(old.dtype)
      return jax.lax.dynamic_update_slice(old, new, (0, layer, start, 0, 0))

    cache = Cache(write(cache.k_BNSGK, k_BLGK), write(cache.v_BNSGK, v_BLGK))
    of_layer = functools.partial(
      jax.lax.dynamic_index_in_dim, index=layer, axis=1, keepdims=False
    )
    k_BSGK, v_BSGK = map(of_layer, cache)
    i = start + jnp.arange(k_BLGK.shape[1])[:, None]
    sees_LS = _sees(i, jnp.arange(k_BSGK.shape[1])[None], self.window)
    return cache, k_BSGK, v_BSGK, sees_LS[None]
