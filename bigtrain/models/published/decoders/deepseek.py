"""Families with latent attention, from DeepSeek V2 on.

DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash, Mistral 4, Youtu and MiniCPM 3. The
rules for latents and their rotary embeddings come first, then the families.
"""

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
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ENDS,
  EXPERTS,
  LATENT_ATTENTION,
  MLP,
  NORMS_BEFORE,
  SHARED_EXPERTS,
  with_prediction,
)
from bigtrain.models.published.families import ConfigJson, Key, Rule, choice
from bigtrain.models.published.tables import linear, table, transposed

# {option of `mla`: its key}.
_LATENT_KEYS = {
  "q_rank": "q_lora_rank",
  "kv_rank": "kv_lora_rank",
  "nope_dim": "qk_nope_head_dim",
  "rope_dim": "qk_rope_head_dim",
  "v_dim": "v_head_dim",
}


def latents() -> Rule:
  """Latent attention. Each query head has its own keys and values."""

  def read(config: ConfigJson) -> dict[str, Any]:
    options = {name: config[key] for name, key in _LATENT_KEYS.items()}
    heads = config["num_attention_heads"]
    if options["v_dim"] is None:
      options["v_dim"] = config["hidden_size"] // heads
    config.require("num_key_value_heads", heads, None)
    return {
      "mla": options,
      "num_kv_heads": heads,
      "head_dim": options["nope_dim"] + options["rope_dim"],
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    latents = fields["mla"][0]
    if latents is None:
      return {}
    keys = {key: latents[name] for name, key in _LATENT_KEYS.items()}
    return {**keys, "num_key_value_heads": fields["num_heads"][0]}

  keys = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": None,
  }
  return Rule(("mla", "num_kv_heads", "head_dim"), keys, read, write)


def _latent_rope(query_scale: bool = False) -> Rule:
  """Rotary embeddings of the features without a latent.

  All of these features rotate. A file may give their share of the whole head,
  which is checked here and hidden from `rope`.
  """
  plain = rope(query_scale=query_scale)
  factor = "partial_rotary_factor"

  def read(config: ConfigJson) -> dict[str, Any]:
    rotated = config["qk_rope_head_dim"]
    share = rotated / (rotated + config["qk_nope_head_dim"])
    values = ConfigJson(config.path, config)
    values[factor] = None
    given = [config[factor]]
    for key in ("rope_parameters", "rope_scaling"):
      stored = dict(config[key] or {})
      given.append(stored.pop(factor, None))
      values[key] = stored or None
    for number in given:
      if number not in (None, 1.0, share):
        raise config.error(f"{factor}={number}: expected {share} or 1.0.")
    return dict(plain.read(values))

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(plain.write(fields))
    latents = fields["mla"][0]
    if not query_scale or latents is None:
      return config
    # The library ignores the older keys of this family.
    stored = config.pop("rope_scaling") or {"rope_type": "default"}
    stored |= {"rope_theta": config.pop("rope_theta")}
    share = latents["rope_dim"] / (latents["rope_dim"] + latents["nope_dim"])
    return config | {"rope_parameters": stored | {factor: share}}

  return plain._replace(read=read, write=write)


def _groups_by_method() -> Rule:
  """Groups of experts: a token chooses some by the best of each."""
  grouped, greedy = "group_limited_greedy", "greedy"

  def read(config: ConfigJson) -> dict[str, Any]:
    config.require("topk_method", grouped, greedy)
    if config["topk_method"] == greedy:
      return {}
    groups = {"num": config["n_group"], "top": config["topk_group"]}
    return {"groups": groups | {"score": "max"}}

  def write(moe: Mapping[str, Any]) -> dict[str, Any]:
    groups = moe["groups"]
    if groups is None:
      return {"topk_method": greedy, "n_group": None, "topk_group": None}
    config = {"n_group": groups["num"], "topk_group": groups["top"]}
    return {"topk_method": grouped, **config}

  keys = {"topk_method": greedy, "n_group": None, "topk_group": None}
  return Rule(("groups",), keys, read, write)


_ARRAYS = table(
  ENDS, LATENT_ATTENTION, NORMS_BEFORE, MLP, EXPERTS, SHARED_EXPERTS
)
# Keys of training, and of calls of the library's model.
_HARMLESS = (
  "head_dim",
  "qk_head_dim",
  "aux_loss_alpha",
  "seq_aux",
  "ep_size",
  # Layers after the last one predict further tokens: see config.model.mtp.
  "num_nextn_predict_layers",
  "num_mtp_layers",
)

DEEPSEEK_V2 = LLAMA.but(
  "deepseek_v2",
  "DeepseekV2ForCausalLM",
  arrays=_ARRAYS,
  constants={"rope_interleaved": True},
  rules=(
    biases(attention_bias=("qkv", "out"), mlp_bias=("mlp",)),
    latents(),
    _latent_rope(),
    mlp_width(),
    experts(
      num_experts=Key("n_routed_experts", 64),
      top_k=Key("num_experts_per_tok"),
      mlp_dim=Key("moe_intermediate_size", 1407),
      normalize=False,
      scale=Key("routed_scaling_factor", 1.0),
      layers=sparse_after_first(),
      rules=(_groups_by_method(), shared_experts()),
    ),
  ),
  requires={
    "norm_topk_prob": (False, None),
    "scoring_func": ("softmax",),
    "moe_layer_freq": (1,),
  },
  harmless=_HARMLESS,
  defaults={
    "vocab_size": 102400,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
  },
)

