"""IBM's Granite 3 and 4, also with experts, and Naver's HyperCLOVA X."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import experts, mlp_width
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  NORMS_BEFORE,
)
from bigtrain.models.published.decoders.window_rules import LayerTypes, windows
from bigtrain.models.published.families import ConfigJson, Key, Rule, inverse
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import linear, norm, table, transposed


def _shared_mlp() -> Rule:
  """The width of an additional MLP in layers with experts; 0 for none."""
  key = "shared_intermediate_size"
  return Rule(
    ("shared_dim",),
    {key: 0},
    lambda config: {"shared_dim": config[key]} if config[key] else {},
    lambda moe: {key: moe["shared_dim"]},
  )


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

_EXPERTS = experts(
  num_experts=Key("num_local_experts", 8),
  top_k=Key("num_experts_per_tok", 2),
  normalize=True,
  rules=(_shared_mlp(),),
)
_SHARED_MLP = table(
  linear(
    "model.layers.{i}.shared_mlp.input_linear",
    "blocks/shared_experts/gate",
    "blocks/shared_experts/up",
  ),
  linear(
    "model.layers.{i}.shared_mlp.output_linear", "blocks/shared_experts/down"
  ),
)
GRANITE_MOE_SHARED = GRANITE_MOE.but(
  "granitemoeshared",
  "GraniteMoeSharedForCausalLM",
  arrays=table(GRANITE_MOE.arrays, _SHARED_MLP),
  rules=(_EXPERTS,),
)


def _rope_by_layer() -> Rule:
  """Rotary embeddings whose base each layer may give; 0 for no rotation."""
  key = "layer_rope_theta"
  rule = rope()

  def read(config: ConfigJson) -> Mapping[str, Any]:
    fields = rule.read(config)
    depth = config["num_hidden_layers"]
    thetas = config[key] or [fields["rope_theta"]] * depth
    return {
      **fields,
      "posemb": ByLayer("rope" if x else "none" for x in thetas),
      "rope_theta": ByLayer(x or fields["rope_theta"] for x in thetas),
    }

  def write(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    # Layers that do not rotate have no base.
    return {**rule.write(fields), key: [x or 0 for x in fields["rope_theta"]]}

  return Rule((*rule.fields, "posemb"), {**rule.keys, key: None}, read, write)


# The first layer of four has no window.
_WINDOWS = windows(LayerTypes(lambda config, i: i % 4 != 0), default=128)
GRANITE_SWA = GRANITE.but(
  "granite_swa",
  "GraniteSWAForCausalLM",
  # Each head has a learned logit in the softmax that attends to nothing.
  constants={"sinks": True},
  rules=(_rope_by_layer(), _WINDOWS),
  defaults={
    "vocab_size": 100352,
    "max_position_embeddings": 8192,
    "hidden_size": 2560,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
  },
)
GRANITE_MOE_SWA = GRANITE_MOE_SHARED.but(
  "granitemoe_swa",
  "GraniteMoeSWAForCausalLM",
  # The library names experts here as in memory.
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    linear("model.layers.{i}.block_sparse_moe.router", "blocks/moe/router"),
    transposed(
      "model.layers.{i}.block_sparse_moe.experts.gate_up_proj",
      "blocks/moe/gate/kernel",
      "blocks/moe/up/kernel",
    ),
    transposed(
      "model.layers.{i}.block_sparse_moe.experts.down_proj",
      "blocks/moe/down/kernel",
    ),
    _SHARED_MLP,
  ),
  constants={"sinks": True},
  rules=(_rope_by_layer(), _WINDOWS),
)


def _norm_after_branches() -> Rule:
  """Whether there are norms after attention and MLP as well as before."""
  key = "use_post_norm"
  return Rule(
    ("norm_at",),
    {key: True},
    lambda config: {"norm_at": "sandwich" if config[key] else "pre"},
    lambda fields: {key: fields["norm_at"][0] == "sandwich"},
  )


HYPERCLOVAX = GRANITE.but(
  "hyperclovax",
  "HyperCLOVAXForCausalLM",
  arrays=table(
    shared_arrays.LLAMA,
    norm("model.layers.{i}.post_norm1", "blocks/attention_post_norm"),
    norm("model.layers.{i}.post_norm2", "blocks/mlp_post_norm"),
  ),
  without=("logits_multiplier", "attention_scale"),
  keys={
    "logits_multiplier": Key("logits_scaling", 1.0),
    "attention_scale": Key("attention_multiplier"),
  },
  rules=(_norm_after_branches(),),
)


def _attention_alone() -> Rule:
  """Layers of attention, which may rotate; layers of Mamba are refused."""
  types, positions = "layer_types", "position_embedding_type"
  attention = ("full_attention", "attention")

  def read(config: ConfigJson) -> dict[str, Any]:
    given = config[types]
    others = {"linear_attention"} if given is None else {*given} - {*attention}
    if others:
      raise config.error(
        f"{types}={given!r}: the model computes attention only, and no layers "
        "of Mamba."
      )
    config.require(positions, "rope", "nope", None)
    return {"posemb": "rope" if config[positions] == "rope" else "none"}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = fields["posemb"]
    return {
      types: [attention[0]] * len(kinds),
      positions: "rope" if kinds[0] == "rope" else None,
      # The library checks it, although no layer is of Mamba.
      "mamba_n_heads": 1,
    }

  return Rule(("posemb",), {types: None, positions: None}, read, write)


def _shared_mlp_or_mlp() -> Rule:
  """Experts and an MLP, or, without experts, only that MLP."""
  with_experts = mlp_width(), _EXPERTS
  width, number = "shared_intermediate_size", "num_local_experts"

  def read(config: ConfigJson) -> dict[str, Any]:
    if not config[number]:
      return {"moe": None, "mlp_dim": config[width]}
    fields: dict[str, Any] = {}
    for rule in with_experts:
      fields |= rule.read(config)
    return fields

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["moe"][0] is None:
      return {number: 0, width: fields["mlp_dim"][0]}
    config: dict[str, Any] = {}
    for rule in with_experts:
      config |= rule.write(fields)
    return config

  keys = {**with_experts[0].keys, **with_experts[1].keys}
  return Rule(("moe", "mlp_dim"), keys, read, write)


# Granite 4, if it has no layers of Mamba.
GRANITE_MOE_HYBRID = GRANITE_MOE_SHARED.but(
  "granitemoehybrid",
  "GraniteMoeHybridForCausalLM",
  arrays=table(
    GRANITE_MOE_SHARED.arrays,
    linear(
      "model.layers.{i}.shared_mlp.input_linear",
      "blocks/mlp/gate",
      "blocks/mlp/up",
    ),
    linear("model.layers.{i}.shared_mlp.output_linear", "blocks/mlp/down"),
  ),
  rules=(_attention_alone(), _shared_mlp_or_mlp()),
  requires={"normalization_function": ("rmsnorm",)},
  # Of Mamba.
  harmless=(
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_head",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "time_step_limit",
    "init_method",
  ),
  aliases={"layers_block_type": "layer_types"},
  defaults={"shared_intermediate_size": 1024},
)
