"""T5, T5 1.1, mT5 and Switch Transformers: their config.json and their arrays.

Keys and defaults follow transformers. The arrays may also have the names of T5X
or of Mesh TensorFlow.
"""

import re
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import array_files, layouts
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Key,
  Rule,
  choice,
)
from bigtrain.models.published.tables import linear, plain, table, transposed

# transformers' names. A block's layers are numbered: attention and MLP in the
# encoder; attention, cross-attention and MLP in the decoder.
_ATTENTION_ARRAYS = table(
  plain("shared.weight", "token_embedding"),
  plain(
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder/relative_bias/embedding",
  ),
  plain(
    "encoder.block.{i}.layer.0.layer_norm.weight",
    "encoder/blocks/attention_norm/scale",
  ),
  linear(
    "encoder.block.{i}.layer.0.SelfAttention.q",
    "encoder/blocks/attention/query",
  ),
  linear(
    "encoder.block.{i}.layer.0.SelfAttention.k", "encoder/blocks/attention/key"
  ),
  linear(
    "encoder.block.{i}.layer.0.SelfAttention.v",
    "encoder/blocks/attention/value",
  ),
  linear(
    "encoder.block.{i}.layer.0.SelfAttention.o", "encoder/blocks/attention/out"
  ),
  plain(
    "encoder.block.{i}.layer.1.layer_norm.weight",
    "encoder/blocks/mlp_norm/scale",
  ),
  plain("encoder.final_layer_norm.weight", "encoder/norm/scale"),
  plain(
    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder/relative_bias/embedding",
  ),
  plain(
    "decoder.block.{i}.layer.0.layer_norm.weight",
    "decoder/blocks/attention_norm/scale",
  ),
  linear(
    "decoder.block.{i}.layer.0.SelfAttention.q",
    "decoder/blocks/attention/query",
  ),
  linear(
    "decoder.block.{i}.layer.0.SelfAttention.k", "decoder/blocks/attention/key"
  ),
  linear(
    "decoder.block.{i}.layer.0.SelfAttention.v",
    "decoder/blocks/attention/value",
  ),
  linear(
    "decoder.block.{i}.layer.0.SelfAttention.o", "decoder/blocks/attention/out"
  ),
  plain(
    "decoder.block.{i}.layer.1.layer_norm.weight",
    "decoder/blocks/cross_attention_norm/scale",
  ),
  linear(
    "decoder.block.{i}.layer.1.EncDecAttention.q",
    "decoder/blocks/cross_attention/query",
  ),
  linear(
    "decoder.block.{i}.layer.1.EncDecAttention.k",
    "decoder/blocks/cross_attention/key",
  ),
  linear(
    "decoder.block.{i}.layer.1.EncDecAttention.v",
    "decoder/blocks/cross_attention/value",
  ),
  linear(
    "decoder.block.{i}.layer.1.EncDecAttention.o",
    "decoder/blocks/cross_attention/out",
  ),
  plain(
    "decoder.block.{i}.layer.2.layer_norm.weight",
    "decoder/blocks/mlp_norm/scale",
  ),
  plain("decoder.final_layer_norm.weight", "decoder/norm/scale"),
  linear("lm_head", "head"),
)
_T5_ARRAYS = table(
  _ATTENTION_ARRAYS,
  linear(
    "encoder.block.{i}.layer.1.DenseReluDense.wi", "encoder/blocks/mlp/up"
  ),
  linear(
    "encoder.block.{i}.layer.1.DenseReluDense.wo", "encoder/blocks/mlp/down"
  ),
  linear(
    "decoder.block.{i}.layer.2.DenseReluDense.wi", "decoder/blocks/mlp/up"
  ),
  linear(
    "decoder.block.{i}.layer.2.DenseReluDense.wo", "decoder/blocks/mlp/down"
  ),
)
_T5_1_1_ARRAYS = table(
  _ATTENTION_ARRAYS,
  linear(
    "encoder.block.{i}.layer.1.DenseReluDense.wi_0", "encoder/blocks/mlp/gate"
  ),
  linear(
    "encoder.block.{i}.layer.1.DenseReluDense.wi_1", "encoder/blocks/mlp/up"
  ),
  linear(
    "encoder.block.{i}.layer.1.DenseReluDense.wo", "encoder/blocks/mlp/down"
  ),
  linear(
    "decoder.block.{i}.layer.2.DenseReluDense.wi_0", "decoder/blocks/mlp/gate"
  ),
  linear(
    "decoder.block.{i}.layer.2.DenseReluDense.wi_1", "decoder/blocks/mlp/up"
  ),
  linear(
    "decoder.block.{i}.layer.2.DenseReluDense.wo", "decoder/blocks/mlp/down"
  ),
)
_SWITCH_ARRAYS = table(
  _ATTENTION_ARRAYS,
  linear("encoder.block.{i}.layer.1.mlp.wi", "encoder/blocks/mlp/up"),
  linear("encoder.block.{i}.layer.1.mlp.wo", "encoder/blocks/mlp/down"),
  linear(
    "encoder.block.{i}.layer.1.mlp.router.classifier",
    "encoder/blocks/moe/router",
  ),
  linear(
    "encoder.block.{i}.layer.1.mlp.experts.expert_{e}.wi",
    "encoder/blocks/moe/up",
  ),
  linear(
    "encoder.block.{i}.layer.1.mlp.experts.expert_{e}.wo",
    "encoder/blocks/moe/down",
  ),
  linear("decoder.block.{i}.layer.2.mlp.wi", "decoder/blocks/mlp/up"),
  linear("decoder.block.{i}.layer.2.mlp.wo", "decoder/blocks/mlp/down"),
  linear(
    "decoder.block.{i}.layer.2.mlp.router.classifier",
    "decoder/blocks/moe/router",
  ),
  linear(
    "decoder.block.{i}.layer.2.mlp.experts.expert_{e}.wi",
    "decoder/blocks/moe/up",
  ),
  linear(
    "decoder.block.{i}.layer.2.mlp.experts.expert_{e}.wo",
    "decoder/blocks/moe/down",
  ),
)
# T5X's names, of google-research/t5x, examples/t5/network.py. It has heads and
# their width in one axis, and the relative biases as (heads, buckets).
_T5X = table(
  plain("token_embedder/embedding", "token_embedding"),
  plain("decoder/logits_dense/kernel", "head/kernel"),
  plain("encoder/encoder_norm/scale", "encoder/norm/scale"),
  transposed(
    "encoder/relpos_bias/rel_embedding", "encoder/relative_bias/embedding"
  ),
  plain(
    "encoder/layers_{i}/pre_attention_layer_norm/scale",
    "encoder/blocks/attention_norm/scale",
  ),
  plain(
    "encoder/layers_{i}/attention/query/kernel",
    "encoder/blocks/attention/query/kernel",
  ),
  plain(
    "encoder/layers_{i}/attention/key/kernel",
    "encoder/blocks/attention/key/kernel",
  ),
  plain(
    "encoder/layers_{i}/attention/value/kernel",
    "encoder/blocks/attention/value/kernel",
  ),
  plain(
    "encoder/layers_{i}/attention/out/kernel",
    "encoder/blocks/attention/out/kernel",
  ),
  plain(
    "encoder/layers_{i}/pre_mlp_layer_norm/scale",
    "encoder/blocks/mlp_norm/scale",
  ),
  plain("encoder/layers_{i}/mlp/wo/kernel", "encoder/blocks/mlp/down/kernel"),
  plain("decoder/decoder_norm/scale", "decoder/norm/scale"),
  transposed(
    "decoder/relpos_bias/rel_embedding", "decoder/relative_bias/embedding"
  ),
  plain(
    "decoder/layers_{i}/pre_self_attention_layer_norm/scale",
    "decoder/blocks/attention_norm/scale",
  ),
  plain(
    "decoder/layers_{i}/self_attention/query/kernel",
    "decoder/blocks/attention/query/kernel",
  ),
  plain(
    "decoder/layers_{i}/self_attention/key/kernel",
    "decoder/blocks/attention/key/kernel",
  ),
  plain(
    "decoder/layers_{i}/self_attention/value/kernel",
    "decoder/blocks/attention/value/kernel",
  ),
  plain(
    "decoder/layers_{i}/self_attention/out/kernel",
    "decoder/blocks/attention/out/kernel",
  ),
  plain(
    "decoder/layers_{i}/pre_cross_attention_layer_norm/scale",
    "decoder/blocks/cross_attention_norm/scale",
  ),
  plain(
    "decoder/layers_{i}/encoder_decoder_attention/query/kernel",
    "decoder/blocks/cross_attention/query/kernel",
  ),
  plain(
    "decoder/layers_{i}/encoder_decoder_attention/key/kernel",
    "decoder/blocks/cross_attention/key/kernel",
  ),
  plain(
    "decoder/layers_{i}/encoder_decoder_attention/value/kernel",
    "decoder/blocks/cross_attention/value/kernel",
  ),
  plain(
    "decoder/layers_{i}/encoder_decoder_attention/out/kernel",
    "decoder/blocks/cross_attention/out/kernel",
  ),
  plain(
    "decoder/layers_{i}/pre_mlp_layer_norm/scale",
    "decoder/blocks/mlp_norm/scale",
  ),
  plain("decoder/layers_{i}/mlp/wo/kernel", "decoder/blocks/mlp/down/kernel"),
)
_T5X_1_0 = table(
  _T5X,
  plain("encoder/layers_{i}/mlp/wi/kernel", "encoder/blocks/mlp/up/kernel"),
  plain("decoder/layers_{i}/mlp/wi/kernel", "decoder/blocks/mlp/up/kernel"),
)
_T5X_1_1 = table(
  _T5X,
  plain("encoder/layers_{i}/mlp/wi_0/kernel", "encoder/blocks/mlp/gate/kernel"),
  plain("encoder/layers_{i}/mlp/wi_1/kernel", "encoder/blocks/mlp/up/kernel"),
  plain("decoder/layers_{i}/mlp/wi_0/kernel", "decoder/blocks/mlp/gate/kernel"),
  plain("decoder/layers_{i}/mlp/wi_1/kernel", "decoder/blocks/mlp/up/kernel"),
)
# Mesh TensorFlow's names. Its matrices are as T5X's.
_MTF = table(
  plain("shared/embedding", "token_embedding"),
  plain("decoder/logits/kernel", "head/kernel"),
  plain("encoder/final_layer_norm/scale", "encoder/norm/scale"),
  transposed(
    "encoder/block_000/layer_000/SelfAttention/relative_attention_bias",
    "encoder/relative_bias/embedding",
  ),
  plain(
    "encoder/block_{i:03}/layer_000/layer_norm/scale",
    "encoder/blocks/attention_norm/scale",
  ),
  plain(
    "encoder/block_{i:03}/layer_000/SelfAttention/q",
    "encoder/blocks/attention/query/kernel",
  ),
  plain(
    "encoder/block_{i:03}/layer_000/SelfAttention/k",
    "encoder/blocks/attention/key/kernel",
  ),
  plain(
    "encoder/block_{i:03}/layer_000/SelfAttention/v",
    "encoder/blocks/attention/value/kernel",
  ),
  plain(
    "encoder/block_{i:03}/layer_000/SelfAttention/o",
    "encoder/blocks/attention/out/kernel",
  ),
  plain(
    "encoder/block_{i:03}/layer_001/layer_norm/scale",
    "encoder/blocks/mlp_norm/scale",
  ),
  plain(
    "encoder/block_{i:03}/layer_001/DenseReluDense/wo/kernel",
    "encoder/blocks/mlp/down/kernel",
  ),
  plain("decoder/final_layer_norm/scale", "decoder/norm/scale"),
  transposed(
    "decoder/block_000/layer_000/SelfAttention/relative_attention_bias",
    "decoder/relative_bias/embedding",
  ),
  plain(
    "decoder/block_{i:03}/layer_000/layer_norm/scale",
    "decoder/blocks/attention_norm/scale",
  ),
  plain(
    "decoder/block_{i:03}/layer_000/SelfAttention/q",
    "decoder/blocks/attention/query/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_000/SelfAttention/k",
    "decoder/blocks/attention/key/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_000/SelfAttention/v",
    "decoder/blocks/attention/value/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_000/SelfAttention/o",
    "decoder/blocks/attention/out/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_001/layer_norm/scale",
    "decoder/blocks/cross_attention_norm/scale",
  ),
  plain(
    "decoder/block_{i:03}/layer_001/EncDecAttention/q",
    "decoder/blocks/cross_attention/query/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_001/EncDecAttention/k",
    "decoder/blocks/cross_attention/key/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_001/EncDecAttention/v",
    "decoder/blocks/cross_attention/value/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_001/EncDecAttention/o",
    "decoder/blocks/cross_attention/out/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_002/layer_norm/scale",
    "decoder/blocks/mlp_norm/scale",
  ),
  plain(
    "decoder/block_{i:03}/layer_002/DenseReluDense/wo/kernel",
    "decoder/blocks/mlp/down/kernel",
  ),
)
_MTF_1_0 = table(
  _MTF,
  plain(
    "encoder/block_{i:03}/layer_001/DenseReluDense/wi/kernel",
    "encoder/blocks/mlp/up/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_002/DenseReluDense/wi/kernel",
    "decoder/blocks/mlp/up/kernel",
  ),
)
_MTF_1_1 = table(
  _MTF,
  plain(
    "encoder/block_{i:03}/layer_001/DenseReluDense/wi_0/kernel",
    "encoder/blocks/mlp/gate/kernel",
  ),
  plain(
    "encoder/block_{i:03}/layer_001/DenseReluDense/wi_1/kernel",
    "encoder/blocks/mlp/up/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_002/DenseReluDense/wi_0/kernel",
    "decoder/blocks/mlp/gate/kernel",
  ),
  plain(
    "decoder/block_{i:03}/layer_002/DenseReluDense/wi_1/kernel",
    "decoder/blocks/mlp/up/kernel",
  ),
)


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
  whatever is equal, and have a key for the scale.
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
  arrays=_T5_ARRAYS,
  rules=(choice("mlp", "feed_forward_proj", {"relu": "relu"}),),
)
_T5_1_1 = _T5.but(
  "t5",
  "T5ForConditionalGeneration",
  arrays=_T5_1_1_ARRAYS,
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
  arrays=_SWITCH_ARRAYS,
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
  "t5x_1_0": _T5X_1_0,
  "t5x_1_1": _T5X_1_1,
  "mtf_1_0": _MTF_1_0,
  "mtf_1_1": _MTF_1_1,
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
  return {
    **values,
    "moe": {name: moe[name] for name in compared},
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
