"""The Swiss AI Initiative's Apertus."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  MLP,
)
from bigtrain.models.published.families import choice
from bigtrain.models.published.tables import norm, plain, table

_ACTIVATION = "model.layers.{i}.mlp.act_fn."
_OURS = "blocks/mlp/activation/"

APERTUS = LLAMA.but(
  "apertus",
  "ApertusForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    norm("model.layers.{i}.attention_layernorm", "blocks/attention_norm"),
    norm("model.layers.{i}.feedforward_layernorm", "blocks/mlp_norm"),
    MLP,
    plain(_ACTIVATION + "alpha_p", _OURS + "alpha_p"),
    plain(_ACTIVATION + "alpha_n", _OURS + "alpha_n"),
    # Constants that files have too.
    plain(_ACTIVATION + "beta", _OURS + "beta", ndim=0),
    plain(_ACTIVATION + "eps", _OURS + "eps", ndim=0),
  ),
  constants={"qk_norm": "head"},
  rules=(
    choice("mlp", "hidden_act", {"xielu": "xielu"}),
    biases(attention_bias=("qkv", "out")),
    rope(theta=1.2e7, scaled=True),
  ),
  # Of the first releases, which had other values as options.
  requires={"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
  defaults={
    "vocab_size": 131072,
    "max_position_embeddings": 65536,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
      "rope_type": "llama3",
      "rope_theta": 1.2e7,
      "factor": 8.0,
      "original_max_position_embeddings": 8192,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
    },
  },
)
