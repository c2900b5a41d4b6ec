"""Decoders: GPT-2, Llama and their relatives.

Their tables are in decoder_families.toml. Keys, and the values of absent ones,
follow Hugging Face's transformers; decoder_rules.py has what takes more than a
key.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import decoder_rules, families, mxfp4, tables

LAYOUTS, ARRAYS = families.load("decoder_families", decoder_rules)
for _name, _family in LAYOUTS.items():
  _stem = re.sub("(ForCausalLM|LMHeadModel)$", "", _family.architecture)
  _rules = {**_family.rules, "classes": families.classes(_stem)}
  LAYOUTS[_name] = _family._replace(rules=_rules)

_CONSTANTS = (
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids"
)
# Of models that read images too.
_IMAGES = r"(.*\.)?(vision_tower|vision_model|multi_modal_projector)\..*"
_CLASSES = "the model has a head of classes"
# Starts of names that some files have.
_PREFIXES = (
  (r"transformer\.", ""),
  (r"(model\.)?language_model\.(model\.)?", "model."),
)


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  names: dict[str, str] = {}  # {name without a prefix: name in the file}.
  for name in sorted(flat, key=lambda name: _short(name) != name):
    names[_short(name)] = name  # Of two, the one with a prefix wins.
  result = tables.load(
    {name: family.arrays for name, family in LAYOUTS.items()},
    mxfp4.joined({short: flat[name] for short, name in names.items()}),
    like,
    param_dims,
    ignored={
      _CONSTANTS: "a constant that the model computes",
      _IMAGES: "the model reads text alone",
      **({r"lm_head\..*": _CLASSES} if "score/kernel" in like else {}),
      **_prediction_layers(names),
    },
  )
  if result is None:
    return None
  # A file may have a name with and without the prefix.
  twice = {name: flat[name] for name in set(flat) - set(names.values())}
  return tables.with_names_of_file(result, names, like) | twice


def _short(name: str) -> str:
  for start, new in _PREFIXES:
    if match := re.match(start, name):
      rest = name[match.end() :]
      return rest if rest.startswith("lm_head.") else new + rest
  return name


def _prediction_layers(names: Collection[str]) -> dict[str, str]:
  """Layers after the last one, which predict a token beyond the next."""
  own = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight").fullmatch
  starts = [match[1] for match in map(own, names) if match]
  reason = "a layer for the prediction of several tokens"
  return {re.escape(start) + ".*": reason for start in starts}


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  return decoder_rules.canonical(values, LAYOUTS["llama"].neutral)


PUBLISHED = families.Layouts(LAYOUTS, canonical)
