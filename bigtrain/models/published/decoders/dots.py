"""Rednote's dots.llm1."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  expert_groups,
  experts,
  mlp_width,
  shared_experts,
  sparse_after_first,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  EXPERTS,
  MLP,
  NORMS_BEFORE,
  SHARED_EXPERTS,
)
from bigtrain.models.published.decoders.window_rules import LayerTypes, windows
from bigtrain.models.published.families import ConfigJson, Key
from bigtrain.models.published.tables import table


def _slides(config: ConfigJson, i: int) -> bool:
  return bool(config["sliding_window"] and i >= config["max_window_layers"])


DOTS1 = LLAMA.but(
  "dots1",
  "Dots1ForCausalLM",
  arrays=table(ENDS, ATTENTION, NORMS_BEFORE, MLP, EXPERTS, SHARED_EXPERTS),
  constants={"qk_norm": "head"},
  rules=(
    biases(attention_bias=("qkv", "out")),
    windows(LayerTypes(_slides, {"max_window_layers": 62})),
    mlp_width(),
    experts(
      num_experts=Key("n_routed_experts"),
      top_k=Key("num_experts_per_tok"),
      mlp_dim=Key("moe_intermediate_size", 1408),
      normalize=Key("norm_topk_prob", False),
      scale=Key("routed_scaling_factor", 1.0),
      score="sigmoid",
      selection_bias=True,
      layers=sparse_after_first(),
      rules=(expert_groups(), shared_experts()),
    ),
  ),
  aliases={"num_local_experts": "n_routed_experts"},
  requires={"moe_layer_freq": (1,)},
  harmless=("scoring_func", "topk_method"),
  defaults={
    "vocab_size": 152064,
    "hidden_size": 4608,
    "num_hidden_layers": 62,
    "intermediate_size": 10944,
    "first_k_dense_replace": 0,
  },
)
