"""Models that read pictures, from PaliGemma to Qwen-VL: config.json and arrays.

A model that reads pictures has three parts. Its decoder is one of
decoder_families.py and its image tower one of this module; their configs stand
in `text_config` and `vision_config`. A `Kind` has the rest: the projector, and
how the parts are joined.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.arrays import dims, tile_grids
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.models.published import (
  array_files,
  conversions,
  decoder_families,
  layouts,
  tables,
  two_tower_families,
  vit_families,
)
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Key,
  Rule,
  choice,
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
from bigtrain.models.published.vits import native_towers

# Image towers.

_CLIP = two_tower_families.CLIP_IMAGE._replace(
  arrays=two_tower_families.CLIP_IMAGE_ARRAYS
)
_SIGLIP = two_tower_families.SIGLIP_IMAGE.but(
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
_IDEFICS3 = _SIGLIP.but(
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
_TOWERS = {
  **{
    family.model_type: family
    for family in (_CLIP, _SIGLIP, _IDEFICS3, _SMOLVLM)
  },
  **native_towers.FAMILIES,
}


class Kind(NamedTuple):
  """Published models of one type, with any sizes of their parts."""

  # Its keys in addition to the parts', and the arrays of the projector.
  family: Family
  towers: tuple[str, ...]  # Names in _TOWERS.
  # {start of names in the part's own file: start in a file of the whole}.
  starts: Mapping[str, str]
  decoders: tuple[str, ...] = ()  # Names of decoder families; none for all.
  # Makes comparable fields of a tower.
  canonical_tower: Callable[[Mapping[str, Any]], dict[str, Any]] = (
    vit_families.canonical
  )


def _parts(
  towers: Collection[str],
  decoders: Collection[str] = (),
  *,
  tower: str,
  decoder: str,
  tied: bool | None = None,
  unread: Collection[str] = (),
) -> Rule:
  """The options of the tower and of the decoder.

  Args:
    tower, decoder: their types if the file does not name them.
    tied: whether the head is the embedding if the file does not say so; None if
      the decoder's own config says it.
    unread: keys of the decoder's config that this kind handles itself.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    image_config = {"model_type": tower, **config["vision_config"]}
    text_config = {"model_type": decoder, **config["text_config"]}
    for part, values, known in (
      ("vision_config", image_config, towers),
      ("text_config", text_config, decoders or decoder_families.LAYOUTS),
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
    family = _TOWERS[image_config["model_type"]]
    size = image_config.get("image_size", family.absent().get("image_size"))
    return {
      "image_size": size,
      "image": _options(config, "vision_config", _TOWERS, image_config),
      "text": _options(
        config, "text_config", decoder_families.LAYOUTS, text_config
      ),
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
  return Rule(("image", "text", "image_size"), keys, read, write)


def _options(
  config: ConfigJson,
  key: str,
  families: Mapping[str, Family],
  values: Mapping[str, Any],
) -> dict[str, Any]:
  family = families[values["model_type"]]
  fields = family.read(f"{config.path}: {key}", values)
  return {
    name: field.value for name, field in fields.items() if not field.is_neutral
  }


def _grid_side(config: ConfigJson) -> int:
  """Number of patches beside each other in a picture."""
  vision = {"image_size": 224, "patch_size": 16, **config["vision_config"]}
  return vision["image_size"] // vision["patch_size"]


def _linear() -> Rule:
  """PaliGemma: one layer, as wide as the decoder."""
  return Rule(
    ("projector",),
    {},
    lambda config: {"projector": dict(use_bias=True)},
    lambda fields: {"projection_dim": fields["text"]["width"]},
  )


def _pooled() -> Rule:
  """Gemma 3: averages of patches, so that a number of tokens is left."""
  key = "mm_tokens_per_image"

  def read(config: ConfigJson) -> dict[str, Any]:
    side = round(config[key] ** 0.5)
    patches = _grid_side(config)
    if side**2 != config[key] or patches % side:
      raise config.error(
        f"{key}={config[key]}: expected the square of a divisor of {patches}, "
        "the patches beside each other in a picture."
      )
    eps = config["vision_config"].get("layer_norm_eps", 1e-6)
    projector = dict(pool=patches // side, norm_eps=eps, use_bias=False)
    return {"projector": projector}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    num_patches = fields["shapes"]["img/pos_embedding"][1]
    return {key: num_patches // fields["projector"]["pool"] ** 2}

  return Rule(("projector",), {key: 256}, read, write)


_ACTIVATIONS = {
  "gelu": "gelu_erf",
  "gelu_pytorch_tanh": "gelu",
  "gelu_new": "gelu",
  "quick_gelu": "gelu_quick",
  "relu": "relu",
}


def _two_layers() -> Rule:
  """LLaVA: an MLP."""
  act, bias = "projector_hidden_act", "multimodal_projector_bias"

  def read(config: ConfigJson) -> dict[str, Any]:
    config.require(act, *_ACTIVATIONS)
    return {
      "projector": dict(mlp=_ACTIVATIONS[config[act]], use_bias=config[bias])
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    projector = fields["projector"]
    names = [x for x, y in _ACTIVATIONS.items() if y == projector["mlp"]]
    return {act: [*names, "gelu"][0], bias: projector["use_bias"]}

  return Rule(("projector",), {act: "gelu", bias: True}, read, write)


def _merged() -> Rule:
  """Idefics 3: the features of neighbouring patches, joined."""
  key = "scale_factor"
  return Rule(
    ("projector",),
    {key: 2},
    lambda config: {"projector": dict(merge=config[key], use_bias=False)},
    lambda fields: {key: fields["projector"]["merge"]},
  )


def _tiles(sizes: Sequence[tuple[int, int]], limited: bool) -> Rule:
  """Tiles of pictures.

  Args:
    limited: whether a key says how many tiles' features remain.
  """
  key, limit = "image_grid_pinpoints", "vision_aspect_ratio"

  def read(config: ConfigJson) -> dict[str, Any]:
    vision = config["vision_config"]
    tower = _TOWERS.get(vision.get("model_type", ""), _SIGLIP)
    side = vision.get("image_size", tower.absent().get("image_size", 224))
    pairs = config[key] or sizes
    if any(n % side or not n for pair in pairs for n in pair):
      raise config.error(
        f"{key}={pairs}: expected multiples of vision_config.image_size={side}."
      )
    grids = tuple((h // side, w // side) for h, w in pairs)
    if not limited:
      return {"tiles": dict(grids=grids, limit=None)}
    found = re.fullmatch(r"anyres_max_(\d+)", config[limit])
    if not found:
      raise config.error(
        f"{limit}={config[limit]!r}: expected 'anyres_max_' and a number, such "
        "as 9."
      )
    return {"tiles": dict(grids=grids, limit=int(found[1]))}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    side = fields["configs"]["vision_config"]["image_size"]
    tiles = fields["tiles"] or dict(grids=(), limit=None)
    config: dict[str, Any] = {
      key: [[h * side, w * side] for h, w in tiles["grids"]]
    }
    if limited:
      config[limit] = f"anyres_max_{tiles['limit'] or 9}"
    return config

  keys = {key: None, **({limit: "anyres_max_9"} if limited else {})}
  return Rule(("tiles",), keys, read, write)


def _llava_features(parts: Rule, *, tiled: bool = False) -> Rule:
  """The tower's features: of which layer, and whether of the class token."""
  layer, strategy = "vision_feature_layer", "vision_feature_select_strategy"

  def read(config: ConfigJson) -> dict[str, Any]:
    fields = dict(parts.read(config))
    depth = fields["image"]["depth"]
    number = config[layer]
    if not isinstance(number, int) or not -depth - 1 <= number <= depth:
      raise config.error(
        f"{layer}={number!r}: expected the number of a layer, from "
        f"{-depth - 1} to {depth}."
      )
    config.require(strategy, "default", "full")
    has_class = fields["image"].get("class_token", False)
    is_full = config[strategy] == "full"
    if not has_class and not is_full:
      raise config.error(
        f"{strategy}='default': expected 'full' for a tower without a class "
        "token."
      )
    if tiled and has_class and is_full:
      raise config.error(
        f"{strategy}='full': expected 'default' for tiles of a tower with a "
        "class token."
      )
    number += depth + 1 if number < 0 else 0
    fields["image"] = {**fields["image"], "feature_layer": number}
    return {**fields, "class_token": has_class and is_full}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    image = fields["image"]
    depth, number = image["depth"], image["feature_layer"]
    if number is None:
      number = 0
    is_full = fields["class_token"] or not image["class_token"]
    num_patches = fields["shapes"]["img/pos_embedding"][1] - (
      image["posemb_class"] and not fields["class_token"]
    )
    return {
      **parts.write(fields),
      layer: number - depth - 1,
      strategy: "full" if is_full else "default",
      "image_seq_length": num_patches,
    }

  keys = {**parts.keys, layer: -2, strategy: "default"}
  return Rule((*parts.fields, "class_token"), keys, read, write)


_HARMLESS = (
  "hidden_size",
  "vocab_size",
  "ignore_index",
  "num_image_tokens",
  "projection_dim",
  "image_seq_length",
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
# Fields that change no result.
_LIMITS = ("image_size", "published_as")
_STARTS = {
  "img/": "vision_tower.",
  "llm/": "language_model.",
  "projector/": "multi_modal_projector.",
}
_PALIGEMMA = Kind(
  Family(
    model_type="paligemma",
    architecture="PaliGemmaForConditionalGeneration",
    arrays=dense("linear", "linear_0"),
    keys={"image_token": Key("image_token_index", 256000)},
    constants={"mask": "prefix", "class_token": False},
    rules=(
      _linear(),
      _parts(
        ("siglip_vision_model",),
        ("gemma", "gemma2"),
        tower="siglip_vision_model",
        decoder="gemma",
        tied=True,
        unread=("use_bidirectional_attention", "num_image_tokens"),
      ),
    ),
    aliases={"image_token_id": "image_token_index"},
    harmless=_HARMLESS,
    limits=_LIMITS,
  ),
  towers=("siglip_vision_model",),
  starts=_STARTS,
  decoders=("gemma", "gemma2"),
)
_GEMMA3 = Kind(
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
      _parts(
        ("siglip_vision_model",),
        ("gemma3_text",),
        tower="siglip_vision_model",
        decoder="gemma3_text",
        tied=True,
      ),
    ),
    aliases={"image_token_id": "image_token_index"},
    harmless=_HARMLESS,
    limits=_LIMITS,
  ),
  towers=("siglip_vision_model",),
  starts=_STARTS,
  decoders=("gemma3_text",),
)
_LLAVA_TOWERS = ("clip_vision_model", "siglip_vision_model")
_LLAVA = Kind(
  Family(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    arrays=table(
      dense("linear_1", "linear_0"),
      dense("linear_2", "linear_1"),
    ),
    keys={"image_token": Key("image_token_index", 32000)},
    constants={"mask": "causal"},
    rules=(
      _two_layers(),
      _llava_features(
        _parts(_LLAVA_TOWERS, tower="clip_vision_model", decoder="llama")
      ),
    ),
    aliases={"image_token_id": "image_token_index"},
    harmless=_HARMLESS,
    limits=_LIMITS,
  ),
  towers=_LLAVA_TOWERS,
  starts=_STARTS,
)


_LLAVA_ONEVISION = Kind(
  Family(
    model_type="llava_onevision",
    architecture="LlavaOnevisionForConditionalGeneration",
    arrays=table(_LLAVA.family.arrays, plain("image_newline", "newline")),
    keys={"image_token": Key("image_token_index", 151646)},
    constants={"mask": "causal"},
    rules=(
      _two_layers(),
      _tiles(tile_grids.ONEVISION_SIZES, limited=True),
      _llava_features(
        _parts(_LLAVA_TOWERS, tower="siglip_vision_model", decoder="qwen2"),
        tiled=True,
      ),
    ),
    aliases={"image_token_id": "image_token_index"},
    defaults={
      "vision_feature_layer": -1,
      "vision_feature_select_strategy": "full",
    },
    harmless=(*_HARMLESS, "video_token_index", "video_token_id"),
    limits=_LIMITS,
  ),
  towers=_LLAVA_TOWERS,
  starts={"tiles/": "", **_STARTS},
)
_LLAVA_NEXT = _LLAVA_ONEVISION._replace(
  family=_LLAVA_ONEVISION.family._replace(
    model_type="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    keys=_LLAVA.family.keys,
    rules=(
      _two_layers(),
      _tiles(tile_grids.NEXT_SIZES, limited=False),
      _llava_features(
        _parts(_LLAVA_TOWERS, tower="clip_vision_model", decoder="llama"),
        tiled=True,
      ),
    ),
    defaults={},
    harmless=_HARMLESS,
  )
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
      limits=_LIMITS,
      rules=(
        _merged(),
        _parts((tower,), tower=tower, decoder="llama"),
      ),
      harmless=_HARMLESS,
    ),
    towers=(tower,),
    starts={
      "img/": "model.vision_model.",
      "llm/model.": "model.text_model.",
      "llm/": "",
      "projector/": "model.connector.",
    },
  )


def _joined_squares(tower: str, norm_kind: str) -> Rule:
  """Qwen: the norms of patches, joined by squares, and an MLP as wide."""

  def read(config: ConfigJson) -> dict[str, Any]:
    key = f"{config.path}: vision_config"
    fields = _TOWERS[tower].read(key, config["vision_config"])
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
  """The parts, of which the tower's config has the decoder's width too."""
  parts = _parts((tower,), (decoder,), tower=tower, decoder=decoder)

  def read(config: ConfigJson) -> Mapping[str, Any]:
    vision = dict(config["vision_config"])
    if f"{vision.get('model_type')}_vision" == tower:  # In older files.
      vision["model_type"] = tower
    return parts.read(
      ConfigJson(config.path, {**config, "vision_config": vision})
    )

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(parts.write(fields))
    width = {width_key: fields["text"]["width"]}
    config["vision_config"] = {**config["vision_config"], **width}
    return config

  return parts._replace(read=read, write=write)


def _qwen(
  model_type: str,
  architecture: str,
  arrays: tables.Table,
  *,
  norm_kind: str = "layernorm",
  width_key: str = "out_hidden_size",
  nested: bool = True,
) -> Kind:
  """A Qwen-VL; `nested` files have all arrays below `model.`."""
  tower, decoder = f"{model_type}_vision", f"{model_type}_text"
  start = "model." if nested else ""
  return Kind(
    Family(
      model_type=model_type,
      architecture=architecture,
      arrays=arrays,
      keys={"image_token": Key("image_token_id", 151655)},
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
      harmless=(*_HARMLESS, *_OF_VIDEOS),
      limits=_LIMITS,
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


def _averaged() -> Rule:
  """Gemma 4: averages of squares of patches, and a norm without a scale."""

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
  """The parts, of which the decoder's config has the mask."""
  key = "use_bidirectional_attention"
  parts = _parts(
    ("gemma4_vision",),
    ("gemma4_text",),
    tower="gemma4_vision",
    decoder="gemma4_text",
    tied=True,
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


# Its parts that read sounds are left out.
_GEMMA4 = Kind(
  Family(
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    arrays=linear("embedding_projection", "linear_0"),
    keys={"image_token": Key("image_token_id", 258880)},
    constants={"class_token": False, "image_model": "native_vit"},
    rules=(_averaged(), _gemma4_parts()),
    harmless=(
      *_HARMLESS,
      *("audio_config", "video_token_id", "audio_token_id"),
      *("boa_token_id", "eoa_token_id", "eoa_token_index"),
    ),
    limits=_LIMITS,
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

# Tokens of videos, which rows do not have.
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


# {model_type: kind}. An export takes the first that expresses the model.
KINDS: Mapping[str, Kind] = {
  kind.family.model_type: kind
  for kind in (
    _PALIGEMMA,
    _GEMMA3,
    _GEMMA4,
    _LLAVA,
    _LLAVA_NEXT,
    _LLAVA_ONEVISION,
    _idefics3("idefics3", "Idefics3ForConditionalGeneration"),
    _idefics3("smolvlm", "SmolVLMForConditionalGeneration"),
    _qwen("qwen3_vl", "Qwen3VLForConditionalGeneration", _QWEN3_MERGERS),
    _qwen("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _QWEN3_MERGERS),
    _qwen(
      "qwen2_5_vl",
      "Qwen2_5_VLForConditionalGeneration",
      _QWEN2_MERGER,
      norm_kind="rmsnorm",
      nested=False,
    ),
    _qwen(
      "qwen2_vl",
      "Qwen2VLForConditionalGeneration",
      _QWEN2_MERGER,
      width_key="hidden_size",
      nested=False,
    ),
  )
}
_OF_PROJECTOR: Mapping[str, str] = {
  r"(blocks(_\d+)?/)?linear_\d/kernel": "D -> D",
  r"(blocks(_\d+)?/)?(linear_\d/bias|norm/(scale|bias))|newline": "D",
}
PROJECTORS = ("projector/", "deepstack/", "tiles/")
PROJECTOR_DIMS: Mapping[str, str] = {
  **dims.under("projector/", _OF_PROJECTOR),
  **dims.under("deepstack/", _OF_PROJECTOR),
  **dims.under("tiles/", _OF_PROJECTOR),
}

# {part: start of its names in files, of any version of transformers}.
_PARTS = {
  "deepstack/": r"(model\.)?visual\.(?=deepstack_merger_list\.)",
  "tiles/": r"(model\.)?(?=image_newline$)",
  "projector/": (
    r"(model\.)?(multi_modal_projector|connector|embed_vision"
    r"|visual(?=\.merger\.))\."
  ),
  "img/": r"(model\.)?(vision_tower|vision_model|visual)\.(vision_model\.)?",
}
_TEXT_MODEL = r"(model\.)?text_model\."
_IGNORED = {r".*position_ids": "a constant that the model computes"}
_AUDIO = r"(model\.)?(audio_tower|embed_audio)\."


def load(
  flat: Mapping[str, Any],
  like: Mapping[str, Any],
  param_dims: Mapping[str, dims.Table],
) -> dict[str, Any]:
  """Converts a file's arrays; see array_files.load.

  Args:
    param_dims: {part: its table}, of "img/" and "llm/".
  """
  if any("/" in name for name in flat):  # Our own names.
    return dict(flat)
  names: dict[str, dict[str, str]] = {part: {} for part in (*_PARTS, "llm/")}
  result: dict[str, Any] = {}
  for name in flat:
    if re.match(_AUDIO, name):
      result[name] = conversions.Remark(
        "ignored", "of sounds; the model reads texts and pictures"
      )
      continue
    for part, start in _PARTS.items():
      if match := re.match(start, name):
        names[part][name[match.end() :]] = name
        break
    else:
      names["llm/"][re.sub(f"^{_TEXT_MODEL}", "model.", name)] = name
  for part, in_file in names.items():
    if not in_file and part in ("deepstack/", "tiles/"):
      continue
    arrays = {short: flat[name] for short, name in in_file.items()}
    of_model = conversions.below(part, like)
    if part == "llm/":
      loaded = decoder_families.load(arrays, of_model, param_dims[part])
    else:
      loaded = array_files.load(
        _tables(part),
        arrays,
        of_model,
        _dims_of(part, param_dims),
        ignored=_IGNORED,
      )
    for name, value in (arrays if loaded is None else loaded).items():
      known = name in of_model
      result[part + name if known else in_file.get(name, name)] = value
  return result


def _tables(part: str) -> dict[str, tables.Table]:
  if part == "img/":
    return {name: family.arrays for name, family in _TOWERS.items()}
  return {name: kind.family.arrays for name, kind in KINDS.items()}


def _dims_of(part: str, param_dims: Mapping[str, dims.Table]) -> dims.Table:
  return _OF_PROJECTOR if part in PROJECTORS else param_dims[part]


class Part(NamedTuple):
  """The tower or the decoder of a model that is exported."""

  model: Any
  dims: dims.Table


def export(
  published: layouts.Layouts,
  model: Any,
  parts: Mapping[str, Part],
  shapes: tables.Shapes,
  layout: str | None = None,
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  """Returns (contents of config.json, arrays), as layouts.Layouts.export.

  Args:
    published: the layouts of models.vision_language.
    parts: the model's parts "img/" and "llm/".
  """
  # Those with a tower of the same module.
  kinds = {
    name: kind
    for name, kind in KINDS.items()
    if kind.family.constants.get("image_model", "vit") == model.image_model
  }
  layout = layout or model.published_as
  if layout:
    check_choice("--layout", layout, KINDS)
    if layout not in kinds:
      raise ConfigError(
        f"--layout={layout}: expected one of {', '.join(kinds) or 'none'} for "
        f"config.model.image_model={model.image_model!r}."
      )
    kinds = {layout: KINDS[layout]}
  errors = []
  for name, kind in kinds.items():
    key = f"--layout={name}"
    try:
      return _export(key, kind, published, model, parts, shapes)
    except ConfigError as e:
      errors.append(e)
  if not errors:
    raise ConfigError(
      "--format=hf: no published layout has a tower of "
      f"config.model.image_model={model.image_model!r}."
    )
  shortest = min(errors, key=lambda e: len(str(e)))
  if layout:
    raise shortest
  raise ConfigError(
    f"--format=hf: no published layout computes this model. {shortest}"
  ) from shortest


def _export(
  key: str,
  kind: Kind,
  published: layouts.Layouts,
  model: Any,
  parts: Mapping[str, Part],
  shapes: tables.Shapes,
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  towers = {name: _TOWERS[name] for name in kind.towers}
  decoders = decoder_families.LAYOUTS
  if kind.decoders:
    decoders = {name: decoders[name] for name in kind.decoders}
  of_parts = {
    "img/": (layouts.Layouts(towers, kind.canonical_tower), "vision_config"),
    "llm/": (
      layouts.Layouts(decoders, decoder_families.canonical),
      "text_config",
    ),
  }
  configs: dict[str, Any] = {}
  tensors: list[tables.Tensor] = []
  for part, (families, name) in of_parts.items():
    own = conversions.below(part, shapes)
    config, arrays = families.export(parts[part].dims, parts[part].model, own)
    del config["architectures"]
    configs[name] = config
    tensors += [_renamed(kind, part, tensor) for tensor in arrays]
  for part in PROJECTORS:
    own = conversions.below(part, shapes)
    arrays = array_files.export(
      key, kind.family.arrays, own, _dims_of(part, {})
    )
    tensors += [_renamed(kind, part, tensor) for tensor in arrays]
  fields = layouts.fields_of(model)
  ours = {**published.canonical(fields), "shapes": shapes, "configs": configs}
  return published.config_json(key, kind.family, ours), tensors


def _renamed(kind: Kind, part: str, tensor: tables.Tensor) -> tables.Tensor:
  name = part + tensor.name
  start = next(start for start in kind.starts if name.startswith(start))
  name = kind.starts[start] + name.removeprefix(start)
  parts = [(part + ours, index) for ours, index in tensor.parts]
  return tensor._replace(name=name, parts=parts)


def make_layouts(
  canonical: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> layouts.Layouts:
  families = {name: kind.family for name, kind in KINDS.items()}
  return layouts.Layouts(families, canonical)
