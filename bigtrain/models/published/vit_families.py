"""ViTs of transformers and of timm: ViT, MAE, DINOv2, DINOv3 and BEiT.

vits/ has their families. Keys, defaults and names of arrays follow transformers
or timm. The pooling and the number of classes depend on the use of a model, not
on its weights: they are read from its class in `architectures`.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import array_files, layouts, timm
from bigtrain.models.published.families import Family
from bigtrain.models.published.vits import beit, dino, plain_vit, timm_vit

FAMILIES: Mapping[str, Family] = {
  family.model_type: family
  for family in (
    plain_vit.VIT,
    dino.DINOV2,
    dino.DINOV2_WITH_REGISTERS,
    dino.DINOV3,
    beit.BEIT,
    plain_vit.VIT_MAE,
    timm_vit.TIMM,
  )
}
# {name of a layout: family}. An export takes the first that fits the model.
LAYOUTS: Mapping[str, Family] = {
  "vit": plain_vit.VIT,
  "dinov2": dino.DINOV2,
  "dinov2_with_registers": dino.DINOV2_WITH_REGISTERS,
  "dinov3_vit": dino.DINOV3,
  "beit": beit.BEIT,
  "vit_mae": plain_vit.VIT_MAE,
  "dinov2_swiglu": dino.DINOV2_SWIGLU,
  "timm": timm_vit.TIMM,
  "timm_swiglu": timm_vit.TIMM_SWIGLU,
}
# Starts of names in files of classifiers, and of transformers' wrapper of timm.
_PREFIXES = (
  "vit.",
  "dinov2.",
  "dinov2_with_registers.",
  "beit.",
  "model.",
  "timm_model.",
)
# {regular expression of names in a file that are not loaded: reason}.
_IGNORED = {
  r"embeddings\.mask_token": "only for masked training",
  r"decoder\..*": "of masked training, not of the encoder",
  r".*\.relative_position_index": "a constant that the model computes",
}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts a file's arrays; see array_files.load."""
  prefixes = [x for x in _PREFIXES if any(n.startswith(x) for n in flat)]
  names = {name: name for name in flat}
  for prefix in prefixes:
    names = {name.removeprefix(prefix): full for name, full in names.items()}
  result = array_files.load(
    {name: family.arrays for name, family in LAYOUTS.items()},
    {name: flat[full] for name, full in names.items()},
    like,
    param_dims,
    ignored=_IGNORED,
  )
  if result is None or "embedding/kernel" not in result:
    return None
  return array_files.with_names_of_file(result, names, like)


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """Comparable fields of a ViT."""
  rope = values.get("rope")
  if rope is not None and not isinstance(rope, Mapping):
    rope = {name: x for name, x in rope._asdict().items() if x}
  scaled = values.get("layer_scale") is not None
  return {
    **values,
    "rope": rope,
    "use_bias": tuple(sorted(values.get("use_bias", ()))),
    # The initial value says nothing of a trained model.
    "layer_scale": 1.0 if scaled else None,
    "num_classes": values.get("num_classes") or None,
  }


def _of_model(model: Any) -> Mapping[str, Family]:
  if not model.num_classes:
    return LAYOUTS
  return {
    name: family
    if family.model_type == timm.MODEL_TYPE
    else with_prefix(family.model_type.removesuffix("_mae"), family)
    for name, family in LAYOUTS.items()
  }


def with_prefix(prefix: str, family: Family) -> Family:
  """The layout of a classifier: other arrays are below the model's name."""
  arrays = [
    entry
    if entry.published.startswith("classifier")
    else entry._replace(published=f"{prefix}.{entry.published}")
    for entry in family.arrays
  ]
  return family._replace(arrays=arrays)


PUBLISHED = layouts.Layouts(FAMILIES, canonical, _of_model)
