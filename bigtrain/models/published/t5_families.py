"""T5, T5 1.1, mT5 and Switch Transformers: their config.json and their arrays.

Keys, defaults and names of arrays follow Hugging Face's transformers; t5x.py
has T5X's names. In the published names a block's layers are numbered: attention
and MLP in the encoder; attention, cross-attention and MLP in the decoder.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain import dims, settings
from bigtrain.models.published import families, t5x, tables
from bigtrain.models.published.families import ConfigJson, Family, Field
from bigtrain.models.published.tables import Entry, linear, plain

_KEYS, _DEFAULTS = families.keys_and_defaults(
  {
    "vocab_size": ("vocab_size", 32128),
    "width": ("d_model", 512),
    "head_dim": ("d_kv", 64),
    "mlp_dim": ("d_ff", 2048),
    "depth": ("num_layers", 6),
    "decoder_depth": ("num_decoder_layers", None),
    "num_heads": ("num_heads", 8),
    "num_buckets": ("relative_attention_num_buckets", 32),
    "max_distance": ("relative_attention_max_distance", 128),
    "norm_eps": ("layer_norm_epsilon", 1e-6),
  }
)
_DEFAULTS |= dict(feed_forward_proj="relu", tie_word_embeddings=True)
_IN_SHAPES = ("vocab_size", "width", "mlp_dim", "depth", "decoder_depth")

_MLPS = {"relu": "relu", "gated-gelu": "geglu"}
_SWITCH = "switch_transformers"


def _t5(config: ConfigJson, fields: dict[str, Field]) -> dict[str, Field]:
  mlp = Field(_MLPS[config["feed_forward_proj"]], "feed_forward_proj")
  return {"mlp": mlp, **_common(config, fields)}


def _switch(config: ConfigJson, fields: dict[str, Field]) -> dict[str, Field]:
  mlp = Field("relu", "dense_act_fn")
  return {"mlp": mlp, "moe": _experts(config), **_common(config, fields)}


def _common(config: ConfigJson, fields: dict[str, Field]) -> dict[str, Field]:
  depth = fields["decoder_depth"]
  # Older versions of transformers scale the input of a tied head, newer ones
  # tie whatever is equal and have a key for the scale.
  tied = "tie_word_embeddings"
  if "scale_decoder_outputs" in config:
    tied = "scale_decoder_outputs"
  return {
    "decoder_depth": fields["depth"] if depth.value is None else depth,
    "tied_head": Field(config[tied], tied),
  }


def _experts(config: ConfigJson) -> Field:
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


_FAMILY = Family(
  _DEFAULTS,
  _KEYS,
  dict(moe=None),
  {"feed_forward_proj": tuple(_MLPS)},
  _IN_SHAPES,
  _t5,
)
FAMILIES = {
  "t5": _FAMILY,
  "mt5": _FAMILY._replace(
    defaults=_DEFAULTS
    | dict(
      vocab_size=250_112,
      d_ff=1024,
      num_layers=8,
      num_heads=6,
      feed_forward_proj="gated-gelu",
      tie_word_embeddings=False,
    )
  ),
  _SWITCH: Family(
    _DEFAULTS
    | dict(
      d_model=768,
      num_layers=12,
      num_decoder_layers=12,
      num_heads=12,
      num_sparse_encoder_layers=3,
      num_sparse_decoder_layers=3,
      num_experts=8,
    ),
    _KEYS,
    {},
    {"dense_act_fn": ("relu",), "router_bias": (False,)},
    _IN_SHAPES,
    _switch,
  ),
}


def _attention(
  stack: str, number: int, published: str, ours: str
) -> list[Entry]:
  name = f"{stack}.block.{{i}}.layer.{number}"
  of = lambda part: f"{stack}/blocks/{ours}/{part}/kernel"
  return [
    plain(f"{name}.layer_norm.weight", f"{stack}/blocks/{ours}_norm/scale"),
    linear(f"{name}.{published}.q", of("query")),
    linear(f"{name}.{published}.k", of("key")),
    linear(f"{name}.{published}.v", of("value")),
    linear(f"{name}.{published}.o", of("out")),
  ]


def _mlp(published: str, ours: str, gated: bool) -> list[Entry]:
  names = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
  return [
    linear(f"{published}.{theirs}", f"{ours}/{part}/kernel")
    for theirs, part in (names | {"wo": "down"}).items()
  ]


def _stack(stack: str, gated: bool, switch: bool) -> list[Entry]:
  blocks = f"{stack}/blocks"
  number = 2 if stack == "decoder" else 1
  layer = f"{stack}.block.{{i}}.layer.{number}"
  table = [
    plain(
      f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
      f"{stack}/relative_bias/embedding",
    ),
    *_attention(stack, 0, "SelfAttention", "attention"),
  ]
  if stack == "decoder":
    table += _attention(stack, 1, "EncDecAttention", "cross_attention")
  table.append(plain(f"{layer}.layer_norm.weight", f"{blocks}/mlp_norm/scale"))
  if switch:
    expert = f"{layer}.mlp.experts.expert_{{e}}"
    router = f"{layer}.mlp.router.classifier"
    table += [
      *_mlp(f"{layer}.mlp", f"{blocks}/mlp", gated),
      linear(router, f"{blocks}/moe/router/kernel"),
      *_mlp(expert, f"{blocks}/moe", gated),
    ]
  else:
    table += _mlp(f"{layer}.DenseReluDense", f"{blocks}/mlp", gated)
  norm = plain(f"{stack}.final_layer_norm.weight", f"{stack}/norm/scale")
  return [*table, norm]


def _table(gated: bool = False, switch: bool = False) -> list[Entry]:
  return [
    plain("shared.weight", "token_embedding"),
    *_stack("encoder", gated, switch),
    *_stack("decoder", gated, switch),
    linear("lm_head", "head/kernel"),
  ]


LAYOUTS: dict[str, tables.Table] = {
  "t5": _table(),
  "t5_1_1": _table(gated=True),
  "switch": _table(switch=True),
}
# Copies of the embedding.
_COPIES = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
# A table in the released files of version 1.0.
_UNUSED = (
  "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
)


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  return tables.load(
    LAYOUTS,
    t5x.renamed(flat),
    like,
    param_dims,
    ignored={_UNUSED: "no implementation uses it"},
    copies=_COPIES,
  )


# {layout of an export: values of a model's fields that it requires}.
_NEEDS: dict[str, dict[str, Any]] = {
  "t5": dict(mlp="relu", moe=None),
  "t5_1_1": dict(mlp="geglu", moe=None),
  "switch": dict(mlp="relu"),
}
_NO_CAPACITY = 2**30


def export(
  model: Any, shapes: tables.Shapes, layout: str, param_dims: dims.Table
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  """Returns (contents of config.json, arrays) in a published layout."""
  families.check_layout(layout, model, _NEEDS)
  table = list(LAYOUTS[layout])
  if layout == "switch" and not model.tied_head:
    table += [plain(name, "token_embedding") for name in _COPIES]
  config = _config(model, layout)
  return config, tables.export(layout, table, shapes, param_dims)


def _config(model: Any, layout: str) -> dict[str, Any]:
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
