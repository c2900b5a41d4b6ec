"""config.json of T5, mT5 and Switch Transformers: read and written.

Keys and defaults follow transformers' configuration classes.
"""

from typing import Any

from bigtrain import settings
from bigtrain.models.published import configs, layouts
from bigtrain.models.published.configs import ConfigJson, Field, Fields

# {our field: key}.
_KEYS = {
  "vocab_size": "vocab_size",
  "width": "d_model",
  "head_dim": "d_kv",
  "mlp_dim": "d_ff",
  "depth": "num_layers",
  "decoder_depth": "num_decoder_layers",
  "num_heads": "num_heads",
  "num_buckets": "relative_attention_num_buckets",
  "max_distance": "relative_attention_max_distance",
  "norm_eps": "layer_norm_epsilon",
}
_IN_SHAPES = ("vocab_size", "width", "mlp_dim", "depth", "decoder_depth")

# What a key that is absent means.
_T5 = dict(
  vocab_size=32128,
  d_model=512,
  d_kv=64,
  d_ff=2048,
  num_layers=6,
  num_decoder_layers=None,
  num_heads=8,
  relative_attention_num_buckets=32,
  relative_attention_max_distance=128,
  layer_norm_epsilon=1e-6,
  feed_forward_proj="relu",
  tie_word_embeddings=True,
)
_DEFAULTS: dict[str, dict[str, Any]] = {
  "t5": _T5,
  "mt5": _T5
  | dict(
    vocab_size=250_112,
    d_ff=1024,
    num_layers=8,
    num_heads=6,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
  ),
  "switch_transformers": _T5
  | dict(
    d_model=768,
    num_layers=12,
    num_decoder_layers=12,
    num_heads=12,
    num_sparse_encoder_layers=3,
    num_sparse_decoder_layers=3,
    num_experts=8,
  ),
}
_MLPS = {"relu": "relu", "gated-gelu": "geglu"}
_SWITCH = "switch_transformers"


def fields(path: str) -> Fields | None:
  """Returns the fields of models.t5.Model that a config.json determines.

  Returns:
    None if there is no config.json of a published model.

  Raises:
    ConfigError: an architecture that the model does not compute.
  """
  config = configs.read(path, _DEFAULTS)
  if config is None:
    return None
  result = {
    name: Field(config[key], key, in_shapes=name in _IN_SHAPES)
    for name, key in _KEYS.items()
  }
  if result["decoder_depth"].value is None:
    result["decoder_depth"] = result["depth"]
  # Older versions of transformers scale the input of a tied head, newer ones
  # tie whatever is equal and have a key for the scale.
  tied = "tie_word_embeddings"
  if "scale_decoder_outputs" in config:
    tied = "scale_decoder_outputs"
  result["tied_head"] = Field(config[tied], tied)
  if config.kind == _SWITCH:
    config.require("dense_act_fn", "relu")
    config.require("router_bias", False)
    result["mlp"] = Field("relu", "dense_act_fn")
    result["moe"] = _experts(config)
  else:
    config.require("feed_forward_proj", *_MLPS)
    mlp = _MLPS[config["feed_forward_proj"]]
    result["mlp"] = Field(mlp, "feed_forward_proj")
    result["moe"] = Field(None, f"model_type={config.kind!r}")
  return Fields(config, result)


def _experts(config: ConfigJson) -> Field:
  """Returns the field `moe` of a Switch Transformer."""
  keys = ("num_sparse_encoder_layers", "num_sparse_decoder_layers")
  depths = (config["num_layers"], config["num_decoder_layers"])
  key = ", ".join(keys)
  # Layers 1, 1 + step, 1 + 2 step, ... have experts; all have them at step 1.
  steps = {
    depth // config[name] if config[name] else 0
    for name, depth in zip(keys, depths)
  }
  if steps == {0}:
    return Field(None, key)
  if not steps < {1, 2}:
    raise config.error(
      f"{keys[0]}={config[keys[0]]!r}, {keys[1]}={config[keys[1]]!r}: the "
      "model computes only experts in all layers or in every second layer of "
      "both stacks."
    )
  (every,) = steps
  experts = dict(
    num_experts=config["num_experts"], top_k=1, every=every, normalize=False
  )
  return Field(experts, f"num_experts, {key}")


_NEEDS: dict[str, dict[str, Any]] = {
  "t5": dict(mlp="relu", moe=None),
  "t5_1_1": dict(mlp="geglu", moe=None),
  "switch": dict(mlp="relu"),
}
_NO_CAPACITY = 2**30


def write(model: Any, layout: str) -> dict[str, Any]:
  """Returns the contents of config.json for an export.

  Args:
    model: the T5.
    layout: "t5", "t5_1_1" or "switch".

  Raises:
    ConfigError: the layout cannot represent the model.
  """
  layouts.check_model(layout, model, _NEEDS)
  config = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    **{key: getattr(model, name) for name, key in _KEYS.items()},
    "dropout_rate": model.dropout,
    "is_encoder_decoder": True,
    "tie_word_embeddings": model.tied_head,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": None,
  }
  if layout != "switch":
    gated = model.mlp == "geglu"
    return config | {"feed_forward_proj": "gated-gelu" if gated else "relu"}
  moe = model.moe
  # The layout has experts in all layers or in layers 1, 3, 5, ..., and one for
  # each token.
  if moe is None or moe.every > 2 or moe.top_k > 1 or moe.normalizes():
    raise settings.ConfigError(
      "--layout=switch: expected config.model.moe with every=1 or 2, top_k=1 "
      f"and normalize=False, got {moe}."
    )
  return config | {
    "architectures": ["SwitchTransformersForConditionalGeneration"],
    "model_type": _SWITCH,
    "num_experts": moe.num_experts,
    "num_sparse_encoder_layers": model.depth // moe.every,
    "num_sparse_decoder_layers": model.decoder_depth // moe.every,
    # The layout's capacity is a number of tokens, ours a share of the length.
    "expert_capacity": _NO_CAPACITY,
    "router_jitter_noise": moe.jitter,
    "router_bias": False,
    "dense_act_fn": "relu",
  }
