"""PaliGemma, Gemma 3 and Gemma 4.

PaliGemma projects each patch; Gemma 3 and 4 project averages over squares of
patches.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.families import ConfigJson, Family, Key, Rule
from bigtrain.models.published.tables import dense, linear, plain, table
from bigtrain.models.published.vits import native_towers
from bigtrain.models.published.vlms import vlm_parts
from bigtrain.models.published.vlms.vlm_parts import Kind


def _grid_side(config: ConfigJson) -> int:
  """Number of patches along one side of a picture."""
  vision = {"image_size": 224, "patch_size": 16, **config["vision_config"]}
  return vision["image_size"] // vision["patch_size"]


def _linear() -> Rule:
  """PaliGemma: one dense layer, to the width of the decoder."""
  return Rule(
    ("projector",),
    {},
    lambda config: {"projector": dict(use_bias=True)},
    lambda fields: {"projection_dim": fields["text"]["width"]},
  )


def _pooled() -> Rule:
  """Gemma 3: averages patches until `mm_tokens_per_image` are left."""
  key = "mm_tokens_per_image"

  def read(config: ConfigJson) -> dict[str, Any]:
    side = round(config[key] ** 0.5)
    patches = _grid_side(config)
    if side**2 != config[key] or patches % side:
      raise config.error(
        f"{key}={config[key]}: expected the square of a divisor of {patches}, "
        "the number of patches along a side of a picture."
      )
    eps = config["vision_config"].get("layer_norm_eps", 1e-6)
    projector = dict(pool=patches // side, norm_eps=eps, use_bias=False)
    return {"projector": projector}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    num_patches = fields["shapes"]["img/pos_embedding"][1]
    return {key: num_patches // fields["projector"]["pool"] ** 2}

  return Rule(("projector",), {key: 256}, read, write)


PALIGEMMA = Kind(
  Family(
    model_type="paligemma",
    architecture="PaliGemmaForConditionalGeneration",
    arrays=dense("linear", "linear_0"),
    keys={"image_token": Key("image_token_index", 256000)},
    constants={"mask": "prefix", "class_token": False},
    rules=(
      _linear(),
      vlm_parts.part_configs(
        ("siglip_vision_model",),
        ("gemma", "gemma2"),
        tower="siglip_vision_model",
        decoder="gemma",
        tied=True,
        scaled_logits=True,
        unread=("use_bidirectional_attention", "num_image_tokens"),
      ),
    ),
    aliases={"image_token_id": "image_token_index"},
    harmless=vlm_parts.HARMLESS,
    limits=vlm_parts.LIMITS,
  ),
  towers=("siglip_vision_model",),
  starts=vlm_parts.STARTS,
  decoders=("gemma", "gemma2"),
)
GEMMA3 = Kind(
  Family(
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    arrays=table(
      plain("mm_input_projection_weight", "linear_0/kernel"),
      plain("mm_soft_emb_norm.weight", "norm/scale"),
    ),
    keys={"image_token": Key("image_token_index", 262144)},
    constants={"mask": "image", "class_token": False},
    rules=(
      _pooled(),
      vlm_parts.part_configs(
        ("siglip_vision_model",),
        ("gemma3_text",),
        tower="siglip_vision_model",
        decoder="gemma3_text",
        tied=True,
      ),
    ),
    aliases={"image_token_id": "image_token_index"},
    harmless=vlm_parts.HARMLESS,
    limits=vlm_parts.LIMITS,
  ),
  towers=("siglip_vision_model",),
  starts=vlm_parts.STARTS,
  decoders=("gemma3_text",),
)


def _averaged() -> Rule:
  """Gemma 4: averages squares of patches; the norm has no scale."""

  def read(config: ConfigJson) -> dict[str, Any]:
    vision = native_towers.GEMMA4.absent() | (config["vision_config"] or {})
    projector = dict(
      pool=vision["pooling_kernel_size"],
      norm_eps=vision["rms_norm_eps"],
      norm="plain_rmsnorm",
      use_bias=False,
    )
    return {"projector": projector}

  return Rule(("projector",), {}, read, lambda fields: {})


def _gemma4_parts() -> Rule:
  """The parts. The mask is a key of the decoder's config."""
  key = "use_bidirectional_attention"
  parts = vlm_parts.part_configs(
    ("gemma4_vision",),
    ("gemma4_text",),
    tower="gemma4_vision",
    decoder="gemma4_text",
    tied=True,
    scaled_logits=True,
  )

  def read(config: ConfigJson) -> dict[str, Any]:
    if not config["vision_config"]:
      raise config.error(
        "vision_config: missing: expected a model that reads pictures; "
        'config.model_name="decoder" reads its texts.'
      )
    sees_picture = config["text_config"].get(key) == "vision"
    mask = "windowed_image" if sees_picture else "causal"
    return {**parts.read(config), "mask": mask}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(parts.write(fields))
    value = "vision" if fields["mask"] == "windowed_image" else None
    config["text_config"] = {**config["text_config"], key: value}
    return config

  return Rule((*parts.fields, "mask"), parts.keys, read, write)


# The audio tower is left out.
GEMMA4 = Kind(
  Family(
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    arrays=linear("embedding_projection", "linear_0"),
    keys={"image_token": Key("image_token_id", 258880)},
    constants={"class_token": False, "image_model": "native_vit"},
    rules=(_averaged(), _gemma4_parts()),
    harmless=(
      *vlm_parts.HARMLESS,
      "audio_config",
      "video_token_id",
      "audio_token_id",
      "boa_token_id",
      "eoa_token_id",
      "eoa_token_index",
    ),
    limits=vlm_parts.LIMITS,
  ),
  towers=("gemma4_vision",),
  starts={
    "img/": "model.vision_tower.",
    "llm/model.": "model.language_model.",
    "llm/": "",
    "projector/": "model.embed_vision.",
  },
  decoders=("gemma4_text",),
  canonical_tower=native_towers.canonical,
)
