"""Llama, and families that differ from it in little: Mistral, Mixtral, SmolLM3.

LLAMA shows all parts of a `Family`, see ../families.py: `keys` with one field
each, `constants`, and `rules` for the rest. Every other family, here and in
most modules, is LLAMA or a relative with changes: `but` lists only what
differs, and a new rule replaces the one for the same fields. The defaults are
those of the configuration classes in transformers.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders import model_fields, shared_arrays
from bigtrain.models.published.decoders.activation_rules import (
  GATED,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import experts, mlp_width
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.window_rules import LayerTypes, windows
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Key,
  Rule,
)
from bigtrain.models.published.layer_patterns import ByLayer


def _heads() -> Rule:
  """Heads of keys and values, and the width of heads, that may be absent."""

  def read(config: ConfigJson) -> dict[str, Any]:
    num_heads = config["num_attention_heads"]
    return {
      "num_kv_heads": config["num_key_value_heads"] or num_heads,
      "head_dim": config["head_dim"] or config["hidden_size"] // num_heads,
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
      "num_key_value_heads": fields["num_kv_heads"][0],
      "head_dim": fields["head_dim"][0],
    }

  keys = {"num_key_value_heads": None, "head_dim": None}
  return Rule(("num_kv_heads", "head_dim"), keys, read, write)


LLAMA = Family(
  model_type="llama",
  architecture="LlamaForCausalLM",
  arrays=shared_arrays.LLAMA,
  keys={
    "vocab_size": Key("vocab_size", 32000),
    "max_len": Key("max_position_embeddings", 2048),
    "width": Key("hidden_size", 4096),
    "depth": Key("num_hidden_layers", 32),
    "num_heads": Key("num_attention_heads", 32),
    "mlp_dim": Key("intermediate_size", 11008),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "tied_head": Key("tie_word_embeddings", False),
  },
  constants={"posemb": "rope", "norm": "rmsnorm"},
  rules=(
    activation(GATED, "silu"),
    biases(attention_bias=("qkv", "out"), mlp_bias=("mlp",)),
    _heads(),
    rope(),
  ),
  neutral=model_fields.NEUTRAL,
  in_shapes=("vocab_size", "width", "depth", "mlp_dim"),
  limits=("max_len", "num_classes", "pool"),
  unless={"tied_head": "lm_head.weight"},
  quantised=("fp8",),
)

MISTRAL = LLAMA.but(
  "mistral",
  "MistralForCausalLM",
  keys={"window": Key("sliding_window", 4096)},
  rules=(biases(),),
  requires={"attention_bias": (False,), "mlp_bias": (False,)},
  defaults={
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
  },
)

# Layers may differ in their windows. Without layer_types, all have one.
MINISTRAL = LLAMA.but(
  "ministral",
  "MinistralForCausalLM",
  rules=(
    biases(),
    windows(LayerTypes(lambda config, i: config["sliding_window"])),
  ),
  requires={"attention_bias": (False,), "mlp_bias": (False,)},
  defaults={
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
  },
)

MINISTRAL3 = MISTRAL.but(
  "ministral3",
  "Ministral3ForCausalLM",
  rules=(rope(theta=1e6, query_scale=True, scaled=True),),
  defaults={
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 1e6,
      "factor": 16.0,
      "original_max_position_embeddings": 16384,
      "mscale_all_dim": 1.0,
      "mscale": 1.0,
      "llama_4_scaling_beta": 0.1,
    },
  },
)

MIXTRAL = MISTRAL.but(
  "mixtral",
  "MixtralForCausalLM",
  arrays=shared_arrays.MIXTRAL,
  rules=(
    rope(theta=1e6),
    mlp_width(),
    experts(
      num_experts=Key("num_local_experts", 8),
      top_k=Key("num_experts_per_tok", 2),
      normalize=True,
    ),
  ),
  defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
)


def _rotates(config: ConfigJson) -> list[bool]:
  """Whether each layer of SmolLM3 rotates; by default 3 of 4 do."""
  depth, flags = config["num_hidden_layers"], config["no_rope_layers"]
  if flags is None:
    period = config["no_rope_layer_interval"]
    return [(i + 1) % period != 0 for i in range(depth)]
  return [bool(flag) for flag in flags[:depth]]


def _rotating_layers() -> Rule:
  """Layers with and without rotation, written as 1 for each that rotates."""

  def read(config: ConfigJson) -> dict[str, Any]:
    kinds = ("rope" if rotates else "none" for rotates in _rotates(config))
    return {"posemb": ByLayer(kinds)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
      "no_rope_layers": [int(kind == "rope") for kind in fields["posemb"]]
    }

  keys = {"no_rope_layers": None, "no_rope_layer_interval": 4}
  return Rule(("posemb",), keys, read, write)


def _slides_without_rotation(config: ConfigJson, i: int) -> bool:
  has_windows = config["sliding_window"] and config["use_sliding_window"]
  return bool(has_windows and not _rotates(config)[i])


SMOLLM3 = LLAMA.but(
  "smollm3",
  "SmolLM3ForCausalLM",
  rules=(
    rope(theta=2e6),
    _rotating_layers(),
    windows(
      LayerTypes(_slides_without_rotation),
      switch="use_sliding_window",
      default=None,
    ),
  ),
  harmless=("max_window_layers",),
  defaults={
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
  },
)
