"""Adept's Persimmon."""

from bigtrain.models.published.decoders.activation_rules import (
  PLAIN,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ENDS,
  NORMS_BEFORE,
)
from bigtrain.models.published.families import Key, choice
from bigtrain.models.published.tables import (
  dense,
  dense_by_head,
  norm,
  renamed,
  table,
)

_ATTENTION, _OURS = "model.layers.{i}.self_attn.", "blocks/attention/"

PERSIMMON = LLAMA.but(
  "persimmon",
  "PersimmonForCausalLM",
  arrays=table(
    renamed(ENDS, {"model.norm.": "model.final_layernorm."}),
    NORMS_BEFORE,
    # Queries, keys and values take turns by head.
    dense_by_head(
      _ATTENTION + "query_key_value",
      _OURS + "query",
      _OURS + "key",
      _OURS + "value",
    ),
    dense(_ATTENTION + "dense", _OURS + "out"),
    norm(_ATTENTION + "q_layernorm", _OURS + "query_norm"),
    norm(_ATTENTION + "k_layernorm", _OURS + "key_norm"),
    dense("model.layers.{i}.mlp.dense_h_to_4h", "blocks/mlp/up"),
    dense("model.layers.{i}.mlp.dense_4h_to_h", "blocks/mlp/down"),
  ),
  keys={"norm_eps": Key("layer_norm_eps", 1e-5)},
  constants={"norm": "layernorm"},
  rules=(
    activation(PLAIN, "relu2"),
    biases(always=("qkv", "out", "mlp", "norm")),
    rope(fraction=0.5),
    choice("qk_norm", "qk_layernorm", {True: "layernorm", False: None}),
  ),
  defaults={
    "vocab_size": 262144,
    "max_position_embeddings": 16384,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
  },
)
