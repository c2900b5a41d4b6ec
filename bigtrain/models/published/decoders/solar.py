"""Upstage's Solar Open."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  expert_groups,
  experts,
  mlp_width,
  shared_experts,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  EXPERTS,
  NORMS_BEFORE,
  SHARED_EXPERTS,
)
from bigtrain.models.published.families import Key
from bigtrain.models.published.tables import table

SOLAR_OPEN = LLAMA.but(
  "solar_open",
  "SolarOpenForCausalLM",
  arrays=table(ENDS, ATTENTION, NORMS_BEFORE, EXPERTS, SHARED_EXPERTS),
  rules=(
    biases(attention_bias=("qkv",)),
    rope(theta=1e6),
    mlp_width(),
    experts(
      num_experts=Key("n_routed_experts", 128),
      top_k=Key("num_experts_per_tok", 8),
      mlp_dim=Key("moe_intermediate_size", 1280),
      normalize=Key("norm_topk_prob", True),
      scale=Key("routed_scaling_factor", 1.0),
      score="sigmoid",
      selection_bias=True,
      rules=(expert_groups(), shared_experts()),
    ),
  ),
  aliases={"num_local_experts": "n_routed_experts"},
  requires={"use_qk_norm": (False,), "first_k_dense_replace": (0,)},
  harmless=("num_nextn_predict_layers",),
  defaults={
    "vocab_size": 196608,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
  },
)
