"""A decoder-only language model: GPT-2, Llama, Mixtral and their successors.

Each difference between GPT-2 (Radford et al. 2019), Llama
(https://arxiv.org/abs/2302.13971) and later models is a field of Model, and
fields combine freely; published/decoder_variants.py has the published sizes.
The model is an embedding, blocks (layers/causal_block.py, run by
layers/stack.py) and a head. Kernels multiply from the right:
blocks/attention/query/kernel is (D, H, K).

This module begins with the model: its fields, the forward pass in the order of
computation, the head, and the caches of generation. The checks of the fields
follow. It ends with the names of the parameters and their conversion from and
to published files.

Axes: B batch, L length, D model width, H heads, G heads of keys and values,
K head width, F hidden width, N layers, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.arrays import dims, packed
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.models.layers import (
  causal_block,
  deltanet,
  kernels,
  kv_cache,
  latent_attention,
  layer_dims,
  layer_inputs,
  layer_kinds,
  masks,
  mlp,
  moe,
  multi_token,
  options,
  short_conv,
  stack,
)
from bigtrain.models.published import (
  blocks,
  decoder_families,
  decoder_variants,
)
from bigtrain.models.published.decoders import bias_rules

POSEMBS = ("learn", "rope", "none")
POOLS = ("last", "first", "mean")

VARIANTS = decoder_variants.VARIANTS
# Fields that are None in Model unless the config gives them.
_GIVEN_BY_VARIANTS = {
  field for variant in VARIANTS.values() for field in variant
}
# Defaults of the fields that some variants give. In the class they are None, to
# distinguish a value in the config from the default: the config's value comes
# first, then the variant's, then the one here.
_DEFAULTS: dict[str, Any] = dict(
  rope_theta=1e4,
  rope_fraction=1.0,
  norm_offset=0.0,
  norm_at="pre",
  layers=(),
  first_layers=(),
  rope_interleaved=False,
  logits_softcap=None,
  v_norm=False,
  layer_scalar=False,
  output_gate=False,
  sinks=False,
  embed_multiplier=1.0,
  mla=None,
)


class Model(nn.Module):
  """The decoder. After construction no field that a variant gives is None."""

  variant: str | None = None  # A name in VARIANTS, by default "gpt2".

  # Sizes.

  vocab_size: int = options.DERIVED  # V.
  width: int = options.DERIVED  # D.
  depth: int = options.DERIVED  # N.
  num_heads: int = options.DERIVED  # H.
  num_kv_heads: int = options.DERIVED  # G, which divides H; by default H.
  head_dim: int = options.DERIVED  # K; D / H by default.
  # Latent attention: kv_rank, nope_dim, rope_dim, v_dim, q_rank or None; see
  # latent_attention.Options.
  mla: Any = None
  mlp_dim: int = options.DERIVED  # F; 4 D by default.

  # Positions.

  max_len: int | None = None  # Number of positions; posemb "learn" needs it.
  posemb: str = options.DERIVED  # "learn", "rope" or "none".
  rope_theta: float = options.DERIVED  # Base of wavelengths; 10,000 by default.
  rope_scaling: Mapping[str, Any] | None = None  # See positions.frequencies.
  # Share of a head's features that rotate: the first ones.
  rope_fraction: float = options.DERIVED
  # Whether features 2 i and 2 i + 1 form a pair.
  rope_interleaved: bool = options.DERIVED
  rope_reversed: bool = False  # Whether angles are negative, as in nanochat.
  # Options of positions.Axes, if positions have three axes; None for one.
  rope_axes: Any = None

  # Norms, and their places around attention and MLP.

  norm: str = options.DERIVED  # "layernorm" or "rmsnorm".
  norm_eps: float = options.DERIVED  # Added to the variance in norms.
  norm_offset: float = options.DERIVED  # Added to scales of norms, as in Gemma.
  norm_scaled: bool = True  # Whether norms of the stream have a scale.
  embed_norm: bool = False  # Whether a norm follows the embedding.
  norm_at: str = options.DERIVED  # "pre" or "post" a branch; "sandwich", both.
  parallel: bool = False  # Whether attention and MLP read the same input.
  parallel_norms: bool = False  # Whether each of them then has its own norm.

  # MLPs, experts, and layers in place of attention.

  mlp: str = options.DERIVED  # A name in mlp.NAMES.
  mlp_clip: Any = None  # Bounds of gated MLPs: limit, alpha and up_offset.
  moe: Any = None  # See moe.Options: experts of kind `mlp` in place of MLPs.
  # See deltanet.Options: a recurrent layer in place of attention.
  deltanet: Any = None
  # See short_conv.Options: a gated convolution in place of attention.
  short_conv: Any = None
  # Names in bias_rules.SITES; True is "qkv", "out", "mlp", "norm".
  use_bias: Any = options.DERIVED

  # Outputs.

  tied_head: bool = options.DERIVED  # Whether the head is the embedding.
  # Number of modules that each predict one more token, see multi_token.py.
  mtp: int = 0
  # Number of classes of a text, or 1 for a reward or another number, which a
  # linear layer `score` without a bias predicts; None to predict tokens.
  num_classes: int | None = None
  pool: str = "last"  # The state of a whole text: "last", "first" or "mean".

  # Attention.

  # Norms of queries and keys: RMS norms "head", "projection" (over all heads)
  # and "l2" (by head, without a scale), layer norms "layernorm" and
  # "layernorm_by_head" (with a scale for each head), or None; True is "head".
  qk_norm: Any = None
  qk_norm_after_rope: bool = False  # Whether qk_norm follows the rotation.
  qkv_clip: float | None = None  # Largest entry of queries, keys and values.
  window: int | None = None  # Number of positions that each one attends to.
  # Number of positions of a chunk: attention stays within one, as in Llama 4.
  chunk: int | None = None

  # Layers that differ from one another.

  # {name: fields of layer_kinds.FIELDS} of layers that differ.
  kinds: Mapping[str, Mapping[str, Any]] | None = None
  # Names in `kinds`, a repeated period, which need not divide the depth.
  layers: Sequence[str] = options.DERIVED
  first_layers: Sequence[str] = options.DERIVED  # Before the first period.

  # Implementation and scores of attention.

  attention: str = "auto"  # A name in attention_backends.NAMES.
  attention_scale: float | None = None  # Of scores; 1 / sqrt(K) if None.
  attention_softcap: float | None = None  # Scores s: cap * tanh(s / cap).
  # Whether log entries have each layer's largest score; config.qk_clip sets it.
  attention_logits: bool = False
  query_scale: Any = None  # Options of positions.QueryScale, by position.
  v_norm: bool = options.DERIVED  # RMS norm of values, without a scale.
  # Whether values are the keys before their norm and rotation.
  keys_as_values: bool = False
  # Whether a layer uses the keys and values of an earlier layer: the last one
  # that has its own, with the same number of heads, head width and window.
  shares_kv: bool = False
  # Whether a sigmoid multiplies each feature of the attention's output.
  output_gate: bool = options.DERIVED
  sinks: bool = options.DERIVED  # Whether each softmax has a learned logit.

  # Factors of the embedding, the stream and the logits.

  embed_multiplier: float | str = options.DERIVED  # A number or "sqrt_width".
  residual_multiplier: float = 1.0  # Of residual branches.
  # See layer_inputs.Options: embeddings of tokens for each layer.
  layer_inputs: Any = None
  # Whether each layer's output is multiplied by a factor, which is not trained.
  layer_scalar: bool = options.DERIVED
  logits_multiplier: float = 1.0  # Factor of the logits.
  # Logits x become cap * tanh(x / cap).
  logits_softcap: float | None = options.DERIVED

  # Regularization and initial values.

  dropout: float = 0.0  # Rate after the embedding and on branches.
  drop_path: float = 0.0  # Of the last block; grows linearly from 0.
  neftune: float = 0.0  # Noise on embeddings, arXiv 2310.05914.
  # Of kernels; those that write to the stream have init_std / sqrt(2 N).
  init_std: float = 0.02

  # Computation.

  scan: bool = False  # Whether a compiled block loops over stacked layers.
  remat_policy: str = "none"  # A name in remat.POLICIES.
  dtype: str = "float32"  # Of activations; parameters and logits are float32.

  def __post_init__(self) -> None:
    of_variant = VARIANTS.get(self.variant or "", {}).get("mla")
    mla = options.changed(latent_attention.Options, of_variant, self.mla)
    options.set_fields(self, dict(mla=mla))
    latents = latent_attention.read(mla, "config.model.mla")
    if latents is not None and self.head_dim is None:
      options.set_fields(self, dict(mla=latents, head_dim=latents.head_dim))
    values = options.filled(
      self, VARIANTS, _GIVEN_BY_VARIANTS, default="gpt2", example="gpt2_124m"
    )
    derived = dict(num_kv_heads=values["num_heads"])
    options.set_fields(self, _DEFAULTS | derived | values)
    _read(self)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    real: jax.Array | None = None,
    prefix: jax.Array | None = None,
    inserted: tuple[jax.Array, jax.Array] | None = None,
    added: jax.Array | None = None,
    groups: masks.Groups | None = None,
    cache: kv_cache.Caches | None = None,
    start: jax.Array | int = 0,
    head: bool = True,
    train: bool = False,
  ) -> tuple[jax.Array | None, dict[str, Any]]:
    """Predicts the next token at each position.

    Args:
      tokens: int (B, L) token ids. Ids outside the vocabulary give NaN.
      segments: int (B, L), document of each token, 0 for padding; documents do
        not see each other. None means one document per example.
      positions: int (B, L), or (B, L, 3) with rope_axes; by default from 0 on
        in each document.
      real: bool (B, L), False for padding, which experts leave out; by default
        segment 0 is padding. A cache of texts that end in padding needs it.
      prefix: int (B,), number of leading tokens that all tokens attend to, even
        earlier ones. Not with segments or a window.
      inserted: embeddings (B, L, D), and bool (B, L), which says where they
        replace the embeddings of the tokens.
      added: (B, n, L, D), added to the stream after each of the first n layers.
      groups: groups of the tokens, and of the positions that they may see.
      cache: keys and values of earlier tokens, from `init_cache`. The call adds
        those of its tokens, and experts drop no token. Not with segments.

    Returns:
      Float32 logits (B, L, V), or None without `head`; with num_classes they
      are (B, C).
      A dict: "pre_logits" (B, L, D), or (B, D) with num_classes; "cache", the
      new cache or None; "moe", the experts' statistics or None; with `train`
      and `mtp` also "mtp", a list of hidden states (B, L, D).
    """
    init = nn.initializers.normal(self.init_std)
    shape = self.vocab_size, self.width
    embedding_VD = self.param("token_embedding", init, shape)
    x_BLD = self._embedded(tokens, embedding_VD, inserted)
    inputs_BLNI = self._layer_inputs(tokens, x_BLD, inserted)

    mask = self._mask(segments, prefix, groups)
    if segments is not None and real is None:
      real = segments != 0
    if self.neftune and train:
      x_BLD = self._with_noise(x_BLD, real)
    if positions is None:
      positions = masks.positions_of(tokens.shape[1], start, segments)
    x_BLD = self._with_positions(x_BLD, positions, init)
    x_BLD = nn.Dropout(self.dropout)(x_BLD, deterministic=not train)

    if cache is not None:
      cache = cache.with_tokens(tokens, start, real)
    layers = layer_kinds.of_model(self)
    lengths = _lengths(layers, tokens, segments, real, cache)
    tables = layers.tables(positions, lengths, added)
    tables = tables._replace(inputs_BLNI=inputs_BLNI)
    x_BLD, cache, stats = self._blocks(
      layers, x_BLD, cache, tables, mask, real, start, train
    )
    x_BLD = causal_block.norm(self, self.width, "norm")(x_BLD)

    out = {"pre_logits": x_BLD, "cache": cache, "moe": stats}
    if self.mtp and (train or self.is_initializing()):
      out["mtp"], out["moe"] = self._predict_further(
        embedding_VD, x_BLD, tokens, stats, tables, mask, real, train
      )
    if self.num_classes is not None:
      out["pre_logits"] = self.pooled(x_BLD, real)
      return self._class_logits(out["pre_logits"]), out
    # A call without `head` still makes the parameters of the head.
    weights = {"token_embedding": embedding_VD, **self._own_head(init)}
    return self.logits(x_BLD, weights) if head else None, out

  @nn.nowrap
  def _own_head(self, init: Any) -> dict[str, Any]:
    """The parameters of the head other than the embedding, as "head"."""
    V, D = self.vocab_size, self.width
    kernel = None if self.tied_head else (D, V)
    bias = (V,) if "head" in self.use_bias else None
    if not kernel and not bias:
      return {}
    return {"head": kernels.Kernel(kernel, bias, init, name="head")()}

  @nn.nowrap
  def embed(self, embedding_VD: jax.Array, tokens: jax.Array) -> jax.Array:
    x_BLD = sharding.lookup(embedding_VD, tokens, self.dtype)
    multiplier: Any = self.embed_multiplier
    if multiplier == 1:
      return x_BLD
    if multiplier == "sqrt_width":
      multiplier = self.width**0.5
    return x_BLD * jnp.asarray(multiplier, x_BLD.dtype)

  @nn.nowrap
  def mtp_modules(self, **options: Any) -> multi_token.Modules:
    """Modules that predict further tokens; their block is the last layer's."""
    last = layer_kinds.of_model(self).of_all(self.depth)[-1]
    return multi_token.Modules(last, self.remat_policy, **options)

  @nn.nowrap
  def _predict_further(
    self,
    embedding_VD: jax.Array,
    x_BLD: jax.Array,
    tokens: jax.Array,
    stats: dict[str, Any] | None,
    tables: causal_block.Tables,
    mask: masks.Mask,
    real: jax.Array | None,
    train: bool,
  ) -> tuple[list[jax.Array], dict[str, Any] | None]:
    """Hidden states of each module, and `stats` including their layers'."""
    modules = self.mtp_modules(name="mtp")
    tables = tables._replace(added_BNLD=None)  # Only for the first layers.
    real_BL = jnp.ones(tokens.shape, bool) if real is None else real
    hidden = []
    by_layer = {} if stats is None else stats["by_layer"]
    for number in range(self.mtp):
      # The last tokens of a document have nothing to predict.
      own_real_BL = real_BL & packed.ahead(
        real_BL, mask.segments_BL, number + 1
      )
      x_BLD, _, own = modules(
        number,
        x_BLD,
        self.embed(embedding_VD, jnp.roll(tokens, -number - 1, axis=1)),
        tables,
        mask,
        own_real_BL,
        train=train,
      )
      hidden.append(x_BLD)
      layer = [self.depth + number]
      by_layer = by_layer | moe.of_layers(own, layer, stacked=False)
    return hidden, stats and {**stats, "by_layer": by_layer}

  def pooled(self, x_BLD: jax.Array, real_BL: jax.Array | None) -> jax.Array:
    """Features (B, D) of whole texts, pooled as `config.model.pool` says."""
    real_BL = jnp.full(x_BLD.shape[:2], True) if real_BL is None else real_BL
    if self.pool == "mean":
      weight_BL = real_BL / jnp.maximum(jnp.sum(real_BL, 1, keepdims=True), 1)
      return jnp.einsum("bl,bld->bd", weight_BL, x_BLD).astype(x_BLD.dtype)
    last_B = jnp.max(real_BL * jnp.arange(x_BLD.shape[1]), axis=1)
    at_B = last_B * (self.pool == "last")
    return jnp.take_along_axis(x_BLD, at_B[:, None, None], axis=1)[:, 0]

  def _mask(
    self,
    segments: jax.Array | None,
    prefix: jax.Array | None,
    groups: masks.Groups | None,
  ) -> masks.Mask:
    if prefix is not None:
      _check_prefix(self, segments)
    mask = masks.Mask(
      causal=True,
      prefix_B=prefix,
      segments_BL=segments,
      segments_BS=segments,
    )
    return mask if groups is None else groups.added(mask)

  def _embedded(
    self,
    tokens: jax.Array,
    embedding_VD: jax.Array,
    inserted: tuple[jax.Array, jax.Array] | None,
  ) -> jax.Array:
    if inserted is not None:
      tokens = jnp.where(inserted[1], 0, tokens)
    x_BLD = self.embed(embedding_VD, tokens)
    if inserted is not None:
      inserted_BLD, at_BL = inserted
      x_BLD = jnp.where(at_BL[..., None], inserted_BLD, x_BLD)
    if self.embed_norm:
      x_BLD = causal_block.norm(self, self.width, "embedding_norm")(x_BLD)
    return x_BLD

  def _layer_inputs(
    self,
    tokens: jax.Array,
    x_BLD: jax.Array,
    inserted: tuple[jax.Array, jax.Array] | None,
  ) -> jax.Array | None:
    own = self.layer_inputs
    if own is None:
      return None
    if inserted is not None:
      # As in transformers, its embedding is not trained there.
      tokens = jnp.where(inserted[1], own.image_id, tokens)
    module = layer_inputs.LayerInputs(
      own.dim,
      own.vocab_size or self.vocab_size,
      self.depth,
      self.norm_eps,
      self.init_std,
      self.dtype,
      name="layer_inputs",
    )
    return module(tokens, x_BLD, None if inserted is None else inserted[1])

  def _with_noise(self, x_BLD: jax.Array, real: jax.Array | None) -> jax.Array:
    """NEFTune: uniform noise, which is smaller for longer texts."""
    B, L, D = x_BLD.shape
    length_B = jnp.full(B, L) if real is None else jnp.sum(real, axis=1)
    bound_B = self.neftune / jnp.sqrt(jnp.maximum(length_B, 1) * D)
    key = self.make_rng("dropout")
    noise_BLD = jax.random.uniform(key, (B, L, D), jnp.float32, -1, 1)
    return x_BLD + (noise_BLD * bound_B[:, None, None]).astype(x_BLD.dtype)

  def _with_positions(
    self, x_BLD: jax.Array, positions: jax.Array, init: Any
  ) -> jax.Array:
    L = x_BLD.shape[1]
    if self.max_len is not None and L > self.max_len:
      raise ConfigError(
        f"config.model.max_len={self.max_len} is too short for texts of {L} "
        "tokens."
      )
    if self.posemb != "learn":
      return x_BLD
    table_LD = self.param("pos_embedding", init, (self.max_len, self.width))
    return x_BLD + jnp.take(table_LD, positions, axis=0).astype(self.dtype)

  def _class_logits(self, x_BD: jax.Array) -> jax.Array:
    shape: Any = self.width, self.num_classes
    init = kernels.initializer(self.init_std)
    weights = kernels.Kernel(shape, init=init, name="score")()
    kernel_DC = weights["kernel"].astype(self.dtype)
    return kernels.logits(x_BD[:, None], kernel_DC)[:, 0]

  @nn.nowrap
  def logits(self, x_BLD: jax.Array, weights: Mapping[str, Any]) -> jax.Array:
    kernel_DV = self.head_kernel(weights).astype(self.dtype)
    logits_BLV = kernels.logits(x_BLD, kernel_DV)
    bias_V = self.head_bias(weights)
    if bias_V is not None:
      logits_BLV += bias_V
    if self.logits_softcap is None:
      return logits_BLV
    return self.logits_softcap * jnp.tanh(logits_BLV / self.logits_softcap)

  def _blocks(
    self,
    layers: layer_kinds.Layers,
    x_BLD: jax.Array,
    cache: kv_cache.Caches | None,
    tables: causal_block.Tables,
    mask: masks.Mask,
    real_BL: jax.Array | None,
    start: jax.Array | int,
    train: bool,
  ) -> tuple[jax.Array, kv_cache.Caches | None, Any]:
    """Returns (the stream after all blocks, new cache, experts' statistics)."""
    if cache is not None and x_BLD.shape[1] > 1:
      # A capacity would depend on the longest prompt of the batch. It drops
      # nothing where tokens come one by one.
      layers = layers.without_drops()
    carry: causal_block.Carry = sharding.stream(x_BLD), cache, {}
    (x_BLD, cache, _), stats = stack.run(
      self,
      causal_block.Block,
      layers.period,
      self.depth,
      carry,
      tables,
      mask,
      real_BL,
      start,
      train,
      first=layers.first,
      scan=self.scan,
      remat_policy=self.remat_policy,
    )
    return x_BLD, None if cache is None else cache.after_call(), stats

  def head_kernel(self, params: Mapping[str, Any]) -> jax.Array:
    """The matrix (D, V) that computes logits, including their multiplier."""
    if self.num_classes is not None:
      raise ConfigError(
        f"config.model.num_classes={self.num_classes}: expected None for a "
        "task that predicts tokens."
      )
    if self.tied_head:
      kernel_DV = params["token_embedding"].T
    else:
      kernel_DV = params["head"]["kernel"]
    if self.logits_multiplier == 1:
      return kernel_DV
    return self.logits_multiplier * kernel_DV

  def head_bias(self, params: Mapping[str, Any]) -> jax.Array | None:
    if "head" not in self.use_bias:
      return None
    return self.logits_multiplier * params["head"]["bias"]

  def end_of_step(
    self, mutable: Mapping[str, Any], step_sums: Mapping[str, Any]
  ) -> dict[str, Any]:
    rate = layer_kinds.of_model(self).bias_rate()
    return moe.end_of_step(mutable, step_sums, rate)

  def init_cache(
    self,
    batch_size: int,
    max_len: int,
    write_once: bool = False,
    whole: bool = False,
  ) -> kv_cache.Caches:
    """Returns an empty cache; see kv_cache.of_layers."""
    if self.max_len is not None and max_len > self.max_len:
      raise ConfigError(
        f"max_len={max_len}: the model has only {self.max_len} positions "
        "(config.model.max_len)."
      )
    layers = layer_kinds.of_model(self)
    kind_N = [block.cache for block in layers.of_all(self.depth)]
    cache = kv_cache.of_layers(
      batch_size, max_len, layers.caches, kind_N, self.dtype, write_once, whole
    )
    if not layers.depends_on_length():
      return cache
    text = kv_cache.Text(
      jnp.zeros((batch_size, max_len), jnp.int32),
      jnp.zeros(batch_size, jnp.int32),
      tuple(length for length in layers.switches() if length < max_len),
    )
    return dataclasses.replace(cache, text=text)

  @nn.nowrap
  def init_draft_cache(self, batch_size: int, max_len: int) -> kv_cache.Caches:
    """An empty cache of the modules in `mtp`."""
    layers = layer_kinds.of_model(self)
    whole = [
      cache
      for cache in layers.caches
      if isinstance(cache, kv_cache.Kind) and not cache.window
    ]
    if len(whole) < len(layers.caches) or layers.depends_on_length():
      raise ConfigError(
        "drafts: expected layers that see all positions, and whose rotary "
        "embeddings do not depend on the length of a text."
      )
    modules = self.mtp_modules()
    own = modules.options.cache
    assert own is not None  # See _check_last_layer.
    kind = whole[own]
    return modules.init_cache(batch_size, max_len, kind, self.mtp)

  @nn.nowrap
  def draft(
    self,
    variables: Mapping[str, Any],
    number: int,
    hidden_BLD: jax.Array,
    ahead_BL: jax.Array,
    cache: kv_cache.Caches,
    start: jax.Array | int,
    real: jax.Array | None = None,
  ) -> tuple[jax.Array, kv_cache.Caches]:
    """Applies a module of `mtp` to positions from `start` on.

    Args:
      ahead_BL: the tokens `number + 1` places after these positions.

    Returns:
      (its hidden states, which `logits` and the next module read; the new
      cache).
    """
    own = {
      name: tree["mtp"] for name, tree in variables.items() if "mtp" in tree
    }
    embedding_VD = variables["params"]["token_embedding"]
    L = ahead_BL.shape[1]
    positions = start + jnp.arange(L)[None]
    layers = layer_kinds.of_model(self).without_drops()
    modules = self.mtp_modules()
    result: Any = modules.apply(
      own,
      number,
      hidden_BLD,
      self.embed(embedding_VD, ahead_BL),
      layers.tables(positions, cache.length),
      masks.Mask(causal=True),
      real,
      cache,
      start,
    )
    return result[0], result[1]


