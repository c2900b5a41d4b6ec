"""Decoders of Hugging Face's transformers: GPT-2, Llama and their relatives.

decoders/ has their families, a module for each lineage. This module lists them
and loads their arrays.
"""

import re
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import (
  array_files,
  blocks,
  fp8_blocks,
  layouts,
  mxfp4,
  tables,
)
from bigtrain.models.published.decoders import (
  afmoe,
  apertus,
  aria,
  cohere,
  cwm,
  deepseek,
  dots,
  ernie,
  exaone,
  gemma,
  glm,
  gpt2,
  gpt_families,
  gpt_oss,
  granite,
  hunyuan,
  kimi_linear,
  lfm2,
  llama,
  llama4,
  mellum,
  minimax,
  model_fields,
  nanochat,
  nemotron,
  olmo,
  persimmon,
  phi,
  plain_families,
  prediction_layers,
  qwen,
  qwen_next,
  seed_oss,
  shared_arrays,
  solar,
  starcoder,
)
from bigtrain.models.published.decoders.missing_parts import MISSING_PARTS
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
  deepseek.DEEPSEEK_V2,
  deepseek.DEEPSEEK_V3,
  deepseek.KIMI_K2,
  deepseek.GLM4_MOE_LITE,
  deepseek.MISTRAL4,
  # Dense models of both kinds are Qwen 3.5, with experts Qwen3-Next.
  qwen_next.QWEN3_5,
  qwen_next.QWEN3_NEXT,
  qwen_next.QWEN3_5_MOE,
  olmo.OLMO_HYBRID,
  seed_oss.SEED_OSS,
  ernie.ERNIE4_5,
  ernie.ERNIE4_5_MOE,
  dots.DOTS1,
  hunyuan.HUNYUAN_DENSE,
  hunyuan.HUNYUAN_MOE,
  exaone.EXAONE4,
  apertus.APERTUS,
  nanochat.NANOCHAT,
  lfm2.LFM2,
  lfm2.LFM2_MOE,
  glm.GLM,
  cohere.COHERE,
  olmo.OLMO,
  olmo.FLEX_OLMO,
  gemma.VAULTGEMMA,
  phi.PHI,
  starcoder.STARCODER2,
  starcoder.STABLELM,
  granite.GRANITE_MOE_SHARED,
  granite.GRANITE_SWA,
  granite.GRANITE_MOE_SWA,
  granite.HYPERCLOVAX,
  plain_families.ARCEE,
  plain_families.JAIS2,
  plain_families.HELIUM,
  plain_families.INTERNLM3,
  plain_families.IQUEST_CODER,
  cwm.CWM,
  exaone.EXAONE_MOE,
  solar.SOLAR_OPEN,
  mellum.MELLUM,
  afmoe.AFMOE,
  deepseek.YOUTU,
  llama4.LLAMA4,
  qwen.QWEN2_VL_TEXT,
  qwen.QWEN2_5_VL_TEXT,
  qwen.QWEN3_VL_TEXT,
  qwen.QWEN3_VL_MOE_TEXT,
  deepseek.MINICPM3,
  qwen.FLINT,
  hunyuan.HY_V3,
  granite.GRANITE_MOE_HYBRID,
  gpt_families.GPTJ,
  gpt_families.GPT_BIGCODE,
  gpt_families.GPT_NEO,
  gpt_families.GPT_NEOX,
  gpt_families.FALCON,
  kimi_linear.KIMI_LINEAR,
  persimmon.PERSIMMON,
  aria.ARIA_TEXT,
  gemma.GEMMA4_UNIFIED,
  gpt2.GPT_SW3,
)

# {regular expression of names in a file that are not loaded: reason}.
_IGNORED = {
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids": (
    "a constant that the model computes"
  ),
  r"(.*\.)?(vision_tower|vision_model|visual|multi_modal_projector)\..*": (
    "the model reads text alone"
  ),
  r"model\.(audio_tower|embed_vision|vision_embedder|embed_audio)\..*": (
    "the model reads text alone"
  ),
  **prediction_layers.IGNORED,
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
  names = gpt_families.falcon_names(names)
  names = kimi_linear.with_names_of_mlps(olmo.hybrid_names(names))
  names, ignored_layers = prediction_layers.with_names_of_tables(
    names, prediction_layers.number_of(like)
  )
  ignored = {**_IGNORED, **ignored_layers, **_unread_keys(like)}
  if "score/kernel" in like:
    ignored[r"lm_head\..*"] = "the model has a head of classes"
  arrays = {short: flat[name] for short, name in names.items()}
  result = array_files.load(
    {
      **{name: family.arrays for name, family in LAYOUTS.items()},
      **{
        f"{name}, fused": shared_arrays.with_fused_experts(family.arrays)
        for name, family in LAYOUTS.items()
      },
    },
    olmo.with_own_convolutions(fp8_blocks.joined(mxfp4.joined(arrays))),
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


def _unread_keys(like: Mapping[str, Any]) -> dict[str, str]:
  """{regular expression of names: reason} for layers that share keys.

  Some files have keys and values of these layers, which nothing reads.
  """
  layouts_of_stacks = blocks.layouts(like, "blocks")
  layers: dict[str, set[Any]] = {"query": set(), "key": set()}
  for name, leaf in like.items():
    block = blocks.parse_name(name, "blocks")
    if block is None or block.stack != "blocks":
      continue
    numbers: set[Any] = {block.layer}
    if block.layer is None:
      layout = layouts_of_stacks[block.key]
      numbers = {*layout.layers(block.place, leaf.shape[0])}
    for part, found in layers.items():
      if block.rest == f"/attention/{part}/kernel":
        found |= numbers
  reason = "the layer reads keys and values of another one"
  return {
    rf"model\.layers\.{i}\.self_attn\.[kv]_(proj|norm)\..*": reason
    for i in sorted(layers["query"] - layers["key"])
  }


def export(
  param_dims: dims.Table,
  model: Any,
  shapes: tables.Shapes,
  layout: str | None = None,
  origin: str | None = None,
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  """See layouts.Layouts.export; `shapes` may lack the modules of `mtp`."""
  config, tensors = PUBLISHED.export(param_dims, model, shapes, layout, origin)
  if config["model_type"] == "falcon" and model.parallel_norms:
    tensors = [
      x._replace(name=gpt_families.with_own_norms(x.name)) for x in tensors
    ]
  arrays = LAYOUTS[config["model_type"]].arrays
  if not any("mtp/" in entry.ours[0] for entry in arrays):
    return config, tensors
  kind = config["model_type"]
  number = prediction_layers.number_of(shapes)
  config[prediction_layers.key_of_number(kind)] = number
  return config, [
    x._replace(name=prediction_layers.name_in_file(x.name, kind, model.depth))
    for x in tensors
  ]


canonical = model_fields.canonical
PUBLISHED = layouts.Layouts(LAYOUTS, canonical, missing_parts=MISSING_PARTS)
