"""Cohere's Command R, Command R7B and Command A."""

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.window_rules import (
  SLIDING,
  full_every,
  windows,
)
from bigtrain.models.published.families import Key, choice

COHERE = LLAMA.but(
  "cohere",
  "CohereForCausalLM",
  arrays=[
    entry._replace(shaped="attention/" in entry.ours[0])
    if entry.published.endswith("_norm.weight")
    else entry
    for entry in shared_arrays.LLAMA
  ],
  keys={
    "norm_eps": Key("layer_norm_eps", 1e-5),
    "logits_multiplier": Key("logit_scale", 0.0625),
  },
  # Attention and MLP read the same norm, and are added together.
  constants={"norm": "layernorm", "parallel": True, "rope_interleaved": True},
  rules=(
    biases(attention_bias=("qkv", "out")),
    rope(theta=5e5),
    # Command R+ has layer norms of queries and keys.
    choice(
      "qk_norm",
      "use_qk_norm",
      {False: None, True: "layernorm_by_head", None: None},
    ),
  ),
  harmless=("rms_norm_eps",),
  defaults={
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "hidden_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "intermediate_size": 22528,
    "tie_word_embeddings": True,
  },
)

COHERE2 = COHERE.but(
  "cohere2",
  "Cohere2ForCausalLM",
  without=("qk_norm",),
  rules=(
    rope(),
    # Layers without a window have no positions.
    windows(full_every(4, key="sliding_window_pattern"), rotates=SLIDING),
  ),
  requires={
    "use_qk_norm": (False, None),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "order_of_interleaved_layers": ("local_attn_first",),
  },
  harmless=(
    "layer_switch",
    "_sliding_window_pattern",
    "use_embedding_sharing",
    "use_parallel_embedding",
  ),
)
