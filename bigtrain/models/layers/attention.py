"""Multi-head attention: self and cross, causal and not, with a cache.

Axes: B batch, L length, S length attended to, D model width, H heads, G heads
of keys and values, R = H / G, K head width.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from bigtrain import settings, sharding
from bigtrain.models.layers import (
  attention_backends,
  attention_blockwise,
  attention_cudnn,
  attention_splash,
  attention_split,
  attention_xla,
  kernels,
  kv_cache,
  masks,
  positions,
  remat,
)


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
    implementation: a name in attention_backends.NAMES.
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
  implementation: str = "auto"
  dtype: str = "float32"


class Attention(nn.Module):
  """Attention of the positions of x to the positions of y.

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
    mask: masks.Mask = masks.Mask(),
    bias: jax.Array | positions.BiasByDistance | None = None,
    rope: positions.Rotation | None = None,
    cache: kv_cache.Cache | None = None,
    layer: Any = None,
    start: Any = 0,
  ) -> tuple[jax.Array | None, kv_cache.Cache | None]:
    """Attends.

    Args:
      x_BLD: stream of the queries; None to write keys and values only. It may
        have a multiple of y's rows: successive rows of x share a row of y,
        which they see in full.
      y_BSD: stream of the keys and values; None if the cache holds them.
      cache: keys and values of all layers. Those of y are written to it, and x
        attends to all positions of the layer in the cache.

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

    def dense(
      name: str, heads: int, std: float | None, product: Any
    ) -> nn.Module:
      return nn.DenseGeneral(
        (heads, K),
        use_bias=options.use_bias,
        dtype=options.dtype,
        kernel_init=kernels.initializer(std),
        dot_general=product,
        name=name,
      )

    # Heads over the mesh axis `tensor`, if any.
    of_x = of_y = rows = None
    if self._splits(x_or_y):
      of_x = None if x_BLD is None else sharding.columns(x_BLD)
      of_y = of_x
      if y_BSD is not x_BLD and y_BSD is not None:
        of_y = sharding.columns(y_BSD)
      rows = sharding.rows(x_or_y.shape[0])
    q_BLHK = k_BSGK = v_BSGK = None
    if x_BLD is not None:
      q_BLHK = dense("query", H, options.query_std, of_x)(x_BLD)
    if y_BSD is not None:
      k_BSGK = dense("key", G, options.kv_std, of_y)(y_BSD)
      v_BSGK = dense("value", G, options.kv_std, of_y)(y_BSD)
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
    q = q_BLHK
    if options.num_kv_heads:
      G = k_BSGK.shape[2]
      q = q_BLHK.reshape(*q_BLHK.shape[:2], G, H // G, K)
    o = attend(
      q,
      k_BSGK,
      v_BSGK,
      mask=dataclasses.replace(mask, window=options.window),
      start=None if cache is None else start,
      bias=bias,
      scaled=options.scaled,
      softcap=options.softcap,
      # Initialisation needs no more than the shapes.
      implementation="xla"
      if self.is_initializing()
      else options.implementation,
    )
    out = nn.DenseGeneral(
      x_BLD.shape[-1],
      axis=(-2, -1),
      use_bias=options.use_bias,
      dtype=options.dtype,
      kernel_init=kernels.initializer(options.out_std),
      dot_general=rows,
      name="out",
    )
    return out(o.reshape(q_BLHK.shape)), cache

  def _splits(self, x_BLD: jax.Array) -> bool:
    """Whether the heads are split over `tensor`."""
    options = self.options
    ways = sharding.tensor_ways(x_BLD.shape[0])
    if ways == 1 or options.num_heads % ways:
      return False
    G = options.num_kv_heads or options.num_heads
    if options.use_bias and G % ways:
      raise settings.ConfigError(
        f"config.mesh.tensor={ways}: with biases it must divide the {G} heads "
        "of keys and values (config.model.num_kv_heads)."
      )
    return True


def attend(
  q: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  *,
  mask: masks.Mask = masks.Mask(),
  start: Any = None,
  bias: jax.Array | positions.BiasByDistance | None = None,
  scaled: bool = True,
  softcap: float | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Means of values, weighted by the softmax of the queries' scores.

  Scores and their softmax are float32.

  Args:
    q: queries [B, L, H, K], or [B, L, G, R, K]. If H is R G, heads g R, ...,
      g R + R - 1 share the g-th keys. B may be a multiple of the keys' rows:
      successive rows of queries share a row of keys, which they see in full.
    start: int scalar, number of the first query's position, if the keys come
      from a cache; then the implementation is "xla".
    bias: added to the scaled scores: (1, H, L, S), or by distance.
    scaled: whether scores are divided by sqrt(K).
    softcap: scores s become softcap * tanh(s / softcap); None for no cap.

  Returns:
    An array of the shape and dtype of the queries.

  Raises:
    ConfigError: the implementation cannot compute this attention.
  """
  q, k_BSGK, v_BSGK = checkpoint_name((q, k_BSGK, v_BSGK), remat.INNER)
  shape = q.shape
  B, S, G, K = k_BSGK.shape
  L = shape[0] // B * shape[1]
  H = math.prod(shape[2:]) // K
  ways = 1
  # A single query has no matrix of scores that a kernel would avoid.
  if L == 1 or start is not None or isinstance(bias, jax.Array):
    implementation = "xla"
  else:
    ways = sharding.length_ways(B, L)
    if implementation == "ring" and ways == 1:
      implementation = "blockwise"
  if implementation not in ("ring", "xla"):
    case = attention_backends.case_of(
      B,
      mask,
      queries=L,
      positions=S,
      heads=H,
      kv_heads=G,
      width=K,
      dtype=str(q.dtype),
      bias=bias is not None,
      softcap=softcap is not None,
    )
    implementation = attention_backends.choose(implementation, case, _KERNELS)
  compute = functools.partial(
    _compute,
    implementation,
    grouped=q.ndim == 5 or H != G,
    scaled=scaled,
    softcap=softcap,
  )
  if ways == 1:
    o = compute(q, k_BSGK, v_BSGK, mask, start, bias)
    return o.reshape(shape)
  q_BLGRK = q.reshape(B, L, G, H // G, K)
  distances = bias if isinstance(bias, positions.BiasByDistance) else None
  if implementation == "ring" or (
    implementation == "blockwise" and mask.causal
  ):
    o = attention_split.attend_blockwise(
      q_BLGRK,
      k_BSGK,
      v_BSGK,
      mask,
      bias=distances,
      scale=_scale(scaled, K),
      softcap=softcap,
      ring=implementation == "ring",
    )
  elif implementation == "splash" and mask.causal:
    o = attention_split.attend_splash(
      *(q_BLGRK, k_BSGK, v_BSGK, mask),
      scale=_scale(scaled, K),
      softcap=softcap,
    )
  else:
    o = attention_split.attend(
      q_BLGRK, k_BSGK, v_BSGK, mask, compute, bias=distances
    )
  return o.reshape(shape)


def _scale(scaled: bool, K: int) -> float:
  return 1 / math.sqrt(K) if scaled else 1.0


def _compute(
  implementation: str,
  q: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  start: Any,
  bias: jax.Array | positions.BiasByDistance | None,
  *,
  grouped: bool,
  scaled: bool,
  softcap: float | None,
) -> jax.Array:
  """Attends with an implementation, see `attend`.

  Args:
    implementation: "splash", "cudnn", "blockwise" or "xla".
    grouped: whether "xla" adds up the heads of a group together.

  Returns:
    An array that has the queries' shape after a reshape.
  """
  B, _, G, K = k_BSGK.shape
  L = q.shape[0] // B * q.shape[1]
  H = math.prod(q.shape[2:]) // K
  scale = _scale(scaled, K)
  if implementation == "cudnn":
    q_BLHK = q.reshape(B, L, H, K)
    return attention_cudnn.attend(q_BLHK, k_BSGK, v_BSGK, mask, scale=scale)
  if implementation == "xla":
    q = q.reshape(B, L, G, -1, K) if grouped else q.reshape(B, L, G, K)
    return attention_xla.attend(
      *(q, k_BSGK, v_BSGK, mask, start, bias, scaled, softcap)
    )
  qkv = q.reshape(B, L, G, H // G, K), k_BSGK, v_BSGK
  options: dict[str, Any] = dict(scale=scale, softcap=softcap)
  if implementation == "splash":
    return attention_splash.attend(*qkv, mask, **options)
  bias_GRT = None
  if isinstance(bias, positions.BiasByDistance):
    bias_GRT = bias.by_group(G)
  return attention_blockwise.attend(*qkv, mask, bias_GRT=bias_GRT, **options)


# In the order in which "auto" considers them.
_KERNELS = {
  "splash": attention_backends.Kernel(
    attention_splash.unsupported_because, attention_splash.best_because
  ),
  "cudnn": attention_backends.Kernel(
    attention_cudnn.unsupported_because, attention_cudnn.best_because
  ),
  "blockwise": attention_backends.Kernel(
    attention_blockwise.unsupported_because, attention_blockwise.best_because
  ),
  "xla": attention_backends.Kernel(lambda case: "", attention_xla.best_because),
}


def wants_bias_by_distance(
  options: Options, x_BLD: jax.Array, mask: masks.Mask
) -> bool:
  """Whether self-attention takes a bias by distance, not as a matrix."""
  B, L, _ = x_BLD.shape
  if options.implementation == "xla" or L == 1:
    return False
  if options.implementation == "ring":
    return True
  case = attention_backends.case_of(
    B,
    mask,
    queries=L,
    positions=L,
    heads=options.num_heads,
    kv_heads=options.num_kv_heads or options.num_heads,
    width=options.head_dim,
    dtype=options.dtype,
    bias=True,
  )
  name = attention_backends.choose(options.implementation, case, _KERNELS)
  return name != "xla"
