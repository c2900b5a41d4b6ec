"""MiniMax M2."""

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import experts, mlp_width
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.families import Key

MINIMAX_M2 = LLAMA.but(
  "minimax_m2",
  "MiniMaxM2ForCausalLM",
  arrays=shared_arrays.MIXTRAL,
  constants={"qk_norm": "projection"},
  rules=(
    biases(),
    rope(theta=5e6, fraction=1.0, rotary_dim=True),
    mlp_width(),
    experts(
      num_experts=Key("num_local_experts", 256),
      top_k=Key("num_experts_per_tok", 8),
      score="sigmoid",
      normalize=True,
      selection_bias=True,
    ),
  ),
  requires={
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
  },
  harmless=(
    "use_mtp",
    "num_mtp_modules",
    "mtp_transformer_layers",
    "mlp_intermediate_size",
    "attn_type_list",
    "sliding_window",
    "layernorm_full_attention_beta",
  ),
  defaults={
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "hidden_size": 3072,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
  },
)
