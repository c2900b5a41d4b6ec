"""OpenAI's gpt-oss, whose experts may be in MXFP4."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders.activation_rules import gated_silu
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import experts, mlp_width
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  NORMS_BEFORE,
)
from bigtrain.models.published.decoders.window_rules import full_every, windows
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.tables import dense, interleaved, table


def _clipped_mlp() -> Rule:
  """Bounds of the gated MLP."""

  def read(config: ConfigJson) -> dict[str, Any]:
    limit, alpha = config["swiglu_limit"], config["swiglu_alpha"]
    return {"mlp_clip": {"limit": limit, "alpha": alpha, "up_offset": 1.0}}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    clip = fields["mlp_clip"] or {"limit": 7.0, "alpha": 1.702}
    return {"swiglu_limit": clip["limit"], "swiglu_alpha": clip["alpha"]}

  keys = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
  return Rule(("mlp_clip",), keys, read, write)


GPT_OSS = LLAMA.but(
  "gpt_oss",
  "GptOssForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    NORMS_BEFORE,
    dense("model.layers.{i}.mlp.router", "blocks/moe/router"),
    # All experts of a layer are in one array.
    interleaved(
      "model.layers.{i}.mlp.experts.gate_up_proj",
      "blocks/moe/gate/kernel",
      "blocks/moe/up/kernel",
    ),
    interleaved(
      "model.layers.{i}.mlp.experts.gate_up_proj_bias",
      "blocks/moe/gate/bias",
      "blocks/moe/up/bias",
    ),
    interleaved(
      "model.layers.{i}.mlp.experts.down_proj", "blocks/moe/down/kernel"
    ),
    interleaved(
      "model.layers.{i}.mlp.experts.down_proj_bias", "blocks/moe/down/bias"
    ),
  ),
  # Each head has a learned logit in the softmax that attends to nothing.
  constants={"sinks": True},
  rules=(
    gated_silu(),
    biases(always=("experts", "router"), attention_bias=("qkv", "out")),
    rope(theta=150_000.0, scaled=True),
    windows(full_every(2), default=128),
    mlp_width(),
    _clipped_mlp(),
    experts(
      num_experts=Key("num_local_experts", 128),
      top_k=Key("num_experts_per_tok", 4),
      score="softmax_of_top",
      normalize=True,
    ),
  ),
  harmless=("initial_context_length", "experts_per_token"),
  quantised=("mxfp4",),
  defaults={
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "rope_parameters": {
      "rope_type": "yarn",
      "factor": 32.0,
      "truncate": False,
      "original_max_position_embeddings": 4096,
    },
  },
)
