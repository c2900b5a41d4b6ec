"""Liquid AI's LFM2, dense and with experts."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders.activation_rules import gated_silu
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  experts,
  mlp_width,
  sparse_after_first,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import ATTENTION, ENDS
from bigtrain.models.published.families import ConfigJson, Key, Rule, choice
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import (
  dense,
  depthwise_conv1d,
  linear,
  norm,
  plain,
  renamed,
  table,
)

CONV, FULL = "conv", "full_attention"


def _short_convolutions(*, listed: str | None) -> Rule:
  """Layers that are convolutions, by `layer_types`.

  Args:
    listed: a key of older files, with the numbers of the other layers.
  """

  def types(config: ConfigJson) -> list[str]:
    given, depth = config["layer_types"], config["num_hidden_layers"]
    if given is None and listed:
      full = config[listed]
      return [FULL if full is None or i in full else CONV for i in range(depth)]
    if given is None or len(given) != depth or not {*given} <= {CONV, FULL}:
      raise config.error(
        f"layer_types={given!r}: expected {CONV!r} or {FULL!r} for each of "
        f"the {depth} layers."
      )
    return list(given)

  def read(config: ConfigJson) -> dict[str, Any]:
    conv = {"width": config["conv_L_cache"], "bias": config["conv_bias"]}
    kinds = types(config)
    return {"short_conv": ByLayer(conv if x == CONV else None for x in kinds)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["short_conv"]
    config: dict[str, Any] = {
      "layer_types": [FULL if x is None else CONV for x in layers]
    }
    for conv in layers:
      if conv is not None:
        sizes = {"conv_L_cache": conv["width"], "conv_bias": conv["bias"]}
        return config | sizes
    return config

  keys = {"layer_types": None, "conv_L_cache": 3, "conv_bias": False}
  if listed:
    keys[listed] = None
  return Rule(("short_conv",), keys, read, write)


def _adjusted_width() -> Rule:
  """The width of MLPs, which files give before two factors and rounding."""
  key, adjusts = "intermediate_size", "block_auto_adjust_ff_dim"
  factor, multiple = "block_ffn_dim_multiplier", "block_multiple_of"

  def read(config: ConfigJson) -> dict[str, Any]:
    width = config[key]
    if config[adjusts]:
      width = int(2 * width / 3)
      if config[factor] is not None:
        width = int(config[factor] * width)
        width = -(-width // config[multiple]) * config[multiple]
    return {"mlp_dim": width}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: fields["mlp_dim"][0], adjusts: False}

  keys = {key: 12288, adjusts: True, factor: 1.0, multiple: 256}
  return Rule(("mlp_dim",), keys, read, write)


_LAYER, _OURS = "model.layers.{i}.", "blocks/short_conv/"
_ARRAYS = table(
  renamed(
    table(ENDS, ATTENTION),
    {
      "model.norm.": "model.embedding_norm.",
      "o_proj": "out_proj",
      "q_norm": "q_layernorm",
      "k_norm": "k_layernorm",
    },
  ),
  norm(_LAYER + "operator_norm", "blocks/attention_norm"),
  norm(_LAYER + "ffn_norm", "blocks/mlp_norm"),
  dense(
    _LAYER + "conv.in_proj",
    _OURS + "input_gate",
    _OURS + "output_gate",
    _OURS + "value",
  ),
  depthwise_conv1d(_LAYER + "conv.conv", _OURS + "conv"),
  plain(_LAYER + "conv.conv.bias", _OURS + "conv/bias"),
  dense(_LAYER + "conv.out_proj", _OURS + "out"),
  linear(_LAYER + "feed_forward.w1", "blocks/mlp/gate"),
  linear(_LAYER + "feed_forward.w3", "blocks/mlp/up"),
  linear(_LAYER + "feed_forward.w2", "blocks/mlp/down"),
)

LFM2 = LLAMA.but(
  "lfm2",
  "Lfm2ForCausalLM",
  arrays=_ARRAYS,
  without=("mlp_dim", "norm_eps"),
  keys={"norm_eps": Key("norm_eps", 1e-5)},
  constants={"qk_norm": "head"},
  rules=(
    gated_silu(),
    biases(),
    rope(theta=1e6),
    _short_convolutions(listed="full_attn_idxs"),
    _adjusted_width(),
  ),
  aliases={
    "tie_embedding": "tie_word_embeddings",
    "block_ff_dim": "intermediate_size",
  },
  requires={
    "block_use_swiglu": (True,),
    "use_pos_enc": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
  },
  # Of the first releases: initial values, and sizes that others repeat.
  harmless=(
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
  ),
  defaults={
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "hidden_size": 2560,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
  },
)

LFM2_MOE = LFM2.but(
  "lfm2_moe",
  "Lfm2MoeForCausalLM",
  arrays=table(
    _ARRAYS,
    linear(_LAYER + "feed_forward.gate", "blocks/moe/router"),
    linear(_LAYER + "feed_forward.experts.{e}.w1", "blocks/moe/gate"),
    linear(_LAYER + "feed_forward.experts.{e}.w3", "blocks/moe/up"),
    linear(_LAYER + "feed_forward.experts.{e}.w2", "blocks/moe/down"),
    plain(
      _LAYER + "feed_forward.expert_bias",
      "router_state/blocks/moe/selection_bias",
    ),
  ),
  rules=(
    _short_convolutions(listed=None),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 32),
      top_k=Key("num_experts_per_tok", 4),
      mlp_dim=Key("moe_intermediate_size", 1792),
      normalize=Key("norm_topk_prob", True),
      total_epsilon=1e-6,
      scale=Key("routed_scaling_factor", 1.0),
      score="sigmoid",
      layers=sparse_after_first("num_dense_layers", 2),
      rules=(
        choice("selection_bias", "use_expert_bias", {True: True, False: False}),
      ),
    ),
  ),
  defaults={"hidden_size": 2048, "intermediate_size": 7168},
)
