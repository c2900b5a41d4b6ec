"""Models that read pictures, from PaliGemma to Qwen-VL.

vlms/ has their families, a module for each lineage. This module lists them, and
loads and exports the arrays of their three parts: image tower, projector and
decoder.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.models.published import (
  array_files,
  conversions,
  decoder_families,
  layouts,
  tables,
)
from bigtrain.models.published.vlms import (
  gemma_vision,
  idefics,
  joined_patches,
  llava,
  mistral,
  qwen_vl,
  uncomputed_vlms,
  vlm_parts,
)
from bigtrain.models.published.vlms.vlm_parts import TOWERS, Kind

_PIXTRAL = "llava_pixtral"
# {model_type, or a name of our own: kind}. An export takes the first that
# expresses the model.
KINDS: Mapping[str, Kind] = {
  kind.family.model_type: kind
  for kind in (
    gemma_vision.PALIGEMMA,
    gemma_vision.GEMMA3,
    gemma_vision.GEMMA4,
    llava.LLAVA,
    llava.VIPLLAVA,
    llava.LLAVA_NEXT,
    llava.LLAVA_ONEVISION,
    idefics.IDEFICS3,
    idefics.SMOLVLM,
    qwen_vl.QWEN3_VL,
    qwen_vl.QWEN3_VL_MOE,
    qwen_vl.QWEN2_5_VL,
    qwen_vl.QWEN2_VL,
    qwen_vl.QWEN3_5,
    qwen_vl.QWEN3_5_MOE,
    qwen_vl.EXAONE4_5,
    mistral.MISTRAL3,
    mistral.LIGHTON_OCR,
    joined_patches.AYA_VISION,
    joined_patches.COHERE2_VISION,
    joined_patches.INTERNVL,
    llava.DEEPSEEK_VL,
  )
} | {_PIXTRAL: mistral.PIXTRAL}

# Dimensions of the arrays of projectors.
_OF_PROJECTOR: Mapping[str, str] = {
  r"(blocks(_\d+)?/)?(linear_\d|merge_layer)/kernel": "D -> D",
  r"(blocks(_\d+)?/)?(linear_\d/bias|norm/(scale|bias))|newline": "D",
}
PROJECTORS = ("projector/", "deepstack/", "tiles/")
PROJECTOR_DIMS: Mapping[str, str] = {
  **dims.under("projector/", _OF_PROJECTOR),
  **dims.under("deepstack/", _OF_PROJECTOR),
  **dims.under("tiles/", _OF_PROJECTOR),
}

# {part: start of its names in files, of any version of transformers}.
_PARTS = {
  "deepstack/": r"(model\.)?visual\.(?=deepstack_merger_list\.)",
  "tiles/": r"(model\.)?(?=image_newline$)",
  "projector/": (
    r"(model\.)?(multi_modal_projector|connector|embed_vision|aligner"
    r"|vision_projection|visual(?=\.merger\.))\."
  ),
  "img/": (
    r"(model\.)?(vision_tower|vision_model|vision_encoder|visual)\."
    r"(vision_model\.)?"
  ),
}
# All other names belong to the decoder.
_TEXT_MODEL = r"(model\.)?text_model\."
_IGNORED = {r".*position_ids": "a constant that the model computes"}
_AUDIO = r"(model\.)?(audio_tower|embed_audio)\."


def load(
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
  param_dims: Mapping[str, dims.Table],
) -> dict[str, Any]:
  """Converts a file's arrays; see array_files.load.

  Args:
    param_dims: {part: its table}, of "img/" and "llm/".
  """
  if any("/" in name for name in flat):  # Our own names.
    return dict(flat)
  names: dict[str, dict[str, str]] = {part: {} for part in (*_PARTS, "llm/")}
  result: dict[str, Any] = {}
  for name in flat:
    if re.match(_AUDIO, name):
      result[name] = conversions.Remark(
        "ignored", "of sounds; the model reads texts and pictures"
      )
      continue
    for part, start in _PARTS.items():
      if match := re.match(start, name):
        names[part][name[match.end() :]] = name
        break
    else:
      names["llm/"][re.sub(f"^{_TEXT_MODEL}", "model.", name)] = name
  for part, in_file in names.items():
    if not in_file and part in ("deepstack/", "tiles/"):
      continue
    arrays = {short: flat[name] for short, name in in_file.items()}
    of_model = conversions.below(part, like)
    if part == "llm/":
      loaded = decoder_families.load(arrays, of_model, param_dims[part])
    else:
      loaded = array_files.load(
        _tables(part),
        arrays,
        of_model,
        _dims_of(part, param_dims),
        ignored=_IGNORED,
      )
    for name, value in (arrays if loaded is None else loaded).items():
      known = name in of_model
      result[part + name if known else in_file.get(name, name)] = value
  return result


def _tables(part: str) -> dict[str, tables.Table]:
  if part == "img/":
    return {name: family.arrays for name, family in TOWERS.items()}
  return {name: kind.family.arrays for name, kind in KINDS.items()}


def _dims_of(part: str, param_dims: Mapping[str, dims.Table]) -> dims.Table:
  return _OF_PROJECTOR if part in PROJECTORS else param_dims[part]


class Part(NamedTuple):
  """The tower or the decoder of a model that is exported."""

  model: Any
  dims: dims.Table


def export(
  published: layouts.Layouts,
  model: Any,
  parts: Mapping[str, Part],
  shapes: tables.Shapes,
  layout: str | None = None,
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  """Returns (contents of config.json, arrays), as layouts.Layouts.export.

  Args:
    published: the layouts of models.vision_language.
    parts: the model's parts "img/" and "llm/".
  """
  # Only families whose tower is computed by the same module.
  kinds = {
    name: kind
    for name, kind in KINDS.items()
    if kind.family.constants.get("image_model", "vit") == model.image_model
  }
  layout = layout or model.published_as
  if layout:
    check_choice("--layout", layout, KINDS)
    if layout not in kinds:
      raise ConfigError(
        f"--layout={layout}: expected one of {', '.join(kinds) or 'none'} for "
        f"config.model.image_model={model.image_model!r}."
      )
    kinds = {layout: KINDS[layout]}
  errors = []
  for name, kind in kinds.items():
    key = f"--layout={name}"
    try:
      return _export(key, kind, published, model, parts, shapes)
    except ConfigError as e:
      errors.append(e)
  if not errors:
    raise ConfigError(
      "--format=hf: no published layout has a tower of "
      f"config.model.image_model={model.image_model!r}."
    )
  shortest = min(errors, key=lambda e: len(str(e)))
  if layout:
    raise shortest
  raise ConfigError(
    f"--format=hf: no published layout computes this model. {shortest}"
  ) from shortest


def _export(
  key: str,
  kind: Kind,
  published: layouts.Layouts,
  model: Any,
  parts: Mapping[str, Part],
  shapes: tables.Shapes,
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  towers = {name: TOWERS[name] for name in kind.towers}
  decoders = vlm_parts.decoder_layouts(kind.decoders)
  of_parts = {
    "img/": (layouts.Layouts(towers, kind.canonical_tower), "vision_config"),
    "llm/": (
      layouts.Layouts(decoders, decoder_families.canonical),
      "text_config",
    ),
  }
  configs: dict[str, Any] = {}
  tensors: list[tables.Tensor] = []
  for part, (families, name) in of_parts.items():
    own = conversions.below(part, shapes)
    config, arrays = families.export(parts[part].dims, parts[part].model, own)
    del config["architectures"]
    size = model.image_size
    if isinstance(size, int) and "image_size" in config:
      # Pixels beyond the last whole patch, which the arrays do not show.
      patch_size = config["patch_size"]
      if size // patch_size * patch_size == config["image_size"]:
        config["image_size"] = size
    configs[name] = config
    tensors += [_renamed(kind, part, tensor) for tensor in arrays]
  for part in PROJECTORS:
    own = conversions.below(part, shapes)
    arrays = array_files.export(
      key, kind.family.arrays, own, _dims_of(part, {})
    )
    tensors += [_renamed(kind, part, tensor) for tensor in arrays]
  fields = layouts.fields_of(model)
  ours = {**published.canonical(fields), "shapes": shapes, "configs": configs}
  return published.config_json(key, kind.family, ours), tensors


def _renamed(kind: Kind, part: str, tensor: tables.Tensor) -> tables.Tensor:
  name = part + tensor.name
  start = next(start for start in kind.starts if name.startswith(start))
  name = kind.starts[start] + name.removeprefix(start)
  parts = [(part + ours, index) for ours, index in tensor.parts]
  return tensor._replace(name=name, parts=parts)


def make_layouts(
  canonical: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> layouts.Layouts:
  families = {name: kind.family for name, kind in KINDS.items()}
  missing = uncomputed_vlms.MISSING_PARTS
  return layouts.Layouts(families, canonical, None, missing, _name)


def _name(config: Mapping[str, Any]) -> str:
  """The name in KINDS of the family of a config.json."""
  kind = str(config["model_type"])
  tower = (config.get("vision_config") or {}).get("model_type")
  return _PIXTRAL if (kind, tower) == ("llava", "pixtral") else kind
