"""Models of stages of Hugging Face: BiT, ConvNeXt and Swin.

Keys, defaults and names of arrays follow transformers.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import (
  conversions,
  encoder_rules,
  families,
  tables,
  vit_families,
)

_STAGES, _LAYERS = 4, 48  # At most.
DIMS = {
  ".*conv[^/]*/kernel": "height width channels -> D",
  "head/kernel": "D -> V",
  r".*Dense_\d/kernel": "D -> F",
  ".*": "D",
}


def _in_stages(rows: tables.Table) -> tables.Table:
  """The rows with the numbers of all stages and layers; ours are from 1."""
  entries = [
    row._replace(
      published=row.published.format(stage=stage, i=i),
      ours=tuple(x.format(stage=stage + 1, i=i + 1) for x in row.ours),
    )
    for row in rows
    for stage, i in itertools.product(range(_STAGES), range(_LAYERS))
  ]
  return [*dict.fromkeys(entries)]  # Rows without numbers, once.


def _layouts(*names: str) -> families.Layouts:
  named = {
    name: _ALL[name]._replace(arrays=_in_stages(_ALL[name].arrays))
    for name in names
  }
  classifiers = {n: vit_families.below(n, x) for n, x in named.items()}
  of_model = lambda model: classifiers if model.num_classes else named
  return families.Layouts(named, vit_families.canonical, of_model)


_ALL, _ = families.load("stage_families", encoder_rules, vit_families.FAMILIES)
BIT = _layouts("bit")
CONVNEXT = _layouts("convnext", "convnextv2")
SWIN = _layouts("swin", "swinv2")


def load(
  layouts: families.Layouts,
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
  param_dims: dims.Table = DIMS,
) -> dict[str, Any] | None:
  if not any(re.search(r"\b(stages|layers)\.", name) for name in flat):
    return None
  kinds = "|".join(layouts.families)
  names = {re.sub(f"^({kinds})[.]", "", name): x for name, x in flat.items()}
  arrays = {name: x.arrays for name, x in layouts.families.items()}
  return tables.load(
    arrays, names, like, param_dims, ignored=families.IGNORED["stages"]
  )


def read(
  layouts: families.Layouts,
  param_dims: dims.Table,
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
) -> dict[str, Any]:
  """Converts published arrays; those of another layout keep their names."""
  flat = conversions.normalise(flat)
  converted = load(layouts, flat, like, param_dims)
  return dict(flat) if converted is None else converted
