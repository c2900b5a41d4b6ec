"""IBM's Granite 3, also with experts."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import experts, mlp_width
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  NORMS_BEFORE,
)
from bigtrain.models.published.families import Key, inverse
from bigtrain.models.published.tables import linear, table

GRANITE = LLAMA.but(
  "granite",
  "GraniteForCausalLM",
  keys={
    "embed_multiplier": Key("embedding_multiplier", 1.0),
    "residual_multiplier": Key("residual_multiplier", 1.0),
    "attention_scale": Key("attention_multiplier", 1.0),
  },
  rules=(inverse("logits_multiplier", "logits_scaling"),),
)

GRANITE_MOE = GRANITE.but(
  "granitemoe",
  "GraniteMoeForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    linear(
      "model.layers.{i}.block_sparse_moe.router.layer", "blocks/moe/router"
    ),
    linear(
      "model.layers.{i}.block_sparse_moe.input_linear",
      "blocks/moe/gate",
      "blocks/moe/up",
    ),
    linear(
      "model.layers.{i}.block_sparse_moe.output_linear", "blocks/moe/down"
    ),
  ),
  rules=(
    biases(attention_bias=("qkv", "out")),
    mlp_width(),
    experts(
      num_experts=Key("num_local_experts", 8),
      top_k=Key("num_experts_per_tok", 2),
      normalize=True,
    ),
  ),
)
