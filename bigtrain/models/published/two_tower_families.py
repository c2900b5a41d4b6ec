"""CLIP, SigLIP and SigLIP 2 of Hugging Face: config.json and arrays.

A model of two towers has the fields `image` and `text`, options of its towers.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import (
  encoder_rules,
  families,
  tables,
  vit_families,
)

_PARTS, _ = families.load(
  "two_tower_families", encoder_rules, vit_families.FAMILIES
)
FAMILIES = {name: _PARTS[name] for name in ("clip", "siglip", "siglip2")}
_PATCHES = "vision_model.embeddings.patch_embedding"


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  kernel = flat.get(f"{_PATCHES}.weight")
  of_patches = kernel is not None and len(kernel.shape) == 2
  names = [n for n in FAMILIES if of_patches == (n == "siglip2")]
  arrays = {name: FAMILIES[name].arrays for name in names}
  result = tables.load(
    arrays, flat, like, param_dims, ignored=families.IGNORED["two_towers"]
  )
  known = result is not None and "txt/Embed_0/embedding" in result
  return result if known and "txt/Embed_0/embedding" not in flat else None
