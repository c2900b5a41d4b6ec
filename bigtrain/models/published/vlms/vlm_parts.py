"""What all models that read pictures share: towers, and the parts' configs.

Such a model has three parts: a decoder, one of decoder_families.py; an image
tower, one of TOWERS; and a projector between them. The decoder has its own
config in `text_config` of config.json, and the tower in `vision_config`;
`part_configs` is the rule for both. A `Kind` is a whole family: its projector,
its other keys, and the parts that it may have.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from bigtrain.models.published import (
  decoder_families,
  two_tower_families,
  vit_families,
)
from bigtrain.models.published.decoders import qwen_next
from bigtrain.models.published.families import ConfigJson, Family, Rule, choice
from bigtrain.models.published.tables import conv, table
from bigtrain.models.published.vits import internvl, native_towers

_CLIP = two_tower_families.CLIP_IMAGE._replace(
  arrays=two_tower_families.CLIP_IMAGE_ARRAYS
)
SIGLIP = two_tower_families.SIGLIP_IMAGE.but(
  "siglip_vision_model",
  "",
  without=("pool_type",),
  arrays=table(
    two_tower_families.IMAGE_ARRAYS,
    two_tower_families.HEAD_ARRAYS,
    conv("embeddings.patch_embedding", "embedding"),
  ),
  # The pooled features are not used, but files may have their parameters.
  rules=(choice("pool_type", "vision_use_head", {True: "map", False: "none"}),),
  requires={"vision_use_head": (True, False)},
  harmless=("projector_hidden_act", "num_image_tokens"),
)
_IDEFICS3 = SIGLIP.but(
  "idefics3_vision",
  "",
  without=("pool_type",),
  constants={"pool_type": "none"},
  harmless=("use_base_siglip", "size", "max_image_size", "tie_word_embeddings"),
  defaults={
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "patch_size": 32,
  },
)
_SMOLVLM = _IDEFICS3.but("smolvlm_vision", "")
TOWERS = {
  **{
    family.model_type: family
    for family in (_CLIP, SIGLIP, _IDEFICS3, _SMOLVLM, internvl.INTERNVL)
  },
  **native_towers.FAMILIES,
}

# Keys of config.json that change no result.
HARMLESS = (
  "hidden_size",
  "vocab_size",
  "ignore_index",
  "num_image_tokens",
  "projection_dim",
  "image_seq_length",
  "image_seq_len",
  "use_image_newline_parameter",
  "use_reentrant_checkpointing",
  "_vocab_size",
  "boi_token_index",
  "eoi_token_index",
  "boi_token_id",
  "eoi_token_id",
  "_pad_token_id",
  "perceiver_config",
  "freeze_config",
  "use_resampler",
  "qk_layer_norms",
  "alpha_initializer",
  "alphas_initializer_range",
  "alpha_type",
  "additional_vocab_size",
  "max_position_embeddings",
)
# Keys of decoders that scale all embeddings, also those of pictures: Granite's
# and AFMoE's. Gemma and others scale the tokens' own alone.
_OF_ALL_EMBEDDINGS = ("embedding_multiplier", "mup_enabled")
# Fields of a decoder that its own head applies.
_OF_LOGITS = ("logits_multiplier", "logits_softcap")
# Our fields that change no result.
LIMITS = ("image_size", "published_as")
# Usual names of the parts in files; see Kind.starts.
STARTS = {
  "img/": "vision_tower.",
  "llm/": "language_model.",
  "projector/": "multi_modal_projector.",
}
# In files of newer families.
NESTED_STARTS = {
  "img/": "model.vision_tower.",
  "llm/model.": "model.language_model.",
  "llm/": "",
  "projector/": "model.multi_modal_projector.",
}


class Kind(NamedTuple):
  """Published models of one type: the parts, and how they are joined."""

  # Keys beside the parts' own configs, and the arrays of the projector.
  family: Family
  towers: tuple[str, ...]  # Names in TOWERS.
  # {prefix of our names: prefix of the names in files}.
  starts: Mapping[str, str]
  decoders: tuple[str, ...] = ()  # Names of decoder families; () for all.
  # Brings a tower's fields into a form that can be compared.
  canonical_tower: Callable[[Mapping[str, Any]], dict[str, Any]] = (
    vit_families.canonical
  )


def decoder_layouts(names: Collection[str]) -> Mapping[str, Family]:
  """Families of decoders by name.

  Without names, all but those with positions in three axes, which only Qwen's
  models give to the tokens of pictures.
  """
  known = decoder_families.LAYOUTS
  if names:
    return {x: qwen_next.WITH_PICTURES.get(x) or known[x] for x in names}
  return {x: y for x, y in known.items() if "rope_axes" not in y.fields()}


def part_configs(
  towers: Collection[str],
  decoders: Collection[str] = (),
  *,
  tower: str,
  decoder: str,
  tied: bool | None = None,
  scaled_logits: bool = False,
  unread: Collection[str] = (),
) -> Rule:
  """Converts `vision_config` and `text_config`.

  Args:
    towers, decoders: types that the model may have; () for all decoders.
    tower, decoder: types to assume if the file names none.
    tied: whether the head shares the embedding's kernel if the file does not
      say; None to look in the decoder's own config too.
    scaled_logits: whether logits are scaled and capped as the decoder's config
      says. The heads of most families ignore it.
    unread: keys of the decoder's config that the family handles itself.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    image_config = {"model_type": tower, **config["vision_config"]}
    if f"{image_config['model_type']}_vision" in towers:  # In older files.
      image_config["model_type"] += "_vision"
    text_config = {"model_type": decoder, **config["text_config"]}
    layouts = decoder_layouts(decoders)
    for part, values, known in (
      ("vision_config", image_config, towers),
      ("text_config", text_config, layouts),
    ):
      if values["model_type"] not in known:
        raise config.error(
          f"{part}.model_type={values['model_type']!r}: expected "
          f"{' or '.join(map(repr, known))}."
        )
    text_config = {n: x for n, x in text_config.items() if n not in unread}
    is_tied = config["tie_word_embeddings"]
    if tied is None:
      is_tied = is_tied or text_config.get("tie_word_embeddings", False)
    text_config["tie_word_embeddings"] = is_tied
    family = TOWERS[image_config["model_type"]]
    size = image_config.get("image_size", family.absent().get("image_size"))
    if isinstance(size, list | tuple) and len({*size}) == 1:
      size = size[0]
    text = _options(config, "text_config", layouts, text_config)
    if not scaled_logits:
      text = {x: y for x, y in text.items() if x not in _OF_LOGITS}
    return {
      "embed_multiplier": _factor(layouts[text_config["model_type"]], text),
      "image_size": size,
      "image": _options(config, "vision_config", TOWERS, image_config),
      "text": text,
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    # `export` has written the parts' configs.
    configs = dict(fields["configs"])
    configs["tie_word_embeddings"] = fields["text"]["tied_head"]
    return configs

  keys = {
    "vision_config": {},
    "text_config": {},
    "tie_word_embeddings": bool(tied),
  }
  return Rule(
    ("image", "text", "image_size", "embed_multiplier"), keys, read, write
  )


def _factor(decoder: Family, text: Mapping[str, Any]) -> float:
  """What a decoder multiplies the embeddings of pictures by."""
  if not {*_OF_ALL_EMBEDDINGS} & decoder.absent().keys():
    return 1.0
  factor = text.get("embed_multiplier", 1.0)
  return text["width"] ** 0.5 if factor == "sqrt_width" else factor


def _options(
  config: ConfigJson,
  key: str,
  families: Mapping[str, Family],
  values: Mapping[str, Any],
) -> dict[str, Any]:
  family = families[values["model_type"]]
  fields = family.read(f"{config.path}: {key}", values, config.unread)
  return {
    name: field.value for name, field in fields.items() if not field.is_neutral
  }
