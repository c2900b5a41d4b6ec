"""NVIDIA's Nemotron 4 and Minitron."""

from bigtrain.models.published.decoders.activation_rules import (
  PLAIN,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.families import Key

NEMOTRON = LLAMA.but(
  "nemotron",
  "NemotronForCausalLM",
  keys={"norm_eps": Key("norm_eps", 1e-5)},
  constants={"norm": "layernorm", "norm_offset": 1.0},
  rules=(
    activation(PLAIN, "relu2"),
    biases(always=("norm",), attention_bias=("qkv", "out"), mlp_bias=("mlp",)),
    rope(fraction=0.5),
  ),
  defaults={
    "vocab_size": 256000,
    "max_position_embeddings": 4096,
    "hidden_size": 6144,
    "num_attention_heads": 48,
    "intermediate_size": 24576,
  },
)
