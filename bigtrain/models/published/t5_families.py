"""T5, T5 1.1, mT5 and Switch Transformers: their config.json and their arrays.

Keys, defaults and names of arrays follow Hugging Face's transformers; t5x.py
has T5X's names. In the published names a block's layers are numbered: attention
and MLP in the encoder; attention, cross-attention and MLP in the decoder.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain import dims
from bigtrain.models.published import families, t5x, tables
from bigtrain.models.published.families import ConfigJson, Family, Rule, choice
from bigtrain.models.published.tables import Entry, linear, plain

_KEYS = {
  "vocab_size": "vocab_size",
  "width": "d_model",
  "head_dim": "d_kv",
  "mlp_dim": "d_ff",
  "depth": "num_layers",
  "num_heads": "num_heads",
  "num_buckets": "relative_attention_num_buckets",
  "max_distance": "relative_attention_max_distance",
  "norm_eps": "layer_norm_epsilon",
}
_DEFAULTS = dict(
  vocab_size=32128,
  d_model=512,
  d_kv=64,
  d_ff=2048,
  num_layers=6,
  num_heads=8,
  relative_attention_num_buckets=32,
  relative_attention_max_distance=128,
  layer_norm_epsilon=1e-6,
)
_IN_SHAPES = ("vocab_size", "width", "mlp_dim", "depth", "decoder_depth")
_SPARSE = ("num_sparse_encoder_layers", "num_sparse_decoder_layers")
_NO_CAPACITY = 2**30


def _decoder_depth() -> Rule:
  key = "num_decoder_layers"

  def read(config: ConfigJson) -> dict[str, Any]:
    return {"decoder_depth": config[key] or config["num_layers"]}

  return Rule({key: None}, read, lambda fields: {key: fields["decoder_depth"]})


def _tied() -> Rule:
  # Older versions of transformers scale the input of a tied head, newer ones
  # tie whatever is equal and have a key for the scale.
  tied, scaled = "tie_word_embeddings", "scale_decoder_outputs"

  def read(config: ConfigJson) -> dict[str, Any]:
    key = tied if config[scaled] is None else scaled
    return {"tied_head": config[key]}

  write = lambda fields: {tied: fields["tied_head"]}
  return Rule({tied: True, scaled: None}, read, write)


def _experts() -> Rule:
  """Experts in all layers or in layers 1, 3, 5, ..., one for each token."""

  def read(config: ConfigJson) -> dict[str, Any]:
    depths = (config["num_layers"], config["num_decoder_layers"])
    # Layers 1, 1 + step, 1 + 2 step, ... have experts; all at step 1.
    given = [(n or depths[0], config[x]) for x, n in zip(_SPARSE, depths)]
    steps = {depth // number if number else 0 for depth, number in given}
    if steps == {0}:
      return {"moe": None}
    if not steps < {1, 2}:
      raise config.error(
        f"{_SPARSE[0]}={config[_SPARSE[0]]!r}, {_SPARSE[1]}="
        f"{config[_SPARSE[1]]!r}: the model computes only experts in all "
        "layers or in every second layer of both stacks."
      )
    (every,) = steps
    num = config["num_experts"]
    moe = dict(num_experts=num, top_k=1, every=every, normalize=False)
    return {"moe": moe}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    moe = fields["moe"] or dict(num_experts=1, every=1, jitter=0.0)
    depths = (fields["depth"], fields["decoder_depth"])
    sparse = [depth // moe["every"] for depth in depths]
    return {
      "num_experts": moe["num_experts"],
      **dict(zip(_SPARSE, sparse if fields["moe"] else (0, 0))),
      # The layout's capacity is a number of tokens, ours a share of the length.
      "expert_capacity": _NO_CAPACITY,
      "router_jitter_noise": fields["jitter"],
      "router_bias": False,
    }

  return Rule(dict.fromkeys(_SPARSE, 3) | {"num_experts": 8}, read, write)


def _others() -> Rule:
  """Keys that no field depends on."""

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
      "dropout_rate": fields["dropout"],
      "is_encoder_decoder": True,
      "pad_token_id": 0,
      "decoder_start_token_id": 0,
      "eos_token_id": None,
    }

  return Rule({"is_encoder_decoder": True}, lambda config: {}, write)


_T5 = Family(
  "t5",
  "T5ForConditionalGeneration",
  (),
  keys=_KEYS,
  defaults=_DEFAULTS,
  constants=dict(moe=None),
  rules=dict(
    mlp=choice(
      "mlp", "feed_forward_proj", {"relu": "relu", "gated-gelu": "geglu"}
    ),
    decoder_depth=_decoder_depth(),
    tied=_tied(),
    others=_others(),
  ),
  harmless=("n_positions", "dense_act_fn", "is_gated_act", "output_past"),
  in_shapes=_IN_SHAPES,
)
_MT5 = _T5.but(
  "mt5",
  "MT5ForConditionalGeneration",
  defaults=dict(
    vocab_size=250_112,
    d_ff=1024,
    num_layers=8,
    num_heads=6,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
  ),
)
_SWITCH = _T5.but(
  "switch_transformers",
  "SwitchTransformersForConditionalGeneration",
  defaults=dict(
    d_model=768, num_layers=12, num_decoder_layers=12, num_heads=12
  ),
  constants=dict(),
  rules=dict(
    mlp=choice("mlp", "dense_act_fn", {"relu": "relu"}), moe=_experts()
  ),
  requires={"router_bias": (False,)},
  harmless=(
    *("expert_capacity", "add_router_probs", "router_dtype", "n_positions"),
    *("router_ignore_padding_tokens", "router_type", "sparse_step"),
    *("batch_prioritized_routing", "num_selected_experts", "is_gated_act"),
    *("encoder_sparse_step", "decoder_sparse_step", "feed_forward_proj"),
  ),
)
FAMILIES = {family.model_type: family for family in (_T5, _MT5, _SWITCH)}


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
  parts = (names | {"wo": "down"}).items()
  return [linear(f"{published}.{x}", f"{ours}/{y}/kernel") for x, y in parts]


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


def _of_mlp(kind: str, gated: str, arrays: list[Entry]) -> Family:
  mlp = choice("mlp", "feed_forward_proj", {kind: gated})
  t5 = _T5.but(_T5.model_type, _T5.architecture, rules=dict(mlp=mlp))
  return t5._replace(arrays=arrays)


LAYOUTS: dict[str, Family] = {
  "t5": _of_mlp("relu", "relu", _table()),
  "t5_1_1": _of_mlp("gated-gelu", "geglu", _table(gated=True)),
  "switch": _SWITCH._replace(arrays=_table(switch=True)),
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
    {name: family.arrays for name, family in LAYOUTS.items()},
    t5x.renamed(flat),
    like,
    param_dims,
    ignored={_UNUSED: "no implementation uses it"},
    copies=_COPIES,
  )


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """Comparable fields of a model."""
  moe = values.get("moe")
  if moe is not None and not isinstance(moe, Mapping):
    moe = moe._asdict() | {"normalize": moe.normalizes()}
  names = ("num_experts", "top_k", "every", "normalize")
  own = moe and {name: moe[name] for name in names}
  jitter = moe.get("jitter", 0.0) if moe else 0.0
  return {**values, "moe": own, "jitter": jitter}


def _of_model(model: Any) -> dict[str, Family]:
  if model.tied_head:
    return LAYOUTS
  # transformers reads all three embeddings of a Switch Transformer.
  copies = [plain(name, "token_embedding") for name in _COPIES]
  switch = LAYOUTS["switch"]
  switch = switch._replace(arrays=[*switch.arrays, *copies])
  return LAYOUTS | {"switch": switch}


PUBLISHED = families.Layouts(FAMILIES, canonical, _of_model)
