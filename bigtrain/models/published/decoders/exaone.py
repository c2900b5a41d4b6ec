"""LG's EXAONE 4, and K-EXAONE with experts."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  expert_groups,
  experts,
  mlp_width,
  shared_experts,
  sparse_after_first,
  sparse_by_types,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  EXPERTS,
  MLP,
  NORMS_AFTER,
  NORMS_BEFORE,
  SHARED_EXPERTS,
)
from bigtrain.models.published.decoders.window_rules import (
  SLIDING,
  LayerTypes,
  windows,
)
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import renamed, table

_PATTERN = "sliding_window_pattern"


def _slides(config: ConfigJson, i: int) -> bool:
  """By a period whose last layer is full, or letters such as "LLLG"."""
  pattern = config[_PATTERN]
  if not config["sliding_window"] or not pattern:
    return False
  if isinstance(pattern, str):
    is_last = i == config["num_hidden_layers"] - 1
    return pattern[i % len(pattern)] == "L" and not is_last
  return (i + 1) % pattern != 0


def _hybrid_windows() -> Rule:
  """Layers with a window rotate. The others do so if no layer has a window."""
  types = LayerTypes(_slides, {_PATTERN: 4})
  rule = windows(types, rotates=SLIDING)

  def read(config: ConfigJson) -> Mapping[str, Any]:
    if config["sliding_window"]:
      return rule.read(config)
    depth = config["num_hidden_layers"]
    if SLIDING in types.read(config):
      raise config.error("sliding_window: missing beside layer_types.")
    return {"window": None, "posemb": ByLayer(["rope"] * depth)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(rule.write(fields))
    if "rope" in fields["posemb"] and not any(fields["window"]):
      config["sliding_window"] = None
    return config

  return Rule(rule.fields, rule.keys, read, write)


EXAONE4 = LLAMA.but(
  "exaone4",
  "Exaone4ForCausalLM",
  arrays=table(ENDS, ATTENTION, NORMS_AFTER, MLP),
  constants={"norm_at": "post", "qk_norm": "head"},
  rules=(biases(), _hybrid_windows()),
  requires={"attention_bias": (False,), "mlp_bias": (False,)},
  defaults={
    "vocab_size": 102400,
    "num_key_value_heads": 32,
    "intermediate_size": 16384,
    "rms_norm_eps": 1e-5,
  },
)

EXAONE_MOE = EXAONE4.but(
  "exaone_moe",
  "ExaoneMoeForCausalLM",
  without=("norm_at",),
  arrays=renamed(
    table(ENDS, ATTENTION, NORMS_BEFORE, MLP, EXPERTS, SHARED_EXPERTS),
    {"mlp.gate.e_score": "mlp.e_score"},
  ),
  rules=(
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 64),
      top_k=Key("num_experts_per_tok", 8),
      mlp_dim=Key("moe_intermediate_size", 1024),
      normalize=Key("norm_topk_prob", True),
      scale=Key("routed_scaling_factor", 2.5),
      score="sigmoid",
      selection_bias=True,
      layers=sparse_by_types(sparse_after_first()),
      rules=(expert_groups(), shared_experts("num_shared_experts")),
    ),
  ),
  # Layers after the last one predict further tokens.
  harmless=("num_nextn_predict_layers",),
)
