"""How published families write pictures in texts, by a model's folder.

Each function returns fields of pictures.Pictures, from what the folder says. A
layout has its sizes from picture_layouts.of_processor, and here its texts.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bigtrain.config.errors import ConfigError
from bigtrain.text import picture_layouts, tokenizers

Fields = dict[str, Any]


class Folder(NamedTuple):
  """What a published folder says about pictures."""

  model: Mapping[str, Any]  # Contents of config.json.
  processor: Mapping[str, Any]  # Options of the processor of pictures.
  # Contents of processor_config.json, options of the processor of texts.
  texts: Mapping[str, Any]
  tokenizer: tokenizers.Tokenizer
  # Of pictures whose size decides what the model sees; else None.
  layout: Mapping[str, Any] | None

  def token(self, default: int) -> int:
    """The id of image tokens."""
    for key in ("image_token_index", "image_token_id"):
      if self.model.get(key) is not None:
        return int(self.model[key])
    return default

  def spell(self, key: str, default: int) -> str:
    """The text of the token whose id is at a key of config.json."""
    return self.tokenizer.spell([self.model.get(key, default)])

  def special(self, key: str, default: str) -> str:
    """The text of a token that processor_config.json may name."""
    return str(self.texts.get(key) or default)

  def side(self) -> int:
    """Rows of patches of a picture of one size."""
    vision = {"image_size": 224, "patch_size": 16}
    return picture_layouts.patches_of_side(
      {**vision, **(self.model.get("vision_config") or {})}
    )

  def with_layout(self, token: int, **texts: Any) -> Fields:
    """Fields for the layout, with texts and numbers that it lacks."""
    return dict(token=token, tokens=1, layout={**(self.layout or {}), **texts})


def _paligemma(folder: Folder) -> Fields:
  token = folder.token(256000)
  return dict(token=token, tokens=folder.side() ** 2, first=True)


def _gemma3(folder: Folder) -> Fields:
  if folder.processor.get("do_pan_and_scan"):
    raise ConfigError(
      "do_pan_and_scan=true: the model reads whole pictures; expected false."
    )
  begin = folder.spell("boi_token_index", 255999)
  end = folder.spell("eoi_token_index", 256000)
  return dict(
    token=folder.token(262144),
    tokens=folder.model.get("mm_tokens_per_image", 256),
    placeholder=begin,
    before="\n\n" + begin,
    after=end + "\n\n",
  )


def _gemma4(folder: Folder) -> Fields:
  token = folder.token(258880)
  begin = folder.spell("boi_token_id", 255999)
  end = folder.spell("eoi_token_id", 258882)
  return dict(
    **folder.with_layout(token, before=begin, after=end),
    placeholder=folder.tokenizer.spell([token]),
  )


def _llava(folder: Folder) -> Fields:
  if folder.layout is not None:
    return _pixtral(folder)
  tower = (folder.model.get("vision_config") or {}).get("model_type", "clip")
  strategy = folder.model.get("vision_feature_select_strategy", "default")
  has_class = tower.startswith("clip") and strategy == "full"
  return dict(token=folder.token(32000), tokens=folder.side() ** 2 + has_class)


def _vipllava(folder: Folder) -> Fields:
  return dict(token=folder.token(32000), tokens=folder.side() ** 2)


def _deepseek_vl(folder: Folder) -> Fields:
  token = folder.token(100015)
  placeholder = folder.tokenizer.spell([token])
  return dict(token=token, tokens=folder.side() ** 2, placeholder=placeholder)


def _llava_next(folder: Folder) -> Fields:
  return folder.with_layout(folder.token(32000))


def _llava_onevision(folder: Folder) -> Fields:
  limit = folder.model.get("vision_aspect_ratio", "anyres_max_9")
  number = int(limit.removeprefix("anyres_max_"))
  return folder.with_layout(folder.token(151646), limit=number)


def _idefics(folder: Folder) -> Fields:
  return folder.with_layout(folder.token(128257))


def _qwen(folder: Folder, token: int = 151655) -> Fields:
  token = folder.token(token)
  placeholder = folder.tokenizer.spell([token])
  return dict(
    **folder.with_layout(token),
    placeholder=placeholder,
    unplaced=f"<|vision_start|>{placeholder}<|vision_end|>",
  )


def _qwen3_5(folder: Folder) -> Fields:
  return _qwen(folder, 248056)


def _exaone4_5(folder: Folder) -> Fields:
  begin = folder.spell("vision_start_token_id", 73)
  end = folder.spell("vision_end_token_id", 74)
  fields = _qwen(folder, 67)
  return {**fields, "unplaced": f"{begin}{fields['placeholder']}{end}"}


def _pixtral(folder: Folder) -> Fields:
  """Pixtral and Mistral 3: each row of tokens has an end."""
  token = folder.token(10)
  return dict(
    **folder.with_layout(
      token,
      after_row=folder.special("image_break_token", "[IMG_BREAK]"),
      after=folder.special("image_end_token", "[IMG_END]"),
    ),
    placeholder=folder.tokenizer.spell([token]),
  )


def _lighton_ocr(folder: Folder) -> Fields:
  token = folder.token(151655)
  placeholder = folder.tokenizer.spell([token])
  return dict(**folder.with_layout(token), placeholder=placeholder)


def _internvl(folder: Folder) -> Fields:
  token = folder.token(151667)
  shrinks = folder.model.get("downsample_ratio", 0.5)
  return dict(
    **folder.with_layout(
      token,
      tokens=int(folder.side() * shrinks) ** 2,
      before="<img>",
      after="</img>",
    ),
    placeholder=folder.tokenizer.spell([token]),
  )


def _aya_vision(folder: Folder) -> Fields:
  token = folder.token(255036)
  tile = folder.special("tile_token", "TILE")
  return folder.with_layout(
    token,
    tokens=(folder.side() // folder.model.get("downsample_factor", 2)) ** 2,
    before=folder.special("start_of_img_token", "<|START_OF_IMG|>"),
    after=folder.special("end_of_img_token", "<|END_OF_IMG|>"),
    before_tile=tile + "_{number}",
    before_whole=folder.special("tile_global_token", "TILE_GLOBAL"),
  )


def _cohere2_vision(folder: Folder) -> Fields:
  token = folder.token(255036)
  return dict(
    **folder.with_layout(
      token,
      tokens=(folder.side() // folder.model.get("downsample_factor", 2)) ** 2,
      before="<|START_OF_IMG|>",
      after="<|END_OF_IMG|>",
      after_tile="<|IMG_LINE_BREAK|>",
    ),
    placeholder=folder.tokenizer.spell([token]),
  )


# {model_type: (kinds of layouts that its processor may have, "" for pictures of
# one size; what returns the fields)}.
FAMILIES: Mapping[str, tuple[tuple[str, ...], Callable[[Folder], Fields]]] = {
  "paligemma": (("",), _paligemma),
  "gemma3": (("",), _gemma3),
  "gemma4": (("fitted",), _gemma4),
  "llava": (("", "bounded"), _llava),
  "vipllava": (("",), _vipllava),
  "llava_next": (("views",), _llava_next),
  "llava_onevision": (("views",), _llava_onevision),
  "deepseek_vl": (("",), _deepseek_vl),
  "idefics3": (("tiles",), _idefics),
  "smolvlm": (("tiles",), _idefics),
  "internvl": (("canvas",), _internvl),
  "aya_vision": (("canvas",), _aya_vision),
  "cohere2_vision": (("canvas",), _cohere2_vision),
  "mistral3": (("bounded",), _pixtral),
  "lighton_ocr": (("bounded",), _lighton_ocr),
  "qwen2_vl": (("native",), _qwen),
  "qwen2_5_vl": (("native",), _qwen),
  "qwen3_vl": (("native",), _qwen),
  "qwen3_vl_moe": (("native",), _qwen),
  "qwen3_5": (("native",), _qwen3_5),
  "qwen3_5_moe": (("native",), _qwen3_5),
  "exaone4_5": (("native",), _exaone4_5),
}
