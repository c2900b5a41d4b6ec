"""config.json of GPT-2, Llama, Mistral and Mixtral: read and written.

Keys and defaults follow transformers' configuration classes.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain import settings
from bigtrain.models.published import configs, layouts
from bigtrain.models.published.configs import ConfigJson, Field, Fields

# {our field: key}; None in the file means that the field is derived.
_GPT2_KEYS = {
  "vocab_size": "vocab_size",
  "max_len": "n_positions",
  "width": "n_embd",
  "depth": "n_layer",
  "num_heads": "n_head",
  "mlp_dim": "n_inner",
  "norm_eps": "layer_norm_epsilon",
}
_LLAMA_KEYS = {
  "vocab_size": "vocab_size",
  "max_len": "max_position_embeddings",
  "width": "hidden_size",
  "depth": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "mlp_dim": "intermediate_size",
  "norm_eps": "rms_norm_eps",
}
# Values that all these architectures have in common.
_PLAIN: dict[str, Any] = dict(
  qk_norm=False, attention_softcap=None, logits_softcap=None
)
_GPT2_FIELDS = _PLAIN | dict(
  posemb="learn", norm="layernorm", mlp="gelu", use_bias=True
)
_LLAMA_FIELDS = _PLAIN | dict(
  posemb="rope", norm="rmsnorm", mlp="swiglu", use_bias=False
)
_IN_SHAPES = ("vocab_size", "width", "depth", "mlp_dim")

# What a key that is absent means.
_GPT2 = dict(
  vocab_size=50257,
  n_positions=1024,
  n_embd=768,
  n_layer=12,
  n_head=12,
  n_inner=None,
  layer_norm_epsilon=1e-5,
  tie_word_embeddings=True,
)
_LLAMA: dict[str, Any] = dict(
  vocab_size=32000,
  max_position_embeddings=2048,
  hidden_size=4096,
  num_hidden_layers=32,
  num_attention_heads=32,
  num_key_value_heads=None,
  head_dim=None,
  intermediate_size=11008,
  rms_norm_eps=1e-6,
  rope_theta=1e4,
  sliding_window=None,
  tie_word_embeddings=False,
)
_MISTRAL = _LLAMA | dict(
  max_position_embeddings=131_072,
  num_key_value_heads=8,
  intermediate_size=14_336,
)
_DEFAULTS: dict[str, dict[str, Any]] = {
  "gpt2": _GPT2,
  "llama": _LLAMA,
  "mistral": _MISTRAL | dict(sliding_window=4096),
  "mixtral": _MISTRAL
  | dict(
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    num_local_experts=8,
    num_experts_per_tok=2,
  ),
}

# Keys of scaled rotary embeddings, {ours: theirs}.
_SCALINGS = {
  "linear": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_len": "original_max_position_embeddings",
  },
}


def fields(path: str) -> Fields | None:
  """Returns the fields of models.decoder.Model that a config.json determines.

  Returns:
    None if there is no config.json of a published model.

  Raises:
    ConfigError: an architecture that the decoder does not compute.
  """
  config = configs.read(path, _DEFAULTS)
  if config is None:
    return None
  kind = f"model_type={config.kind!r}"
  fixed = _GPT2_FIELDS if config.kind == "gpt2" else _LLAMA_FIELDS
  keys = _GPT2_KEYS if config.kind == "gpt2" else _LLAMA_KEYS
  result = {name: Field(value, kind) for name, value in fixed.items()}
  for name, key in keys.items():
    result[name] = Field(config[key], key, in_shapes=name in _IN_SHAPES)
  # A head of its own in the file overrides this key: the arrays decide.
  tied = config["tie_word_embeddings"]
  result["tied_head"] = Field(
    tied,
    "tie_word_embeddings",
    unless_array="lm_head.weight" if tied else None,
  )
  if config.kind == "gpt2":
    _check_gpt2(config)
    result |= {
      "max_len": result["max_len"]._replace(in_shapes=True),
      "num_kv_heads": result["num_heads"],
      "window": Field(None, kind),
      "moe": Field(None, kind),
    }
  else:
    config.require("hidden_act", "silu", "swish")
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    # Rotary models have no array of positions: max_len is a mere limit.
    result["max_len"] = result["max_len"]._replace(is_limit=True)
    result |= _rope(config)
    result["window"] = Field(config["sliding_window"], "sliding_window")
    if config.kind == "llama":
      result["window"] = Field(None, kind)
    result["moe"] = _moe(config)
  return Fields(config, _derived(result))


def _check_gpt2(config: ConfigJson) -> None:
  tanh_gelus = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
  config.require("activation_function", *tanh_gelus)
  config.require("scale_attn_weights", True)
  config.require("scale_attn_by_inverse_layer_idx", False)
  config.require("add_cross_attention", False)


def _derived(fields: dict[str, Field]) -> dict[str, Field]:
  """Fills the sizes that follow from others."""
  width, heads = fields["width"].value, fields["num_heads"].value
  derived = {"head_dim": width // heads, "num_kv_heads": heads}
  derived["mlp_dim"] = 4 * width
  for name, value in derived.items():
    field = fields.get(name, Field(None, fields["num_heads"].key))
    if field.value is None:
      fields[name] = field._replace(value=value)
  return fields


def _rope(config: ConfigJson) -> dict[str, Field]:
  """Returns rope_theta and rope_scaling."""
  # transformers 5 has both in `rope_parameters`.
  key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
  values = dict(config.get(key) or {})
  wrong = config.error(
    f"{key}={values!r}: the model computes only rotary embeddings of all "
    f"features, of the types 'default', {', '.join(map(repr, _SCALINGS))}."
  )
  theta = Field(config["rope_theta"], "rope_theta")
  if "rope_theta" in values:
    theta = Field(values["rope_theta"], f"{key}.rope_theta")
  config.require("partial_rotary_factor", 1.0, None)
  per_layer = any(isinstance(value, dict) for value in values.values())
  if per_layer or values.get("partial_rotary_factor", 1.0) != 1.0:
    raise wrong
  kind = values.get("rope_type", values.get("type", "default"))
  if kind == "default":
    return {"rope_theta": theta, "rope_scaling": Field(None, key)}
  names = _SCALINGS.get(kind, {})
  if not names or not set(names.values()) <= set(values):
    raise wrong
  scaling = {ours: values[theirs] for ours, theirs in names.items()}
  return {
    "rope_theta": theta,
    "rope_scaling": Field({"type": kind, **scaling}, key),
  }


def _moe(config: ConfigJson) -> Field:
  if config.kind != "mixtral":
    return Field(None, f"model_type={config.kind!r}")
  experts = dict(
    num_experts=config["num_local_experts"],
    top_k=config["num_experts_per_tok"],
    every=1,
    normalize=True,
  )
  return Field(experts, "num_local_experts, num_experts_per_tok")


# Values of a model's fields that each layout requires.
_NEEDS: dict[str, dict[str, Any]] = {
  "gpt2": _GPT2_FIELDS | dict(tied_head=True, window=None),
  "llama": _LLAMA_FIELDS | dict(window=None),
  "mixtral": _LLAMA_FIELDS,
}


def write(model: Any, layout: str) -> dict[str, Any]:
  """Returns the contents of config.json for an export.

  Args:
    layout: "gpt2", "llama" or "mixtral".

  Raises:
    ConfigError: the layout cannot represent the model.
  """
  layouts.check_model(layout, model, _NEEDS)
  if (model.moe is not None) != (layout == "mixtral"):
    raise settings.ConfigError(
      f"--layout={layout}: expected config.model.moe for the layout mixtral "
      f"and None for all others, got {model.moe}."
    )
  if layout == "gpt2":
    return _write_gpt2(model)
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **{key: getattr(model, name) for name, key in _LLAMA_KEYS.items()},
    "max_position_embeddings": model.max_len or 2048,
    "hidden_act": "silu",
    "rope_theta": model.rope_theta,
    "rope_scaling": _write_scaling(model.rope_scaling),
    "tie_word_embeddings": model.tied_head,
    "bos_token_id": None,
    "eos_token_id": None,
  }
  if layout == "llama":
    return config
  if not model.moe.normalizes():
    raise settings.ConfigError(
      "--layout=mixtral: expected config.model.moe.normalize=True, got "
      f"{model.moe}."
    )
  return config | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": model.window,
    "num_local_experts": model.moe.num_experts,
    "num_experts_per_tok": model.moe.top_k,
  }


def _write_gpt2(model: Any) -> dict[str, Any]:
  heads = (model.num_kv_heads, model.num_heads * model.head_dim)
  if heads != (model.num_heads, model.width):
    raise settings.ConfigError(
      f"--layout=gpt2: expected num_kv_heads={model.num_heads} and num_heads "
      f"x head_dim={model.width}, got {heads[0]} and {heads[1]}."
    )
  return {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    **{key: getattr(model, name) for name, key in _GPT2_KEYS.items()},
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
  }


def _write_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
  if not scaling:
    return None
  keys = {"type": "rope_type", **_SCALINGS[scaling["type"]]}
  return {keys[name]: value for name, value in scaling.items()}