def _check_mtp(model: Model) -> None:
  check_number("config.model.mtp", model.mtp, least=0, whole=True)
  if model.mtp and model.max_len is not None and model.mtp >= model.max_len:
    raise ConfigError(
      f"config.model.mtp={model.mtp}: expected at most {model.max_len - 1}, "
      f"because texts have up to config.model.max_len={model.max_len} tokens, "
      "and the last ones have nothing to predict."
    )
  if model.mtp and model.num_classes is not None:
    raise ConfigError(
      f"config.model.mtp={model.mtp}: expected 0 with num_classes="
      f"{model.num_classes}, which predicts no tokens."
    )


def _check_layer_inputs(model: Model) -> None:
  size = model.layer_inputs and model.layer_inputs.vocab_size
  if size and size < model.vocab_size:
    raise ConfigError(
      f"config.model.layer_inputs.vocab_size={size}: expected at least "
      f"vocab_size={model.vocab_size}, the number of tokens."
    )


def _check_last_layer(model: Model) -> None:
  """Checks that modules of `mtp` can have a block like the last layer's."""
  last = layer_kinds.of_model(model).of_all(model.depth)[-1]
  if model.mtp and (model.layer_inputs is not None or last.view is not None):
    raise ConfigError(
      f"config.model.mtp={model.mtp}: expected 0 with layer_inputs, and with a "
      "last layer that shares keys and values."
    )


