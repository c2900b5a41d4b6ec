"""Decoders of Hugging Face's transformers: GPT-2, Llama and their relatives.

decoders/ has their families, a module for each lineage. This module lists them
and loads their arrays.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import array_files, layouts, mxfp4
from bigtrain.models.published.decoders import (
  cohere,
  gemma,
  glm,
  gpt2,
  gpt_oss,
  granite,
  llama,
  minimax,
  model_fields,
  nemotron,
  olmo,
  phi,
  qwen,
  qwen_next,
)
from bigtrain.models.published.families import Family, classes

# {model_type: family}. An export takes the first that expresses the model.
LAYOUTS: dict[str, Family] = {}


def add(*families: Family) -> None:
  """Adds families, also in their form with a head of classes, at the end."""
  for family in families:
    stem = re.sub("(ForCausalLM|LMHeadModel)$", "", family.architecture)
    rules = (*family.rules, classes(stem))
    LAYOUTS[family.model_type] = family._replace(rules=rules)


add(
  gpt2.GPT2,
  llama.LLAMA,
  llama.MISTRAL,
  llama.MINISTRAL,
  llama.MINISTRAL3,
  llama.MIXTRAL,
  qwen.QWEN2,
  qwen.QWEN3,
  qwen.QWEN2_MOE,
  qwen.QWEN3_MOE,
  gemma.GEMMA,
  gemma.GEMMA2,
  gemma.GEMMA3,
  gemma.GEMMA4,
  olmo.OLMO2,
  olmo.OLMO3,
  olmo.OLMOE,
  llama.SMOLLM3,
  phi.PHI3,
  cohere.COHERE2,
  glm.GLM4,
  glm.GLM4_MOE,
  granite.GRANITE,
  granite.GRANITE_MOE,
  nemotron.NEMOTRON,
  minimax.MINIMAX_M2,
  gpt_oss.GPT_OSS,
  qwen_next.QWEN3_NEXT,
  qwen_next.QWEN3_5,
  qwen_next.QWEN3_5_MOE,
  olmo.OLMO_HYBRID,
)

# {regular expression of names in a file that are not loaded: reason}.
_IGNORED = {
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids": (
    "a constant that the model computes"
  ),
  r"(.*\.)?(vision_tower|vision_model|visual|multi_modal_projector)\..*": (
    "the model reads text alone"
  ),
  r"mtp\..*": "a layer for the prediction of several tokens",
}
# {start of names in some files: what stands there in the tables}.
_PREFIXES = {
  r"transformer\.": "",
  r"(model\.)?language_model\.(model\.)?": "model.",
}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts a file's arrays; see array_files.load."""
  names: dict[str, str] = {}  # {name without a prefix: name in the file}.
  for name in sorted(flat, key=lambda name: _short(name) != name):
    names[_short(name)] = name  # Of two, the one with a prefix wins.
  names = olmo.hybrid_names(names)
  ignored = {**_IGNORED, **_prediction_layers(names)}
  if "score/kernel" in like:
    ignored[r"lm_head\..*"] = "the model has a head of classes"
  result = array_files.load(
    {name: family.arrays for name, family in LAYOUTS.items()},
    olmo.with_own_convolutions(
      mxfp4.joined({short: flat[name] for short, name in names.items()})
    ),
    like,
    param_dims,
    ignored=ignored,
  )
  if result is None:
    return None
  # A file may have a name with and without the prefix.
  twice = {name: flat[name] for name in set(flat) - set(names.values())}
  return array_files.with_names_of_file(result, names, like) | twice


def _short(name: str) -> str:
  for start, new in _PREFIXES.items():
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


canonical = model_fields.canonical
PUBLISHED = layouts.Layouts(LAYOUTS, canonical)
