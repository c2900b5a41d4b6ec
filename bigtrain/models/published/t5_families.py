"""T5, T5 1.1, mT5 and Switch Transformers.

Keys and defaults follow transformers. t5_arrays.py has the arrays, also by the
names of T5X and of Mesh TensorFlow.
"""

import re
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import array_files, layouts, t5_arrays
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Key,
  Rule,
  choice,
)
from bigtrain.models.published.tables import plain, table


def _decoder_depth() -> Rule:
  """Layers of the decoder, by default as many as in the encoder."""
  key = "num_decoder_layers"
  return Rule(
    ("decoder_depth",),
    {key: None},
    lambda config: {"decoder_depth": config[key] or config["num_layers"]},
    lambda fields: {key: fields["decoder_depth"]},
  )


def _tied_head() -> Rule:
  """Whether the head is the embedding.

  Older versions of transformers scale the input of a tied head. Newer ones tie
  arrays that are equal, and have a key for the scale.
  """
  tied, scaled = "tie_word_embeddings", "scale_decoder_outputs"

  def read(config: ConfigJson) -> dict[str, Any]:
    key = tied if config[scaled] is None else scaled
    return {"tied_head": config[key]}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {tied: fields["tied_head"]}

  return Rule(("tied_head",), {tied: True, scaled: None}, read, write)


def _keys_without_fields() -> Rule:
  """Keys that the library wants and that no field depends on."""

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
      "dropout_rate": fields["dropout"],
      "is_encoder_decoder": True,
      "pad_token_id": 0,
      "decoder_start_token_id": 0,
      "eos_token_id": None,
    }

  return Rule((), {"is_encoder_decoder": True}, lambda config: {}, write)


_SPARSE = ("num_sparse_encoder_layers", "num_sparse_decoder_layers")
# The library's capacity is a number of tokens, and ours a share of the length.
# This number drops no token.
_NO_CAPACITY = 2**30


