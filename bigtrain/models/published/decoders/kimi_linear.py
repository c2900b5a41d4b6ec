"""Kimi Linear: recurrent layers, and latent attention without positions."""

import re
from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.activation_rules import (
  GATED,
  activation,
  plain_activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.deepseek import latents
from bigtrain.models.published.decoders.deltanet_rules import FULL, LINEAR
from bigtrain.models.published.decoders.expert_rules import (
  expert_groups,
  experts,
  mlp_width,
  shared_experts,
  sparse_after_first,
  sparse_by_types,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import (
  depthwise_conv1d,
  linear,
  norm,
  plain,
  table,
  within,
)

_RECURRENT = within(
  "model.layers.{i}.self_attn.",
  "blocks/deltanet/",
  linear("q_proj", "query"),
  linear("k_proj", "key"),
  linear("v_proj", "value"),
  depthwise_conv1d("q_conv1d", "query_conv"),
  depthwise_conv1d("k_conv1d", "key_conv"),
  depthwise_conv1d("v_conv1d", "value_conv"),
  linear("b_proj", "beta"),
  linear("f_a_proj", "decay_down"),
  linear("f_b_proj", "decay_up"),
  plain("dt_bias", "channel_time_step"),
  plain("A_log", "log_rate", ndim=4, ones_after=1),
  linear("g_a_proj", "gate_down"),
  linear("g_b_proj", "gate_up"),
  norm("o_norm", "norm"),
  linear("o_proj", "out"),
)
_MOE = "model.layers.{i}.block_sparse_moe."
_EXPERTS = table(
  linear(_MOE + "gate", "blocks/moe/router"),
  linear(_MOE + "experts.{e}.w1", "blocks/moe/gate"),
  linear(_MOE + "experts.{e}.w3", "blocks/moe/up"),
  linear(_MOE + "experts.{e}.w2", "blocks/moe/down"),
  plain(
    _MOE + "gate.e_score_correction_bias",
    "router_state/blocks/moe/selection_bias",
  ),
  linear(_MOE + "shared_experts.gate_proj", "blocks/shared_experts/gate"),
  linear(_MOE + "shared_experts.up_proj", "blocks/shared_experts/up"),
  linear(_MOE + "shared_experts.down_proj", "blocks/shared_experts/down"),
)


def with_names_of_mlps(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Arrays by name; those that the library saves have MLPs named as experts."""
  own = r"(model\.layers\.\d+\.)block_sparse_moe(\.(gate|up|down)_proj\.weight)"
  return {re.sub(own, r"\1mlp\2", name): x for name, x in arrays.items()}


def _recurrent_layers() -> Rule:
  """Recurrent layers between layers of attention.

  The releases list the numbers of both, from 1 on, in `linear_attn_config`; the
  library has `layer_types`.
  """
  # {option of the library: in `linear_attn_config`}.
  sizes = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
  }

  def types(config: ConfigJson, lists: Mapping[str, Any]) -> list[str]:
    given, depth = config["layer_types"], config["num_hidden_layers"]
    if given is None and "full_attn_layers" in lists:
      full = {number - 1 for number in lists["full_attn_layers"]}
      given = [FULL if i in full else LINEAR for i in range(depth)]
    if given is None:
      given = [FULL if i and i % 4 == 0 else LINEAR for i in range(depth)]
    if len(given) != depth or not {*given} <= {LINEAR, FULL}:
      raise config.error(
        f"layer_types={given!r}: expected {LINEAR!r} or {FULL!r} for each of "
        f"the {depth} layers."
      )
    return list(given)

  def read(config: ConfigJson) -> dict[str, Any]:
    own = config["linear_attn_config"] or {}
    heads, width, conv = (own.get(sizes[key], config[key]) for key in sizes)
    options = {
      "num_heads": heads,
      "key_dim": width,
      "value_dim": width,
      "conv_width": conv,
      "decay_rank": width,
      "gate_rank": width,
      "gate": "sigmoid",
      "activation": plain_activation(config),
    }
    kinds = types(config, own)
    return {
      "deltanet": ByLayer(options if x == LINEAR else None for x in kinds)
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["deltanet"]
    config: dict[str, Any] = {
      "layer_types": [FULL if x is None else LINEAR for x in layers]
    }
    options = next(filter(None, layers), None)
    if options is not None:
      names = ("num_heads", "key_dim", "conv_width")
      config |= {key: options[name] for key, name in zip(sizes, names)}
    return config

  keys = {
    "linear_attn_config": None,
    "layer_types": None,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
  }
  return Rule(("deltanet",), keys, read, write)


KIMI_LINEAR = LLAMA.but(
  "kimi_linear",
  "KimiLinearForCausalLM",
  without=(
    "max_len",
    "mlp_dim",
    "num_kv_heads",
    "head_dim",
    "posemb",
    "rope_theta",
    "tied_head",
  ),
  arrays=table(
    shared_arrays.ENDS,
    shared_arrays.NORMS_BEFORE,
    shared_arrays.LATENT_ATTENTION,
    _RECURRENT,
    shared_arrays.MLP,
    _EXPERTS,
  ),
  keys={"max_len": Key("model_max_length", 1048576)},
  # The library has a head whatever `tie_word_embeddings` says.
  constants={"posemb": "none", "tied_head": False},
  rules=(
    activation(GATED, "silu"),
    biases(attention_bias=("qkv", "out")),
    latents(),
    _recurrent_layers(),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 256),
      top_k=Key("num_experts_per_token", 8),
      mlp_dim=Key("moe_intermediate_size", 1024),
      normalize=Key("moe_renormalize", True),
      scale=Key("routed_scaling_factor", 2.446),
      score="sigmoid",
      selection_bias=True,
      layers=sparse_by_types(sparse_after_first()),
      rules=(
        expert_groups("num_expert_group"),
        shared_experts("num_shared_experts"),
      ),
    ),
  ),
  requires={
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "use_grouped_topk": (True,),
  },
  # The library's names.
  aliases={
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
  },
  harmless=(
    "head_dim",
    "qk_head_dim",
    # Nothing rotates.
    "rope_theta",
    "rope_scaling",
    "num_nextn_predict_layers",
    "tie_word_embeddings",
  ),
  defaults={
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
  },
)
