"""OLMo 1 to 3, OLMoE, FlexOLMo and OLMo Hybrid."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.activation_rules import (
  GATED,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.deltanet_rules import (
  FULL,
  LINEAR,
  deltanet,
)
from bigtrain.models.published.decoders.expert_rules import experts, mlp_width
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  EXPERTS,
  MLP,
  NORMS_AFTER,
)
from bigtrain.models.published.decoders.window_rules import full_every, windows
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.tables import (
  depthwise_conv1d,
  linear,
  norm,
  plain,
  table,
)

OLMO = LLAMA.but(
  "olmo",
  "OlmoForCausalLM",
  arrays=table(ENDS, ATTENTION, MLP),
  without=("norm_eps",),
  keys={"qkv_clip": Key("clip_qkv")},
  # Its layer norms have no parameters.
  constants={"norm": "layernorm", "norm_scaled": False, "norm_eps": 1e-5},
  rules=(biases(attention_bias=("qkv", "out")),),
  requires={"mlp_bias": (False,)},
  defaults={"vocab_size": 50304},
)

OLMO2 = LLAMA.but(
  "olmo2",
  "Olmo2ForCausalLM",
  arrays=table(ENDS, ATTENTION, NORMS_AFTER, MLP),
  # Norms come after attention and MLP, and queries and keys have norms over all
  # heads, arXiv 2501.00656.
  constants={"norm_at": "post", "qk_norm": "projection"},
  rules=(biases(attention_bias=("qkv", "out")),),
  defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
)

OLMO3 = OLMO2.but(
  "olmo3",
  "Olmo3ForCausalLM",
  rules=(windows(full_every(4)), rope(theta=5e5, types=full_every(4))),
)

OLMOE = LLAMA.but(
  "olmoe",
  "OlmoeForCausalLM",
  arrays=shared_arrays.QWEN_MOE,
  keys={"qkv_clip": Key("clip_qkv")},
  constants={"qk_norm": "projection"},
  rules=(
    biases(attention_bias=("qkv", "out")),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 64),
      top_k=Key("num_experts_per_tok", 8),
      normalize=Key("norm_topk_prob", False),
    ),
  ),
  defaults={
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 2048,
    "rms_norm_eps": 1e-5,
  },
)

FLEX_OLMO = OLMO2.but(
  "flex_olmo",
  "FlexOlmoForCausalLM",
  arrays=table(ENDS, ATTENTION, NORMS_AFTER, EXPERTS),
  rules=(
    rope(theta=5e5),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 7),
      top_k=Key("num_experts_per_tok", 5),
      normalize=Key("norm_topk_prob", False),
    ),
  ),
  aliases={"num_local_experts": "num_experts"},
  defaults={
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
  },
)

_OURS = "blocks/deltanet/"
_THEIRS = "model.layers.{i}.linear_attn."
_HYBRID_ARRAYS = table(
  ENDS,
  ATTENTION,
  MLP,
  linear(_THEIRS + "q_proj", _OURS + "query"),
  linear(_THEIRS + "k_proj", _OURS + "key"),
  linear(_THEIRS + "v_proj", _OURS + "value"),
  linear(_THEIRS + "g_proj", _OURS + "gate"),
  linear(_THEIRS + "b_proj", _OURS + "beta"),
  linear(_THEIRS + "a_proj", _OURS + "decay"),
  linear(_THEIRS + "o_proj", _OURS + "out"),
  depthwise_conv1d(_THEIRS + "q_conv1d", _OURS + "query_conv"),
  depthwise_conv1d(_THEIRS + "k_conv1d", _OURS + "key_conv"),
  depthwise_conv1d(_THEIRS + "v_conv1d", _OURS + "value_conv"),
  plain(_THEIRS + "A_log", _OURS + "log_rate"),
  plain(_THEIRS + "dt_bias", _OURS + "time_step"),
  norm(_THEIRS + "o_norm", _OURS + "norm"),
  # Before branches of recurrent layers, and after branches of attention. Both
  # kinds of layers have the second name, for different norms.
  norm("model.layers.{i}.attention_layer_norm", "blocks/attention_norm"),
  norm("model.layers.{i}.feedforward_layer_norm", "blocks/mlp_norm"),
  norm("model.layers.{i}.feedforward_layer_norm", "blocks/attention_post_norm"),
  norm("model.layers.{i}.post_feedforward_layernorm", "blocks/mlp_post_norm"),
)
# {name of a norm in some files: in the table}.
_HYBRID_NORMS = {
  "input_layernorm": "attention_layer_norm",
  "post_attention_layernorm": "feedforward_layer_norm",
}
_CONVOLUTION = re.compile(r"(.*\.linear_attn\.)q_conv1d\.weight")


def hybrid_names(names: Mapping[str, str]) -> dict[str, str]:
  """Names of norms as in the table; `names` are {name: name in the file}."""
  if not any(map(_CONVOLUTION.fullmatch, names)):
    return dict(names)
  result = {}
  for name, in_file in names.items():
    *layer, norm_name, kind = [*name.rsplit(".", 2)]
    norm_name = _HYBRID_NORMS.get(norm_name, norm_name)
    result[".".join([*layer, norm_name, kind])] = in_file
  return result


def with_own_convolutions(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Splits the kernels of convolutions where the projections end.

  The library reads the three kernels of a layer as one, and saves it in three
  equal parts.
  """
  result = dict(arrays)
  for start in [
    match[1] for match in map(_CONVOLUTION.fullmatch, arrays) if match
  ]:
    kernels = [f"{start}{name}_conv1d.weight" for name in "qkv"]
    projections = [f"{start}{name}_proj.weight" for name in "qkv"]
    if not {*kernels, *projections} <= arrays.keys():
      continue
    sizes = [arrays[name].shape[0] for name in projections]
    parts = [arrays[name] for name in kernels]
    stored = [part.shape[0] for part in parts]
    if stored != sizes and sum(stored) == sum(sizes):
      joined = np.concatenate(parts)
      ends = np.cumsum(sizes)[:-1]
      result |= dict(zip(kernels, np.split(joined, ends)))
  return result