def _experts() -> Rule:
  """Experts in all layers or in layers 1, 3, 5, ..., one for each token."""

  def read(config: ConfigJson) -> dict[str, Any]:
    encoder_depth = config["num_layers"]
    decoder_depth = config["num_decoder_layers"] or encoder_depth
    # Layers 1, 1 + step, 1 + 2 step, ... have experts; all at step 1.
    steps = set()
    for key, depth in zip(_SPARSE, (encoder_depth, decoder_depth)):
      steps.add(depth // config[key] if config[key] else 0)
    if steps == {0}:
      return {"moe": None}
    if not steps < {1, 2}:
      raise config.error(
        f"{_SPARSE[0]}={config[_SPARSE[0]]!r}, {_SPARSE[1]}="
        f"{config[_SPARSE[1]]!r}: the model computes only experts in all "
        "layers or in every second layer of both stacks."
      )
    (every,) = steps
    moe = {
      "num_experts": config["num_experts"],
      "top_k": 1,
      "every": every,
      "normalize": False,
    }
    return {"moe": moe}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    moe = fields["moe"]
    sparse = [0, 0]
    if moe:
      depths = (fields["depth"], fields["decoder_depth"])
      sparse = [depth // moe["every"] for depth in depths]
    return {
      "num_experts": moe["num_experts"] if moe else 1,
      **dict(zip(_SPARSE, sparse)),
      "expert_capacity": _NO_CAPACITY,
      "router_jitter_noise": fields["jitter"],
      "router_bias": False,
    }

  keys = {**dict.fromkeys(_SPARSE, 3), "num_experts": 8}
  return Rule(("moe",), keys, read, write)


_T5 = Family(
  model_type="t5",
  architecture="T5ForConditionalGeneration",
  keys={
    "vocab_size": Key("vocab_size", 32128),
    "width": Key("d_model", 512),
    "head_dim": Key("d_kv", 64),
    "mlp_dim": Key("d_ff", 2048),
    "depth": Key("num_layers", 6),
    "num_heads": Key("num_heads", 8),
    "num_buckets": Key("relative_attention_num_buckets", 32),
    "max_distance": Key("relative_attention_max_distance", 128),
    "norm_eps": Key("layer_norm_epsilon", 1e-6),
  },
  constants={"moe": None},
  rules=(
    choice("mlp", "feed_forward_proj", {"relu": "relu", "gated-gelu": "geglu"}),
    _decoder_depth(),
    _tied_head(),
    _keys_without_fields(),
  ),
  harmless=("n_positions", "dense_act_fn", "is_gated_act", "output_past"),
  in_shapes=("vocab_size", "width", "mlp_dim", "depth", "decoder_depth"),
)
# The two kinds of arrays of model_type t5.
_T5_1_0 = _T5.but(
  "t5",
  "T5ForConditionalGeneration",
  arrays=t5_arrays.T5,
  rules=(choice("mlp", "feed_forward_proj", {"relu": "relu"}),),
)
_T5_1_1 = _T5.but(
  "t5",
  "T5ForConditionalGeneration",
  arrays=t5_arrays.T5_1_1,
  rules=(choice("mlp", "feed_forward_proj", {"gated-gelu": "geglu"}),),
)
_MT5 = _T5.but(
  "mt5",
  "MT5ForConditionalGeneration",
  defaults={
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
  },
)
_SWITCH = _T5.but(
  "switch_transformers",
  "SwitchTransformersForConditionalGeneration",
  arrays=t5_arrays.SWITCH,
  rules=(choice("mlp", "dense_act_fn", {"relu": "relu"}), _experts()),
  requires={"router_bias": (False,)},
  harmless=(
    "expert_capacity",
    "add_router_probs",
    "router_dtype",
    "router_ignore_padding_tokens",
    "router_type",
    "sparse_step",
    "batch_prioritized_routing",
    "num_selected_experts",
    "encoder_sparse_step",
    "decoder_sparse_step",
    "feed_forward_proj",
  ),
  defaults={
    "d_model": 768,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "num_heads": 12,
  },
)

FAMILIES = {family.model_type: family for family in (_T5, _MT5, _SWITCH)}
LAYOUTS = {"t5": _T5_1_0, "t5_1_1": _T5_1_1, "switch": _SWITCH}
_ARRAYS = {
  **{name: family.arrays for name, family in LAYOUTS.items()},
  "t5x_1_0": t5_arrays.T5X_1_0,
  "t5x_1_1": t5_arrays.T5X_1_1,
  "mtf_1_0": t5_arrays.MTF_1_0,
  "mtf_1_1": t5_arrays.MTF_1_1,
}
# Copies of the embedding.
_COPIES = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
# A table in the released files of version 1.0.
_IGNORED = {
  "decoder.block.*EncDecAttention.relative_attention_bias.*": (
    "no implementation uses it"
  )
}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts a file's arrays; see array_files.load."""
  return array_files.load(
    _ARRAYS,
    _unstacked({_name_of_norm(name): x for name, x in flat.items()}),
    like,
    param_dims,
    ignored=_IGNORED,
    copies=_COPIES,
  )


def _name_of_norm(name: str) -> str:
  """Undoes the other names of norms in later versions of Mesh TensorFlow."""
  name = re.sub(r"(/layer_\d+)/rms_norm/scale$", r"\1/layer_norm/scale", name)
  return re.sub(r"coder/rms_norm/scale$", "coder/final_layer_norm/scale", name)


def _unstacked(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Splits the layers of T5X's scalable_t5, stacked along the second axis."""
  result: dict[str, Any] = {}
  for name, array in flat.items():
    stack, _, rest = name.partition("/")
    if rest.startswith(f"{stack}/"):
      inside = rest.removeprefix(stack)
      for layer in range(array.shape[1]):
        result[f"{stack}/layers_{layer}{inside}"] = array[:, layer]
    else:
      result[name] = array
  return result


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """Comparable fields of a T5."""
  moe = values.get("moe")
  if moe is not None and not isinstance(moe, Mapping):
    moe = moe._asdict() | {"normalize": moe.normalizes()}
  if not moe:
    return {**values, "moe": moe, "jitter": 0.0}
  compared = ("num_experts", "top_k", "every", "normalize")
  routing = moe.get("routing", "token_choice")
  return {
    **values,
    "moe": {name: moe[name] for name in compared} | {"routing": routing},
    "jitter": moe.get("jitter", 0.0),
  }


def _of_model(model: Any) -> dict[str, Family]:
  if model.tied_head:
    return LAYOUTS
  # transformers reads all three embeddings of a Switch Transformer.
  copies = table(*[plain(name, "token_embedding") for name in _COPIES])
  arrays = table(_SWITCH.arrays, copies)
  return LAYOUTS | {"switch": _SWITCH._replace(arrays=arrays)}


PUBLISHED = layouts.Layouts(FAMILIES, canonical, _of_model)
