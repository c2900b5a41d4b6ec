"""Layers of T5: attention with relative positions and without a scale.

From https://arxiv.org/abs/1910.10683; the gated hidden layer of version 1.1
from https://arxiv.org/abs/2002.05202.

Axes: B batch, L length, S length attended to, D model width, H heads, K head
width, F hidden width, N layers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.models.layers import attention, mlp, moe, stack


class Sizes(NamedTuple):
  """What stacks have to know; fields of Model."""

  num_heads: int
  head_dim: int
  mlp_dim: int
  mlp: str
  moe: moe.Options | None
  num_buckets: int
  max_distance: int
  norm_eps: float
  init_scale: float
  dropout: float
  scan: bool
  remat_policy: str
  dtype: str


class Cache(NamedTuple):
  """What decoding remembers, of all layers; the batch comes first.

  Attributes:
    past: keys and values of the targets so far.
    source: those of the encoded inputs.
    source_mask_BS: which of them are no padding.
  """

  past: attention.Cache
  source: attention.Cache
  source_mask_BS: jax.Array


class Source(NamedTuple):
  """What cross-attention sees: the encoder's output; None if it is cached."""

  encoded_BSD: jax.Array | None
  mask_BLS: jax.Array


def distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
  """Bucket of each distance 0, ..., max_distance, from which on it is the last.

  The first half of the buckets is for one distance each, the others get wider
  logarithmically. In float32, as the published models have it.

  Returns:
    int32 [max_distance + 1].
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


class RelativeBias(nn.Module):
  """A number for each head and bucket of distances, added to the scores.

  Attributes:
    num_heads: H.
    num_buckets: of distances, half for each direction if `two_sided`.
    max_distance: from here on all are in the last bucket.
    two_sided: whether queries see what comes after them.
    init_std: of the numbers.
  """

  num_heads: int
  num_buckets: int
  max_distance: int
  two_sided: bool
  init_std: float

  @nn.compact
  def __call__(self, at_L: jax.Array, of_S: jax.Array) -> jax.Array:
    """float32 (1, H, L, S) for queries and keys at these positions."""
    table = self.param(
      "embedding",
      nn.initializers.normal(self.init_std),
      (self.num_buckets, self.num_heads),
    )
    each = self.num_buckets // (2 if self.two_sided else 1)
    bucket_of = jnp.asarray(distance_buckets(each, self.max_distance))
    ahead_LS = of_S[None, :] - at_L[:, None]
    if self.two_sided:
      distance_LS = jnp.abs(ahead_LS)
    else:
      distance_LS = jnp.maximum(-ahead_LS, 0)
    bucket_LS = bucket_of[jnp.minimum(distance_LS, self.max_distance)]
    if self.two_sided:
      bucket_LS += each * (ahead_LS > 0)
    return jnp.moveaxis(table[bucket_LS], -1, 0)[None]


class Attention(nn.Module):
  """Attention whose scores are not divided by the root of the head width.

  The initial values of the queries make up for it. Parameters: query, key and
  value with a kernel (D, H, K), out (H, K, D).
  """

  sizes: Sizes

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    y_BSD: jax.Array | None,
    bias_1HLS: jax.Array | None,
    mask_BLS: jax.Array,
    remember: Callable[..., Any] = lambda k, v: (k, v),
  ) -> jax.Array:
    """Attends.

    Args:
      x_BLD: what asks.
      y_BSD: what is attended to; None if `remember` knows.
      bias_1HLS: added to the scores.
      mask_BLS: who sees whom.
      remember: given keys and values, of which it may have more.
    """
    D = x_BLD.shape[-1]
    H, K = self.sizes.num_heads, self.sizes.head_dim
    scaled = lambda fan_in: nn.initializers.normal(
      (self.sizes.init_scale / fan_in) ** 0.5
    )
    dense = functools.partial(
      nn.DenseGeneral, use_bias=False, dtype=self.sizes.dtype
    )
    q_BLHK = dense((H, K), kernel_init=scaled(D * K), name="query")(x_BLD)
    k_BSHK = v_BSHK = None
    if y_BSD is not None:
      init = scaled(D)
      k_BSHK = dense((H, K), kernel_init=init, name="key")(y_BSD)
      v_BSHK = dense((H, K), kernel_init=init, name="value")(y_BSD)
    k_BSHK, v_BSHK = remember(k_BSHK, v_BSHK)
    scores = jnp.einsum(
      "blhk,bshk->bhls", q_BLHK, k_BSHK, preferred_element_type=jnp.float32
    )
    if bias_1HLS is not None:
      scores += bias_1HLS
    # Not -inf: a row of padding that sees nothing must not become NaN.
    scores = jnp.where(mask_BLS[:, None], scores, -1e30)
    shares = jax.nn.softmax(scores, axis=-1).astype(q_BLHK.dtype)
    o_BLHK = jnp.einsum("bhls,bshk->blhk", shares, v_BSHK)
    return dense(D, axis=(-2, -1), kernel_init=scaled(H * K), name="out")(
      o_BLHK
    )


class Block(nn.Module):
  """Self-attention, in a decoder cross-attention, MLP; each after a norm.

  In the place of the MLP there may be experts.
  """

  sizes: Sizes

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, Cache | None],
    index: Any,
    bias_1HLS: jax.Array,
    mask_BLS: jax.Array,
    source: Source | None,
    real_BL: jax.Array | None,
    start: Any,
    train: bool,
  ) -> tuple[tuple[jax.Array, Cache | None], Any]:
    """Returns the carry, (stream, cache), and statistics of the experts.

    Args:
      carry: the stream (B, L, D), and when decoding the cache of all layers.
      index: which layer this is.
      bias_1HLS: of the positions.
      mask_BLS: what self-attention may see.
      source: what cross-attention sees; None in an encoder.
      real_BL: which of the stream are no padding; all if None.
      start: position in the cache of the first of the stream.
      train: whether dropout acts.
    """
    x_BLD, cache = carry
    norm = functools.partial(
      nn.RMSNorm, epsilon=self.sizes.norm_eps, dtype=self.sizes.dtype
    )
    drop = lambda y: nn.Dropout(self.sizes.dropout)(y, deterministic=not train)

    def of_past(k: jax.Array, v: jax.Array) -> attention.Cache:
      nonlocal cache
      if cache is None:
        return attention.Cache(k, v)
      cache = cache._replace(past=_write(cache.past, (k, v), index, start))
      return _layer(cache.past, index)

    def of_source(k: jax.Array | None, v: jax.Array | None) -> attention.Cache:
      nonlocal cache
      if cache is None:
        return attention.Cache(k, v)
      if k is not None:
        cache = cache._replace(source=_write(cache.source, (k, v), index, 0))
      return _layer(cache.source, index)

    y_BLD = norm(name="attention_norm")(x_BLD)
    x_BLD += drop(
      Attention(self.sizes, name="attention")(
        y_BLD, y_BLD, bias_1HLS, mask_BLS, of_past
      )
    )
    if source is not None:
      y_BLD = norm(name="cross_attention_norm")(x_BLD)
      x_BLD += drop(
        Attention(self.sizes, name="cross_attention")(
          y_BLD, source.encoded_BSD, None, source.mask_BLS, of_source
        )
      )
    y_BLD = norm(name="mlp_norm")(x_BLD)
    y_BLD, stats = moe.mlp_or_experts(
      self.sizes.moe, self._mlp(x_BLD.shape[-1]), y_BLD, real_BL, train
    )
    return (sharding.over_batch(x_BLD + drop(y_BLD)), cache), stats

  def _mlp(self, width: int) -> mlp.Options:
    sizes = self.sizes
    return mlp.Options(
      dim=sizes.mlp_dim,
      kind=sizes.mlp,
      init_std=(sizes.init_scale / width) ** 0.5,
      out_init_std=(sizes.init_scale / sizes.mlp_dim) ** 0.5,
      dropout=sizes.dropout,
      dtype=sizes.dtype,
    )


class Stack(nn.Module):
  """An encoder's or decoder's blocks, and a norm.

  Parameters are those of stack.run, relative_bias/embedding and norm/scale.

  Attributes:
    sizes: of the blocks.
    depth: number of them.
    two_sided: whether it is the encoder.
  """

  sizes: Sizes
  depth: int
  two_sided: bool

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    mask_BLS: jax.Array,
    *,
    source: Source | None = None,
    real_BL: jax.Array | None = None,
    cache: Cache | None = None,
    start: Any = 0,
    train: bool = False,
  ) -> tuple[jax.Array, Cache | None, dict[str, jax.Array] | None]:
    """Returns the normalised stream, the cache, statistics; see Block."""
    sizes = self.sizes
    drop = lambda y: nn.Dropout(sizes.dropout)(y, deterministic=not train)
    L = x_BLD.shape[1]
    S = L if cache is None else cache.past.k_BNSGK.shape[2]
    bias_1HLS = RelativeBias(
      sizes.num_heads,
      sizes.num_buckets,
      sizes.max_distance,
      self.two_sided,
      (sizes.init_scale / x_BLD.shape[-1]) ** 0.5,
      name="relative_bias",
    )(start + jnp.arange(L), jnp.arange(S))
    (x_BLD, cache), stats = stack.run(
      self,
      Block,
      moe.kinds(sizes),
      self.depth,
      (drop(x_BLD), cache),
      bias_1HLS,
      mask_BLS,
      source,
      real_BL,
      start,
      train,
      scan=sizes.scan,
      remat_policy=sizes.remat_policy,
    )
    norm = nn.RMSNorm(epsilon=sizes.norm_eps, dtype=sizes.dtype, name="norm")
    return drop(norm(x_BLD)), cache, stats


def _write(
  old: attention.Cache, new: Any, layer: Any, start: Any
) -> attention.Cache:
  """The cache with keys and values of a layer from `start` on."""
  return attention.Cache(
    *[
      jax.lax.dynamic_update_slice(
        o, n[:, None].astype(o.dtype), (0, layer, start, 0, 0)
      )
      for o, n in zip(old, new)
    ]
  )


def _layer(cache: attention.Cache, layer: Any) -> attention.Cache:
  """Keys and values of one layer."""
  return attention.Cache(
    *[
      jax.lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False)
      for x in cache
    ]
  )
