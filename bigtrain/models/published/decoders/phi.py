"""Phi 1 to 4."""

from bigtrain.models.published.decoders.activation_rules import (
  PLAIN,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ATTENTION_OUT,
  ENDS,
  FUSED_MLP,
  NORMS_BEFORE,
)
from bigtrain.models.published.families import Key, choice
from bigtrain.models.published.tables import dense, plain, renamed, table

_ATTENTION, _OURS = "model.layers.{i}.self_attn.", "blocks/attention/"

PHI = LLAMA.but(
  "phi",
  "PhiForCausalLM",
  arrays=table(
    renamed(
      table(ENDS, ATTENTION, NORMS_BEFORE),
      {
        "model.norm.": "model.final_layernorm.",
        "o_proj": "dense",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
      },
    ),
    plain(_ATTENTION + "q_layernorm.bias", _OURS + "query_norm/bias"),
    plain(_ATTENTION + "k_layernorm.bias", _OURS + "key_norm/bias"),
    dense("model.layers.{i}.mlp.fc1", "blocks/mlp/up"),
    dense("model.layers.{i}.mlp.fc2", "blocks/mlp/down"),
  ),
  keys={"norm_eps": Key("layer_norm_eps", 1e-5)},
  # Attention and MLP read the same norm, and are added together.
  constants={"norm": "layernorm", "parallel": True},
  rules=(
    activation(PLAIN, "gelu_new"),
    biases(always=("qkv", "out", "mlp", "norm", "head")),
    rope(fraction=0.5),
    choice("qk_norm", "qk_layernorm", {False: None, True: "layernorm"}),
  ),
  defaults={
    "vocab_size": 51200,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "intermediate_size": 8192,
  },
)

PHI3 = LLAMA.but(
  "phi3",
  "Phi3ForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION_OUT,
    NORMS_BEFORE,
    FUSED_MLP,
    dense(
      "model.layers.{i}.self_attn.qkv_proj",
      "blocks/attention/query",
      "blocks/attention/key",
      "blocks/attention/value",
    ),
  ),
  keys={"window": Key("sliding_window")},
  rules=(biases(), rope(fraction=1.0, original_len=4096)),
  requires={
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
  },
  defaults={
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
  },
)