def _check_prefix(model: Model, segments: jax.Array | None) -> None:
  if segments is not None:
    raise ConfigError(
      "prefix: expected one text per example, got packed ones (segments)."
    )
  layers = layer_kinds.of_model(model)
  for name in ("window", "chunk"):
    if any(getattr(block, name) for block in layers.of_all(model.depth)):
      raise ConfigError(
        f"prefix: expected layers that see all positions, got "
        f"config.model.{name}."
      )
  if layers.has_recurrence():
    raise ConfigError(
      "prefix: expected layers that see later positions too, got "
      "config.model.deltanet or short_conv."
    )


def _lengths(
  layers: layer_kinds.Layers,
  tokens: jax.Array,
  segments: jax.Array | None,
  real: jax.Array | None,
  cache: kv_cache.Caches | None,
) -> jax.Array | int:
  """Length of each token's text (B, L or 1), or one length for all texts.

  Rotary embeddings of types "longrope" and "dynamic" depend on it. The padding
  of a text does not count, so that it has the same length in any batch.
  """
  L = tokens.shape[1]
  if not layers.depends_on_length():
    return L
  if segments is not None:
    first_BL, last_BL = _document_ends(segments)
    return last_BL + 1 - first_BL
  if cache is not None:
    assert cache.text is not None
    return cache.text.length_B[:, None]
  return L if real is None else masks.num_real(L, real)[:, None]


