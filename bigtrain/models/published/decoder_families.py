"""GPT-2, Llama, Mistral and Mixtral: their config.json and their arrays.

Keys, defaults and names of arrays follow Hugging Face's transformers.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain import dims, settings
from bigtrain.models.published import families, tables
from bigtrain.models.published.families import ConfigJson, Family, Field
from bigtrain.models.published.tables import Entry, linear, plain

_GPT2_KEYS, _GPT2_DEFAULTS = families.keys_and_defaults(
  {
    "vocab_size": ("vocab_size", 50257),
    "max_len": ("n_positions", 1024),
    "width": ("n_embd", 768),
    "depth": ("n_layer", 12),
    "num_heads": ("n_head", 12),
    "mlp_dim": ("n_inner", None),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
  }
)
_GPT2_DEFAULTS |= dict(tie_word_embeddings=True)
_LLAMA_KEYS, _LLAMA_DEFAULTS = families.keys_and_defaults(
  {
    "vocab_size": ("vocab_size", 32000),
    "max_len": ("max_position_embeddings", 2048),
    "width": ("hidden_size", 4096),
    "depth": ("num_hidden_layers", 32),
    "num_heads": ("num_attention_heads", 32),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "mlp_dim": ("intermediate_size", 11008),
    "norm_eps": ("rms_norm_eps", 1e-6),
  }
)
_LLAMA_DEFAULTS |= dict(
  rope_theta=1e4, sliding_window=None, tie_word_embeddings=False
)
# Values that all these architectures have in common.
_PLAIN: dict[str, Any] = dict(
  qk_norm=None, attention_softcap=None, logits_softcap=None
)
_GPT2_FIELDS = _PLAIN | dict(
  posemb="learn",
  norm="layernorm",
  mlp="gelu",
  use_bias=("qkv", "out", "mlp", "norm"),
)
_LLAMA_FIELDS = _PLAIN | dict(
  posemb="rope", norm="rmsnorm", mlp="swiglu", use_bias=()
)
_IN_SHAPES = ("vocab_size", "width", "depth", "mlp_dim")

_MISTRAL_DEFAULTS = _LLAMA_DEFAULTS | dict(
  max_position_embeddings=131_072,
  num_key_value_heads=8,
  intermediate_size=14_336,
)

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


def _gpt2(config: ConfigJson, fields: dict[str, Field]) -> dict[str, Field]:
  return _tied(config) | _derived(fields)


def _llama(config: ConfigJson, fields: dict[str, Field]) -> dict[str, Field]:
  # Rotary models have no array of positions: max_len is a mere limit.
  max_len = fields["max_len"]._replace(is_limit=True)
  others = {"max_len": max_len, **_rope(config), **_tied(config)}
  return others | _derived(fields)


def _mixtral(config: ConfigJson, fields: dict[str, Field]) -> dict[str, Field]:
  experts = dict(
    num_experts=config["num_local_experts"],
    top_k=config["num_experts_per_tok"],
    every=1,
    normalize=True,
  )
  moe = Field(experts, "num_local_experts, num_experts_per_tok")
  return _llama(config, fields) | {"moe": moe}


def _tied(config: ConfigJson) -> dict[str, Field]:
  # A head of its own in the file overrides this key: the arrays decide.
  key = "tie_word_embeddings"
  head = "lm_head.weight" if config[key] else None
  return {"tied_head": Field(config[key], key, unless_array=head)}


def _derived(fields: dict[str, Field]) -> dict[str, Field]:
  width, heads = fields["width"].value, fields["num_heads"].value
  absent = fields["num_heads"]._replace(value=None, in_shapes=False)
  return {
    name: fields.get(name, absent)._replace(value=value)
    for name, value in (
      ("head_dim", width // heads),
      ("num_kv_heads", heads),
      ("mlp_dim", 4 * width),
    )
    if fields.get(name, absent).value is None
  }


def _rope(config: ConfigJson) -> dict[str, Field]:
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
  names = _SCALINGS.get(str(kind), {})
  if not names or not set(names.values()) <= set(values):
    raise wrong
  scaling = {ours: values[theirs] for ours, theirs in names.items()}
  return {
    "rope_theta": theta,
    "rope_scaling": Field({"type": kind, **scaling}, key),
  }


_LLAMA_REQUIRES = {
  "hidden_act": ("silu", "swish"),
  "attention_bias": (False,),
  "mlp_bias": (False,),
}
_LLAMA_FAMILY = Family(
  _LLAMA_DEFAULTS,
  _LLAMA_KEYS,
  _LLAMA_FIELDS | dict(window=None, moe=None),
  _LLAMA_REQUIRES,
  _IN_SHAPES,
  _llama,
)
_MISTRAL_FAMILY = _LLAMA_FAMILY._replace(
  defaults=_MISTRAL_DEFAULTS | dict(sliding_window=4096),
  keys=_LLAMA_KEYS | dict(window="sliding_window"),
  constants=_LLAMA_FIELDS | dict(moe=None),
)
FAMILIES = {
  "gpt2": Family(
    _GPT2_DEFAULTS,
    _GPT2_KEYS,
    _GPT2_FIELDS | dict(window=None, moe=None),
    {
      "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
      "scale_attn_weights": (True,),
      "scale_attn_by_inverse_layer_idx": (False,),
      "add_cross_attention": (False,),
    },
    (*_IN_SHAPES, "max_len"),
    _gpt2,
  ),
  "llama": _LLAMA_FAMILY,
  "mistral": _MISTRAL_FAMILY,
  "mixtral": _MISTRAL_FAMILY._replace(
    defaults=_MISTRAL_DEFAULTS
    | dict(
      rms_norm_eps=1e-5,
      rope_theta=1e6,
      num_local_experts=8,
      num_experts_per_tok=2,
    ),
    constants=_LLAMA_FIELDS,
    others=_mixtral,
  ),
}


def _gpt2_layer(published: str, *ours: str) -> list[Entry]:
  """Returns the entries of a weight (inputs, outputs) and a bias."""
  kernels = (f"blocks/{name}/kernel" for name in ours)
  biases = (f"blocks/{name}/bias" for name in ours)
  return [
    plain(f"h.{{i}}.{published}.weight", *kernels),
    plain(f"h.{{i}}.{published}.bias", *biases),
  ]


def _gpt2_norm(published: str, ours: str) -> list[Entry]:
  return [
    plain(f"{published}.weight", f"{ours}/scale"),
    plain(f"{published}.bias", f"{ours}/bias"),
  ]


def _llama_layer(published: str, ours: str) -> Entry:
  return linear(f"model.layers.{{i}}.{published}", f"blocks/{ours}/kernel")


def _llama_norm(published: str, ours: str) -> Entry:
  name = f"model.layers.{{i}}.{published}.weight"
  return plain(name, f"blocks/{ours}/scale")


_HEAD = linear("lm_head", "head/kernel")
_QKV = ("attention/query", "attention/key", "attention/value")
_LLAMA_ATTENTION = [
  plain("model.embed_tokens.weight", "token_embedding"),
  _llama_layer("self_attn.q_proj", "attention/query"),
  _llama_layer("self_attn.k_proj", "attention/key"),
  _llama_layer("self_attn.v_proj", "attention/value"),
  _llama_layer("self_attn.o_proj", "attention/out"),
  _llama_norm("input_layernorm", "attention_norm"),
  _llama_norm("post_attention_layernorm", "mlp_norm"),
  plain("model.norm.weight", "norm/scale"),
]
LAYOUTS: dict[str, tables.Table] = {
  "gpt2": [
    plain("wte.weight", "token_embedding"),
    plain("wpe.weight", "pos_embedding"),
    *_gpt2_norm("h.{i}.ln_1", "blocks/attention_norm"),
    *_gpt2_layer("attn.c_attn", *_QKV),
    *_gpt2_layer("attn.c_proj", "attention/out"),
    *_gpt2_norm("h.{i}.ln_2", "blocks/mlp_norm"),
    *_gpt2_layer("mlp.c_fc", "mlp/up"),
    *_gpt2_layer("mlp.c_proj", "mlp/down"),
    *_gpt2_norm("ln_f", "norm"),
    _HEAD,
  ],
  "llama": [
    *_LLAMA_ATTENTION,
    _llama_layer("mlp.gate_proj", "mlp/gate"),
    _llama_layer("mlp.up_proj", "mlp/up"),
    _llama_layer("mlp.down_proj", "mlp/down"),
    _HEAD,
  ],
  "mixtral": [
    *_LLAMA_ATTENTION,
    _llama_layer("block_sparse_moe.gate", "moe/router"),
    _llama_layer("block_sparse_moe.experts.{e}.w1", "moe/gate"),
    _llama_layer("block_sparse_moe.experts.{e}.w3", "moe/up"),
    _llama_layer("block_sparse_moe.experts.{e}.w2", "moe/down"),
    _HEAD,
  ],
}

_CONSTANTS = (
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids"
)
_PREFIX = "transformer."


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts published arrays. GPT-2's may start with "transformer."."""
  # {name without the prefix: name in the file}. Of two, the one with it wins.
  in_order = sorted(flat, key=lambda name: name.startswith(_PREFIX))
  names = {name.removeprefix(_PREFIX): name for name in in_order}
  result = tables.load(
    LAYOUTS,
    {short: flat[name] for short, name in names.items()},
    like,
    param_dims,
    ignored={_CONSTANTS: "a constant that the model computes"},
  )
  if result is None:
    return None
  # A file may have a name with and without the prefix.
  twice = {name: flat[name] for name in set(flat) - set(names.values())}
  ours = {name: x for name, x in result.items() if name in like}
  theirs = {names[n]: x for n, x in result.items() if n not in like}
  return ours | theirs | twice


