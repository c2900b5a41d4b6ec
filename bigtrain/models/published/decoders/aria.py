"""The text model of Rhymes AI's Aria."""

from bigtrain.models.published.decoders.activation_rules import gated_silu
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  experts,
  mlp_width,
  shared_experts,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  NORMS_BEFORE,
  SHARED_EXPERTS,
)
from bigtrain.models.published.families import Key
from bigtrain.models.published.tables import linear, plain, table

_MLP = "model.layers.{i}.mlp."

ARIA_TEXT = LLAMA.but(
  "aria_text",
  "AriaTextForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    SHARED_EXPERTS,
    linear(_MLP + "router", "blocks/moe/router"),
    # All experts of a layer are in one array.
    plain(
      _MLP + "experts.fc1.weight",
      "blocks/moe/gate/kernel",
      "blocks/moe/up/kernel",
    ),
    plain(_MLP + "experts.fc2.weight", "blocks/moe/down/kernel"),
  ),
  rules=(
    # Experts have it whatever the key says.
    gated_silu(),
    # The MLPs for all tokens would have those of `mlp_bias`.
    biases(attention_bias=("qkv", "out")),
    mlp_width(),
    experts(
      num_experts=Key("moe_num_experts", 8),
      top_k=Key("moe_topk", 2),
      score="softmax_of_top",
      normalize=True,
      rules=(shared_experts("moe_num_shared_experts", 2),),
    ),
  ),
  requires={"mlp_bias": (False,)},
  defaults={"intermediate_size": 4096},
)
