"""Decoders after GPT-2: GPT-J, GPT-Neo, GPT-NeoX, StarCoder and Falcon."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders.activation_rules import (
  PLAIN,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.gpt2 import GPT2
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import (
  dense,
  dense_by_head,
  linear,
  norm,
  plain,
  table,
)

_ENDS = table(
  plain("wte.weight", "token_embedding"),
  plain("wpe.weight", "pos_embedding"),
  norm("ln_f", "norm"),
  dense("lm_head", "head"),
  linear("score", "score"),
)
_NORMS = table(
  norm("h.{i}.ln_1", "blocks/attention_norm"),
  norm("h.{i}.ln_2", "blocks/mlp_norm"),
)
_MLP = table(
  dense("h.{i}.mlp.c_fc", "blocks/mlp/up"),
  dense("h.{i}.mlp.c_proj", "blocks/mlp/down"),
)


def _first_features() -> Rule:
  """The number of features of a head that rotate; null for all."""
  key = "rotary_dim"

  def head_dim(config: ConfigJson) -> int:
    return config["n_embd"] // config["n_head"]

  return Rule(
    ("rope_fraction",),
    {key: 64},
    lambda config: {
      "rope_fraction": (config[key] or head_dim(config)) / head_dim(config)
    },
    lambda fields: {
      key: round((fields["rope_fraction"][0] or 1) * fields["head_dim"][0])
    },
  )


GPTJ = GPT2.but(
  "gptj",
  "GPTJForCausalLM",
  arrays=table(
    _ENDS,
    _NORMS,
    linear("h.{i}.attn.q_proj", "blocks/attention/query"),
    linear("h.{i}.attn.k_proj", "blocks/attention/key"),
    linear("h.{i}.attn.v_proj", "blocks/attention/value"),
    linear("h.{i}.attn.out_proj", "blocks/attention/out"),
    dense("h.{i}.mlp.fc_in", "blocks/mlp/up"),
    dense("h.{i}.mlp.fc_out", "blocks/mlp/down"),
  ),
  without=("use_bias", "attention_scale"),
  constants={"posemb": "rope", "parallel": True, "rope_interleaved": True},
  rules=(
    activation(PLAIN, "gelu_new", "activation_function"),
    biases(always=("mlp", "norm", "head")),
    _first_features(),
  ),
  requires={"rotary": (True,), "scale_attn_weights": (True,)},
  defaults={
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "tie_word_embeddings": False,
  },
)

GPT_BIGCODE = GPT2.but(
  "gpt_bigcode",
  "GPTBigCodeForCausalLM",
  arrays=table(
    _ENDS,
    _NORMS,
    # By head, if keys are as many as queries.
    dense_by_head(
      "h.{i}.attn.c_attn",
      "blocks/attention/query",
      "blocks/attention/key",
      "blocks/attention/value",
    ),
    dense("h.{i}.attn.c_proj", "blocks/attention/out"),
    _MLP,
  ),
  rules=(
    activation(PLAIN, "gelu_pytorch_tanh", "activation_function"),
    Rule(
      ("num_kv_heads", "head_dim", "mlp_dim"),
      {"n_inner": None, "multi_query": True},
      lambda config: {
        "num_kv_heads": 1 if config["multi_query"] else config["n_head"],
        "head_dim": config["n_embd"] // config["n_head"],
        "mlp_dim": config["n_inner"] or 4 * config["n_embd"],
      },
      lambda fields: {
        "n_inner": fields["mlp_dim"][0],
        "multi_query": fields["num_kv_heads"][0] == 1,
      },
    ),
  ),
  harmless=(
    "num_key_value_heads",
    "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
    "inference_runner",
    "max_batch_size",
    "max_sequence_length",
    "pad_key_length",
    "pre_allocate_kv_cache",
    "validate_runner_input",
  ),
)


def _windows_of_neo() -> Rule:
  """Layers with a window, from a list of periods and their numbers."""
  types, size = "attention_types", "window_size"

  def read(config: ConfigJson) -> dict[str, Any]:
    kinds = [
      kind for period, number in config[types] for kind in period * number
    ]
    depth = config["num_layers"]
    if len(kinds) != depth or not {*kinds} <= {"global", "local"}:
      raise config.error(
        f"{types}={config[types]!r}: expected 'global' or 'local' for each of "
        f"{depth} layers."
      )
    return {
      "window": ByLayer(config[size] if x == "local" else None for x in kinds)
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["window"]
    kinds = ["global" if x is None else "local" for x in layers]
    sizes = [x for x in layers if x is not None]
    return {
      types: [[kinds, 1]],
      size: sizes[0] if sizes else 256,
      "attention_layers": kinds,
    }

  keys = {
    types: [[["global", "local"], 12]],
    size: 256,
    "attention_layers": None,
  }
  return Rule(("window",), keys, read, write)


def _sizes_of_neo() -> Rule:
  """Sizes that follow from others; the MLP's may have a key."""
  return Rule(
    ("num_kv_heads", "head_dim", "mlp_dim"),
    {"intermediate_size": None},
    lambda config: {
      "num_kv_heads": config["num_heads"],
      "head_dim": config["hidden_size"] // config["num_heads"],
      "mlp_dim": config["intermediate_size"] or 4 * config["hidden_size"],
    },
    lambda fields: {"intermediate_size": fields["mlp_dim"][0]},
  )


