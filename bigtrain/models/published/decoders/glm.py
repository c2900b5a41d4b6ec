"""GLM 4 (also its first version), and GLM 4.5 with experts."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  expert_groups,
  experts,
  mlp_width,
  shared_experts,
  sparse_after_first,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  EXPERTS,
  FUSED_MLP,
  MLP,
  NORMS_BEFORE,
  SHARED_EXPERTS,
  with_prediction,
)
from bigtrain.models.published.families import Key, choice
from bigtrain.models.published.tables import norm, table

GLM4 = LLAMA.but(
  "glm4",
  "Glm4ForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    FUSED_MLP,
    norm(
      "model.layers.{i}.post_self_attn_layernorm", "blocks/attention_post_norm"
    ),
    norm("model.layers.{i}.post_mlp_layernorm", "blocks/mlp_post_norm"),
  ),
  constants={"norm_at": "sandwich", "rope_interleaved": True},
  rules=(biases(attention_bias=("qkv",)), rope(fraction=0.5)),
  defaults={
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 13696,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
  },
)

# Without the norms after attention and MLP.
GLM = GLM4.but(
  "glm",
  "GlmForCausalLM",
  without=("norm_at",),
  arrays=table(ENDS, ATTENTION, NORMS_BEFORE, FUSED_MLP),
)

GLM4_MOE = LLAMA.but(
  "glm4_moe",
  "Glm4MoeForCausalLM",
  arrays=with_prediction(
    table(ENDS, ATTENTION, NORMS_BEFORE, MLP, EXPERTS, SHARED_EXPERTS)
  ),
  rules=(
    biases(attention_bias=("qkv",)),
    rope(fraction=0.5),
    choice("qk_norm", "use_qk_norm", {False: None, True: "head"}),
    mlp_width(),
    experts(
      num_experts=Key("n_routed_experts", 128),
      top_k=Key("num_experts_per_tok", 8),
      mlp_dim=Key("moe_intermediate_size", 1408),
      normalize=Key("norm_topk_prob", True),
      scale=Key("routed_scaling_factor", 1.0),
      score="sigmoid",
      selection_bias=True,
      layers=sparse_after_first(),
      rules=(expert_groups(), shared_experts()),
    ),
  ),
  # Layers after the last one predict further tokens: see config.model.mtp.
  harmless=("num_nextn_predict_layers",),
  defaults={
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "intermediate_size": 10944,
    "rms_norm_eps": 1e-5,
  },
)
