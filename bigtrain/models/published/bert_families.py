"""BERT and RoBERTa of Hugging Face, and the BERT of big_vision's LiT.

Keys, defaults and names of arrays follow transformers; big_vision's names are
those of google/flaxformer. `architectures` tells the use of a model: a tanh
layer over the first token, with classes or not, or the prediction of tokens.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain import dims
from bigtrain.models.published import families, tables, vit_families
from bigtrain.models.published.families import ConfigJson, Family, Rule
from bigtrain.models.published.tables import Entry, plain
from bigtrain.models.published.vit_families import dense, norm

# {our part of a block: (transformers' name, flaxformer's)}.
_PROJECTIONS = {
  f"MultiHeadDotProductAttention_0/{name}": (
    f"attention.self.{name}",
    f"attention_block/attention_layer/{name}",
  )
  for name in ("query", "key", "value")
} | {
  "MultiHeadDotProductAttention_0/out": (
    "attention.output.dense",
    "attention_block/dense_layer",
  ),
  "MlpBlock_0/Dense_0": ("intermediate.dense", "mlp_block/mlp/dense_layer"),
  "MlpBlock_0/Dense_1": ("output.dense", "mlp_block/dense_layer"),
}
_NORMS = {
  "LayerNorm_0": ("attention.output.LayerNorm", "attention_block/layer_norm"),
  "LayerNorm_1": ("output.LayerNorm", "mlp_block/layer_norm"),
}
_BLOCK = "Encoder_0/encoderblock"


def _arrays(classifier: str, mlm: Sequence[str], of_mlm: str) -> list[Entry]:
  layer, at = "encoder.layer.{i}", "embeddings"
  table = [
    plain(f"{at}.word_embeddings.weight", "Embed_0/embedding"),
    Entry(f"{at}.position_embeddings.weight", ("pos_embedding",), ndim=2),
    plain(f"{at}.token_type_embeddings.weight", "token_types/embedding"),
    *norm(f"{at}.LayerNorm", "embed_norm"),
    *dense("pooler.dense", "pre_logits"),
    *dense(classifier, "head"),
    *dense(of_mlm + mlm[0], "mlm_dense"),
    *norm(of_mlm + mlm[1], "mlm_norm"),
    plain(of_mlm + mlm[2], "mlm_bias"),
  ]
  for ours, (theirs, _) in _PROJECTIONS.items():
    table += dense(f"{layer}.{theirs}", f"{_BLOCK}/{ours}")
  for ours, (theirs, _) in _NORMS.items():
    table += norm(f"{layer}.{theirs}", f"{_BLOCK}/{ours}")
  return table


def _flaxformer_arrays() -> list[Entry]:
  top = "BertEncoder_0"
  names = {"token_ids": "Embed_0", "segment_ids": "token_types"}
  position = f"{top}/embedder/embedders_position_ids/embedding"
  table = [Entry(position, ("pos_embedding",), ndim=2)] + [
    plain(f"{top}/embedder/embedders_{name}/embedding", f"{ours}/embedding")
    for name, ours in names.items()
  ]
  layer = f"{top}/encoder_block/layer_sequence/layers_{{i}}"
  pairs = {f"{top}/layer_norm": "embed_norm", "head": "head"} | {
    f"{layer}/{theirs}": f"{_BLOCK}/{ours}"
    for ours, (_, theirs) in (_PROJECTIONS | _NORMS).items()
  }
  for theirs, ours in pairs.items():
    weight = "scale" if "orm" in ours else "kernel"
    table += [plain(f"{theirs}/{x}", f"{ours}/{x}") for x in (weight, "bias")]
  return table


def _use(stem: str) -> Rule:

  def read(config: ConfigJson) -> dict[str, Any]:
    name = str((config.get("architectures") or [""])[0]).removeprefix(stem)
    mlm = name in ("ForMaskedLM", "ForPreTraining")
    number = config.get("num_labels") or len(config["id2label"] or "ab")
    classes = number if name == "ForSequenceClassification" else None
    return {"mlm_head": mlm, "rep_size": not mlm, "num_classes": classes}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["mlm_head"]:
      return {"architectures": [f"{stem}ForMaskedLM"]}
    if not (number := fields["num_classes"]):
      return {}
    return {
      "architectures": [f"{stem}ForSequenceClassification"],
      "id2label": {str(i): f"LABEL_{i}" for i in range(number)},
    }

  return Rule({"id2label": None}, read, write)


_BERT = Family(
  "bert",
  "BertModel",
  _arrays(
    "classifier",
    ("transform.dense", "transform.LayerNorm", "bias"),
    "cls.predictions.",
  ),
  keys=vit_families.KEYS
  | dict(
    vocab_size="vocab_size",
    token_types="type_vocab_size",
    max_len="max_position_embeddings",
    pad_id="pad_token_id",
  ),
  defaults=vit_families.SIZES
  | dict(
    vocab_size=30522,
    layer_norm_eps=1e-12,
    type_vocab_size=2,
    max_position_embeddings=512,
    pad_token_id=0,
  ),
  constants=dict(
    post_norm=True,
    pool_type="first",
    causal=False,
    head_bias=True,
    first_position=0,
  ),
  rules=dict(mlp=vit_families.VIT.rules["mlp"], use=_use("Bert")),
  requires=dict(
    tie_word_embeddings=(True,), position_embedding_type=("absolute",)
  ),
  harmless="attention_probs_dropout_prob hidden_dropout_prob pooler_fc_size "
  "gradient_checkpointing pooler_num_fc_layers pooler_num_attention_heads "
  "pooler_size_per_head pooler_type directionality".split(),
  in_shapes=("width", "depth", "mlp_dim", "vocab_size", "num_classes"),
)
_FIRST = Rule(
  {"pad_token_id": 1},
  lambda config: {
    "pad_id": config["pad_token_id"],
    "first_position": config["pad_token_id"] + 1,
  },
  lambda fields: {"pad_token_id": fields["pad_id"]},
)
_ROBERTA = _BERT.but(
  "roberta",
  "RobertaModel",
  ("pad_id", "first_position"),
  arrays=_arrays(
    "classifier.out_proj", ("dense", "layer_norm", "bias"), "lm_head."
  ),
  defaults=dict(vocab_size=50265),
  rules=dict(use=_use("Roberta"), first=_FIRST),
)
FAMILIES = {family.model_type: family for family in (_BERT, _ROBERTA)}
_IGNORED = {
  r".*position_ids": "a constant that the model computes",
  r"(cls\.predictions|lm_head)\.decoder\..*": "the embedding, and the bias",
  r"cls\.seq_relationship\..*": "only for training",
}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts published arrays; None for a file in another layout."""
  names = {
    name.removeprefix("bert.")
    .removeprefix("roberta.")
    .replace("LayerNorm.gamma", "LayerNorm.weight")
    .replace("LayerNorm.beta", "LayerNorm.bias")
    # RoBERTa's classifier has the tanh layer inside.
    .replace("classifier.dense", "pooler.dense"): x
    for name, x in flat.items()
  }
  ignored = dict(_IGNORED)
  if "mlm_bias" not in like:
    ignored[r"(cls|lm_head)\..*"] = "of the prediction of tokens"
  if "pre_logits/kernel" not in like:
    ignored[r"pooler\..*"] = "of features without a tanh layer"
  layouts = {name: family.arrays for name, family in FAMILIES.items()}
  layouts["flaxformer"] = _flaxformer_arrays()
  result = tables.load(layouts, names, like, param_dims, ignored=ignored)
  known = result is not None and "embed_norm/scale" in result
  return result if known else None


def _of_model(model: Any) -> dict[str, Family]:
  """The names of the arrays depend on the model's use."""
  of_head = "(cls|classifier|lm_head)[.]"
  layouts = dict(FAMILIES)
  for name, family in FAMILIES.items():
    inside = model.num_classes and name == "roberta"
    arrays = []
    for entry in family.arrays:
      old = entry.published
      if inside:
        old = old.replace("pooler.", "classifier.")
      if (model.num_classes or model.mlm_head) and not re.match(of_head, old):
        old = f"{name}.{old}"
      arrays.append(entry._replace(published=old))
    layouts[name] = family._replace(arrays=arrays)
  return layouts


PUBLISHED = families.Layouts(FAMILIES, vit_families.canonical, _of_model)
