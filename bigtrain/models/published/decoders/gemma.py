"""Gemma 1 to 3."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  MLP,
  NORMS_AFTER,
)
from bigtrain.models.published.decoders.window_rules import full_every, windows
from bigtrain.models.published.families import Key, Rule, choice, converted
from bigtrain.models.published.tables import norm, table

# Each branch has a norm before and after it, arXiv 2408.00118, section 2.
_SANDWICH_ARRAYS = table(
  ENDS,
  ATTENTION,
  NORMS_AFTER,
  MLP,
  norm("model.layers.{i}.input_layernorm", "blocks/attention_norm"),
  norm("model.layers.{i}.pre_feedforward_layernorm", "blocks/mlp_norm"),
)


def _query_scalar() -> Rule:
  """The attention's scale, as the number whose inverse root it is."""
  return converted(
    "attention_scale",
    Key("query_pre_attn_scalar", 256),
    read=lambda number: number**-0.5,
    write=lambda scales: round(scales[0] ** -2),  # The library's is an int.
  )


GEMMA = LLAMA.but(
  "gemma",
  "GemmaForCausalLM",
  # Scales of norms are stored without the 1 that is added to them.
  constants={"norm_offset": 1.0, "embed_multiplier": "sqrt_width"},
  rules=(
    choice(
      "mlp",
      "hidden_act",
      # In the first files "gelu" means the tanh form too.
      {"gelu_pytorch_tanh": "geglu", "gelu_fast": "geglu", "gelu": "geglu"},
    ),
    biases(attention_bias=("qkv", "out")),
  ),
  requires={
    "hidden_activation": (None, "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
  },
  defaults={
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "intermediate_size": 24576,
    "tie_word_embeddings": True,
  },
)

GEMMA2 = GEMMA.but(
  "gemma2",
  "Gemma2ForCausalLM",
  arrays=_SANDWICH_ARRAYS,
  keys={
    "attention_softcap": Key("attn_logit_softcapping", 50.0),
    "logits_softcap": Key("final_logit_softcapping", 30.0),
  },
  constants={"norm_at": "sandwich"},
  rules=(
    choice(
      "mlp",
      "hidden_activation",
      {"gelu_pytorch_tanh": "geglu", "gelu_fast": "geglu"},
    ),
    _query_scalar(),
    windows(full_every(2)),
  ),
  harmless=("hidden_act", "sliding_window_size"),
  defaults={
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
  },
)

_GEMMA3_LAYERS = full_every(6, key="sliding_window_pattern")
GEMMA3 = GEMMA.but(
  "gemma3_text",
  "Gemma3ForCausalLM",
  arrays=_SANDWICH_ARRAYS,
  keys={"logits_softcap": Key("final_logit_softcapping")},
  constants={"norm_at": "sandwich", "qk_norm": "head"},
  rules=(
    choice(
      "mlp",
      "hidden_activation",
      {"gelu_pytorch_tanh": "geglu", "gelu_fast": "geglu"},
    ),
    _query_scalar(),
    windows(_GEMMA3_LAYERS),
    # Layers with a window rotate faster.
    rope(theta=1e6, types=_GEMMA3_LAYERS, local_theta=1e4),
  ),
  # The library stores the softcap of attention but never applies it.
  harmless=("hidden_act", "attn_logit_softcapping", "_sliding_window_pattern"),
  defaults={
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
  },
)
