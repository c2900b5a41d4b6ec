"""Families of one model each that are Llamas but for a part or two.

Arcee's AFM, G42's Jais 2, Kyutai's Helium, InternLM 3 and IQuest Coder.
"""

from bigtrain.models.published.decoders.activation_rules import (
  PLAIN,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.families import Key, choice

# An MLP without a gate.
_RELU2 = activation(PLAIN, "relu2")

ARCEE = LLAMA.but(
  "arcee",
  "ArceeForCausalLM",
  rules=(_RELU2,),
  defaults={
    "max_position_embeddings": 4096,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "rms_norm_eps": 1e-5,
  },
)

JAIS2 = LLAMA.but(
  "jais2",
  "Jais2ForCausalLM",
  keys={"norm_eps": Key("layer_norm_eps", 1e-5)},
  constants={"norm": "layernorm"},
  rules=(
    # No other activation: the export of a GPT-NeoX would become a Jais 2.
    choice("mlp", "hidden_act", {"relu2": "relu2"}),
    biases(always=("norm",), attention_bias=("qkv", "out"), mlp_bias=("mlp",)),
  ),
  defaults={
    "vocab_size": 150272,
    "max_position_embeddings": 8192,
    "hidden_size": 3328,
    "num_attention_heads": 26,
    "intermediate_size": 26624,
    "attention_bias": True,
    "mlp_bias": True,
  },
)

HELIUM = LLAMA.but(
  "helium",
  "HeliumForCausalLM",
  constants={"rope_interleaved": True},
  rules=(biases(attention_bias=("qkv",), mlp_bias=("mlp",)), rope(theta=1e5)),
  defaults={
    "vocab_size": 48000,
    "max_position_embeddings": 4096,
    "hidden_size": 2560,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "intermediate_size": 7040,
    "rms_norm_eps": 1e-8,
  },
)

# transformers computes both as Llamas.
INTERNLM3 = LLAMA.but(
  "internlm3",
  "LlamaForCausalLM",
  aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
  defaults={
    "vocab_size": 128512,
    "max_position_embeddings": 32768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 10240,
    "rms_norm_eps": 1e-5,
  },
)

IQUEST_CODER = LLAMA.but(
  "iquestcoder",
  "LlamaForCausalLM",
  requires={"clip_qkv": (None,), "use_sliding_window": (False,)},
  harmless=("sliding_window", "max_window_layers"),
  defaults={
    "vocab_size": 76800,
    "max_position_embeddings": 131072,
    "hidden_size": 5120,
    "num_hidden_layers": 80,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 27648,
    "rms_norm_eps": 1e-5,
  },
)
