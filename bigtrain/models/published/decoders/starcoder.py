"""StarCoder 2, and StableLM."""

from bigtrain.models.published.decoders.activation_rules import (
  PLAIN,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  MLP,
  NORMS_BEFORE,
)
from bigtrain.models.published.families import Key, choice
from bigtrain.models.published.tables import dense, plain, table

# Not "relu2", with which the export of a Jais 2 would become a StarCoder 2.
_GELUS = {name: kind for name, kind in PLAIN.items() if kind != "relu2"}

STARCODER2 = LLAMA.but(
  "starcoder2",
  "Starcoder2ForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    dense("model.layers.{i}.mlp.c_fc", "blocks/mlp/up"),
    dense("model.layers.{i}.mlp.c_proj", "blocks/mlp/down"),
  ),
  keys={
    "norm_eps": Key("norm_epsilon", 1e-5),
    "window": Key("sliding_window"),
  },
  constants={"norm": "layernorm"},
  rules=(
    activation(_GELUS, "gelu_pytorch_tanh"),
    biases(always=("norm",), use_bias=("qkv", "out", "mlp")),
  ),
  requires={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
  harmless=("residual_dropout", "embedding_dropout"),
  defaults={
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "hidden_size": 3072,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "intermediate_size": 12288,
    "tie_word_embeddings": True,
    "use_bias": True,
  },
)

STABLELM = LLAMA.but(
  "stablelm",
  "StableLmForCausalLM",
  arrays=table(
    ENDS,
    NORMS_BEFORE,
    MLP,
    [entry for entry in ATTENTION if "_norm" not in entry.published],
    # Each head has a norm of its own.
    plain(
      "model.layers.{i}.self_attn.q_layernorm.norms.{e}.weight",
      "blocks/attention/query_norm/scale",
    ),
    plain(
      "model.layers.{i}.self_attn.k_layernorm.norms.{e}.weight",
      "blocks/attention/key_norm/scale",
    ),
  ),
  keys={"norm_eps": Key("layer_norm_eps", 1e-5)},
  constants={"norm": "layernorm"},
  rules=(
    biases(always=("norm",), use_qkv_bias=("qkv",)),
    choice("parallel", "use_parallel_residual", {False: False, True: True}),
    rope(fraction=0.25),
    choice("qk_norm", "qk_layernorm", {False: None, True: "layernorm_by_head"}),
  ),
  defaults={
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "hidden_size": 2560,
    "num_key_value_heads": 32,
    "intermediate_size": 6912,
  },
)
