"""Aya Vision, Command A Vision and InternVL: features of joined patches.

Each joins squares of patches, as Idefics 3 does, and has an MLP behind them.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.families import ConfigJson, Family, Key, Rule
from bigtrain.models.published.tables import dense, norm, table
from bigtrain.models.published.vlms import llava, vlm_parts
from bigtrain.models.published.vlms.vlm_parts import Kind

_LINEAR = table(dense("linear_1", "linear_0"), dense("linear_2", "linear_1"))


def _gated_mlp(*, normed: bool) -> Rule:
  """An MLP with a gate, the second half of its first layer.

  Args:
    normed: whether a norm of the joined features comes before it.
  """
  side, width = "downsample_factor", "alignment_intermediate_size"
  eps = "adapter_layer_norm_eps"

  def read(config: ConfigJson) -> dict[str, Any]:
    hidden = config[width]
    if hidden is None:  # As wide as the decoder.
      hidden = {"hidden_size": 8192, **config["text_config"]}["hidden_size"]
    if hidden % 2:
      raise config.error(f"{width}={hidden}: expected an even number.")
    projector = dict(
      merge=config[side], mlp="swiglu", hidden=hidden, use_bias=True
    )
    if normed:
      projector |= dict(norm="layernorm", norm_eps=config[eps])
    return {"projector": projector}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    projector = fields["projector"]
    config = {side: projector["merge"], width: projector["hidden"]}
    return {**config, eps: projector["norm_eps"]} if normed else config

  keys = {side: 2, width: None if normed else 36864}
  return Rule(
    ("projector",), {**keys, eps: 1e-6} if normed else keys, read, write
  )


_PARTS = vlm_parts.part_configs(
  ("siglip_vision_model",),
  tower="siglip_vision_model",
  decoder="cohere2",
  tied=True,
)
AYA_VISION = Kind(
  Family(
    model_type="aya_vision",
    architecture="AyaVisionForConditionalGeneration",
    arrays=table(norm("layernorm", "norm"), _LINEAR),
    keys={"image_token": Key("image_token_index", 255036)},
    constants={"mask": "causal"},
    rules=(_gated_mlp(normed=True), llava.features(_PARTS)),
    defaults={
      "vision_feature_layer": -1,
      "vision_feature_select_strategy": "full",
    },
    aliases={"image_token_id": "image_token_index"},
    harmless=vlm_parts.HARMLESS,
    limits=vlm_parts.LIMITS,
  ),
  towers=("siglip_vision_model",),
  starts=vlm_parts.STARTS,
)
COHERE2_VISION = Kind(
  Family(
    model_type="cohere2_vision",
    architecture="Cohere2VisionForConditionalGeneration",
    arrays=_LINEAR,
    keys={"image_token": Key("image_token_id", 255036)},
    constants={"mask": "causal", "class_token": False},
    rules=(_gated_mlp(normed=False), _PARTS),
    harmless=vlm_parts.HARMLESS,
    limits=vlm_parts.LIMITS,
  ),
  towers=("siglip_vision_model",),
  starts=vlm_parts.NESTED_STARTS,
)


def _normed_mlp() -> Rule:
  """An MLP behind a norm of the joined features."""
  ratio, act = "downsample_ratio", "projector_hidden_act"

  def read(config: ConfigJson) -> dict[str, Any]:
    projector = dict(
      merge=int(1 / config[ratio]),
      norm="layernorm",
      norm_eps=1e-5,
      mlp=llava.activation(config, act),
      use_bias=True,
    )
    return {"projector": projector}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    projector = fields["projector"]
    return {
      ratio: 1 / projector["merge"],
      act: llava.name_of_activation(projector["mlp"]),
    }

  return Rule(("projector",), {ratio: 0.5, act: "gelu"}, read, write)


def _internvl_features(parts: Rule) -> Rule:
  """The layer of the features. The last ones are normed if pooling is not."""
  layer, strategy = "vision_feature_layer", "vision_feature_select_strategy"

  def read(config: ConfigJson) -> dict[str, Any]:
    fields = dict(parts.read(config))
    config.require(strategy, "default")
    image = fields["image"]
    number = llava.layer_number(config, layer, config[layer], image["depth"])
    is_normed = config[layer] == -1 and image.get("final_norm", True)
    image = {**image, "feature_layer": None if is_normed else number}
    return {**fields, "image": image}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    image = fields["image"]
    number = image["feature_layer"]
    at_end = number is None or (
      number == image["depth"] and not image["final_norm"]
    )
    # Positive, since -1 would be with the norm.
    return {**parts.write(fields), layer: -1 if at_end else number}

  keys = {**parts.keys, layer: -1, strategy: "default"}
  return parts._replace(keys=keys, read=read, write=write)


INTERNVL = Kind(
  Family(
    model_type="internvl",
    architecture="InternVLForConditionalGeneration",
    arrays=table(norm("layer_norm", "norm"), _LINEAR),
    keys={"image_token": Key("image_token_id", 151667)},
    constants={"mask": "causal", "class_token": False},
    rules=(
      _normed_mlp(),
      _internvl_features(
        vlm_parts.part_configs(
          ("internvl_vision",),
          tower="internvl_vision",
          decoder="qwen2",
          tied=True,
        )
      ),
    ),
    harmless=vlm_parts.HARMLESS,
    limits=vlm_parts.LIMITS,
  ),
  towers=("internvl_vision",),
  starts=vlm_parts.STARTS,
)
