"""GPT-2."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders import model_fields
from bigtrain.models.published.decoders.activation_rules import (
  PLAIN,
  activation,
)
from bigtrain.models.published.families import ConfigJson, Family, Key, Rule
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import conv1d, linear, norm, plain, table


def _sizes() -> Rule:
  """Sizes that follow from others; the MLP's may have a key."""
  return Rule(
    ("num_kv_heads", "head_dim", "mlp_dim"),
    {"n_inner": None},
    lambda config: {
      "num_kv_heads": config["n_head"],
      "head_dim": config["n_embd"] // config["n_head"],
      "mlp_dim": config["n_inner"] or 4 * config["n_embd"],
    },
    lambda fields: {"n_inner": fields["mlp_dim"][0]},
  )


def _attention_scale() -> Rule:
  """The attention's scale, which may be 1, and fall with a layer's number."""
  scaled, by_number = "scale_attn_weights", "scale_attn_by_inverse_layer_idx"

  def read(config: ConfigJson) -> dict[str, Any]:
    if config[scaled] and not config[by_number]:
      return {"attention_scale": None}
    head_dim = config["n_embd"] // config["n_head"]
    scale = head_dim**-0.5 if config[scaled] else 1.0
    numbers = range(1, config["n_layer"] + 1)
    return {
      "attention_scale": ByLayer(
        scale / i if config[by_number] else scale for i in numbers
      )
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    scales = fields["attention_scale"]
    return {
      scaled: scales[0] != 1.0 or fields["head_dim"][0] == 1,
      by_number: scales[-1] != scales[0],
    }

  keys = {scaled: True, by_number: False}
  return Rule(("attention_scale",), keys, read, write)


GPT2 = Family(
  model_type="gpt2",
  architecture="GPT2LMHeadModel",
  arrays=table(
    plain("wte.weight", "token_embedding"),
    plain("wpe.weight", "pos_embedding"),
    norm("h.{i}.ln_1", "blocks/attention_norm"),
    conv1d(
      "h.{i}.attn.c_attn",
      "blocks/attention/query",
      "blocks/attention/key",
      "blocks/attention/value",
    ),
    conv1d("h.{i}.attn.c_proj", "blocks/attention/out"),
    norm("h.{i}.ln_2", "blocks/mlp_norm"),
    conv1d("h.{i}.mlp.c_fc", "blocks/mlp/up"),
    conv1d("h.{i}.mlp.c_proj", "blocks/mlp/down"),
    norm("ln_f", "norm"),
    linear("lm_head", "head"),
    linear("score", "score"),
  ),
  keys={
    "vocab_size": Key("vocab_size", 50257),
    "max_len": Key("n_positions", 1024),
    "width": Key("n_embd", 768),
    "depth": Key("n_layer", 12),
    "num_heads": Key("n_head", 12),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "tied_head": Key("tie_word_embeddings", True),
  },
  constants={"posemb": "learn", "norm": "layernorm", "use_bias": True},
  rules=(
    activation(PLAIN, "gelu_new", "activation_function"),
    _sizes(),
    _attention_scale(),
  ),
  harmless=(
    "n_ctx",
    "reorder_and_upcast_attn",
    "gradient_checkpointing",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
  ),
  neutral=model_fields.NEUTRAL,
  in_shapes=("vocab_size", "width", "depth", "mlp_dim", "max_len"),
  limits=("num_classes", "pool"),
  unless={"tied_head": "lm_head.weight"},
)

# AI Sweden's GPT-SW3.
GPT_SW3 = GPT2.but("gpt-sw3", "GPT2LMHeadModel")