_SIGMOID_EXPERTS = experts(
  num_experts=Key("n_routed_experts", 256),
  top_k=Key("num_experts_per_tok", 8),
  mlp_dim=Key("moe_intermediate_size", 2048),
  normalize=Key("norm_topk_prob", True),
  scale=Key("routed_scaling_factor", 2.5),
  score="sigmoid",
  selection_bias=True,
  layers=sparse_after_first(),
  rules=(expert_groups(), shared_experts()),
)

DEEPSEEK_V3 = LLAMA.but(
  "deepseek_v3",
  "DeepseekV3ForCausalLM",
  arrays=with_prediction(_ARRAYS),
  rules=(
    biases(attention_bias=("qkv", "out")),
    choice("rope_interleaved", "rope_interleave", {True: True, False: False}),
    latents(),
    _latent_rope(),
    mlp_width(),
    _SIGMOID_EXPERTS,
  ),
  requires={
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
  },
  harmless=_HARMLESS,
  defaults={
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
  },
)

# transformers opens it as DeepSeek V3.
KIMI_K2 = DEEPSEEK_V3.but("kimi_k2", "DeepseekV3ForCausalLM")

GLM4_MOE_LITE = DEEPSEEK_V3.but(
  "glm4_moe_lite",
  "Glm4MoeLiteForCausalLM",
  rules=(
    experts(
      num_experts=Key("n_routed_experts", 64),
      top_k=Key("num_experts_per_tok", 4),
      mlp_dim=Key("moe_intermediate_size", 1536),
      normalize=Key("norm_topk_prob", True),
      scale=Key("routed_scaling_factor", 1.8),
      score="sigmoid",
      selection_bias=True,
      layers=sparse_by_types(sparse_after_first()),
      rules=(expert_groups(), shared_experts()),
    ),
  ),
  defaults={
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "intermediate_size": 10240,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
  },
)

MISTRAL4 = DEEPSEEK_V3.but(
  "mistral4",
  "Mistral4ForCausalLM",
  arrays=table(
    ENDS,
    LATENT_ATTENTION,
    NORMS_BEFORE,
    MLP,
    SHARED_EXPERTS,
    linear("model.layers.{i}.mlp.gate", "blocks/moe/router"),
    # All experts of a layer are in one array.
    transposed(
      "model.layers.{i}.mlp.experts.gate_up_proj",
      "blocks/moe/gate/kernel",
      "blocks/moe/up/kernel",
    ),
    transposed(
      "model.layers.{i}.mlp.experts.down_proj", "blocks/moe/down/kernel"
    ),
  ),
  rules=(
    _latent_rope(query_scale=True),
    experts(
      num_experts=Key("n_routed_experts", 128),
      top_k=Key("num_experts_per_tok", 4),
      mlp_dim=Key("moe_intermediate_size", 2048),
      normalize=Key("norm_topk_prob", True),
      scale=Key("routed_scaling_factor", 1.0),
      layers=sparse_after_first(),
      rules=(expert_groups(), shared_experts()),
    ),
  ),
  requires={"scoring_func": ("softmax",)},
  defaults={
    "vocab_size": 131072,
    "max_position_embeddings": 1048576,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 1e4,
      "factor": 128.0,
      "original_max_position_embeddings": 8192,
      "mscale_all_dim": 1.0,
      "mscale": 1.0,
      "llama_4_scaling_beta": 0.1,
    },
  },
)

# Without experts.
YOUTU = DEEPSEEK_V3.but(
  "youtu",
  "YoutuForCausalLM",
  without=("moe",),
  arrays=table(ENDS, LATENT_ATTENTION, NORMS_BEFORE, MLP),
  harmless=("embedding_initializer_range",),
  defaults={
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "hidden_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "intermediate_size": 6144,
    "tie_word_embeddings": True,
  },
)


def _scales_of_minicpm() -> Rule:
  """Factors of branches and of logits, which depend on depth and width."""
  depth, base = "scale_depth", "dim_model_base"

  def read(config: ConfigJson) -> dict[str, Any]:
    root = config["num_hidden_layers"] ** 0.5
    width = config["hidden_size"]
    return {
      "residual_multiplier": (config[depth] or root) / root,
      "logits_multiplier": (config[base] or width) / width,
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
      depth: fields["residual_multiplier"] * fields["depth"] ** 0.5,
      base: round(fields["logits_multiplier"] * fields["width"]),
    }

  fields = ("residual_multiplier", "logits_multiplier")
  return Rule(fields, {depth: 1.4, base: 256}, read, write)


MINICPM3 = DEEPSEEK_V2.but(
  "minicpm3",
  "MiniCPM3ForCausalLM",
  without=("moe",),
  arrays=table(ENDS, LATENT_ATTENTION, NORMS_BEFORE, MLP),
  keys={"embed_multiplier": Key("scale_emb", 12)},
  constants={"rope_interleaved": False},
  rules=(_scales_of_minicpm(),),
  defaults={
    "vocab_size": 73448,
    "max_position_embeddings": 32768,
    "hidden_size": 2560,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "intermediate_size": 6400,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,
  },
)
