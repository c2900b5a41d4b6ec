"""LLaVA, VipLLaVA, LLaVA-NeXT and LLaVA-OneVision: the projector is an MLP.

LLaVA-NeXT and LLaVA-OneVision read each picture both whole and in tiles.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.arrays import tile_grids
from bigtrain.models.published.families import ConfigJson, Family, Key, Rule
from bigtrain.models.published.tables import dense, norm, plain, table
from bigtrain.models.published.vlms import vlm_parts
from bigtrain.models.published.vlms.vlm_parts import Kind

_ACTIVATIONS = {
  "gelu": "gelu_erf",
  "gelu_pytorch_tanh": "gelu",
  "gelu_new": "gelu",
  "quick_gelu": "gelu_quick",
  "relu": "relu",
  "silu": "silu",
}


def activation(config: ConfigJson, key: str) -> str:
  """The activation between two layers of a projector, by our name."""
  config.require(key, *_ACTIVATIONS)
  return _ACTIVATIONS[config[key]]


def name_of_activation(ours: str | None) -> str:
  names = [x for x, y in _ACTIVATIONS.items() if y == ours]
  return [*names, "gelu"][0]


def two_layers() -> Rule:
  """An MLP of two layers."""
  act, bias = "projector_hidden_act", "multimodal_projector_bias"

  def read(config: ConfigJson) -> dict[str, Any]:
    mlp = activation(config, act)
    return {"projector": dict(mlp=mlp, use_bias=config[bias])}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    projector = fields["projector"]
    return {
      act: name_of_activation(projector["mlp"]),
      bias: projector["use_bias"],
    }

  return Rule(("projector",), {act: "gelu", bias: True}, read, write)


def _normed_layers() -> Rule:
  """VipLLaVA: an MLP of two layers behind a norm."""
  act, eps = "projector_hidden_act", "projector_layernorm_eps"

  def read(config: ConfigJson) -> dict[str, Any]:
    projector = dict(
      norm="layernorm",
      norm_eps=config[eps],
      mlp=activation(config, act),
      use_bias=True,
    )
    return {"projector": projector}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    projector = fields["projector"]
    return {
      act: name_of_activation(projector["mlp"]),
      eps: projector["norm_eps"],
    }

  return Rule(("projector",), {act: "gelu", eps: 1e-5}, read, write)


def _tiles(sizes: Sequence[tuple[int, int]], limited: bool) -> Rule:
  """Grids of tiles into which a picture may be cut.

  Args:
    sizes: pictures' (height, width) in pixels if the file names none.
    limited: whether `vision_aspect_ratio` limits the number of tiles whose
      features are kept.
  """
  key, limit = "image_grid_pinpoints", "vision_aspect_ratio"

  def read(config: ConfigJson) -> dict[str, Any]:
    vision = config["vision_config"]
    tower = vlm_parts.TOWERS.get(vision.get("model_type", ""), vlm_parts.SIGLIP)
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


def layer_number(config: ConfigJson, key: str, given: Any, depth: int) -> int:
  """The number of blocks before the features; negative ones count back."""
  if not isinstance(given, int) or not -depth - 1 <= given <= depth:
    raise config.error(
      f"{key}={config[key]!r}: expected the number of a layer, from "
      f"{-depth - 1} to {depth}."
    )
  return given + (depth + 1 if given < 0 else 0)


def features(parts: Rule, *, tiled: bool = False) -> Rule:
  """The keys that choose the layer of the features, and the class token."""
  layer, strategy = "vision_feature_layer", "vision_feature_select_strategy"

  def read(config: ConfigJson) -> dict[str, Any]:
    fields = dict(parts.read(config))
    depth = fields["image"]["depth"]
    given = config[layer]
    several = isinstance(given, list | tuple)
    if several and not given:
      raise config.error(
        f"{layer}: expected the number of a layer, or several."
      )
    numbers = [
      layer_number(config, layer, number, depth)
      for number in (given if several else [given])
    ]
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
    fields["image"] = {
      **fields["image"],
      "feature_layer": tuple(numbers) if several else numbers[0],
    }
    return {**fields, "class_token": has_class and is_full}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    image = fields["image"]
    depth, numbers = image["depth"], image["feature_layer"] or 0
    if isinstance(numbers, int):
      theirs: Any = numbers - depth - 1
    else:
      theirs = [number - depth - 1 for number in numbers]
    is_full = fields["class_token"] or not image["class_token"]
    num_patches = fields["shapes"]["img/pos_embedding"][1] - (
      image["posemb_class"] and not fields["class_token"]
    )
    return {
      **parts.write(fields),
      layer: theirs,
      strategy: "full" if is_full else "default",
      "image_seq_length": num_patches,
    }

  keys = {**parts.keys, layer: -2, strategy: "default"}
  return Rule((*parts.fields, "class_token"), keys, read, write)


_LLAVA_TOWERS = ("clip_vision_model", "siglip_vision_model")
LLAVA = Kind(
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
      two_layers(),
      features(
        vlm_parts.part_configs(
          _LLAVA_TOWERS, tower="clip_vision_model", decoder="llama"
        )
      ),
    ),
    aliases={"image_token_id": "image_token_index"},
    harmless=vlm_parts.HARMLESS,
    limits=vlm_parts.LIMITS,
  ),
  towers=_LLAVA_TOWERS,
  starts=vlm_parts.STARTS,
)


VIPLLAVA = LLAVA._replace(
  family=LLAVA.family._replace(
    model_type="vipllava",
    architecture="VipLlavaForConditionalGeneration",
    arrays=table(norm("projector_layernorm", "norm"), LLAVA.family.arrays),
    rules=(
      _normed_layers(),
      features(
        vlm_parts.part_configs(
          ("clip_vision_model",), tower="clip_vision_model", decoder="llama"
        )
      ),
    ),
    requires={"vision_feature_select_strategy": ("default",)},
    defaults={"vision_feature_layer": (-2, -5, -8, -11, 6)},
    aliases={
      **LLAVA.family.aliases,
      "vision_feature_layers": "vision_feature_layer",
    },
  ),
  towers=("clip_vision_model",),
)


def _aligner() -> Rule:
  """DeepSeek-VL: an MLP of two layers without options."""
  return Rule(
    ("projector",),
    {},
    lambda config: {"projector": dict(mlp="gelu_erf", use_bias=True)},
    lambda fields: {},
  )


DEEPSEEK_VL = Kind(
  Family(
    model_type="deepseek_vl",
    architecture="DeepseekVLForConditionalGeneration",
    arrays=table(dense("linear1", "linear_0"), dense("linear2", "linear_1")),
    keys={"image_token": Key("image_token_id", 100015)},
    constants={"mask": "causal", "class_token": False},
    rules=(
      _aligner(),
      vlm_parts.part_configs(
        ("siglip_vision_model",),
        tower="siglip_vision_model",
        decoder="llama",
        tied=True,
      ),
    ),
    harmless=vlm_parts.HARMLESS,
    limits=vlm_parts.LIMITS,
  ),
  towers=("siglip_vision_model",),
  starts={
    **vlm_parts.NESTED_STARTS,
    "img/": "model.vision_model.",
    "projector/": "model.aligner.",
  },
)
LLAVA_ONEVISION = Kind(
  Family(
    model_type="llava_onevision",
    architecture="LlavaOnevisionForConditionalGeneration",
    arrays=table(LLAVA.family.arrays, plain("image_newline", "newline")),
    keys={"image_token": Key("image_token_index", 151646)},
    constants={"mask": "causal"},
    rules=(
      two_layers(),
      _tiles(tile_grids.ONEVISION_SIZES, limited=True),
      features(
        vlm_parts.part_configs(
          _LLAVA_TOWERS, tower="siglip_vision_model", decoder="qwen2"
        ),
        tiled=True,
      ),
    ),
    aliases={"image_token_id": "image_token_index"},
    defaults={
      "vision_feature_layer": -1,
      "vision_feature_select_strategy": "full",
    },
    harmless=(*vlm_parts.HARMLESS, "video_token_index", "video_token_id"),
    limits=vlm_parts.LIMITS,
  ),
  towers=_LLAVA_TOWERS,
  starts={"tiles/": "", **vlm_parts.STARTS},
)
LLAVA_NEXT = LLAVA_ONEVISION._replace(
  family=LLAVA_ONEVISION.family._replace(
    model_type="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    keys=LLAVA.family.keys,
    rules=(
      two_layers(),
      _tiles(tile_grids.NEXT_SIZES, limited=False),
      features(
        vlm_parts.part_configs(
          _LLAVA_TOWERS, tower="clip_vision_model", decoder="llama"
        ),
        tiled=True,
      ),
    ),
    defaults={},
    harmless=vlm_parts.HARMLESS,
  )
)
