"""BERT and RoBERTa of transformers, and the BERT of big_vision's LiT.

Keys, defaults and names of arrays follow transformers; big_vision's names are
those of google/flaxformer. `architectures` tells the use of a model: a tanh
layer over the first token, with classes or not, or the prediction of tokens.
"""

import re
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import array_files, layouts, vit_families
from bigtrain.models.published.encoder_rules import TRANSFORMER_KEYS, mlp
from bigtrain.models.published.families import ConfigJson, Family, Key, Rule
from bigtrain.models.published.tables import (
  dense,
  flax_dense,
  flax_norm,
  norm,
  plain,
  table,
  within,
)

_ATTENTION = "MultiHeadDotProductAttention_0"
_ENCODER = table(
  plain("embeddings.word_embeddings.weight", "Embed_0/embedding"),
  plain("embeddings.position_embeddings.weight", "pos_embedding", ndim=2),
  plain("embeddings.token_type_embeddings.weight", "token_types/embedding"),
  norm("embeddings.LayerNorm", "embed_norm"),
  dense("pooler.dense", "pre_logits"),
  within(
    "encoder.layer.{i}.",
    "Encoder_0/encoderblock/",
    dense("attention.self.query", f"{_ATTENTION}/query"),
    dense("attention.self.key", f"{_ATTENTION}/key"),
    dense("attention.self.value", f"{_ATTENTION}/value"),
    dense("attention.output.dense", f"{_ATTENTION}/out"),
    norm("attention.output.LayerNorm", "LayerNorm_0"),
    dense("intermediate.dense", "MlpBlock_0/Dense_0"),
    dense("output.dense", "MlpBlock_0/Dense_1"),
    norm("output.LayerNorm", "LayerNorm_1"),
  ),
)
_FLAXFORMER = table(
  within(
    "BertEncoder_0/",
    "",
    plain("embedder/embedders_position_ids/embedding", "pos_embedding", ndim=2),
    plain("embedder/embedders_token_ids/embedding", "Embed_0/embedding"),
    plain("embedder/embedders_segment_ids/embedding", "token_types/embedding"),
    flax_norm("layer_norm", "embed_norm"),
  ),
  flax_dense("head", "head"),
  within(
    "BertEncoder_0/encoder_block/layer_sequence/layers_{i}/",
    "Encoder_0/encoderblock/",
    flax_dense("attention_block/attention_layer/query", f"{_ATTENTION}/query"),
    flax_dense("attention_block/attention_layer/key", f"{_ATTENTION}/key"),
    flax_dense("attention_block/attention_layer/value", f"{_ATTENTION}/value"),
    flax_dense("attention_block/dense_layer", f"{_ATTENTION}/out"),
    flax_norm("attention_block/layer_norm", "LayerNorm_0"),
    flax_dense("mlp_block/mlp/dense_layer", "MlpBlock_0/Dense_0"),
    flax_dense("mlp_block/dense_layer", "MlpBlock_0/Dense_1"),
    flax_norm("mlp_block/layer_norm", "LayerNorm_1"),
  ),
)


