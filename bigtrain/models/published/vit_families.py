"""ViTs of Hugging Face and timm: their config.json and their arrays.

ViT and MAE's encoder, DINOv2 (with registers, with SwiGLU), DINOv3 and BEiT.
Keys, defaults and names of arrays follow transformers, or timm. What depends on
the use of a model, not on its weights, is read from its class in
`architectures`: the pooling, and the number of classes.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import encoder_rules, families, tables, timm
from bigtrain.models.published.families import Family

LAYOUTS, _ = families.load("vit_families", encoder_rules)
FAMILIES = {
  x.model_type: x for n, x in LAYOUTS.items() if n in (x.model_type, "timm")
}
_PREFIXES = (
  *("vit.", "dinov2.", "dinov2_with_registers.", "beit.", "model."),
  "timm_model.",
)


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  prefixes = [x for x in _PREFIXES if any(n.startswith(x) for n in flat)]
  names = {name: name for name in flat}
  for prefix in prefixes:
    names = {name.removeprefix(prefix): full for name, full in names.items()}
  result = tables.load(
    {name: family.arrays for name, family in LAYOUTS.items()},
    {name: flat[full] for name, full in names.items()},
    like,
    param_dims,
    ignored=families.IGNORED["vit"],
  )
  if result is None or "embedding/kernel" not in result:
    return None
  return tables.with_names_of_file(result, names, like)


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
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


def _of_model(model: Any) -> dict[str, Family]:
  if not model.num_classes:
    return LAYOUTS
  return {
    name: below(family.model_type.removesuffix("_mae"), family)
    if family.model_type != timm.MODEL_TYPE
    else family
    for name, family in LAYOUTS.items()
  }


def below(prefix: str, family: Family) -> Family:
  """The layout of a classifier: other arrays are below the model's name."""
  arrays = [
    entry
    if entry.published.startswith("classifier")
    else entry._replace(published=f"{prefix}.{entry.published}")
    for entry in family.arrays
  ]
  return family._replace(arrays=arrays)


PUBLISHED = families.Layouts(FAMILIES, canonical, _of_model)
