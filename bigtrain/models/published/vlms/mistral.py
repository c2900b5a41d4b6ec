"""Pixtral, Mistral 3 and LightOnOCR: Pixtral's tower.

Pixtral is a LLaVA with this tower. The others have a layer that joins patches.
Mistral 3 is Mistral Small 3.1 and later, Magistral, Devstral and Ministral 3.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.families import ConfigJson, Family, Key, Rule
from bigtrain.models.published.tables import dense, linear, norm, table
from bigtrain.models.published.vits import native_towers
from bigtrain.models.published.vlms import llava, vlm_parts
from bigtrain.models.published.vlms.vlm_parts import Kind

_SIDE = "spatial_merge_size"
_ACT, _BIAS = "projector_hidden_act", "multimodal_projector_bias"


def _merged() -> Rule:
  """Norms of patches, a layer that joins squares of them, and an MLP."""

  def read(config: ConfigJson) -> dict[str, Any]:
    text = {"rms_norm_eps": 1e-6, **config["text_config"]}
    projector = dict(
      merge=config[_SIDE],
      merge_layer=True,
      norm="rmsnorm",
      norm_patches=True,
      norm_eps=text["rms_norm_eps"],
      mlp=llava.activation(config, _ACT),
      use_bias=config[_BIAS],
    )
    return {"projector": projector}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    projector = fields["projector"]
    return {
      _SIDE: projector["merge"],
      _ACT: llava.name_of_activation(projector["mlp"]),
      _BIAS: projector["use_bias"],
    }

  keys = {_SIDE: 2, _ACT: "gelu", _BIAS: False}
  return Rule(("projector",), keys, read, write)


def _fixed_mlp() -> Rule:
  """LightOnOCR: the same without options."""
  rule = _merged()

  def read(config: ConfigJson) -> dict[str, Any]:
    fixed = {_ACT: "gelu", _BIAS: False}
    return dict(rule.read(ConfigJson(config.path, {**config, **fixed})))

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {_SIDE: fields["projector"]["merge"]}

  return rule._replace(keys={_SIDE: 2}, read=read, write=write)


def _parts(
  decoder: str,
  *,
  tied: bool | None = True,
  merges: bool = True,
  partial_squares: bool = False,
) -> Rule:
  """The parts. The tower has its patches in the order of the squares.

  Args:
    tied: see vlm_parts.part_configs.
    merges: whether patches are joined.
    partial_squares: whether the processor makes pictures with rows or columns
      of patches that fill no square.
  """
  parts = vlm_parts.part_configs(
    ("pixtral",), tower="pixtral", decoder=decoder, tied=tied
  )

  def read(config: ConfigJson) -> dict[str, Any]:
    fields = dict(parts.read(config))
    merge = config[_SIDE] if merges else 1
    image = {**fields["image"], "merge": merge}
    if partial_squares:
      image["partial_squares"] = True
    return {**fields, "image": image, "image_size": None}

  return parts._replace(read=read)


def _canonical_tower(values: Mapping[str, Any]) -> dict[str, Any]:
  fixed = {"merge": 1, "partial_squares": False}
  return {**native_towers.canonical(values), **fixed}


MISTRAL3 = Kind(
  Family(
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    arrays=table(
      norm("norm", "norm"),
      linear("patch_merger.merging_layer", "merge_layer"),
      dense("linear_1", "linear_0"),
      dense("linear_2", "linear_1"),
    ),
    keys={"image_token": Key("image_token_index", 10)},
    constants={
      "mask": "causal",
      "class_token": False,
      "image_model": "native_vit",
    },
    rules=(_merged(), _parts("mistral")),
    requires={"vision_feature_layer": (-1,)},
    aliases={"image_token_id": "image_token_index"},
    harmless=vlm_parts.HARMLESS,
    limits=vlm_parts.LIMITS,
  ),
  towers=("pixtral",),
  starts=vlm_parts.STARTS,
  canonical_tower=_canonical_tower,
)
_LAYER, _STRATEGY = "vision_feature_layer", "vision_feature_select_strategy"


def _last_features(parts: Rule) -> Rule:
  """The keys of LLaVA that choose features; here it is always the last ones."""

  def read(config: ConfigJson) -> dict[str, Any]:
    config.require(_LAYER, -1)
    config.require(_STRATEGY, "full")
    return dict(parts.read(config))

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    # transformers asks the processor for the number of tokens.
    own = {_LAYER: -1, _STRATEGY: "full", "image_seq_length": 1}
    return {**parts.write(fields), **own}

  keys = {**parts.keys, _LAYER: -2, _STRATEGY: "default"}
  return parts._replace(keys=keys, read=read, write=write)


PIXTRAL = Kind(
  llava.LLAVA.family._replace(
    constants={
      "mask": "causal",
      "class_token": False,
      "image_model": "native_vit",
    },
    rules=(
      llava.two_layers(),
      _last_features(_parts("mistral", tied=None, merges=False)),
    ),
  ),
  towers=("pixtral",),
  starts=vlm_parts.STARTS,
  canonical_tower=native_towers.canonical,
)
LIGHTON_OCR = MISTRAL3._replace(
  family=MISTRAL3.family._replace(
    model_type="lighton_ocr",
    architecture="LightOnOcrForConditionalGeneration",
    keys={"image_token": Key("image_token_id", 151655)},
    constants={**MISTRAL3.family.constants, "published_as": "lighton_ocr"},
    rules=(_fixed_mlp(), _parts("qwen3", partial_squares=True)),
    requires={},
    aliases={},
  ),
  starts={
    **vlm_parts.NESTED_STARTS,
    "img/": "model.vision_encoder.",
    "projector/": "model.vision_projection.",
  },
)