def _document_ends(segments_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Index of the first and last token of each token's document, (B, L)."""
  L = segments_BL.shape[1]
  index_L = jnp.arange(L)
  differs_BL = segments_BL[:, 1:] != segments_BL[:, :-1]
  starts_BL = jnp.where(jnp.pad(differs_BL, ((0, 0), (1, 0))), index_L, 0)
  ends_BL = jnp.where(jnp.pad(differs_BL, ((0, 0), (0, 1))), index_L, L - 1)
  first_BL = jax.lax.cummax(starts_BL, axis=1)
  return first_BL, jax.lax.cummin(ends_BL, axis=1, reverse=True)


def _read(model: Model) -> None:
  """Checks the fields, and sets those that can be written in several ways."""
  sizes = ["vocab_size", "width", "depth", "num_heads", "num_kv_heads"]
  sizes += ["head_dim", "mlp_dim"]
  for name in ("max_len", "window", "chunk", "num_classes"):
    if getattr(model, name) is not None:
      sizes.append(name)
  options.check_sizes(model, sizes)
  options.check_fields(
    model,
    "dropout",
    "drop_path",
    posemb=POSEMBS,
    pool=POOLS,
    mlp=mlp.NAMES,
    norm=causal_block.NORMS,
    norm_at=causal_block.NORMS_AT,
  )
  _check_numbers(model)
  _check_mtp(model)
  if model.posemb == "learn" and model.max_len is None:
    raise ConfigError("config.model.max_len: missing; posemb='learn' needs it.")
  if model.parallel and model.norm_at != "pre":
    raise ConfigError(
      "config.model.norm_at: expected 'pre' with parallel=True, got "
      f"{model.norm_at!r}."
    )
  if model.parallel_norms and not model.parallel:
    raise ConfigError("config.model.parallel_norms: expected parallel=True.")
  use_bias = model.use_bias
  if isinstance(use_bias, bool):
    use_bias = ("qkv", "out", "mlp", "norm") if use_bias else ()
  values = layer_kinds.read_names(model) | dict(
    use_bias=options.read_names(
      "config.model.use_bias", use_bias, bias_rules.SITES
    ),
    qk_norm=layer_kinds.read_qk_norm(model.qk_norm, "config.model.qk_norm"),
    rope_axes=options.hashable(model.rope_axes),
    mla=latent_attention.read(model.mla, "config.model.mla"),
    layer_inputs=layer_inputs.read(
      model.layer_inputs, "config.model.layer_inputs"
    ),
    moe=moe.read(model.moe, "config.model.moe", depth=model.depth),
    deltanet=deltanet.read(model.deltanet, "config.model.deltanet"),
    short_conv=short_conv.read(model.short_conv, "config.model.short_conv"),
    rope_scaling=options.hashable(model.rope_scaling),
    query_scale=options.hashable(model.query_scale),
    mlp_clip=mlp.read_clip(model.mlp_clip, model.mlp, "config.model.mlp_clip"),
  )
  options.set_fields(model, values)
  _check_layer_inputs(model)
  _check_last_layer(model)


def _check_numbers(model: Model) -> None:
  if model.norm_offset not in (0, 1):
    raise ConfigError(
      f"config.model.norm_offset: expected 0 or 1, got {model.norm_offset!r}."
    )
  key, multiplier = "config.model.embed_multiplier", model.embed_multiplier
  if isinstance(multiplier, str):
    check_choice(key, multiplier, ["sqrt_width"])
  else:
    check_number(key, multiplier, above=0)
  for name in ("residual_multiplier", "logits_multiplier"):
    check_number(f"config.model.{name}", getattr(model, name), above=0)
  for name in ("qkv_clip", "attention_softcap", "logits_softcap"):
    value = getattr(model, name)
    if value is not None:
      check_number(f"config.model.{name}", value, above=0)


DIMS: dict[str, str] = {
  r"token_embedding": "V -> D",
  r"pos_embedding": "positions -> D",
  r"head/kernel": "D -> V",
  r"head/bias": "V",
  r"score/kernel": "D -> V",
  r"score/bias": "V",
  r"mtp/.*/projection/kernel": "both_widths -> D",
  r"layer_inputs/embedding": "V -> layer_inputs",
  r"layer_inputs/projection/kernel": "D -> layer_inputs",
  r"layer_inputs/norm/scale": "layer_input",
  **layer_dims.LAYERS,
}


def param_dims(model: Model) -> dims.Table:
  table = DIMS
  layers = layer_kinds.of_model(model)
  norms = {block.qk_norm for block in layers.of_all(model.depth)}
  if norms & {"projection", "layernorm_by_head"}:
    table = layer_dims.HEAD_NORMS | table
  return layer_dims.with_experts(table, layers.experts())


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
  converted = decoder_families.load(flat, like, DIMS)
  return converted or blocks.restack_blocks(flat, like, block="blocks")


to_published = functools.partial(decoder_families.export, DIMS)
published_fields = decoder_families.PUBLISHED.fields
