"""Meta's Code World Model."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.window_rules import LayerTypes, windows

# The first layer of four has no window.
_TYPES = LayerTypes(lambda config, i: i % 4 != 0)

CWM = LLAMA.but(
  "cwm",
  "CwmForCausalLM",
  rules=(
    biases(mlp_bias=("mlp",)),
    rope(theta=1e6, scaled=True),
    windows(_TYPES, default=8192),
  ),
  requires={"attention_bias": (False,)},
  defaults={
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "hidden_size": 6144,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
      "rope_type": "llama3",
      "rope_theta": 1e6,
      "factor": 16.0,
      "original_max_position_embeddings": 8192,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
    },
  },
)