GPT_NEO = GPT2.but(
  "gpt_neo",
  "GPTNeoForCausalLM",
  without=("use_bias", "attention_scale"),
  arrays=table(
    _ENDS,
    _NORMS,
    linear("h.{i}.attn.attention.q_proj", "blocks/attention/query"),
    linear("h.{i}.attn.attention.k_proj", "blocks/attention/key"),
    linear("h.{i}.attn.attention.v_proj", "blocks/attention/value"),
    dense("h.{i}.attn.attention.out_proj", "blocks/attention/out"),
    _MLP,
  ),
  keys={
    "max_len": Key("max_position_embeddings", 2048),
    "width": Key("hidden_size", 2048),
    "depth": Key("num_layers", 24),
    "num_heads": Key("num_heads", 16),
  },
  constants={"attention_scale": 1.0},
  rules=(
    activation(PLAIN, "gelu_new", "activation_function"),
    biases(always=("out", "mlp", "norm")),
    _sizes_of_neo(),
    _windows_of_neo(),
  ),
  harmless=("resid_dropout", "embed_dropout"),
)


def _parallel_norms() -> Rule:
  """Whether attention and MLP have one input, with a norm each."""
  key = "use_parallel_residual"
  return Rule(
    ("parallel", "parallel_norms"),
    {key: True},
    lambda config: {"parallel": config[key], "parallel_norms": config[key]},
    lambda fields: {key: fields["parallel"]},
  )


