"""Multi-head latent attention, of DeepSeek V2 (arXiv 2405.04434).

Keys and values of all heads are computed from one short vector per token, the
latent, by a matrix product. A rotary embedding does not commute with that
product, so positions enter through a few separate features of the keys: they
come from the stream, and all heads share them. Queries may have their own
latent.

The first pass over a text makes keys and values from the latents
(`_keys_and_values`).
Generation caches only latents and rotated features. It multiplies the queries
and outputs, instead of the whole cache, with the kernel (`_absorbed`).

Axes: B batch, L length, S length attended to, D model width, H heads, Q width
of the queries' latent, C width of the latent, N features of a query or key
without rotation, R those with it, V width of values.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.models.layers import (
  attention,
  attention_logits,
  kernels,
  masks,
  options,
  positions,
  rms_norm,
)

_SIZE = dict(least=1, whole=True)


class Options(NamedTuple):
  """config.model.mla."""

  kv_rank: int  # C.
  nope_dim: int  # N.
  rope_dim: int  # R.
  v_dim: int  # V.
  q_rank: int | None = None  # Q; None for queries without a latent.
  norm_eps: float = 1e-6  # Of the latents' RMS norms.

  @property
  def head_dim(self) -> int:
    return self.nope_dim + self.rope_dim

  @property
  def cached_width(self) -> int:
    """Numbers that generation keeps for each token."""
    return self.kv_rank + self.rope_dim


def read(given: Any, key: str) -> Options | None:
  return options.read_tuple(
    Options,
    given,
    key,
    kv_rank=_SIZE,
    nope_dim=_SIZE,
    rope_dim=_SIZE,
    v_dim=_SIZE,
    q_rank=_SIZE,
    norm_eps=dict(above=0),
  )


def scale(latents: Options, rope_scaling: Mapping[str, Any] | None) -> float:
  """Factor of the scores.

  With yarn, `mscale_all_dim` sharpens the scores as a whole, while sines and
  cosines have only the ratio of the two mscales (positions.magnitude).
  """
  sharpened = 1.0
  scaling = rope_scaling or {}
  if scaling.get("mscale_all_dim") and scaling["factor"] > 1:
    sharpened += 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"])
  return sharpened**2 / math.sqrt(latents.head_dim)


class LatentAttention(nn.Module):
  """Causal self-attention with latents.

  Parameters: query (D, H, N + R), or if queries have a latent query_down (D,
  Q), query_down_norm (Q) and query_up (Q, H, N + R); kv_down (D, C + R),
  kv_down_norm (C), kv_up (C, H, N + V), out (H, V, D). The bias sites are
  "qkv", the two down-projections, and "out".
  """

  latents: Options
  options: attention.Options

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    *,
    mask: masks.Mask,
    rope: positions.Rotation | None = None,
    query_scale_BL: jax.Array | None = None,
    real_BL: jax.Array | None = None,
    cache: Any = None,
    layer: jax.Array | int = 0,
    start: jax.Array | int | None = 0,
  ) -> tuple[jax.Array, Any]:
    """Returns (output (B, L, D), new cache or None); see attention.Attention.

    The cache has keys of one head and width C + R, and no values.
    """
    options, N = self.options, self.latents.nope_dim
    H, V = options.num_heads, self.latents.v_dim
    q_BLHK = self._queries(x_BLD)
    c_BLC, r_BL1R = self._latents(x_BLD)
    if rope is not None:
      rotated_BLHR = positions.rotate(q_BLHK[..., N:], rope)
      q_BLHK = jnp.concatenate([q_BLHK[..., :N], rotated_BLHR], axis=-1)
      r_BL1R = positions.rotate(r_BL1R, rope)
    if query_scale_BL is not None:
      q_BLHK *= query_scale_BL[..., None, None].astype(q_BLHK.dtype)
    shape = (self.latents.kv_rank, H, N + V)
    kernel_CHM = kernels.Kernel(
      shape, init=kernels.initializer(options.kv_std), name="kv_up"
    )()["kernel"].astype(options.dtype)
    sinks_H = None
    if options.sinks:
      sinks_H = self.param("sinks", nn.initializers.zeros, (H,))

    first = None
    if cache is not None:
      new_BL1S = jnp.concatenate([c_BLC[:, :, None], r_BL1R], axis=-1)
      cache, view = cache.extend(
        new_BL1S, new_BL1S[..., :0], mask, layer, start
      )
      cached_BS1W, _, mask, first = view
    mask = dataclasses.replace(mask, window=options.window)
    attend = functools.partial(
      attention.attend,
      mask=mask,
      start=first,
      sinks_H=sinks_H,
      scale=options.scale,
      softcap=options.softcap,
      backend="xla" if self.is_initializing() else options.backend,
    )
    if first is None:
      k_BLHK, v_BLHV = self._keys_and_values(c_BLC, r_BL1R, kernel_CHM)
      attention_logits.record(
        self, q_BLHK, k_BLHK, mask, real_BL, options.scale
      )
      o_BLHV = attend(q_BLHK, k_BLHK, v_BLHV)
    else:
      o_BLHV = self._absorbed(attend, q_BLHK, cached_BS1W, kernel_CHM)
    out = nn.DenseGeneral(
      x_BLD.shape[-1],
      axis=(-2, -1),
      use_bias="out" in options.bias,
      dtype=options.dtype,
      kernel_init=kernels.initializer(options.out_std),
      dot_general=sharding.rows(len(x_BLD)) if self._splits(x_BLD) else None,
      name="out",
    )
    return out(o_BLHV), cache

  @nn.nowrap
  def _queries(self, x_BLD: jax.Array) -> jax.Array:
    options, latents, name = self.options, self.latents, "query"
    if latents.q_rank is not None:
      x_BLD = self._down(x_BLD, latents.q_rank, "query_down")
      x_BLD = self._norm(x_BLD, "query_down_norm")
      name = "query_up"
    return nn.DenseGeneral(
      (options.num_heads, latents.head_dim),
      use_bias=False,
      dtype=options.dtype,
      kernel_init=kernels.initializer(options.query_std),
      dot_general=sharding.columns(x_BLD) if self._splits(x_BLD) else None,
      name=name,
    )(x_BLD)

  @nn.nowrap
  def _latents(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The normed latents (B, L, C), and the shared keys (B, L, 1, R)."""
    latents = self.latents
    y_BLW = self._down(x_BLD, latents.cached_width, "kv_down")
    c_BLC, r_BLR = jnp.split(y_BLW, [latents.kv_rank], axis=-1)
    return self._norm(c_BLC, "kv_down_norm"), r_BLR[:, :, None]

  @nn.nowrap
  def _down(self, x_BLD: jax.Array, width: int, name: str) -> jax.Array:
    # On a mesh with an axis `tensor` each device makes the latents of its part
    # of the length: they are cheaper to gather than the stream.
    return nn.Dense(
      width,
      use_bias=bool({"qkv", "qkv_without_gate"} & {*self.options.bias}),
      dtype=self.options.dtype,
      kernel_init=kernels.initializer(self.options.kv_std),
      name=name,
    )(x_BLD)

  @nn.nowrap
  def _norm(self, x_BLC: jax.Array, name: str) -> jax.Array:
    shape = x_BLC.shape[-1:]
    eps, dtype = self.latents.norm_eps, self.options.dtype
    return rms_norm.RMSNorm(shape, eps, dtype=dtype, name=name)(x_BLC)

  @nn.nowrap
  def _keys_and_values(
    self, c_BLC: jax.Array, r_BL1R: jax.Array, kernel_CHM: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Keys (B, L, H, N + R) and values (B, L, H, V) of each head."""
    up = sharding.columns(c_BLC) if self._splits(c_BLC) else None
    if up is None:
      kv_BLHM = jnp.einsum("blc,chm->blhm", c_BLC, kernel_CHM)
    else:
      kv_BLHM = up(c_BLC, kernel_CHM, None)
    k_BLHN, v_BLHV = jnp.split(kv_BLHM, [self.latents.nope_dim], axis=-1)
    r_BLHR = jnp.broadcast_to(r_BL1R, (*k_BLHN.shape[:3], r_BL1R.shape[-1]))
    k_BLHK = jnp.concatenate([k_BLHN, r_BLHR], axis=-1)
    return k_BLHK, v_BLHV

  @nn.nowrap
  def _absorbed(
    self,
    attend: Any,
    q_BLHK: jax.Array,
    cached_BS1W: jax.Array,
    kernel_CHM: jax.Array,
  ) -> jax.Array:
    """Attends with latents, as keys and values of one head that all share."""
    C, N = self.latents.kv_rank, self.latents.nope_dim
    q_BLHN, q_BLHR = jnp.split(q_BLHK, [N], axis=-1)
    key_CHN, value_CHV = jnp.split(kernel_CHM, [N], axis=-1)
    q_BLHC = jnp.einsum("blhn,chn->blhc", q_BLHN, key_CHN)
    q_BLHW = jnp.concatenate([q_BLHC, q_BLHR], axis=-1)
    # The values are only the latents. To leave out the other features after the
    # product is cheaper than a copy of the cache without them.
    o_BLHW = attend(q_BLHW[:, :, None], cached_BS1W, cached_BS1W)[:, :, 0]
    return jnp.einsum("blhc,chv->blhv", o_BLHW[..., :C], value_CHV)

  @nn.nowrap
  def _splits(self, x_BLD: jax.Array) -> bool:
    """Whether the mesh axis `tensor` splits the heads."""
    ways = sharding.tensor_ways(x_BLD.shape[0])
    return ways > 1 and self.options.num_heads % ways == 0
