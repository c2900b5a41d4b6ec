"""GLM 4, and GLM 4.5 with experts."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  SparseLayers,
  experts,
  mlp_width,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  EXPERTS,
  FUSED_MLP,
  MLP,
  NORMS_BEFORE,
)
from bigtrain.models.published.families import ConfigJson, Key, Rule, choice
from bigtrain.models.published.tables import dense, norm, table

GLM4 = LLAMA.but(
  "glm4",
  "Glm4ForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    FUSED_MLP,
    norm(
      "model.layers.{i}.post_self_attn_layernorm", "blocks/attention_post_norm"
    ),
    norm("model.layers.{i}.post_mlp_layernorm", "blocks/mlp_post_norm"),
  ),
  constants={"norm_at": "sandwich", "rope_interleaved": True},
  rules=(biases(attention_bias=("qkv",)), rope(fraction=0.5)),
  defaults={
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 13696,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
  },
)


def _sparse_after_first() -> SparseLayers:
  """All layers after the first ones have experts."""
  key = "first_k_dense_replace"

  def read(config: ConfigJson) -> list[bool]:
    return [i >= config[key] for i in range(config["num_hidden_layers"])]

  def write(sparse: list[bool]) -> dict[str, Any]:
    return {key: sparse.index(True) if True in sparse else len(sparse)}

  return SparseLayers({key: 1}, read, write)


def _expert_groups() -> Rule:
  """Groups of experts: a token chooses some by the sum of their top two."""

  def read(config: ConfigJson) -> dict[str, Any]:
    num, top = config["n_group"], config["topk_group"]
    groups = {"num": num, "top": top, "score": "top2"}
    return {"groups": groups} if num > 1 else {}

  def write(moe: Mapping[str, Any]) -> dict[str, Any]:
    groups = moe["groups"] or {"num": 1, "top": 1}
    return {"n_group": groups["num"], "topk_group": groups["top"]}

  return Rule(("groups",), {"n_group": 1, "topk_group": 1}, read, write)


def _shared_experts() -> Rule:
  """The width of an MLP for all tokens, in experts."""
  key = "n_shared_experts"
  return Rule(
    ("shared_experts",),
    {key: 1},
    lambda config: {"shared_experts": config[key]},
    lambda moe: {key: moe["shared_dim"] // moe["mlp_dim"]},
  )


GLM4_MOE = LLAMA.but(
  "glm4_moe",
  "Glm4MoeForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    MLP,
    EXPERTS,
    dense(
      "model.layers.{i}.mlp.shared_experts.gate_proj",
      "blocks/shared_experts/gate",
    ),
    dense(
      "model.layers.{i}.mlp.shared_experts.up_proj", "blocks/shared_experts/up"
    ),
    dense(
      "model.layers.{i}.mlp.shared_experts.down_proj",
      "blocks/shared_experts/down",
    ),
  ),
  rules=(
    biases(attention_bias=("qkv",)),
    rope(fraction=0.5),
    choice("qk_norm", "use_qk_norm", {False: None, True: "head"}),
    mlp_width(),
    experts(
      num_experts=Key("n_routed_experts", 128),
      top_k=Key("num_experts_per_tok", 8),
      mlp_dim=Key("moe_intermediate_size", 1408),
      normalize=Key("norm_topk_prob", True),
      scale=Key("routed_scaling_factor", 1.0),
      score="sigmoid",
      selection_bias=True,
      layers=_sparse_after_first(),
      rules=(_expert_groups(), _shared_experts()),
    ),
  ),
  # Layers after the last one, which predict further tokens, are not loaded.
  harmless=("num_nextn_predict_layers",),
  defaults={
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "intermediate_size": 10944,
    "rms_norm_eps": 1e-5,
  },
)
