"""T5, an encoder-decoder for text: versions 1.0 and 1.1.

https://arxiv.org/abs/1910.10683. Version 1.0 has ReLUs, and one embedding table
for inputs, targets and (scaled) logits. Version 1.1 has gated GELUs and a
separate head. With experts in every second layer it is a Switch Transformer,
https://arxiv.org/abs/2101.03961. The decoder's first input is 0, which is also
the id of padding. The stacks are in layers/t5_stack.py.

Axes: B batch, L length of targets, S length of inputs, D model width, H heads,
K head width, F hidden width, N layers, V vocabulary.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.models.layers import (
  kernels,
  kv_cache,
  layer_dims,
  masks,
  moe,
  options,
  t5_stack,
)
from bigtrain.models.published import blocks, conversions, t5_families

# Differences between the two versions, besides sizes.
_T5 = dict(mlp="relu", tied_head=True)
_T5_1_1 = dict(mlp="geglu", tied_head=False)


def _sized(
  version: dict[str, Any],
  *,
  width: int,
  depth: int,
  num_heads: int,
  mlp_dim: int,
  head_dim: int = 64,
) -> dict[str, Any]:
  return dict(
    version,
    vocab_size=32128,
    head_dim=head_dim,
    width=width,
    depth=depth,
    num_heads=num_heads,
    mlp_dim=mlp_dim,
  )


VARIANTS: dict[str, dict[str, Any]] = {
  # With sizes from the config.
  "t5": _T5,
  "t5_1_1": _T5_1_1,
  # The released models. Heads times their width is not always the width D.
  "t5_small": _sized(_T5, width=512, depth=6, num_heads=8, mlp_dim=2048),
  "t5_base": _sized(_T5, width=768, depth=12, num_heads=12, mlp_dim=3072),
  "t5_large": _sized(_T5, width=1024, depth=24, num_heads=16, mlp_dim=4096),
  "t5_3b": _sized(
    _T5, width=1024, depth=24, num_heads=32, head_dim=128, mlp_dim=16384
  ),
  "t5_11b": _sized(
    _T5, width=1024, depth=24, num_heads=128, head_dim=128, mlp_dim=65536
  ),
  "t5_1_1_small": _sized(
    _T5_1_1, width=512, depth=8, num_heads=6, mlp_dim=1024
  ),
  "t5_1_1_base": _sized(
    _T5_1_1, width=768, depth=12, num_heads=12, mlp_dim=2048
  ),
  "t5_1_1_large": _sized(
    _T5_1_1, width=1024, depth=24, num_heads=16, mlp_dim=2816
  ),
  "t5_1_1_xl": _sized(
    _T5_1_1, width=2048, depth=24, num_heads=32, mlp_dim=5120
  ),
  "t5_1_1_xxl": _sized(
    _T5_1_1, width=4096, depth=24, num_heads=64, mlp_dim=10240
  ),
}
MLPS = ("relu", "geglu")
_NEEDED = ("vocab_size", "width", "depth", "num_heads")


class Model(nn.Module):
  """The model. After construction no field that a variant gives is None."""

  variant: str | None = None  # A name in VARIANTS, by default "t5_1_1".
  vocab_size: int = options.DERIVED  # V.
  width: int = options.DERIVED  # D.
  depth: int = options.DERIVED  # N, number of blocks of the encoder.
  decoder_depth: int = options.DERIVED  # The same of the decoder; N by default.
  num_heads: int = options.DERIVED  # H.
  head_dim: int = options.DERIVED  # K; D / H by default.
  mlp_dim: int = options.DERIVED  # F; 4 D by default.
  mlp: str = options.DERIVED  # "relu" or "geglu".
  moe: Any = None  # See moe.Options: experts in place of MLPs, in both stacks.
  # Whether the head is the embedding, with its input divided by sqrt(D).
  tied_head: bool = options.DERIVED
  num_buckets: int = 32  # Number of buckets of distances between positions.
  max_distance: int = 128  # Larger distances share the last bucket.
  norm_eps: float = 1e-6  # Added to the variance in norms.
  init_scale: float = 1.0  # Of the initial variance; 0.1 suits experts.
  dropout: float = 0.0  # After embeddings and norms, in MLPs, on branches.
  drop_path: float = 0.0  # Of the last blocks; grows linearly from 0.
  scan: bool = False  # Whether a compiled block loops over stacked layers.
  attention: str = "auto"  # A name in attention_backends.NAMES.
  remat_policy: str = "none"  # A name in remat.POLICIES.
  dtype: str = "float32"  # Of activations; parameters and logits are float32.

  def __post_init__(self) -> None:
    names = (*VARIANTS["t5_base"], "decoder_depth")
    values = options.filled(
      self, VARIANTS, names, default="t5_1_1", example="t5_1_1_base"
    )
    values.setdefault("decoder_depth", values["depth"])
    options.set_fields(self, values)
    _check(self)
    experts = moe.read(
      self.moe,
      "config.model.moe",
      has_encoder=True,
      depth=self.depth,
      decoder_depth=self.decoder_depth,
    )
    options.set_fields(self, {"moe": experts})
    super().__post_init__()

  def setup(self) -> None:
    V, D = self.vocab_size, self.width
    self.token_embedding = self.param(
      "token_embedding", nn.initializers.normal(1.0), (V, D)
    )
    blocks = options.pick(t5_stack.Options, self)
    self.encoder = t5_stack.Stack(blocks, two_sided=True)
    blocks = blocks._replace(depth=self.decoder_depth)
    self.decoder = t5_stack.Stack(blocks, two_sided=False)
    if not self.tied_head:
      init = nn.initializers.normal(blocks.std(D))
      self.head = kernels.Kernel((D, V), init=init)

  def __call__(
    self,
    inputs: jax.Array,
    targets: jax.Array,
    *,
    inputs_segments: jax.Array | None = None,
    targets_segments: jax.Array | None = None,
    real: jax.Array | None = None,
    head: bool = True,
    train: bool = False,
  ) -> tuple[jax.Array | None, dict[str, Any]]:
    """Predicts each target from the inputs and the targets before it.

    Args:
      inputs: int (B, S) token ids, padded with 0. Ids outside the vocabulary
        give NaN.
      targets: int (B, L) token ids, padded with 0.
      inputs_segments: int (B, S), document of each token, 0 for padding;
        documents do not see each other. None means one document per example.
      targets_segments: int (B, L), the same for targets; both or neither.
      real: bool (B, L), False for targets that no loss depends on. Experts
        leave these out, and also all inputs of an example that has only such
        targets. By default, these are the targets of segment 0 or, without
        segments, the padding at the end.

    Returns:
      (float32 logits (B, L, V), or None without `head`; a dict of "pre_logits"
      (B, L, D), "encoded" (B, S, D), and "moe", the experts' statistics).
    """
    if (inputs_segments is None) != (targets_segments is None):
      raise ConfigError(
        "Expected both inputs_segments and targets_segments, or neither."
      )
    before_BL = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    if targets_segments is None:
      source_mask = masks.Mask(real_BS=inputs != 0)
      mask = masks.Mask(causal=True)
      if real is None:
        # Up to the last one that follows a token other than padding.
        read_BL = (before_BL != 0).at[:, 0].set(True).astype(jnp.int32)
        real = jax.lax.cummax(read_BL, axis=1, reverse=True) != 0
    else:
      source_mask = masks.Mask(
        segments_BL=targets_segments, segments_BS=inputs_segments
      )
      mask = masks.within_documents(targets_segments, causal=True)
      # Each document begins with 0, not with the last token of another one.
      segments_before_BL = jnp.pad(targets_segments[:, :-1], ((0, 0), (1, 0)))
      is_same_BL = segments_before_BL == targets_segments
      before_BL = jnp.where(is_same_BL, before_BL, 0)
      if real is None:
        real = targets_segments != 0
    encoded_BSD, inputs_stats = self._encode(
      inputs, inputs_segments, train, jnp.any(real, axis=1)
    )
    source = t5_stack.Source(encoded_BSD, source_mask)
    x_BLD, _, targets_stats = self.decoder(
      self._embed(before_BL), mask, source=source, real_BL=real, train=train
    )
    stats = self._mean_of_stacks(inputs_stats, targets_stats)
    x_BLD = self._scaled(x_BLD)
    out = {"pre_logits": x_BLD, "encoded": encoded_BSD, "moe": stats}
    return self._logits(x_BLD) if head else None, out

  @nn.nowrap
  def _mean_of_stacks(self, encoder: Any, decoder: Any) -> Any:
    """A mean weighted by layers, because the stacks may differ in depth."""
    if encoder is None:
      return None

    def mean(x: jax.Array, y: jax.Array) -> jax.Array:
      total = self.depth * x + self.decoder_depth * y
      return total / (self.depth + self.decoder_depth)

    by_layer = {
      f"{name}_{layer}": x
      for name, stats in (("encoder", encoder), ("decoder", decoder))
      for layer, x in stats.pop("by_layer").items()
    }
    # A metric that only one kind of routing reports is the mean of that stack.
    alone = {
      name: {**encoder, **decoder}[name]
      for name in encoder.keys() ^ decoder.keys()
    }
    both = [
      {name: x for name, x in stats.items() if name not in alone}
      for stats in (encoder, decoder)
    ]
    return {**jax.tree.map(mean, *both), **alone, "by_layer": by_layer}

  def encode(
    self,
    inputs: jax.Array,
    segments: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> jax.Array:
    return self._encode(inputs, segments, train)[0]

  def _encode(
    self,
    inputs: jax.Array,
    segments: jax.Array | None,
    train: bool,
    real_B: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    if segments is None:
      real_BS = inputs != 0
      mask = masks.Mask(real_BS=real_BS)
    else:
      real_BS = segments != 0
      mask = masks.within_documents(segments, causal=False)
    if real_B is not None:
      real_BS &= real_B[:, None]
    encoded_BSD, _, stats = self.encoder(
      self._embed(inputs), mask, real_BL=real_BS, train=train
    )
    return encoded_BSD, stats

  def begin(self, inputs: jax.Array, max_len: int) -> t5_stack.DecodingState:
    """Returns the state before the first `step`, for max_len - 1 targets."""
    B, S = inputs.shape

    def empty(length: int) -> kv_cache.Cache:
      N, H, K = self.decoder_depth, self.num_heads, self.head_dim
      return kv_cache.empty(B, N, length, H, K, self.dtype)

    state = t5_stack.DecodingState(empty(max_len), empty(S), inputs != 0)
    encoded_BSD = self.encode(inputs)
    return self._advance(state, jnp.zeros(B, jnp.int32), 0, encoded_BSD)[1]

  def step(
    self, state: t5_stack.DecodingState, token_B: jax.Array, position: jax.Array
  ) -> tuple[jax.Array, t5_stack.DecodingState]:
    """Returns the logits (B, V) after the token at a position; the first is 0.

    text/decoding.py calls it.
    """
    x_B1D, state = self._advance(state, token_B, position, None)
    return self._logits(self._scaled(x_B1D))[:, 0], state

  def _advance(
    self,
    state: t5_stack.DecodingState,
    token_B: jax.Array,
    position: Any,
    encoded_BSD: jax.Array | None,
  ) -> tuple[jax.Array, t5_stack.DecodingState]:
    x_B1D, new_state, _ = self.decoder(
      self._embed(token_B[:, None]),
      masks.Mask(causal=True),
      source=t5_stack.Source(
        encoded_BSD, masks.Mask(real_BS=state.source_mask_BS)
      ),
      state=state,
      start=position,
    )
    assert new_state is not None
    return x_B1D, new_state

  def _embed(self, tokens_BL: jax.Array) -> jax.Array:
    x_BLD = sharding.lookup(self.token_embedding, tokens_BL, self.dtype)
    return sharding.stream(x_BLD)

  def _scaled(self, x_BLD: jax.Array) -> jax.Array:
    return x_BLD * self.width**-0.5 if self.tied_head else x_BLD

  def _logits(self, x_BLD: jax.Array) -> jax.Array:
    params: dict[str, Any] = {"token_embedding": self.token_embedding}
    if not self.tied_head:
      params["head"] = self.head()
    return kernels.logits(x_BLD, self.head_kernel(params).astype(self.dtype))

  def head_kernel(self, params: Mapping[str, Any]) -> jax.Array:
    if self.tied_head:
      return params["token_embedding"].T
    return params["head"]["kernel"]

  def end_of_step(
    self, mutable: Mapping[str, Any], step_sums: Mapping[str, Any]
  ) -> dict[str, Any]:
    return moe.end_of_step(mutable, step_sums, self.moe.bias_rate)


def _check(model: Model) -> None:
  options.check_sizes(model, (*_NEEDED, "decoder_depth", "head_dim", "mlp_dim"))
  check_number("config.model.init_scale", model.init_scale, above=0)
  if model.num_buckets < 4 or model.max_distance <= model.num_buckets // 2:
    raise ConfigError(
      f"config.model.num_buckets={model.num_buckets}: expected at least 4, and "
      f"less than twice max_distance={model.max_distance}."
    )
  options.check_fields(model, "dropout", "drop_path", mlp=MLPS)


_DIMS: dict[str, str] = {
  r"token_embedding": "V -> D",
  r"(encoder|decoder)/relative_bias/embedding": "buckets -> heads",
  r"head/kernel": "D -> V",
  r"head/bias": "V",
  **layer_dims.LAYERS,
}


def param_dims(model: Model) -> dims.Table:
  return layer_dims.with_experts(_DIMS, model.moe)


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
  flat = conversions.normalise(flat)
  converted = t5_families.load(flat, like, _DIMS)
  return converted or blocks.restack_blocks(flat, like, block="blocks")


to_published = functools.partial(t5_families.PUBLISHED.export, _DIMS)
published_fields = t5_families.PUBLISHED.fields