# {layout of an export: values of a model's fields that it requires}.
_NEEDS: dict[str, dict[str, Any]] = {
  "gpt2": _GPT2_FIELDS | dict(tied_head=True, window=None),
  "llama": _LLAMA_FIELDS | dict(window=None),
  "mixtral": _LLAMA_FIELDS,
}


def export(
  model: Any, shapes: tables.Shapes, layout: str, param_dims: dims.Table
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  """Returns (contents of config.json, arrays) in a published layout."""
  families.check_layout(layout, model, _NEEDS)
  if (model.moe is not None) != (layout == "mixtral"):
    raise settings.ConfigError(
      f"--layout={layout}: expected config.model.moe for the layout mixtral "
      f"and None for all others, got {model.moe}."
    )
  config = _gpt2_config(model) if layout == "gpt2" else _llama_config(model)
  return config | {"bos_token_id": None, "eos_token_id": None}, tables.export(
    layout, LAYOUTS[layout], shapes, param_dims
  )


def _gpt2_config(model: Any) -> dict[str, Any]:
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
  }


def _llama_config(model: Any) -> dict[str, Any]:
  scaling = model.rope_scaling
  if scaling:
    keys = {"type": "rope_type", **_SCALINGS[scaling["type"]]}
    scaling = {keys[name]: value for name, value in scaling.items()}
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **{key: getattr(model, name) for name, key in _LLAMA_KEYS.items()},
    "max_position_embeddings": model.max_len or 2048,
    "hidden_act": "silu",
    "rope_theta": model.rope_theta,
    "rope_scaling": scaling or None,
    "tie_word_embeddings": model.tied_head,
  }
  if model.moe is None:
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
