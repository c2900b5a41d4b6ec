"""BERT and RoBERTa of Hugging Face, and the BERT of big_vision's LiT.

Keys, defaults and names of arrays follow transformers; big_vision's names are
those of google/flaxformer. `architectures` tells the use of a model: a tanh
layer over the first token, with classes or not, or the prediction of tokens.
"""

import re
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import (
  encoder_rules,
  families,
  tables,
  vit_families,
)
from bigtrain.models.published.families import Family

FAMILIES, _ARRAYS = families.load(
  "bert_families", encoder_rules, vit_families.FAMILIES
)


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  names = {
    name.removeprefix("bert.")
    .removeprefix("roberta.")
    .replace("LayerNorm.gamma", "LayerNorm.weight")
    .replace("LayerNorm.beta", "LayerNorm.bias")
    # RoBERTa's classifier has the tanh layer inside.
    .replace("classifier.dense", "pooler.dense"): x
    for name, x in flat.items()
  }
  ignored = dict(families.IGNORED["bert"])
  if "mlm_bias" not in like:
    ignored[r"(cls|lm_head)\..*"] = "of the prediction of tokens"
  if "pre_logits/kernel" not in like:
    ignored[r"pooler\..*"] = "of features without a tanh layer"
  layouts = {name: family.arrays for name, family in FAMILIES.items()}
  layouts["flaxformer"] = _ARRAYS["flaxformer"]
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
