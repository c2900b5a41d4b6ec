"""Models of several stages, of transformers: BiT, ConvNeXt and Swin.

Keys, defaults and names of arrays follow transformers. In the tables, {stage}
and {i}, a layer in its stage, count from 0 in published names and from 1 in
ours.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import (
  array_files,
  conversions,
  encoder_rules,
  layouts,
  tables,
  vit_families,
)
from bigtrain.models.published.encoder_rules import layer_scale, mlp
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Key,
  Rule,
  classes,
)
from bigtrain.models.published.tables import (
  conv,
  dense,
  linear,
  norm,
  plain,
  table,
  within,
)

# Upper bounds for the numbers in tables; a model lacks what it does not have.
_MAX_STAGES, _MAX_LAYERS = 4, 48
DIMS = {
  ".*conv[^/]*/kernel": "height width channels -> D",
  "head/kernel": "D -> V",
  r".*Dense_\d/kernel": "D -> F",
  ".*": "D",
}
_HARMLESS = (*encoder_rules.HARMLESS, "output_stride", "num_stages")
_OURS = "stage{stage}_block{i}/"


def _in_all_stages(rows: tables.Table) -> tables.Table:
  """The entries with the numbers of all stages and layers."""
  entries = [
    row._replace(
      published=row.published.format(stage=stage, i=i),
      ours=tuple(x.format(stage=stage + 1, i=i + 1) for x in row.ours),
    )
    for row in rows
    for stage, i in itertools.product(range(_MAX_STAGES), range(_MAX_LAYERS))
  ]
  return [*dict.fromkeys(entries)]  # Entries without numbers, once.


def _bit_sizes() -> Rule:
  """The width and the depths of a ResNet."""

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
    return {"embedding_size": size, "hidden_sizes": sizes, "depths": depths}

  keys = {
    "embedding_size": 64,
    "hidden_sizes": (256, 512, 1024, 2048),
    "depths": (3, 4, 6, 3),
  }
  return Rule(("width", "depth"), keys, read, write)


_BIT = Family(
  model_type="bit",
  architecture="BitModel",
  arrays=_in_all_stages(
    table(
      conv("embedder.convolution", "conv_root"),
      within(
        "encoder.stages.{stage}.layers.{i}.",
        _OURS,
        conv("downsample.conv", "conv_proj"),
        conv("conv1", "conv1"),
        norm("norm1", "gn1"),
        conv("conv2", "conv2"),
        norm("norm2", "gn2"),
        conv("conv3", "conv3"),
        norm("norm3", "gn3"),
      ),
      norm("norm", "gn_final"),
      dense("classifier.1", "head"),
    )
  ),
  keys={"groups": Key("num_groups", 32)},
  constants={"version": 2, "norm": "bit_torch"},
  rules=(_bit_sizes(), classes("Bit", "Image")),
  requires={
    "layer_type": ("preactivation",),
    "hidden_act": ("relu",),
    "global_padding": (None,),
    "embedding_dynamic_padding": (False,),
    "width_factor": (1,),
  },
  harmless=_HARMLESS,
  in_shapes=("width", "depth", "num_classes"),
)

_CONVNEXT = Family(
  model_type="convnext",
  architecture="ConvNextModel",
  arrays=_in_all_stages(
    table(
      conv("embeddings.patch_embeddings", "conv_patch"),
      norm("embeddings.layernorm", "patch_norm"),
      within(
        "encoder.stages.{stage}.layers.{i}.",
        _OURS,
        conv("dwconv", "conv_depthwise"),
        norm("layernorm", "LayerNorm_0"),
        dense("pwconv1", "Dense_0"),
        dense("pwconv2", "Dense_1"),
        plain("layer_scale_parameter", "layer_scale_0"),
        plain("grn.weight", "response_scale", ndim=4),
        plain("grn.bias", "response_bias", ndim=4),
      ),
      norm("encoder.stages.{stage}.downsampling_layer.0", "down{stage}_norm"),
      conv("encoder.stages.{stage}.downsampling_layer.1", "conv_down{stage}"),
      norm("layernorm", "norm"),
      dense("classifier", "head"),
    )
  ),
  keys={
    "widths": Key("hidden_sizes", (96, 192, 384, 768)),
    "depths": Key("depths", (3, 3, 9, 3)),
    "patch_size": Key("patch_size", 4),
    "norm_eps": Key("layer_norm_eps", 1e-12),
  },
  constants={"version": 1},
  rules=(
    mlp(),
    layer_scale("layer_scale_init_value", 1e-6),
    classes("ConvNext", "Image"),
  ),
  harmless=_HARMLESS,
  in_shapes=("widths", "depths", "num_classes", "patch_size"),
)

_CONVNEXT_V2 = _CONVNEXT.but(
  "convnextv2",
  "ConvNextV2Model",
  without=("layer_scale",),
  constants={"version": 2, "layer_scale": None},
  rules=(classes("ConvNextV2", "Image"),),
)


def _swin_arrays(*attention: tables.Table) -> tables.Table:
  """The arrays of a Swin, with those of its attention beside the layers."""
  return _in_all_stages(
    table(
      conv("embeddings.patch_embeddings.projection", "conv_patch"),
      norm("embeddings.norm", "patch_norm"),
      within(
        "encoder.layers.{stage}.blocks.{i}.",
        _OURS,
        norm("layernorm_before", "LayerNorm_0"),
        dense("attention.self.query", "query"),
        dense("attention.self.key", "key"),
        dense("attention.self.value", "value"),
        dense("attention.output.dense", "out"),
        norm("layernorm_after", "LayerNorm_1"),
        dense("intermediate.dense", "Dense_0"),
        dense("output.dense", "Dense_1"),
      ),
      norm("encoder.layers.{stage}.downsample.norm", "merge{stage}_norm"),
      linear("encoder.layers.{stage}.downsample.reduction", "merge{stage}"),
      norm("layernorm", "norm"),
      dense("classifier", "head"),
      within(
        "encoder.layers.{stage}.blocks.{i}.attention.self.", _OURS, *attention
      ),
    )
  )


_SWIN = Family(
  model_type="swin",
  architecture="SwinModel",
  arrays=_swin_arrays(plain("relative_position_bias_table", "relative_bias")),
  keys={
    "width": Key("embed_dim", 96),
    "depths": Key("depths", (2, 2, 6, 2)),
    "num_heads": Key("num_heads", (3, 6, 12, 24)),
    "patch_size": Key("patch_size", 4),
    "window": Key("window_size", 7),
    "mlp_ratio": Key("mlp_ratio", 4.0),
    "qkv_bias": Key("qkv_bias", True),
    "norm_eps": Key("layer_norm_eps", 1e-5),
  },
  constants={"version": 1},
  rules=(mlp(), classes("Swin", "Image")),
  requires={"use_absolute_embeddings": (False,)},
  harmless=(*encoder_rules.HARMLESS, "hidden_size", "num_layers", "path_norm"),
  in_shapes=("width", "depths", "num_classes", "patch_size"),
)

_SWIN_V2 = _SWIN.but(
  "swinv2",
  "Swinv2Model",
  arrays=_swin_arrays(
    plain("logit_scale", "logit_scale"),
    dense("continuous_position_bias_mlp.0", "bias_mlp_0"),
    linear("continuous_position_bias_mlp.2", "bias_mlp_1"),
  ),
  keys={
    "image_size": Key("image_size", 224),
    "pretrained_windows": Key("pretrained_window_sizes", (0, 0, 0, 0)),
  },
  constants={"version": 2},
  rules=(classes("Swinv2", "Image"),),
)


def _layouts(*families: Family) -> layouts.Layouts:
  named = {family.model_type: family for family in families}
  classifiers = {
    name: vit_families.with_prefix(name, family)
    for name, family in named.items()
  }
  return layouts.Layouts(
    named,
    vit_families.canonical,
    lambda model: classifiers if model.num_classes else named,
  )


BIT = _layouts(_BIT)
CONVNEXT = _layouts(_CONVNEXT, _CONVNEXT_V2)
SWIN = _layouts(_SWIN, _SWIN_V2)
# {regular expression of names in a file that are not loaded: reason}.
_IGNORED = {
  r".*\.relative_(position_index|coords_table)": "the model computes it",
  r"embeddings\.mask_token": "only for masked training",
}


def load(
  published: layouts.Layouts,
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
  param_dims: dims.Table = DIMS,
) -> dict[str, Any] | None:
  """Converts a file's arrays; see array_files.load."""
  if not any(re.search(r"\b(stages|layers)\.", name) for name in flat):
    return None
  kinds = "|".join(published.families)
  names = {re.sub(f"^({kinds})[.]", "", name): x for name, x in flat.items()}
  arrays = {name: x.arrays for name, x in published.families.items()}
  return array_files.load(arrays, names, like, param_dims, ignored=_IGNORED)


def read(
  published: layouts.Layouts,
  param_dims: dims.Table,
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
) -> dict[str, Any]:
  """Converts published arrays; those of another layout keep their names."""
  flat = conversions.normalise(flat)
  converted = load(published, flat, like, param_dims)
  return dict(flat) if converted is None else converted
