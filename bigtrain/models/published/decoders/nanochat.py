"""Karpathy's nanochat."""

from bigtrain.models.published.decoders.activation_rules import (
  PLAIN,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
)
from bigtrain.models.published.families import Key
from bigtrain.models.published.tables import dense, table

NANOCHAT = LLAMA.but(
  "nanochat",
  "NanoChatForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    dense("model.layers.{i}.mlp.fc1", "blocks/mlp/up"),
    dense("model.layers.{i}.mlp.fc2", "blocks/mlp/down"),
  ),
  keys={"logits_softcap": Key("final_logit_softcapping", 15.0)},
  # No norm has a scale, and one of them follows the embedding.
  constants={
    "norm_scaled": False,
    "embed_norm": True,
    "qk_norm": "l2",
    "qk_norm_after_rope": True,
    "rope_reversed": True,
  },
  rules=(
    activation(PLAIN, "relu2"),
    biases(attention_bias=("qkv", "out")),
  ),
  defaults={
    "vocab_size": 50304,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "intermediate_size": 8192,
  },
)
