"""StarCoder 2, and StableLM."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  NORMS_BEFORE,
)
from bigtrain.models.published.families import Key, choice
from bigtrain.models.published.tables import dense, table

# {activation of an MLP without a gate: its name here}.
GELUS = {
  "gelu_new": "gelu",
  "gelu_pytorch_tanh": "gelu",
  "gelu_fast": "gelu",
  "gelu": "gelu_erf",
  "relu": "relu",
}

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
    choice("mlp", "hidden_act", {"gelu_pytorch_tanh": "gelu", **GELUS}),
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
  keys={"norm_eps": Key("layer_norm_eps", 1e-5)},
  constants={"norm": "layernorm"},
  rules=(
    biases(always=("norm",), use_qkv_bias=("qkv",)),
    choice("parallel", "use_parallel_residual", {False: False, True: True}),
    rope(fraction=0.25),
  ),
  requires={"qk_layernorm": (False,)},
  defaults={
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "hidden_size": 2560,
    "num_key_value_heads": 32,
    "intermediate_size": 6912,
  },
)
