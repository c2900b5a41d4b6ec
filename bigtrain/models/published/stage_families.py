"""Models of stages of Hugging Face: BiT and ConvNeXt.

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
  r".*Dense_\d/kernel": "D -> F",
  ".*": "D",
}


def _convolution(published: str, ours: str) -> list[Entry]:
  return [
    Entry(f"{published}.weight", (f"{ours}/kernel",), convolution=True),
    tables.plain(f"{published}.bias", f"{ours}/bias"),
  ]


def _in_stages(rows: Sequence[Entry], layers: int = _LAYERS) -> list[Entry]:
  """The rows with all numbers; ours are from 1."""
  return [
    row._replace(
      published=row.published.format(stage=stage, i=i),
      ours=tuple(x.format(stage=stage + 1, i=i + 1) for x in row.ours),
    )
    for stage, i in itertools.product(range(_STAGES), range(layers))
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


def _convnext_arrays() -> list[Entry]:
  at, theirs = "encoder.stages.{stage}", "encoder.stages.{stage}.layers.{i}"
  ours, down = "stage{stage}_block{i}", "downsampling_layer"
  rows = [
    *_convolution(f"{theirs}.dwconv", f"{ours}/conv_depthwise"),
    *norm(f"{theirs}.layernorm", f"{ours}/LayerNorm_0"),
    *dense(f"{theirs}.pwconv1", f"{ours}/Dense_0"),
    *dense(f"{theirs}.pwconv2", f"{ours}/Dense_1"),
    tables.plain(f"{theirs}.layer_scale_parameter", f"{ours}/layer_scale_0"),
    Entry(f"{theirs}.grn.weight", (f"{ours}/response_scale",), ndim=4),
    Entry(f"{theirs}.grn.bias", (f"{ours}/response_bias",), ndim=4),
  ]
  of_stage = norm(f"{at}.{down}.0", "down{stage}_norm")
  of_stage += _convolution(f"{at}.{down}.1", "conv_down{stage}")
  return [
    *_convolution("embeddings.patch_embeddings", "conv_patch"),
    *norm("embeddings.layernorm", "patch_norm"),
    *_in_stages(rows),
    *_in_stages(of_stage, 1),
    *norm("layernorm", "norm"),
    *dense("classifier", "head"),
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


_HARMLESS = (*vit_families.HARMLESS, "output_stride", "num_stages")
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


_CONVNEXT = Family(
  "convnext",
  "ConvNextModel",
  _convnext_arrays(),
  keys=dict(
    widths="hidden_sizes",
    depths="depths",
    patch_size="patch_size",
    norm_eps="layer_norm_eps",
  ),
  defaults=dict(
    patch_size=4,
    layer_norm_eps=1e-12,
    hidden_sizes=(96, 192, 384, 768),
    depths=(3, 3, 9, 3),
  ),
  constants=dict(version=1),
  rules=dict(
    mlp=vit_families.VIT.rules["mlp"],
    scale=vit_families.layer_scale("layer_scale_init_value", 1e-6),
    use=_classes("ConvNext"),
  ),
  harmless=_HARMLESS,
  in_shapes=("widths", "depths", "num_classes", "patch_size"),
)
_CONVNEXT_V2 = _CONVNEXT.but(
  "convnextv2",
  "ConvNextV2Model",
  ("scale",),
  constants=dict(version=2, layer_scale=None),
  rules=dict(use=_classes("ConvNextV2")),
)


def _layouts(*members: Family) -> families.Layouts:
  named = {family.model_type: family for family in members}
  classifiers = {n: vit_families.below(n, x) for n, x in named.items()}
  of_model = lambda model: classifiers if model.num_classes else named
  return families.Layouts(named, vit_families.canonical, of_model)


BIT = _layouts(_BIT)
CONVNEXT = _layouts(_CONVNEXT, _CONVNEXT_V2)


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
