"""JetBrains' Mellum 2."""

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  experts,
  mlp_width,
  sparse_by_types,
  sparse_everywhere,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.window_rules import LayerTypes, windows
from bigtrain.models.published.families import Key

_TYPES = LayerTypes(lambda config, i: False)

MELLUM = LLAMA.but(
  "mellum",
  "MellumForCausalLM",
  arrays=shared_arrays.QWEN_MOE,
  constants={"qk_norm": "head"},
  rules=(
    biases(attention_bias=("qkv", "out")),
    windows(_TYPES, default=1024),
    rope(types=_TYPES),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 64),
      top_k=Key("num_experts_per_tok", 8),
      mlp_dim=Key("moe_intermediate_size", 896),
      normalize=Key("norm_topk_prob", True),
      layers=sparse_by_types(sparse_everywhere()),
    ),
  ),
  aliases={"num_local_experts": "num_experts"},
  # Of a layer after the last one, which predicts a further token.
  harmless=(
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "mtp_layer_types",
    "mtp_mlp_layer_types",
  ),
  defaults={
    "vocab_size": 98304,
    "max_position_embeddings": 131072,
    "hidden_size": 2304,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 7168,
    "rope_parameters": {
      "full_attention": {"rope_type": "default", "rope_theta": 5e5},
      "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
  },
)
