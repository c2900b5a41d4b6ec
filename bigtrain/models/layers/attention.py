"""Multi-head attention: self and cross, causal and not, with a cache.

`Attention` is the layer: projections, norms and rotations of queries and keys,
the cache, `attend`, and the last projection. `attend` chooses a backend
(attention_backends.py) and calls it; on a mesh with an axis `sequence`, it does
so through attention_split.py.

Axes: B batch, L length, S length attended to, D model width, H heads, G heads
of keys and values, R = H / G, K head width, which values may not have.
"""

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bigtrain import sharding
from bigtrain.config.errors import ConfigError, nearest_divisors
from bigtrain.models.layers import (
  attention_backends,
  attention_blockwise,
  attention_kernels,
  attention_logits,
  attention_split,
  attention_xla,
  clipping,
  head_norm,
  kernels,
  masks,
  positions,
  remat,
  rms_norm,
)
from bigtrain.models.layers.attention_inputs import Inputs


class Options(NamedTuple):
  """Options of an attention layer."""

  num_heads: int
  head_dim: int | None = None  # K; D / H if None.
  num_kv_heads: int | None = None  # G, which divides H; H if None.
  # Of "qkv" or "qv", "out", and "norm" for qk_norm "layernorm"; with
  # "qkv_without_gate", the output gate has none. Other sites are ignored.
  bias: Collection[str] = ("qkv", "out")
  # Norms of queries and keys: RMS norms "head", "projection" (over all heads
  # together) and "l2" (by head, without a scale); "layernorm" by head, and
  # "layernorm_by_head", where each head has a scale of its own; or None.
  qk_norm: str | None = None
  norm_eps: float = 1e-6
  norm_offset: float = 0.0  # See rms_norm.RMSNorm.
  qk_norm_after_rope: bool = False  # Whether these norms follow the rotation.
  v_norm: bool = False  # RMS norm of values by head, without a scale.
  keys_as_values: bool = False  # Values are keys before norms and rotation.
  qkv_clip: float | None = None  # Largest size of an entry.
  # Whether a sigmoid of another projection of x multiplies the output.
  output_gate: bool = False
  sinks: bool = False  # Whether each softmax has a learned logit with no value.
  scale: float | None = None  # Factor of the scores; 1 / sqrt(K) if None.
  window: int | None = None  # See masks.Mask.
  chunk: int | None = None  # See masks.in_chunks.
  softcap: float | None = None  # Scores s become softcap * tanh(s / softcap).
  # Standard deviations of initial values; None for Xavier's uniform ones.
  query_std: float | None = None
  kv_std: float | None = None
  out_std: float | None = None
  clipped: bool = False  # Whether projections have bounds, see clipping.py.
  backend: str = "auto"  # A name in attention_backends.NAMES.
  dtype: str = "float32"


