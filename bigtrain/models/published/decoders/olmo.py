"""OLMo 2 and 3, and OLMoE."""

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import experts, mlp_width
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  MLP,
  NORMS_AFTER,
)
from bigtrain.models.published.decoders.window_rules import full_every, windows
from bigtrain.models.published.families import Key
from bigtrain.models.published.tables import table

OLMO2 = LLAMA.but(
  "olmo2",
  "Olmo2ForCausalLM",
  arrays=table(ENDS, ATTENTION, NORMS_AFTER, MLP),
  # Norms come after attention and MLP, and queries and keys have norms over all
  # heads, arXiv 2501.00656.
  constants={"norm_at": "post", "qk_norm": "projection"},
  rules=(biases(attention_bias=("qkv", "out")),),
  defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
)

OLMO3 = OLMO2.but(
  "olmo3",
  "Olmo3ForCausalLM",
  rules=(windows(full_every(4)), rope(theta=5e5, types=full_every(4))),
)

OLMOE = LLAMA.but(
  "olmoe",
  "OlmoeForCausalLM",
  arrays=shared_arrays.QWEN_MOE,
  keys={"qkv_clip": Key("clip_qkv")},
  constants={"qk_norm": "projection"},
  rules=(
    biases(attention_bias=("qkv", "out")),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 64),
      top_k=Key("num_experts_per_tok", 8),
      normalize=Key("norm_topk_prob", False),
    ),
  ),
  defaults={
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 2048,
    "rms_norm_eps": 1e-5,
  },
)
