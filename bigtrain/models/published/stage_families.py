"""Models of stages of Hugging Face: BiT.

Keys, defaults and names of arrays follow transformers. {stage} and {i} in a
row are numbers from 0.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.models.published import families, tables, vit_families
from bigtrain.models.published.families import ConfigJson, Family, Rule
from bigtrain.models.published.tables import Entry
from bigtrain.models.published.vit_families import dense, norm

_STAGES, _LAYERS = 4, 48  # At most.
DIMS = {
  ".*conv[^/]*/kernel": "height width channels -> D",
  "head/kernel": "D -> V",
  ".*": "D",
}


def _convolution(published: str, ours: str) -> list[Entry]:
  return [
    Entry(f"{published}.weight", (f"{ours}/kernel",), convolution=True),
    tables.plain(f"{published}.bias", f"{ours}/bias"),
  ]


def _in_stages(rows: Sequence[Entry]) -> list[Entry]:
  """The rows with all numbers; ours are from 1."""
  return [
    row._replace(
      published=row.published.format(stage=stage, i=i),
      ours=tuple(x.format(stage=stage + 1, i=i + 1) for x in row.ours),
    )
    for stage, i in itertools.product(range(_STAGES), range(_LAYERS))
    for row in rows
  ]


def _bit_arrays() -> list[Entry]:
  theirs, ours = "encoder.stages.{stage}.layers.{i}", "stage{stage}_block{i}"
  rows = _convolution(f"{theirs}.downsample.conv", f"{ours}/conv_proj")
  for i in range(1, 4):
    rows += _convolution(f"{theirs}.conv{i}", f"{ours}/conv{i}")
    rows += norm(f"{theirs}.norm{i}", f"{ours}/gn{i}")
  return [
    *_convolution("embedder.convolution", "conv_root"),
    *_in_stages(rows),
    *norm("norm", "gn_final"),
    *dense("classifier.1", "head"),
  ]


def _classes(stem: str) -> Rule:
  use = vit_families.use(stem, "", "")

  def read(config: ConfigJson) -> dict[str, Any]:
    return {"num_classes": use.read(config)["num_classes"]}

  return use._replace(read=read)


def _bit_sizes() -> Rule:
  def read(config: ConfigJson) -> dict[str, Any]:
    size, sizes = config["embedding_size"], config["hidden_sizes"]
    if [*sizes] != [4 * size * 2**i for i in range(len(sizes))]:
      raise config.error(
        f"hidden_sizes={sizes}: expected 4 times embedding_size={size}, and "
        "twice as many in each next stage."
      )
    return {"width": size / 64, "depth": tuple(config["depths"])}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    size, depths = int(64 * fields["width"]), [*fields["depth"]]
    sizes = [4 * size * 2**i for i in range(len(depths))]
    return dict(embedding_size=size, hidden_sizes=sizes, depths=depths)

  absent = dict(hidden_sizes=(256, 512, 1024, 2048), depths=(3, 4, 6, 3))
  return Rule({"embedding_size": 64, **absent}, read, write)


_HARMLESS = (*vit_families.HARMLESS, "output_stride")
_BIT = Family(
  "bit",
  "BitModel",
  _bit_arrays(),
  keys=dict(groups="num_groups"),
  defaults=dict(num_groups=32),
  constants=dict(version=2, norm="bit_torch"),
  rules=dict(sizes=_bit_sizes(), use=_classes("Bit")),
  requires=dict(
    layer_type=("preactivation",),
    hidden_act=("relu",),
    global_padding=(None,),
    embedding_dynamic_padding=(False,),
    width_factor=(1,),
  ),
  harmless=_HARMLESS,
  in_shapes=("width", "depth", "num_classes"),
)


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  return {**values, "num_classes": values.get("num_classes") or None}


def _layouts(*members: Family) -> families.Layouts:
  named = {family.model_type: family for family in members}
  classifiers = {n: vit_families.below(n, x) for n, x in named.items()}
  of_model = lambda model: classifiers if model.num_classes else named
  return families.Layouts(named, _canonical, of_model)


BIT = _layouts(_BIT)


def load(
  layouts: families.Layouts, flat: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Converts published arrays; None for a file in another layout."""
  if not any(re.search(r"\b(stages|layers)\.", name) for name in flat):
    return None
  kinds = "|".join(layouts.families)
  names = {re.sub(f"^({kinds})[.]", "", name): x for name, x in flat.items()}
  arrays = {name: x.arrays for name, x in layouts.families.items()}
  return tables.load(arrays, names, like, DIMS, ignored={})
