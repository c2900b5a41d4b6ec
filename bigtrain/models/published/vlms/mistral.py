"""Mistral 3 and LightOnOCR: Pixtral's tower, and a layer that joins patches.

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


def _parts(decoder: str) -> Rule:
  """The parts. The tower has its patches in the order of the squares."""
  parts = vlm_parts.part_configs(
    ("pixtral",), tower="pixtral", decoder=decoder, tied=True
  )

  def read(config: ConfigJson) -> dict[str, Any]:
    fields = dict(parts.read(config))
    fields["image"] = {**fields["image"], "merge": config[_SIDE]}
    return {**fields, "image_size": None}

  return parts._replace(read=read)


def _canonical_tower(values: Mapping[str, Any]) -> dict[str, Any]:
  return {**native_towers.canonical(values), "merge": 1}


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
LIGHTON_OCR = MISTRAL3._replace(
  family=MISTRAL3.family._replace(
    model_type="lighton_ocr",
    architecture="LightOnOcrForConditionalGeneration",
    keys={"image_token": Key("image_token_id", 151655)},
    constants={**MISTRAL3.family.constants, "published_as": "lighton_ocr"},
    rules=(_fixed_mlp(), _parts("qwen3")),
    requires={},
    aliases={},
  ),
  starts={
    **vlm_parts.NESTED_STARTS,
    "img/": "model.vision_encoder.",
    "projector/": "model.vision_projection.",
  },
)
