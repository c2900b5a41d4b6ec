"""Tencent's Hunyuan, version 1 (dense and with experts) and version 3."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  SparseLayers,
  experts,
  mlp_width,
  shared_experts,
  sparse_by_types,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import renamed, table

_QK_NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
# Of a scaling with `alpha`, which reads none of them.
_UNREAD = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _stretched_rope() -> Rule:
  """Rotary embeddings whose base `alpha` may stretch.

  Files call this scaling "dynamic", although it does not depend on the length
  of a text. An exported file has the resulting base, and no scaling.
  """
  plain = rope()

  def stretched(stored: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    kind = stored.get("rope_type", stored.get("type"))
    if kind != "dynamic" or not stored.get("alpha"):
      return dict(stored)
    rest = {x: y for x, y in stored.items() if x not in ("alpha", *_UNREAD)}
    rest |= {"rope_type": "default", "type": "default"}
    stretch = stored["alpha"] ** (head_dim / (head_dim - 2))
    return rest | {"rope_theta": stored["rope_theta"] * stretch}

  def read(config: ConfigJson) -> Mapping[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    values = ConfigJson(config.path, config)
    for key in ("rope_parameters", "rope_scaling"):
      if stored := config[key]:
        with_base = {"rope_theta": config["rope_theta"] or 1e4, **stored}
        values[key] = stretched(with_base, head_dim)
    return plain.read(values)

  return plain._replace(read=read)


HUNYUAN_DENSE = LLAMA.but(
  "hunyuan_v1_dense",
  "HunYuanDenseV1ForCausalLM",
  arrays=renamed(shared_arrays.LLAMA, _QK_NORMS),
  constants={"qk_norm": "head", "qk_norm_after_rope": True},
  rules=(biases(attention_bias=("qkv", "out")), _stretched_rope()),
  requires={
    "mlp_bias": (False,),
    "use_qk_norm": (True,),
    "use_cla": (False,),
    "use_mla": (False,),
    "norm_type": ("rms",),
    "use_rotary_pos_emb": (True,),
  },
  # The first releases have sizes twice, and options of other models.
  harmless=(
    "eod_token_id",
    "attention_head_dim",
    "cla_share_factor",
    "num_experts",
    "org_vocab_size",
    "pad_id",
  ),
  defaults={"vocab_size": 290943, "rms_norm_eps": 1e-5},
)


def _experts() -> Rule:
  """Experts as wide as the MLP that each layer also has."""
  number, top_k = "num_experts", "moe_topk"

  def read(config: ConfigJson) -> dict[str, Any]:
    depth = config["num_hidden_layers"]
    tops = config[top_k]
    if isinstance(tops, int):
      tops = [tops] * depth
    if len(tops) < depth:
      raise config.error(f"{top_k}={tops!r}: expected one of {depth} layers.")
    if isinstance(config[number], list):
      raise config.error(
        f"{number}={config[number]!r}: expected one number for all layers."
      )
    experts = {"num_experts": config[number], "normalize": True}
    experts["shared_experts"] = 1
    return {"moe": ByLayer({**experts, "top_k": k} for k in tops[:depth])}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = [x for x in fields["moe"] if x is not None]
    if not layers:
      return {}
    tops = [x["top_k"] for x in layers]
    return {
      number: layers[0]["num_experts"],
      top_k: tops[0] if len({*tops}) == 1 else tops,
    }

  return Rule(("moe",), {number: 1, top_k: 1}, read, write)


_THEIRS = "model.layers.{i}.mlp."
HUNYUAN_MOE = HUNYUAN_DENSE.but(
  "hunyuan_v1_moe",
  "HunYuanMoEV1ForCausalLM",
  arrays=renamed(
    table(
      shared_arrays.ENDS,
      shared_arrays.ATTENTION,
      shared_arrays.NORMS_BEFORE,
      shared_arrays.EXPERTS,
      shared_arrays.SHARED_EXPERTS,
    ),
    {
      **_QK_NORMS,
      _THEIRS + "gate.weight": _THEIRS + "gate.wg.weight",
      _THEIRS + "shared_experts": _THEIRS + "shared_mlp",
    },
  ),
  rules=(mlp_width(), _experts()),
  requires={
    "use_mixed_mlp_moe": (True,),
    "group_limited_greedy": (False,),
    "moe_layer_num_skipped": (0,),
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (1.0,),
  },
  harmless=(
    "num_shared_expert",
    "moe_intermediate_size",
    "moe_drop_tokens",
    "moe_random_routing_dropped_token",
    "capacity_factor",
  ),
  aliases={
    "num_experts_per_tok": "moe_topk",
    "num_local_experts": "num_experts",
  },
)

_AFTER_FIRST = SparseLayers(
  {},
  lambda config: [i > 0 for i in range(config["num_hidden_layers"])],
  lambda sparse: {},
)
HY_V3 = LLAMA.but(
  "hy_v3",
  "HYV3ForCausalLM",
  arrays=shared_arrays.with_prediction(
    renamed(
      table(
        shared_arrays.ENDS,
        shared_arrays.ATTENTION,
        shared_arrays.NORMS_BEFORE,
        shared_arrays.MLP,
        shared_arrays.EXPERTS,
        shared_arrays.SHARED_EXPERTS,
      ),
      {
        _THEIRS + "gate.weight": _THEIRS + "router.gate.weight",
        _THEIRS + "gate.e_score_correction_bias": _THEIRS + "expert_bias",
        _THEIRS + "shared_experts": _THEIRS + "shared_mlp",
      },
    )
  ),
  constants={"qk_norm": "head"},
  rules=(
    rope(theta=11158840.0),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 192),
      top_k=Key("num_experts_per_tok", 8),
      mlp_dim=Key("moe_intermediate_size", 1536),
      normalize=True,
      scale=Key("router_scaling_factor", 2.826),
      score="sigmoid",
      selection_bias=True,
      layers=sparse_by_types(_AFTER_FIRST),
      rules=(shared_experts("num_shared_experts"),),
    ),
  ),
  # The precision of a sum.
  harmless=("enable_moe_fp32_combine", "num_nextn_predict_layers"),
  defaults={
    "vocab_size": 120832,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 13312,
    "rms_norm_eps": 1e-5,
  },
)
