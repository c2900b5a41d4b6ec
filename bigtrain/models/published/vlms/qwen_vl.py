"""Qwen2-VL to Qwen3-VL and Qwen 3.5, which read pictures of any size."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published import tables
from bigtrain.models.published.families import ConfigJson, Family, Key, Rule
from bigtrain.models.published.tables import dense, norm, table, within
from bigtrain.models.published.vits import native_towers
from bigtrain.models.published.vlms import vlm_parts
from bigtrain.models.published.vlms.vlm_parts import Kind

# Tokens of videos, which our data does not have.
_OF_VIDEOS = (
  "video_token_id",
  "vision_start_token_id",
  "vision_end_token_id",
  "vision_token_id",
)
_QWEN3_MERGERS = table(
  norm("merger.norm", "norm"),
  dense("merger.linear_fc1", "linear_0"),
  dense("merger.linear_fc2", "linear_1"),
  within(
    "deepstack_merger_list.{i}.",
    "blocks/",
    norm("norm", "norm"),
    dense("linear_fc1", "linear_0"),
    dense("linear_fc2", "linear_1"),
  ),
)
_QWEN2_MERGER = table(
  norm("merger.ln_q", "norm"),
  dense("merger.mlp.0", "linear_0"),
  dense("merger.mlp.2", "linear_1"),
)


def _joined_squares(tower: str, norm_kind: str) -> Rule:
  """Norms of patches, joined in squares, then an MLP of the same width."""

  def read(config: ConfigJson) -> dict[str, Any]:
    key = f"{config.path}: vision_config"
    fields = vlm_parts.TOWERS[tower].read(key, config["vision_config"])
    merge = fields["merge"].value
    projector = dict(
      merge=merge,
      norm_eps=1e-6,
      norm=norm_kind,
      norm_patches=True,
      mlp="gelu_erf",
      hidden=merge**2 * fields["width"].value,
      use_bias=True,
    )
    return {"projector": projector}

  return Rule(("projector",), {}, read, lambda fields: {})


def _qwen_parts(tower: str, decoder: str, width_key: str) -> Rule:
  """The parts. The tower's config also has the decoder's width."""
  parts = vlm_parts.part_configs(
    (tower,), (decoder,), tower=tower, decoder=decoder
  )

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(parts.write(fields))
    width = {width_key: fields["text"]["width"]}
    config["vision_config"] = {**config["vision_config"], **width}
    return config

  return parts._replace(write=write)


def _qwen(
  model_type: str,
  architecture: str,
  arrays: tables.Table,
  *,
  norm_kind: str = "layernorm",
  width_key: str = "out_hidden_size",
  nested: bool = True,
  image_token: int = 151655,
  decoder: str = "",
) -> Kind:
  """A Qwen-VL. In `nested` files, all names begin with `model.`."""
  tower, decoder = f"{model_type}_vision", decoder or f"{model_type}_text"
  start = "model." if nested else ""
  return Kind(
    Family(
      model_type=model_type,
      architecture=architecture,
      arrays=arrays,
      keys={"image_token": Key("image_token_id", image_token)},
      constants={
        "mask": "causal",
        "class_token": False,
        "image_model": "native_vit",
        "published_as": model_type,
      },
      rules=(
        _joined_squares(tower, norm_kind),
        _qwen_parts(tower, decoder, width_key),
      ),
      harmless=(*vlm_parts.HARMLESS, *_OF_VIDEOS),
      limits=vlm_parts.LIMITS,
    ),
    towers=(tower,),
    starts={
      "img/": f"{start}visual.",
      "llm/model.": "model.language_model." if nested else "model.",
      "llm/": "",
      "projector/": f"{start}visual.",
      "deepstack/": f"{start}visual.",
    },
    decoders=(decoder,),
    canonical_tower=native_towers.canonical,
  )


QWEN3_VL = _qwen("qwen3_vl", "Qwen3VLForConditionalGeneration", _QWEN3_MERGERS)
QWEN3_VL_MOE = _qwen(
  "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _QWEN3_MERGERS
)
QWEN2_5_VL = _qwen(
  "qwen2_5_vl",
  "Qwen2_5_VLForConditionalGeneration",
  _QWEN2_MERGER,
  norm_kind="rmsnorm",
  nested=False,
)
QWEN2_VL = _qwen(
  "qwen2_vl",
  "Qwen2VLForConditionalGeneration",
  _QWEN2_MERGER,
  width_key="hidden_size",
  nested=False,
)
QWEN3_5 = _qwen(
  "qwen3_5",
  "Qwen3_5ForConditionalGeneration",
  _QWEN3_MERGERS,
  image_token=248056,
)
QWEN3_5_MOE = _qwen(
  "qwen3_5_moe",
  "Qwen3_5MoeForConditionalGeneration",
  _QWEN3_MERGERS,
  image_token=248056,
)
# Its decoder counts all tokens alike.
EXAONE4_5 = _qwen(
  "exaone4_5",
  "Exaone4_5_ForConditionalGeneration",
  _QWEN2_MERGER,
  norm_kind="rmsnorm",
  image_token=67,
  decoder="exaone4",
)
