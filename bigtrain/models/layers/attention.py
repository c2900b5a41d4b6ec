"""Multi-head attention: self and cross, causal and not, with a cache.

Axes: B batch, L length, S length attended to, D model width, H heads, G heads
of keys and values, R = H / G, K head width.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.extend
import jax.numpy as jnp

from bigtrain import model_flops, settings
from bigtrain.models.layers import kernels, kv_cache, positions

# Not -inf: a row of padding that sees no position must not become NaN.
_MASKED = -1e30


class Options(NamedTuple):
  """Options of an attention layer.

  Attributes:
    num_heads: H.
    head_dim: K; D / H if None.
    num_kv_heads: G, which divides H; H if None. Grouped queries:
      https://arxiv.org/abs/2305.13245.
    use_bias: whether the projections have biases.
    qk_norm: whether queries and keys are divided by their root mean squares
      (as https://arxiv.org/abs/2302.05442 does with layer norms).
    norm_eps: epsilon of these norms.
    scaled: whether scores are divided by sqrt(K).
    window: number of positions that a causal query sees, itself included; all
      earlier ones if None.
    softcap: scores s become softcap * tanh(s / softcap); None for no cap.
    query_std: standard deviation of the query kernel's initial values; None
      for Xavier's uniform distribution.
    kv_std: the same for the key and value kernels.
    out_std: the same for the output kernel.
    dtype: dtype of the computation.
  """

  num_heads: int
  head_dim: int | None = None
  num_kv_heads: int | None = None
  use_bias: bool = True
  qk_norm: bool = False
  norm_eps: float = 1e-6
  scaled: bool = True
  window: int | None = None
  softcap: float | None = None
  query_std: float | None = None
  kv_std: float | None = None
  out_std: float | None = None
  dtype: str = "float32"


class Attention(nn.Module):
  """Attention of the positions of x to those of y.

  Parameters are named as in flax's MultiHeadDotProductAttention: query
  (D, H, K), key and value (D, G, K), out (H, K, D), each a kernel and, with
  `use_bias`, a bias; with `qk_norm` query_norm and key_norm, each a scale (K,).

  Attributes:
    options: see there.
  """

  options: Options

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array | None,
    y_BSD: jax.Array | None,
    *,
    mask_BLS: jax.Array | None = None,
    causal: bool = False,
    bias_1HLS: jax.Array | None = None,
    rope: positions.Rotation | None = None,
    cache: kv_cache.Cache | None = None,
    layer: Any = None,
    start: Any = 0,
  ) -> tuple[jax.Array | None, kv_cache.Cache | None]:
    """Attends.

    Args:
      x_BLD: stream of the queries; None to write keys and values only. It may
        have a multiple of y's rows: successive rows of x share a row of y,
        without a mask or an order.
      y_BSD: stream of the keys and values; None if the cache holds them.
      mask_BLS: bool, whether a query sees a position; the batch axis may be 1.
        All if None.
      causal: whether queries see no later positions; not with a mask.
      bias_1HLS: added to the scores.
      rope: rotary embeddings of the positions of x and y, which are the same.
      cache: keys and values of all layers. Those of y are written to it, and x
        attends to all positions of the layer in the cache.
      layer: int scalar, number of this layer in the cache.
      start: int scalar, position in the cache of the first of x and y.

    Returns:
      ((B, L, D), or None without x; the new cache, or None).
    """
    options = self.options
    x_or_y = x_BLD if y_BSD is None else y_BSD
    H, K = options.num_heads, options.head_dim
    if K is None:
      D = x_or_y.shape[-1]
      if D % H:
        raise settings.ConfigError(
          f"config.model.num_heads: {H} does not divide the width {D}."
        )
      K = D // H
    G = options.num_kv_heads or H

    def dense(name: str, heads: int, std: float | None) -> nn.Module:
      return nn.DenseGeneral(
        (heads, K),
        use_bias=options.use_bias,
        dtype=options.dtype,
        kernel_init=kernels.initializer(std),
        name=name,
      )

    q_BLHK = k_BSGK = v_BSGK = None
    if x_BLD is not None:
      q_BLHK = dense("query", H, options.query_std)(x_BLD)
    if y_BSD is not None:
      k_BSGK = dense("key", G, options.kv_std)(y_BSD)
      v_BSGK = dense("value", G, options.kv_std)(y_BSD)
    if options.qk_norm:
      norm = functools.partial(
        nn.RMSNorm, epsilon=options.norm_eps, dtype=options.dtype
      )
      q_BLHK = norm(name="query_norm")(q_BLHK)
      k_BSGK = norm(name="key_norm")(k_BSGK)
    if rope is not None:
      q_BLHK = positions.rotate(q_BLHK, rope)
      k_BSGK = positions.rotate(k_BSGK, rope)
    if cache is not None:
      if y_BSD is not None:
        cache = cache.write(k_BSGK, v_BSGK, layer, start)
      k_BSGK, v_BSGK = cache.layer(layer)
    if x_BLD is None:
      return None, cache
    if causal and cache is not None:
      i = start + jnp.arange(q_BLHK.shape[1])
      mask_BLS = _sees(i, jnp.arange(cache.length), options.window)[None]
      causal = False
    q = q_BLHK
    if options.num_kv_heads:
      q = q_BLHK.reshape(*q_BLHK.shape[:2], G, H // G, K)
    o = attend(
      q,
      k_BSGK,
      v_BSGK,
      mask_BLS=mask_BLS,
      causal=causal,
      window=options.window,
      bias_1HLS=bias_1HLS,
      scaled=options.scaled,
      softcap=options.softcap,
    )
    out = nn.DenseGeneral(
      x_BLD.shape[-1],
      axis=(-2, -1),
      use_bias=options.use_bias,
      dtype=options.dtype,
      kernel_init=kernels.initializer(options.out_std),
      name="out",
    )
    return out(o.reshape(q_BLHK.shape)), cache


def attend(
  q: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  *,
  mask_BLS: jax.Array | None = None,
  causal: bool = False,
  window: int | None = None,
  bias_1HLS: jax.Array | None = None,
  scaled: bool = True,
  softcap: float | None = None,
) -> jax.Array:
  """Means of values, weighted by the softmax of the queries' scores.

  Scores and their softmax are float32. cuDNN's fused kernel computes them where
  `implementation` allows it and the scores are plain: scaled, with neither bias
  nor cap.

  Args:
    q: queries [B, L, H, K], or [B, L, G, R, K]. If H is R G, heads g R, ...,
      g R + R - 1 share the g-th keys. B may be a multiple of the keys' rows:
      successive rows of queries share a row of keys, without a mask, bias or
      order.
    k_BSGK: keys.
    v_BSGK: values.
    mask_BLS: bool, whether a query sees a position; the batch axis may be 1.
      All if None.
    causal: whether queries see no later positions; S is L, and there is no
      mask.
    window: number of positions that a causal query sees, itself included; all
      earlier ones if None. A mask has to contain the window.
    bias_1HLS: added to the scaled scores.
    scaled: whether scores are divided by sqrt(K).
    softcap: scores s become softcap * tanh(s / softcap); None for no cap.

  Returns:
    An array of the shape and dtype of the queries.
  """
  shape, kernel = q.shape, implementation(q)
  B, S, G, K = k_BSGK.shape
  L = shape[0] // B * shape[1]
  grouped = q.ndim == 5 or shape[2] != G
  # Positions outside of a window are not model FLOPs.
  in_window = functools.partial(model_flops.share, window or S, S)
  plain = scaled and bias_1HLS is None and softcap is None
  # jax.nn's XLA code adds up the heads of a group in another order, which would
  # change the last bits of existing configs' results.
  if plain and (kernel == "cudnn" or not grouped):
    with in_window():
      o_BLHK = jax.nn.dot_product_attention(
        q.reshape(B, L, -1, K),
        k_BSGK,
        v_BSGK,
        mask=None if mask_BLS is None else mask_BLS[:, None],
        is_causal=causal,
        local_window_size=(window - 1, 0) if causal and window else None,
        implementation=kernel,
      )
    return o_BLHK.reshape(shape)
  if causal:
    mask_BLS = causal_mask(L, window)[None]
  heads, kv_heads = ("gr", "g") if grouped else ("h", "h")
  q = q.reshape(B, L, G, -1, K) if grouped else q.reshape(B, L, G, K)
  with in_window():
    scores = jnp.einsum(
      f"bl{heads}k,bs{kv_heads}k->b{heads}ls",
      q,
      k_BSGK,
      preferred_element_type=jnp.float32,
    )
  if scaled:
    scores /= math.sqrt(K)
  if bias_1HLS is not None:
    scores += bias_1HLS.reshape(1, *scores.shape[1:])
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  if mask_BLS is not None:
    mask = jnp.expand_dims(mask_BLS, [*range(1, scores.ndim - 2)])
    scores = jnp.where(mask, scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  with in_window():
    o = jnp.einsum(f"b{heads}ls,bs{kv_heads}k->bl{heads}k", weights, v_BSGK)
  return o.reshape(shape)


def implementation(q: jax.Array) -> Literal["xla", "cudnn"]:
  """Returns "cudnn" if its fused kernel takes these queries, else "xla".

  Args:
    q: queries [B, L, ..., K].
  """
  L, K = q.shape[1], q.shape[-1]
  # A single query (pooling) has no L x S matrix that fusing would avoid.
  fits = q.dtype.itemsize == 2 and K % 8 == 0 and K <= 128 and L > 1
  if not fits or jax.default_backend() != "gpu":
    return "xla"
  if "cuda" not in jax.extend.backend.get_backend().platform_version:
    return "xla"
  ampere_or_later = float(jax.devices()[0].compute_capability) >= 8.0
  return "cudnn" if ampere_or_later else "xla"


def causal_mask(length: int, window: int | None = None) -> jax.Array:
  """Returns bool [L, L]: whether a position sees another, see `attend`."""
  i = jnp.arange(length)
  return _sees(i, i, window)


def document_mask(
  segments_BL: jax.Array, window: int | None = None
) -> jax.Array:
  """Returns bool [B, L, L]: the causal mask, inside each document only."""
  same = segments_BL[:, :, None] == segments_BL[:, None, :]
  return same & causal_mask(segments_BL.shape[1], window)


def _sees(i_L: jax.Array, j_S: jax.Array, window: int | None) -> jax.Array:
  """Bool [L, S]: whether position i sees position j."""
  i, j = i_L[:, None], j_S[None]
  return (j <= i) & (j > i - window) if window else j <= i