def _rope_in_one_key() -> Rule:
  """Rotary embeddings, for which this family's older keys have other names.

  The library ignores the usual ones.
  """
  rule = rope(fraction=0.25)
  share = "partial_rotary_factor"
  names = {"rope_theta": "rotary_emb_base", share: "rotary_pct"}

  def read(config: ConfigJson) -> Mapping[str, Any]:
    own = {name: config[key] for name, key in names.items()}
    return rule.read(ConfigJson(config.path, {**config, **own}))

  def write(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    config = dict(rule.write(fields))
    stored = config.pop("rope_scaling") or {"rope_type": "default"}
    for key in ("rope_theta", share):
      stored[key] = config.pop(key)
    return config | {"rope_parameters": stored}

  keys = {key: x for key, x in rule.keys.items() if key not in names}
  keys |= dict.fromkeys(names.values())
  return rule._replace(keys=keys, read=read, write=write)


_NEOX = "gpt_neox.layers.{i}."
GPT_NEOX = LLAMA.but(
  "gpt_neox",
  "GPTNeoXForCausalLM",
  arrays=table(
    plain("gpt_neox.embed_in.weight", "token_embedding"),
    norm("gpt_neox.final_layer_norm", "norm"),
    linear("embed_out", "head"),
    linear("score", "score"),
    norm(_NEOX + "input_layernorm", "blocks/attention_norm"),
    norm(_NEOX + "post_attention_layernorm", "blocks/mlp_norm"),
    # Queries, keys and values take turns by head.
    dense_by_head(
      _NEOX + "attention.query_key_value",
      "blocks/attention/query",
      "blocks/attention/key",
      "blocks/attention/value",
    ),
    dense(_NEOX + "attention.dense", "blocks/attention/out"),
    dense(_NEOX + "mlp.dense_h_to_4h", "blocks/mlp/up"),
    dense(_NEOX + "mlp.dense_4h_to_h", "blocks/mlp/down"),
  ),
  keys={"norm_eps": Key("layer_norm_eps", 1e-5)},
  constants={"norm": "layernorm"},
  rules=(
    activation(PLAIN, "gelu"),
    biases(always=("mlp", "norm"), attention_bias=("qkv", "out")),
    _parallel_norms(),
    _rope_in_one_key(),
  ),
  harmless=("rope_theta", "partial_rotary_factor"),
  defaults={
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "attention_bias": True,
  },
)

_FALCON = "h.{i}."
_NEW = "new_decoder_architecture"


def _sizes_of_falcon() -> Rule:
  """Heads of keys and values, and the MLP's width, which may have a key.

  Falcon 7B has one head of keys; in the new architecture several may have
  their own.
  """
  width, new, number = "ffn_hidden_size", _NEW, "num_kv_heads"

  def read(config: ConfigJson) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    groups = config[number] or heads
    if not config[new]:
      groups = 1 if config["multi_query"] else heads
    return {
      "num_kv_heads": groups,
      "head_dim": config["hidden_size"] // heads,
      "mlp_dim": config[width] or 4 * config["hidden_size"],
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    groups, heads = fields["num_kv_heads"][0], fields["num_heads"][0]
    return {
      width: fields["mlp_dim"][0],
      number: groups,
      "multi_query": groups == 1,
      new: fields["parallel_norms"] or groups not in (1, heads),
    }

  keys = {width: None, number: None, "multi_query": True, new: False}
  return Rule(("num_kv_heads", "head_dim", "mlp_dim"), keys, read, write)


def _norms_of_falcon() -> Rule:
  """Whether attention and MLP have one input, and a norm each or one norm."""
  parallel, number = "parallel_attn", "num_ln_in_parallel_attn"

  def read(config: ConfigJson) -> dict[str, Any]:
    if not config[_NEW]:
      return {"parallel": config[parallel], "parallel_norms": False}
    config.require(parallel, True)
    return {"parallel": True, "parallel_norms": config[number] in (2, None)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    both = fields["parallel_norms"]
    return {parallel: fields["parallel"], number: 2 if both else 1}

  keys = {parallel: True, number: None, _NEW: False}
  return Rule(("parallel", "parallel_norms"), keys, read, write)


# {norm of a layer with two norms side by side: its name in other layers}.
_FALCON_NORMS = {
  "ln_attn": "input_layernorm",
  "ln_mlp": "post_attention_layernorm",
}


def falcon_names(names: Mapping[str, str]) -> dict[str, str]:
  """Names of norms as in the table; `names` are {name: name in the file}."""
  result = {}
  for name, in_file in names.items():
    for own, in_table in _FALCON_NORMS.items():
      name = name.replace(f".{own}.", f".{in_table}.")
    result[name] = in_file
  return result


def with_own_norms(name: str) -> str:
  """The published name of an array in layers with two norms side by side."""
  for own, in_table in _FALCON_NORMS.items():
    name = name.replace(f".{in_table}.", f".{own}.")
  return name


FALCON = LLAMA.but(
  "falcon",
  "FalconForCausalLM",
  arrays=table(
    plain("word_embeddings.weight", "token_embedding"),
    norm("ln_f", "norm"),
    linear("lm_head", "head"),
    linear("score", "score"),
    norm(_FALCON + "input_layernorm", "blocks/attention_norm"),
    norm(_FALCON + "post_attention_layernorm", "blocks/mlp_norm"),
    dense_by_head(
      _FALCON + "self_attention.query_key_value",
      "blocks/attention/query",
      "blocks/attention/key",
      "blocks/attention/value",
    ),
    dense(_FALCON + "self_attention.dense", "blocks/attention/out"),
    dense(_FALCON + "mlp.dense_h_to_4h", "blocks/mlp/up"),
    dense(_FALCON + "mlp.dense_4h_to_h", "blocks/mlp/down"),
  ),
  keys={"norm_eps": Key("layer_norm_epsilon", 1e-5)},
  constants={"norm": "layernorm"},
  rules=(
    activation(PLAIN, "gelu", "activation"),
    biases(always=("norm",), bias=("qkv", "out", "mlp")),
    _norms_of_falcon(),
    _sizes_of_falcon(),
  ),
  requires={"alibi": (False,)},
  aliases={
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
  },
  harmless=("apply_residual_connection_post_layernorm",),
  defaults={
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "tie_word_embeddings": True,
  },
)
