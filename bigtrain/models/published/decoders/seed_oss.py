"""ByteDance's Seed-OSS."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA

SEED_OSS = LLAMA.but(
  "seed_oss",
  "SeedOssForCausalLM",
  rules=(
    biases(
      attention_bias=("qkv",), attention_out_bias=("out",), mlp_bias=("mlp",)
    ),
  ),
  harmless=("residual_dropout",),
  defaults={
    "vocab_size": 155136,
    "max_position_embeddings": 524288,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 27648,
    "attention_bias": True,
  },
)