def _hybrid_deltanet() -> Rule:
  """Recurrent layers, whose sizes follow from the model's by default."""
  rule = deltanet(
    norms={LINEAR: "pre", FULL: "post"},
    num_heads=Key("linear_num_value_heads"),
    num_key_heads=Key("linear_num_key_heads"),
    key_dim=Key("linear_key_head_dim"),
    value_dim=Key("linear_value_head_dim"),
    conv_width=Key("linear_conv_kernel_dim", 4),
    negative_eigenvalues=Key("linear_allow_neg_eigval", True),
    norm_eps=1e-5,
  )

  def read(config: ConfigJson) -> Mapping[str, Any]:
    heads = config["num_attention_heads"]
    key_heads = config["linear_num_key_heads"] or heads
    key_dim = config["linear_key_head_dim"]
    key_dim = key_dim or int(0.75 * config["hidden_size"] / key_heads)
    sizes = {
      "linear_num_value_heads": config["linear_num_value_heads"] or heads,
      "linear_num_key_heads": key_heads,
      "linear_key_head_dim": key_dim,
      "linear_value_head_dim": config["linear_value_head_dim"] or 2 * key_dim,
    }
    return rule.read(ConfigJson(config.path, {**config, **sizes}))

  return rule._replace(read=read)


def _rope_if_any() -> Rule:
  """A rotation, or none if its base is null."""
  rule = rope()

  def read(config: ConfigJson) -> Mapping[str, Any]:
    stored = config["rope_parameters"] or {}
    if stored.get("rope_theta", 0) is None:
      return {"posemb": "none"}
    return {"posemb": "rope", **rule.read(config)}

  def write(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields["posemb"][0] == "rope":
      return rule.write(fields)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}

  return Rule(("posemb", *rule.fields), rule.keys, read, write)


OLMO_HYBRID = OLMO2.but(
  "olmo_hybrid",
  "OlmoHybridForCausalLM",
  arrays=_HYBRID_ARRAYS,
  rules=(activation(GATED, "silu"), _hybrid_deltanet(), _rope_if_any()),
  # Of initial values.
  harmless=(
    "linear_a_log_min",
    "linear_a_log_max",
    "linear_dt_min",
    "linear_dt_max",
    "linear_dt_init_floor",
  ),
  defaults={
    "vocab_size": 100352,
    "max_position_embeddings": 65536,
    "hidden_size": 3840,
    "num_attention_heads": 30,
    "rms_norm_eps": 1e-6,
  },
)
