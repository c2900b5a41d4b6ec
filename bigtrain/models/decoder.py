"""A decoder-only language model: GPT-2, Llama, Mixtral, and mixtures of them.

GPT-2 is Radford et al. 2019, Llama https://arxiv.org/abs/2302.13971. What
differs between them is a field each. Kernels multiply from the right:
blocks/attention/query/kernel is (D, H, K). With `scan` there is one `blocks`
whose arrays have a leading axis of layers, without it blocks_0, blocks_1, ...

Axes: B batch, L length, D model width, H heads, G heads of keys and values,
K head width, F hidden width, N layers, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import dims, settings, sharding
from bigtrain.models.layers import (
  causal_block,
  kernels,
  kv_cache,
  layer_dims,
  masks,
  moe,
  options,
  stack,
)
from bigtrain.models.layers.positions import (
  check_scaling,
  frequencies,
  rotation,
)
from bigtrain.models.published import blocks, decoder_families, families
from bigtrain.models.published.tables import Shapes, Tensor

_NORM_EPS: dict[str, Any] = dict(norm_eps=1e-5)
_GPT2 = _NORM_EPS | dict(
  posemb="learn", norm="layernorm", mlp="gelu", use_bias=True, tied_head=True
)
_LLAMA = _NORM_EPS | dict(
  posemb="rope", norm="rmsnorm", mlp="swiglu", use_bias=False, tied_head=False
)
_GPT2_SIZES = dict(vocab_size=50257, max_len=1024)
_LLAMA3 = dict(
  vocab_size=128_256, max_len=131_072, rope_theta=5e5, num_kv_heads=8
)


def _llama3_scaling(factor: float) -> dict[str, Any]:
  return dict(
    type="llama3",
    factor=factor,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_len=8192,
  )


_LLAMA32_1B = dict(width=2048, depth=16, num_heads=32, mlp_dim=8192)
_LLAMA31 = _LLAMA | _LLAMA3 | dict(rope_scaling=_llama3_scaling(8.0))
_MIXTRAL = dict(moe=dict(num_experts=8, top_k=2))
_MU = dict(width=32, depth=2, num_heads=4, max_len=128)

# "gpt2" and "llama" have no sizes; "mu" is for tests. The Llamas are 3.2 1B,
# 3.1 8B and 3.1 70B.
VARIANTS: dict[str, dict[str, Any]] = {
  "gpt2": _GPT2,
  "gpt2_mu": _GPT2 | _MU,
  "gpt2_124m": _GPT2 | _GPT2_SIZES | dict(width=768, depth=12, num_heads=12),
  "gpt2_355m": _GPT2 | _GPT2_SIZES | dict(width=1024, depth=24, num_heads=16),
  "gpt2_774m": _GPT2 | _GPT2_SIZES | dict(width=1280, depth=36, num_heads=20),
  "gpt2_1558m": _GPT2 | _GPT2_SIZES | dict(width=1600, depth=48, num_heads=25),
  "llama": _LLAMA,
  "llama_mu": _LLAMA | _MU | dict(num_kv_heads=2, mlp_dim=64),
  "llama_1b": _LLAMA
  | _LLAMA3
  | _LLAMA32_1B
  | dict(tied_head=True, rope_scaling=_llama3_scaling(32.0)),
  "llama_8b": _LLAMA31
  | dict(width=4096, depth=32, num_heads=32, mlp_dim=14_336),
  "llama_70b": _LLAMA31
  | dict(width=8192, depth=80, num_heads=64, mlp_dim=28_672),
  "mixtral_mu": _LLAMA | _MU | dict(num_kv_heads=2, mlp_dim=64) | _MIXTRAL,
  "mixtral_8x7b": _LLAMA
  | dict(width=4096, depth=32, num_heads=32, num_kv_heads=8, mlp_dim=14_336)
  | dict(vocab_size=32_000, max_len=32_768, rope_theta=1e6)
  | _MIXTRAL,
}

POSEMBS = ("learn", "rope", "none")
NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "swiglu")

# Fields without a default: given, or the variant's.
_SIZES = ("vocab_size", "width", "depth", "num_heads")
_OTHERS = ("mlp_dim", "head_dim", "moe", "rope_scaling")


class Model(nn.Module):
  """The decoder. After construction no field that a variant gives is None.

  Attributes:
    variant: a name in VARIANTS, the defaults of the fields that are None;
      "gpt2" if None.
    vocab_size: V.
    width: D.
    depth: N.
    num_heads: H.
    num_kv_heads: G, which divides H; H by default.
    head_dim: K; D / H by default.
    mlp_dim: F; 4 D by default.
    max_len: largest number of positions; needed for posemb "learn".
    posemb: "learn", "rope" or "none".
    rope_theta: base of the wavelengths; 10,000 by default.
    rope_scaling: see positions.frequencies.
    norm: "layernorm" or "rmsnorm".
    norm_eps: added to the variance in norms.
    mlp: "gelu" (its tanh form) or "swiglu".
    moe: options of moe.Options: experts of kind `mlp` in place of MLPs.
    use_bias: whether projections and the MLP have biases.
    tied_head: whether the head is the embedding.
    qk_norm: whether queries and keys have root-mean-square norms.
    window: number of positions that each position sees; all if None.
    attention_softcap: scores s become softcap * tanh(s / softcap).
    logits_softcap: the same for the logits.
    dropout: rate after the embedding and on residual branches.
    init_std: standard deviation of the initial kernels; kernels that write to
      the residual stream have init_std / sqrt(2 N), as in GPT-2.
    scan: whether to compile one block and loop over stacked parameters.
    attention, remat_policy: names in attention_backends.NAMES, remat.POLICIES.
    dtype: dtype of the computation; parameters and logits are float32.
  """

  variant: str | None = None
  vocab_size: int = options.DERIVED
  width: int = options.DERIVED
  depth: int = options.DERIVED
  num_heads: int = options.DERIVED
  num_kv_heads: int = options.DERIVED
  head_dim: int = options.DERIVED
  mlp_dim: int = options.DERIVED
  max_len: int | None = None
  posemb: str = options.DERIVED
  rope_theta: float = options.DERIVED
  rope_scaling: Mapping[str, Any] | None = None
  norm: str = options.DERIVED
  norm_eps: float = options.DERIVED
  mlp: str = options.DERIVED
  moe: Any = None
  use_bias: bool = options.DERIVED
  tied_head: bool = options.DERIVED
  qk_norm: bool = False
  window: int | None = None
  attention_softcap: float | None = None
  attention: str = "auto"
  logits_softcap: float | None = None
  dropout: float = 0.0
  init_std: float = 0.02
  scan: bool = False
  remat_policy: str = "none"
  dtype: str = "float32"

  def __post_init__(self) -> None:
    values = options.filled(
      self,
      VARIANTS,
      (*_SIZES, *_LLAMA, *_LLAMA3, *_OTHERS),
      default="gpt2",
      example="gpt2_124m",
    )
    derived = dict(rope_theta=1e4, num_kv_heads=values["num_heads"])
    options.set_fields(self, derived | values)
    _check(self)
    experts = moe.read(self.moe, "config.model.moe", depth=self.depth)
    options.set_fields(self, {"moe": experts})
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    real: jax.Array | None = None,
    cache: kv_cache.Cache | None = None,
    start: jax.Array | int = 0,
    head: bool = True,
    train: bool = False,
  ) -> tuple[jax.Array | None, dict[str, Any]]:
    """Predicts the next token at each position.

    Args:
      tokens: int (B, L) token ids. Ids outside the vocabulary give NaN.
      segments: int (B, L), document of each token, 0 for padding; documents do
        not see each other. None for one document a row.
      positions: int (B, L); by default they count from 0 in each document.
      real: bool (B, L), False for padding, which experts leave out; by default
        that of segment 0.
      cache: keys and values of earlier tokens, from `init_cache`; the call
        adds its own, and experts drop no token. Not with segments.

    Returns:
      (float32 logits (B, L, V), or None without `head`; a dict of "pre_logits"
      (B, L, D), "cache" and "moe", the experts' statistics, or None).
    """
    init = nn.initializers.normal(self.init_std)
    embedding_VD = self.param(
      "token_embedding", init, (self.vocab_size, self.width)
    )
    x_BLD = sharding.lookup(embedding_VD, tokens, self.dtype)
    mask = masks.Mask(causal=True)
    if segments is not None:
      mask = masks.within_documents(segments, causal=True)
      real = segments != 0 if real is None else real
    if positions is None:
      positions = start + jnp.arange(tokens.shape[1])[None]
      if segments is not None:
        positions = positions - _document_starts(segments)
    x_BLD, rope = self._positions(x_BLD, positions, init)
    x_BLD = nn.Dropout(self.dropout)(x_BLD, deterministic=not train)
    (x_BLD, cache), stats = self._blocks(
      (sharding.stream(x_BLD), cache), rope, mask, real, start, train
    )
    x_BLD = causal_block.norm(self, "norm")(x_BLD)
    out = {"pre_logits": x_BLD, "cache": cache, "moe": stats}
    kernel_DV = embedding_VD.T
    if not self.tied_head:
      shape = (self.width, self.vocab_size)
      kernel_DV = kernels.Kernel(shape, self.init_std, name="head")()
    return self._logits(x_BLD, kernel_DV) if head else None, out

  def _positions(
    self, x_BLD: jax.Array, positions: jax.Array, init: Any
  ) -> tuple[jax.Array, Any]:
    L = x_BLD.shape[1]
    if self.max_len is not None and L > self.max_len:
      raise settings.ConfigError(
        f"config.model.max_len={self.max_len} is too short for texts of {L} "
        "tokens."
      )
    if self.posemb == "learn":
      table_LD = self.param("pos_embedding", init, (self.max_len, self.width))
      x_BLD += jnp.take(table_LD, positions, axis=0).astype(self.dtype)
    if self.posemb != "rope":
      return x_BLD, None
    omega_Q = frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
    return x_BLD, rotation(positions, omega_Q)

  def _logits(self, x_BLD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    logits_BLV = kernels.logits(x_BLD, kernel_DV.astype(self.dtype))
    if self.logits_softcap is None:
      return logits_BLV
    return self.logits_softcap * jnp.tanh(logits_BLV / self.logits_softcap)

  def _blocks(self, carry: Any, *shared: Any) -> tuple[Any, Any]:
    fields = causal_block.Options._fields
    block = causal_block.Options(*[getattr(self, name) for name in fields])
    x_BLD, cache = carry
    if block.moe is not None and cache is not None and x_BLD.shape[1] > 1:
      # A capacity would depend on the longest prompt of the batch. It drops
      # nothing where tokens come one by one.
      block = block._replace(moe=block.moe.without_drops())
    return stack.run(
      self,
      causal_block.Block,
      moe.kinds(block),
      self.depth,
      carry,
      *shared,
      scan=self.scan,
      remat_policy=self.remat_policy,
    )

  def head_kernel(self, params: Mapping[str, Any]) -> jax.Array:
    if self.tied_head:
      return params["token_embedding"].T
    return params["head"]["kernel"]

  def init_cache(self, batch_size: int, max_len: int) -> kv_cache.Cache:
    if self.max_len is not None and max_len > self.max_len:
      raise settings.ConfigError(
        f"max_len={max_len}: the model has only {self.max_len} positions "
        "(config.model.max_len)."
      )
    return kv_cache.empty(
      batch_size,
      self.depth,
      max_len,
      self.num_kv_heads,
      self.head_dim,
      self.dtype,
    )


def _document_starts(segments_BL: jax.Array) -> jax.Array:
  """Index of the first token of each token's document, int (B, L)."""
  index_L = jnp.arange(segments_BL.shape[1])
  before_BL = jnp.pad(segments_BL[:, :-1], ((0, 0), (1, 0)))
  starts_BL = jnp.where(segments_BL != before_BL, index_L, 0)
  return jax.lax.cummax(starts_BL, axis=1)


def _check(model: Model) -> None:
  sizes = (*_SIZES, "num_kv_heads", "head_dim", "mlp_dim")
  optional = [n for n in ("max_len", "window") if getattr(model, n) is not None]
  options.check_sizes(model, (*sizes, *optional))
  if model.num_heads % model.num_kv_heads:
    raise settings.ConfigError(
      f"config.model.num_kv_heads: {model.num_kv_heads} does not divide "
      f"num_heads={model.num_heads}."
    )
  options.check_fields(model, "dropout", posemb=POSEMBS, norm=NORMS, mlp=MLPS)
  check_scaling(model.rope_scaling, "config.model.rope_scaling")
  if model.posemb == "learn" and model.max_len is None:
    raise settings.ConfigError(
      "config.model.max_len: missing; posemb='learn' needs it."
    )
  if model.posemb == "rope" and model.head_dim % 2:
    raise settings.ConfigError(
      "config.model.head_dim: rotary positions need an even number, got "
      f"{model.head_dim}."
    )


_DIMS = {
  "token_embedding": "V -> D",
  "pos_embedding": "positions -> D",
  **layer_dims.head("head"),
  **layer_dims.LAYERS,
}


def param_dims(model: Model) -> dims.Table:
  return layer_dims.with_experts(_DIMS, model.moe)


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
  """Reads Hugging Face's GPT-2, Llama and Mixtral, or another `scan`."""
  converted = decoder_families.load(flat, like, _DIMS)
  if converted is not None:
    return converted
  return blocks.restack_blocks(flat, like, block="blocks")


def to_published(
  model: Model, shapes: Shapes, layout: str
) -> tuple[dict[str, Any], list[Tensor]]:
  return decoder_families.export(model, shapes, layout, _DIMS)


def published_fields(path: str) -> families.Fields | None:
  return families.fields(path, decoder_families.FAMILIES)
