"""Idefics 3 and SmolVLM, which join the features of neighbouring patches."""

from bigtrain.models.published.families import Family, Key, Rule
from bigtrain.models.published.tables import linear
from bigtrain.models.published.vlms import vlm_parts
from bigtrain.models.published.vlms.vlm_parts import Kind

# Keys of a decoder's config of which no decoder reads any.
_UNREAD = (
  "_flash_attn_2_enabled",
  "neftune_noise_alpha",
  "perceiver_config",
  "pixel_shuffle_factor",
  "qk_layer_norms",
  "use_resampler",
)


def _merged() -> Rule:
  """Joins squares of `scale_factor` x `scale_factor` patches."""
  key = "scale_factor"
  return Rule(
    ("projector",),
    {key: 2},
    lambda config: {"projector": dict(merge=config[key], use_bias=False)},
    lambda fields: {key: fields["projector"]["merge"]},
  )


def _idefics3(model_type: str, architecture: str) -> Kind:
  tower = f"{model_type}_vision"
  return Kind(
    Family(
      model_type=model_type,
      architecture=architecture,
      arrays=linear("modality_projection.proj", "linear_0"),
      keys={"image_token": Key("image_token_id", 128257)},
      constants={
        "mask": "causal",
        "class_token": False,
        "published_as": model_type,
      },
      limits=vlm_parts.LIMITS,
      rules=(
        _merged(),
        vlm_parts.part_configs(
          (tower,), tower=tower, decoder="llama", unread=_UNREAD
        ),
      ),
      harmless=vlm_parts.HARMLESS,
    ),
    towers=(tower,),
    starts={
      "img/": "model.vision_model.",
      "llm/model.": "model.text_model.",
      "llm/": "",
      "projector/": "model.connector.",
    },
  )


IDEFICS3 = _idefics3("idefics3", "Idefics3ForConditionalGeneration")
SMOLVLM = _idefics3("smolvlm", "SmolVLMForConditionalGeneration")