class Attention(nn.Module):
  """Attention of the positions of x to the positions of y.

  Parameters as in flax's MultiHeadDotProductAttention: query (D, H, K), key and
  value (D, G, K), out (H, K, D); also query_norm and key_norm, scales of (K,)
  or of all heads, sinks (H,), and output_gate (D, H, K).
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
    query_scale_BL: jax.Array | None = None,
    real_BL: jax.Array | None = None,
    cache: Any = None,
    layer: jax.Array | int = 0,
    start: jax.Array | int | None = 0,
  ) -> tuple[Any, Any]:
    """Returns (output (B, L, D) or None without x, new cache or None).

    Args:
      x_BLD: stream of the queries; None to write keys and values only. It may
        have n examples for each of y's: then n successive ones share one of y.
      y_BSD: stream of the keys and values; None if the cache holds them.
      query_scale_BL: factors of the rotated queries, see positions.QueryScale.
      real_BL: bool, False for padding of x, see attention_logits.record.
      cache: a cache of kv_cache.py. Keys and values of y are written to it.
    """
    options = self.options
    q_BLHK, k_BSGK, v_BSGK, gate_BLHK = self._projections(x_BLD, y_BSD)
    q_BLHK, k_BSGK, v_BSGK = self._with_positions(
      q_BLHK, k_BSGK, v_BSGK, rope, query_scale_BL
    )
    # Index of the first query among the keys; None if both begin together.
    first = None if cache is None else start
    if cache is not None and y_BSD is None:
      k_BSGK, v_BSGK = cache.layer(layer)
    elif cache is not None:
      cache, view = cache.extend(k_BSGK, v_BSGK, mask, layer, start)
      k_BSGK, v_BSGK, mask, first = view
    if x_BLD is None:
      return None, cache

    q = q_BLHK
    if options.num_kv_heads:
      q = _in_groups(q_BLHK, k_BSGK.shape[2])
    mask = dataclasses.replace(mask, window=options.window)
    if options.chunk is not None:
      mask = masks.in_chunks(
        mask, options.chunk, q, k_BSGK.shape[1], start, first
      )
    sinks_H = None
    if options.sinks:
      sinks_H = self.param("sinks", nn.initializers.zeros, (options.num_heads,))
    mask = masks.of_layer(mask, options.window)
    attention_logits.record(self, q, k_BSGK, mask, real_BL, options.scale)
    o = attend(
      q,
      k_BSGK,
      v_BSGK,
      mask,
      start=first,
      bias=bias,
      sinks_H=sinks_H,
      scale=options.scale,
      softcap=options.softcap,
      # Initialisation needs no more than the shapes.
      backend="xla" if self.is_initializing() else options.backend,
    )
    B = (x_BLD if y_BSD is None else y_BSD).shape[0]
    out = nn.DenseGeneral(
      x_BLD.shape[-1],
      axis=(-2, -1),
      use_bias="out" in options.bias,
      dtype=options.dtype,
      kernel_init=kernels.initializer(options.out_std),
      dot_general=sharding.rows(B) if self._splits(B) else None,
      name="out",
    )
    o_BLHK = o.reshape(q_BLHK.shape)
    if gate_BLHK is not None:
      o_BLHK *= jax.nn.sigmoid(gate_BLHK)
    return clipping.apply(out, o_BLHK, options.clipped), cache

  @nn.nowrap
  def _projections(
    self, x_BLD: jax.Array | None, y_BSD: jax.Array | None
  ) -> tuple[Any, Any, Any, Any]:
    """Queries of x (B, L, H, K), keys and values of y (B, S, G, K), a gate.

    The gate, like the queries, is computed from x. Arrays that are not needed
    are None.
    """
    options = self.options
    H, K = options.num_heads, options.head_dim
    x_or_y: Any = x_BLD if y_BSD is None else y_BSD
    if K is None:
      D = x_or_y.shape[-1]
      if D % H:
        raise ConfigError(
          f"config.model.num_heads: {H} does not divide the width {D}; the "
          f"nearest that do: {nearest_divisors(H, D)}."
        )
      K = D // H
    G = options.num_kv_heads or H
    key_bias = "qkv" in options.bias or "qkv_without_gate" in options.bias
    query_value_bias = key_bias or "qv" in options.bias
    gate_bias = query_value_bias and "qkv_without_gate" not in options.bias
    # The mesh axis `tensor`, if any, splits the heads: columns of the kernels.
    splits = self._splits(x_or_y.shape[0])
    dense = functools.partial(nn.DenseGeneral, dtype=options.dtype)
    q_BLHK = k_BSGK = v_BSGK = gate_BLHK = product = None
    if x_BLD is not None:
      product = sharding.columns(x_BLD) if splits else None
      of_queries = functools.partial(
        dense,
        (H, K),
        kernel_init=kernels.initializer(options.query_std),
        dot_general=product,
      )
      query = of_queries(use_bias=query_value_bias, name="query")
      q_BLHK = clipping.apply(query, x_BLD, options.clipped)
      if options.output_gate:
        gate = of_queries(use_bias=gate_bias, name="output_gate")
        gate_BLHK = gate(x_BLD)
    if y_BSD is not None:
      # In self-attention all three share the product, which gathers x once.
      if y_BSD is not x_BLD:
        product = sharding.columns(y_BSD) if splits else None
      key_or_value = functools.partial(
        dense,
        (G, K),
        kernel_init=kernels.initializer(options.kv_std),
        dot_general=product,
      )
      key = key_or_value(use_bias=key_bias, name="key")
      k_BSGK = clipping.apply(key, y_BSD, options.clipped)
      v_BSGK = k_BSGK
      if not options.keys_as_values:
        value = key_or_value(use_bias=query_value_bias, name="value")
        v_BSGK = clipping.apply(value, y_BSD, options.clipped)
    return q_BLHK, k_BSGK, v_BSGK, gate_BLHK

  @nn.nowrap
  def _with_positions(
    self,
    q_BLHK: Any,
    k_BSGK: Any,
    v_BSGK: Any,
    rope: positions.Rotation | None,
    query_scale_BL: jax.Array | None,
  ) -> tuple[Any, Any, Any]:
    """Normalizes, clips, rotates and scales. An array may be None."""
    options = self.options
    if not options.qk_norm_after_rope:
      q_BLHK, k_BSGK = self._normalized(q_BLHK, k_BSGK)
    if options.v_norm and v_BSGK is not None:
      v_BSGK = rms_norm.RMSNorm(
        v_BSGK.shape[-1:], options.norm_eps, scaled=False, dtype=options.dtype
      )(v_BSGK)
    limit = options.qkv_clip
    if limit is not None:
      q_BLHK, k_BSGK, v_BSGK = jax.tree.map(
        lambda x: jnp.clip(x, -limit, limit), (q_BLHK, k_BSGK, v_BSGK)
      )
    if rope is not None:
      rotate = functools.partial(positions.rotate, by=rope)
      q_BLHK, k_BSGK = jax.tree.map(rotate, (q_BLHK, k_BSGK))
    if options.qk_norm_after_rope:
      q_BLHK, k_BSGK = self._normalized(q_BLHK, k_BSGK)
    if query_scale_BL is not None:
      q_BLHK *= query_scale_BL[..., None, None].astype(q_BLHK.dtype)
    return q_BLHK, k_BSGK, v_BSGK

  @nn.nowrap
  def _normalized(self, q_BLHK: Any, k_BSGK: Any) -> tuple[Any, Any]:
    options = self.options

    def norm(x: jax.Array | None, heads: int, name: str) -> jax.Array | None:
      if x is None or options.qk_norm is None:
        return x
      K = x.shape[-1]
      if options.qk_norm.startswith("layernorm"):
        by_head = options.qk_norm == "layernorm_by_head"
        return head_norm.HeadLayerNorm(
          (heads, K) if by_head else (K,),
          options.norm_eps,
          use_bias="norm" in options.bias and not by_head,
          dtype=options.dtype,
          name=name,
        )(x)
      return rms_norm.RMSNorm(
        (heads, K) if options.qk_norm == "projection" else (K,),
        options.norm_eps,
        offset=options.norm_offset,
        scaled=options.qk_norm != "l2",
        dtype=options.dtype,
        name=name,
      )(x)

    H = options.num_heads
    G = options.num_kv_heads or H
    return norm(q_BLHK, H, "query_norm"), norm(k_BSGK, G, "key_norm")

  @nn.nowrap
  def _splits(self, batch_size: int) -> bool:
    """Whether the mesh axis `tensor` splits the heads."""
    options = self.options
    ways = sharding.tensor_ways(batch_size)
    if ways == 1 or options.num_heads % ways:
      return False
    G = options.num_kv_heads or options.num_heads
    sites = {"qkv", "qv", "qkv_without_gate"}
    if sites & {*options.bias} and G % ways:
      raise ConfigError(
        f"config.mesh.tensor={ways}: with biases it must divide the {G} heads "
        "of keys and values (config.model.num_kv_heads)."
      )
    return True


def _in_groups(q_BLHK: jax.Array, G: int) -> jax.Array:
  """Heads in groups that share a head of keys and values: [B, L, G, R, K]."""
  B, L, H, K = q_BLHK.shape
  return q_BLHK.reshape(B, L, G, H // G, K)


def attend(
  q: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask = masks.Mask(),
  *,
  start: jax.Array | int | None = None,
  bias: jax.Array | positions.BiasByDistance | None = None,
  sinks_H: jax.Array | None = None,
  scale: float | None = None,
  softcap: float | None = None,
  backend: str = "auto",
) -> jax.Array:
  """Means of values, weighted by the float32 softmax of the scores.

  Args:
    q: queries [B, L, H, K], or [B, L, G, R, K] for heads in groups. There may
      be n examples for each example of the keys, which n successive ones share.
    v_BSGK: values, whose width may differ from the keys'; the result has it.
    start: position of the first query, if the keys come from a cache.
    bias, sinks_H: see attention_inputs.Inputs.
  """
  q, k_BSGK, v_BSGK = checkpoint_name((q, k_BSGK, v_BSGK), remat.INNER)
  shape = q.shape
  B, S, G, K = k_BSGK.shape
  # Queries that share keys become the queries of one example.
  L = shape[0] // B * shape[1]
  H = math.prod(shape[2:]) // K
  scale = 1 / math.sqrt(K) if scale is None else scale
  value_width = v_BSGK.shape[-1]
  ways = 1  # Number of devices among which an example is split.
  # A single query has no matrix of scores that a kernel would avoid.
  if L == 1 or start is not None or isinstance(bias, jax.Array):
    backend = "xla"
  else:
    ways = sharding.length_ways(B, L)
    if backend == "ring" and ways == 1:
      backend = "blockwise"
  if backend not in ("ring", "xla"):
    call = attention_backends.call_of(
      B,
      mask,
      queries=L,
      positions=S,
      heads=H,
      kv_heads=G,
      width=max(K, value_width),
      dtype=str(q.dtype),
      bias=bias is not None,
      softcap=softcap is not None,
      sinks=sinks_H is not None,
    )
    backend = attention_backends.choose(backend, call)
  sinks_GR = None if sinks_H is None else sinks_H.reshape(G, H // G)
  compute = functools.partial(_attend_by, backend, scale, softcap)
  q_BLGRK = q.reshape(B, L, G, H // G, K)
  if ways > 1 or backend not in ("xla", "blockwise", "splash"):
    q_BLGRK, k_BSGK, v_BSGK = _with_one_width(q_BLGRK, k_BSGK, v_BSGK)
  inputs = Inputs(q_BLGRK, k_BSGK, v_BSGK, mask, bias, sinks_GR)
  if ways == 1:
    o = compute(inputs, start)
  else:
    o = attention_split.attend(
      backend, inputs, compute, scale=scale, softcap=softcap
    )
  o = o.reshape(*shape[:-1], -1)
  return o if o.shape[-1] == value_width else o[..., :value_width]


def _with_one_width(*arrays: jax.Array) -> list[jax.Array]:
  """Pads heads with zeros up to the widest, which changes no score."""
  widest = max(x.shape[-1] for x in arrays)

  def pad(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, widest - x.shape[-1])])

  return [x if x.shape[-1] == widest else pad(x) for x in arrays]


def _attend_by(
  backend: str,
  scale: float,
  softcap: float | None,
  inputs: Inputs,
  start: jax.Array | int | None,
) -> jax.Array:
  """Attends on a device with all keys, up to a reshape of the output."""
  if backend == "xla":
    return attention_xla.attend(inputs, start, scale=scale, softcap=softcap)
  if backend == "cudnn":
    return attention_kernels.attend_by_cudnn(inputs, scale=scale)
  attend_by = {
    "tokamax": attention_kernels.attend_by_tokamax,
    "splash": attention_kernels.attend_by_splash,
    "blockwise": attention_blockwise.attend,
  }[backend]
  return attend_by(inputs, scale=scale, softcap=softcap)


def wants_bias_by_distance(
  options: Options, x_BLD: jax.Array, mask: masks.Mask
) -> bool:
  """Whether self-attention needs its bias by distance rather than as a matrix.

  A matrix of biases is as large as a matrix of scores, which backends other
  than "xla" avoid.
  """
  B, L, _ = x_BLD.shape
  if options.backend == "xla" or L == 1:
    return False
  if options.backend == "ring":
    return True
  call = attention_backends.call_of(
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
  return attention_backends.choose(options.backend, call) != "xla"