def _use(stem: str) -> Rule:
  """Whether a model predicts tokens or classes, by its class."""

  def read(config: ConfigJson) -> dict[str, Any]:
    name = str((config.get("architectures") or [""])[0]).removeprefix(stem)
    predicts_tokens = name in ("ForMaskedLM", "ForPreTraining")
    num_labels = config.get("num_labels") or len(config["id2label"] or "ab")
    has_classes = name == "ForSequenceClassification"
    return {
      "mlm_head": predicts_tokens,
      "rep_size": not predicts_tokens,
      "num_classes": num_labels if has_classes else None,
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["mlm_head"]:
      return {"architectures": [f"{stem}ForMaskedLM"]}
    if not (number := fields["num_classes"]):
      return {}
    return {
      "architectures": [f"{stem}ForSequenceClassification"],
      "id2label": {str(i): f"LABEL_{i}" for i in range(number)},
    }

  fields = ("mlm_head", "rep_size", "num_classes")
  return Rule(fields, {"id2label": None}, read, write)


def _roberta_padding() -> Rule:
  """Positions count from the one after the padding's id."""
  key = "pad_token_id"
  return Rule(
    ("pad_id", "first_position"),
    {key: 1},
    lambda config: {"pad_id": config[key], "first_position": config[key] + 1},
    lambda fields: {key: fields["pad_id"]},
  )


_BERT = Family(
  model_type="bert",
  architecture="BertModel",
  arrays=table(
    _ENCODER,
    dense("classifier", "head"),
    dense("cls.predictions.transform.dense", "mlm_dense"),
    norm("cls.predictions.transform.LayerNorm", "mlm_norm"),
    plain("cls.predictions.bias", "mlm_bias"),
  ),
  keys={
    **TRANSFORMER_KEYS,
    "vocab_size": Key("vocab_size", 30522),
    "token_types": Key("type_vocab_size", 2),
    "max_len": Key("max_position_embeddings", 512),
    "pad_id": Key("pad_token_id", 0),
  },
  constants={
    "post_norm": True,
    "pool_type": "first",
    "causal": False,
    "head_bias": True,
    "first_position": 0,
  },
  rules=(mlp(), _use("Bert")),
  requires={
    "tie_word_embeddings": (True,),
    "position_embedding_type": ("absolute",),
  },
  harmless=(
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "pooler_fc_size",
    "gradient_checkpointing",
    "pooler_num_fc_layers",
    "pooler_num_attention_heads",
    "pooler_size_per_head",
    "pooler_type",
    "directionality",
  ),
  in_shapes=("width", "depth", "mlp_dim", "vocab_size", "num_classes"),
)

_ROBERTA = _BERT.but(
  "roberta",
  "RobertaModel",
  without=("pad_id", "first_position"),
  arrays=table(
    _ENCODER,
    dense("classifier.out_proj", "head"),
    dense("lm_head.dense", "mlm_dense"),
    norm("lm_head.layer_norm", "mlm_norm"),
    plain("lm_head.bias", "mlm_bias"),
  ),
  rules=(_use("Roberta"), _roberta_padding()),
  defaults={"vocab_size": 50265},
)

FAMILIES: Mapping[str, Family] = {"bert": _BERT, "roberta": _ROBERTA}
# {regular expression of names in a file that are not loaded: reason}.
_IGNORED = {
  ".*position_ids": "a constant that the model computes",
  r"(cls\.predictions|lm_head)\.decoder\..*": "the embedding, and the bias",
  r"cls\.seq_relationship\..*": "only for training",
}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts a file's arrays; see array_files.load."""
  ignored = dict(_IGNORED)
  if "mlm_bias" not in like:
    ignored[r"(cls|lm_head)\..*"] = "of the prediction of tokens"
  if "pre_logits/kernel" not in like:
    ignored[r"pooler\..*"] = "of features without a tanh layer"
  arrays = {name: family.arrays for name, family in FAMILIES.items()}
  result = array_files.load(
    {**arrays, "flaxformer": _FLAXFORMER},
    {_name_in_tables(name): x for name, x in flat.items()},
    like,
    param_dims,
    ignored=ignored,
  )
  known = result is not None and "embed_norm/scale" in result
  return result if known else None


def _name_in_tables(name: str) -> str:
  name = name.removeprefix("bert.").removeprefix("roberta.")
  # As in the first files of BERT, converted from TensorFlow.
  name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
  name = name.replace("LayerNorm.beta", "LayerNorm.bias")
  # RoBERTa's classifier has the tanh layer inside.
  return name.replace("classifier.dense", "pooler.dense")


def _of_model(model: Any) -> dict[str, Family]:
  """The families with the names of arrays for the model's use."""
  has_prefix = model.num_classes or model.mlm_head
  result = {}
  for name, family in FAMILIES.items():
    arrays = []
    for entry in family.arrays:
      published = entry.published
      if model.num_classes and name == "roberta":
        published = published.replace("pooler.", "classifier.")
      of_head = re.match("(cls|classifier|lm_head)[.]", published)
      if has_prefix and not of_head:
        published = f"{name}.{published}"
      arrays.append(entry._replace(published=published))
    result[name] = family._replace(arrays=arrays)
  return result


PUBLISHED = layouts.Layouts(FAMILIES, vit_families.canonical, _of_model)
