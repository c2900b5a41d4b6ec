"""Qwen 2 and 3, also with experts, and Flint.

Qwen 2 is Llama with biases of queries, keys and values; Qwen 3 has norms of
queries and keys in their place. The decoders of Qwen's models that read
pictures follow at the end, with rotary positions in three axes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.models.published import tables
from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  SparseLayers,
  experts,
  mlp_width,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.window_rules import (
  SLIDING,
  LayerTypes,
  windows,
)
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.tables import renamed


def _slides_after_first(config: ConfigJson, i: int) -> bool:
  has_windows = config["sliding_window"] and config["use_sliding_window"]
  return bool(has_windows and i >= config["max_window_layers"])


def _slides_if_even_and_first(config: ConfigJson, i: int) -> bool:
  is_first = i < config["max_window_layers"]
  return bool(i % 2 == 0 and is_first and config["use_sliding_window"])


def _windows_after_first() -> Rule:
  """Windows in the layers from `max_window_layers` on."""
  types = LayerTypes(_slides_after_first, {"max_window_layers": 28})
  return windows(types, switch="use_sliding_window")


QWEN2 = LLAMA.but(
  "qwen2",
  "Qwen2ForCausalLM",
  rules=(biases(always=("qkv",)), _windows_after_first()),
  defaults={
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
  },
)

QWEN3 = LLAMA.but(
  "qwen3",
  "Qwen3ForCausalLM",
  # Norms of queries and keys replace Qwen 2's biases, arXiv 2505.09388.
  constants={"qk_norm": "head"},
  rules=(biases(attention_bias=("qkv", "out")), _windows_after_first()),
  defaults={
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 22016,
  },
)


def sparse_by_step(dense_by_default: Sequence[int] = ()) -> SparseLayers:
  """Every n-th layer has experts, except those in a list."""
  step, dense_layers = "decoder_sparse_step", "mlp_only_layers"

  def read(config: ConfigJson) -> list[bool]:
    dense = config[dense_layers]
    dense = dense_by_default if dense is None else dense
    return [
      (i + 1) % config[step] == 0 and i not in dense
      for i in range(config["num_hidden_layers"])
    ]

  def write(sparse: list[bool]) -> dict[str, Any]:
    return {step: 1, dense_layers: [i for i, x in enumerate(sparse) if not x]}

  return SparseLayers({step: 1, dense_layers: None}, read, write)


QWEN2_MOE = LLAMA.but(
  "qwen2_moe",
  "Qwen2MoeForCausalLM",
  arrays=shared_arrays.QWEN_MOE,
  rules=(
    biases(qkv_bias=("qkv",)),
    windows(
      LayerTypes(_slides_if_even_and_first, {"max_window_layers": 28}),
      switch="use_sliding_window",
    ),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 60),
      top_k=Key("num_experts_per_tok", 4),
      mlp_dim=Key("moe_intermediate_size", 1408),
      normalize=Key("norm_topk_prob", False),
      shared_dim=Key("shared_expert_intermediate_size", 5632),
      shared_gate=True,
      layers=sparse_by_step(),
    ),
  ),
  defaults={
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "qkv_bias": True,
  },
)


def _window_everywhere() -> Rule:
  """A window of all layers."""
  switch, size = "use_sliding_window", "sliding_window"

  def read(config: ConfigJson) -> dict[str, Any]:
    return {"window": config[size] if config[switch] else None}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    window = fields["window"][0]
    return {switch: window is not None, size: window}

  return Rule(("window",), {switch: False, size: 4096}, read, write)


QWEN3_MOE = LLAMA.but(
  "qwen3_moe",
  "Qwen3MoeForCausalLM",
  arrays=shared_arrays.QWEN_MOE,
  constants={"qk_norm": "head"},
  rules=(
    biases(attention_bias=("qkv", "out")),
    _window_everywhere(),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 128),
      top_k=Key("num_experts_per_tok", 8),
      mlp_dim=Key("moe_intermediate_size", 768),
      normalize=Key("norm_topk_prob", False),
      layers=sparse_by_step(),
    ),
  ),
  aliases={"num_local_experts": "num_experts"},
  harmless=("max_window_layers",),
  defaults={
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
  },
)


# Decoders of models that read pictures, with rotary positions in three axes.

QWEN2_VL_TEXT = QWEN2.but(
  "qwen2_vl_text",
  "Qwen2VLTextModel",
  rules=(rope(theta=1e6, sections=(16, 24, 24)),),
  defaults={
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
  },
)
QWEN2_5_VL_TEXT = QWEN2_VL_TEXT.but("qwen2_5_vl_text", "Qwen2_5_VLTextModel")
_INTERLEAVED_AXES = rope(
  theta=5e5, sections=(24, 20, 20), axes_interleaved=True
)
QWEN3_VL_TEXT = QWEN3.but(
  "qwen3_vl_text",
  "Qwen3VLTextModel",
  without=("window",),
  rules=(_INTERLEAVED_AXES,),
  defaults={"max_position_embeddings": 128000},
)
QWEN3_VL_MOE_TEXT = QWEN3_MOE.but(
  "qwen3_vl_moe_text",
  "Qwen3VLMoeTextModel",
  arrays=tables.table(
    shared_arrays.ENDS,
    shared_arrays.ATTENTION,
    shared_arrays.NORMS_BEFORE,
    shared_arrays.MLP,
    shared_arrays.FUSED_EXPERTS,
  ),
  without=("window",),
  rules=(
    _INTERLEAVED_AXES,
    experts(
      num_experts=Key("num_experts", 60),
      top_k=Key("num_experts_per_tok", 4),
      mlp_dim=Key("moe_intermediate_size", 1408),
      normalize=True,
      layers=sparse_by_step(),
    ),
  ),
  # Inherited keys, of which the library's model reads none.
  harmless=("sliding_window", "use_sliding_window", "norm_topk_prob"),
  defaults={
    "max_position_embeddings": 128000,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
  },
)


def _slides_in_flint(config: ConfigJson, i: int) -> bool:
  is_last = i == config["num_hidden_layers"] - 1
  return i >= 2 and i % 4 != 1 and not is_last


FLINT = QWEN3_MOE.but(
  "flint",
  "FlintForCausalLM",
  arrays=renamed(shared_arrays.QWEN_MOE, {".sinks": ".softmax_offset"}),
  constants={"sinks": True},
  rules=(
    # Layers without a window have no positions.
    windows(LayerTypes(_slides_in_flint), default=513, rotates=SLIDING),
    experts(
      num_experts=Key("num_experts", 256),
      top_k=Key("num_experts_per_tok", 6),
      mlp_dim=Key("moe_intermediate_size", 512),
      normalize=Key("norm_topk_prob", True),
      score="sigmoid",
      shared_dim=Key("shared_expert_intermediate_size", 1024),
      layers=sparse_by_step([0, 1]),
    ),
  ),
  defaults={
    "vocab_size": 150144,
    "max_position_embeddings": 262144,
    "num_hidden_layers": 49,
    "head_dim": 128,
  },
)
