"""Baidu's ERNIE 4.5, dense and with experts."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  SparseLayers,
  experts,
  mlp_width,
  shared_experts,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  EXPERTS,
  MLP,
  NORMS_BEFORE,
  SHARED_EXPERTS,
)
from bigtrain.models.published.families import ConfigJson, Key
from bigtrain.models.published.tables import plain, table

ERNIE4_5 = LLAMA.but(
  "ernie4_5",
  "Ernie4_5ForCausalLM",
  constants={"rope_interleaved": True},
  rules=(biases(use_bias=("qkv", "out", "mlp")), rope(theta=5e5)),
  requires={"compression_ratio": (1.0,)},
  defaults={
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "hidden_size": 1024,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
  },
)

_START, _END = "moe_layer_start_index", "moe_layer_end_index"
_INTERVAL = "moe_layer_interval"


def _has_experts(values: Mapping[str, Any], i: int, depth: int) -> bool:
  last = depth - 1 if values[_END] == -1 else values[_END]
  return (i + 1) % values[_INTERVAL] == 0 and values[_START] <= i <= last


def _sparse_in_range() -> SparseLayers:
  """Every n-th layer has experts, from a first layer to a last one."""

  def read(config: ConfigJson) -> list[bool]:
    depth = config["num_hidden_layers"]
    return [_has_experts(config, i, depth) for i in range(depth)]

  def write(sparse: list[bool]) -> dict[str, Any]:
    numbers = [i for i, x in enumerate(sparse) if x]
    if not numbers:
      return {_START: len(sparse), _END: -1, _INTERVAL: 1}
    # One of these is right, if there is any.
    choices = [
      {_START: numbers[0], _END: numbers[-1], _INTERVAL: interval}
      for interval in range(1, len(sparse) + 1)
    ]
    for values in choices:
      depth = len(sparse)
      if [_has_experts(values, i, depth) for i in range(depth)] == sparse:
        return values
    return choices[0]

  return SparseLayers({_START: 1, _END: -1, _INTERVAL: 1}, read, write)


ERNIE4_5_MOE = ERNIE4_5.but(
  "ernie4_5_moe",
  "Ernie4_5_MoeForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    MLP,
    [entry for entry in EXPERTS if "correction_bias" not in entry.published],
    SHARED_EXPERTS,
    plain(
      "model.layers.{i}.mlp.moe_statics.e_score_correction_bias",
      "router_state/blocks/moe/selection_bias",
      ndim=2,
    ),
  ),
  rules=(
    biases(use_bias=("qkv", "out", "mlp", "head")),
    mlp_width(),
    experts(
      num_experts=Key("moe_num_experts", 64),
      top_k=Key("moe_k", 6),
      mlp_dim=Key("moe_intermediate_size", 1536),
      normalize=True,
      total_epsilon=0.0,
      least_total=Key("moe_norm_min", 1e-12),
      selection_bias=True,
      layers=_sparse_in_range(),
      rules=(shared_experts("moe_num_shared_experts", 2),),
    ),
  ),
  aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
  # Of training, and layers after the last one.
  harmless=(
    "moe_capacity",
    "moe_gate",
    "moe_use_aux_free",
    "num_nextn_predict_layers",
  ),
  defaults={
    "hidden_size": 2560,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "intermediate_size": 12288,
  },
)
