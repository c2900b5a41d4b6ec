"""CLIP, SigLIP and SigLIP 2 of Hugging Face: config.json and arrays.

A model of two towers has the fields `image` and `text`, options of its towers.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain import dims
from bigtrain.models.published import tables, vit_families
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Rule,
  converted,
)
from bigtrain.models.published.tables import Entry, dense, linear, norm, plain

# {our part of a block: theirs}.
_BLOCK = {
  "MultiHeadDotProductAttention_0/query": "self_attn.q_proj",
  "MultiHeadDotProductAttention_0/key": "self_attn.k_proj",
  "MultiHeadDotProductAttention_0/value": "self_attn.v_proj",
  "MultiHeadDotProductAttention_0/out": "self_attn.out_proj",
  "MlpBlock_0/Dense_0": "mlp.fc1",
  "MlpBlock_0/Dense_1": "mlp.fc2",
}
_HARMLESS = (
  *vit_families.HARMLESS,
  *("max_position_embeddings", "projection_size", "logit_scale_init_value"),
)
_VISION = vit_families.VIT.but(
  "clip_vision_model",
  "",
  defaults=dict(layer_norm_eps=1e-5, patch_size=32, hidden_act="quick_gelu"),
  constants=dict(
    pool_type="tok",
    pre_norm=True,
    head_bias=False,
    use_bias=("qkv", "out", "mlp"),
  ),
  harmless=_HARMLESS,
)
_IMAGE_RULES = {name: _VISION.rules[name] for name in ("patch", "mlp")}
_VISION = _VISION._replace(rules=_IMAGE_RULES)
_SIGLIP_VISION = _VISION.but(
  "siglip_vision_model",
  "",
  defaults=dict(
    layer_norm_eps=1e-6, patch_size=16, hidden_act="gelu_pytorch_tanh"
  ),
  constants=dict(
    pool_type="map",
    pre_norm=False,
    head_bias=True,
    class_token=False,
    posemb_class=False,
    use_bias=("qkv", "out", "mlp", "patch"),
  ),
  requires={"vision_use_head": (True,)},
)


def _posemb_grid() -> Rule:
  key = "num_patches"

  def read(config: ConfigJson) -> dict[str, Any]:
    side = round(config[key] ** 0.5)
    if side**2 != config[key]:
      raise config.error(f"{key}={config[key]}: expected a square.")
    return {"posemb_grid": (side, side)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    height, width = fields["posemb_grid"] or (1, 1)
    return {key: height * width}

  return Rule({key: 256}, read, write)


_SIGLIP2_VISION = _SIGLIP_VISION.but(
  "siglip2_vision_model", "", rules=dict(grid=_posemb_grid())
)


def _end() -> Rule:
  """The token whose features are pooled: by old files the largest id."""
  key = "eos_token_id"

  def read(config: ConfigJson) -> dict[str, Any]:
    legacy = config[key] == 2
    return {"eos_id": config["vocab_size"] - 1 if legacy else config[key]}

  return Rule({key: 49407}, read, lambda fields: {key: fields["eos_id"]})


_TEXT = Family(
  "clip_text_model",
  "",
  (),
  keys=vit_families.KEYS | dict(vocab_size="vocab_size"),
  defaults=dict(
    vocab_size=49408,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=8,
    layer_norm_eps=1e-5,
    hidden_act="quick_gelu",
  ),
  constants=dict(pool_type="eos", causal=True, head_bias=False),
  rules=dict(mlp=_VISION.rules["mlp"], end=_end()),
  harmless=_HARMLESS,
  in_shapes=("width", "depth", "mlp_dim", "vocab_size"),
)
_SIGLIP_TEXT = _TEXT.but(
  "siglip_text_model",
  "",
  defaults=dict(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=3072,
    num_attention_heads=12,
    layer_norm_eps=1e-6,
    hidden_act="gelu_pytorch_tanh",
  ),
  constants=dict(pool_type="last", causal=False, head_bias=True),
)._replace(rules=dict(mlp=_VISION.rules["mlp"]))


_SIGLIP2_TEXT = _SIGLIP_TEXT.but("siglip2_text_model", "")


def _towers(vision: Family, text: Family) -> Rule:
  of = {"image": ("vision_config", vision), "text": ("text_config", text)}

  def read(config: ConfigJson) -> dict[str, Any]:
    result = {}
    for name, (key, family) in of.items():
      fields = family.read(f"{config.path}: {key}", config[key])
      given = [field for field, x in fields.items() if not x.is_neutral]
      result[name] = {field: fields[field].value for field in given}
    return result

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    written = {name: of[name][1].write(fields[name]) for name in of}
    parts = {of[name][0]: part for name, part in written.items()}
    for part in parts.values():
      del part["architectures"]
    return parts

  return Rule({"vision_config": {}, "text_config": {}}, read, write)


def _clip_dim() -> Rule:
  read, write = lambda x: (x, x), lambda pair: pair[0]
  return converted("out_dim", "projection_dim", 512, read, write)


def _siglip_dim() -> Rule:
  """The text's head is as wide as the image tower, or as the key says."""

  def read(config: ConfigJson) -> dict[str, Any]:
    text = {"hidden_size": 768, **config["text_config"]}
    size = text.get("projection_size") or text["hidden_size"]
    return {"out_dim": (None, size)}

  return Rule({}, read, lambda fields: {})


def _tower_arrays(
  ours: str, stack: str, theirs: str, last_norm: str
) -> list[Entry]:
  layer, block = f"{theirs}.encoder.layers.{{i}}", f"{stack}/encoderblock"
  table = norm(f"{theirs}.{last_norm}", f"{stack}/encoder_norm")
  for part, name in _BLOCK.items():
    table += dense(f"{layer}.{name}", f"{block}/{part}")
  for i in range(2):
    table += norm(f"{layer}.layer_norm{i + 1}", f"{block}/LayerNorm_{i}")
  posemb = f"{theirs}.embeddings.position_embedding.weight"
  return [*table, Entry(posemb, (f"{ours}/pos_embedding",), ndim=2)]


def _map_head() -> list[Entry]:
  ours, theirs = "img/MAPHead_0", "vision_model.head"
  at = f"{ours}/MultiHeadDotProductAttention_0"
  parts = [f"{at}/{name}" for name in ("query", "key", "value")]
  return [
    Entry(f"{theirs}.probe", (f"{ours}/probe",), ndim=3),
    Entry(
      f"{theirs}.attention.in_proj_weight",
      tuple(f"{part}/kernel" for part in parts),
      transposed=True,
    ),
    plain(
      f"{theirs}.attention.in_proj_bias", *(f"{part}/bias" for part in parts)
    ),
    *dense(f"{theirs}.attention.out_proj", f"{at}/out"),
    *norm(f"{theirs}.layernorm", f"{ours}/LayerNorm_0"),
    *dense(f"{theirs}.mlp.fc1", f"{ours}/MlpBlock_0/Dense_0"),
    *dense(f"{theirs}.mlp.fc2", f"{ours}/MlpBlock_0/Dense_1"),
  ]


_PATCHES = "vision_model.embeddings.patch_embedding"
_BOTH = [
  *_tower_arrays("img", "img/Transformer", "vision_model", "post_layernorm"),
  *_tower_arrays("txt", "txt/Encoder_0", "text_model", "final_layer_norm"),
  plain(
    "text_model.embeddings.token_embedding.weight", "txt/Embed_0/embedding"
  ),
  plain(f"{_PATCHES}.bias", "img/embedding/bias"),
]
_CONVOLUTION = Entry(
  f"{_PATCHES}.weight", ("img/embedding/kernel",), convolution=True
)
_CLIP_ARRAYS = [
  *_BOTH,
  _CONVOLUTION,
  Entry("vision_model.embeddings.class_embedding", ("img/cls",), ndim=1),
  *norm("vision_model.pre_layrnorm", "img/pre_norm"),  # Their spelling.
  linear("visual_projection", "img/head/kernel"),
  linear("text_projection", "txt/head/kernel"),
  Entry("logit_scale", ("t",), ndim=0),
]
_SIGLIP_ARRAYS = [
  *_BOTH,
  *_map_head(),
  *dense("text_model.head", "txt/head"),
  plain("logit_scale", "t"),
  plain("logit_bias", "b"),
]
_CLIP = Family(
  "clip",
  "CLIPModel",
  _CLIP_ARRAYS,
  keys={},
  defaults={},
  constants=dict(bias_init=None),
  rules=dict(towers=_towers(_VISION, _TEXT), dim=_clip_dim()),
  harmless=_HARMLESS,
)
_SIGLIP = _CLIP.but(
  "siglip",
  "SiglipModel",
  arrays=[*_SIGLIP_ARRAYS, _CONVOLUTION],
  constants=dict(bias_init=-10.0),
  rules=dict(towers=_towers(_SIGLIP_VISION, _SIGLIP_TEXT), dim=_siglip_dim()),
)
_SIGLIP2 = _SIGLIP.but(
  "siglip2",
  "Siglip2Model",
  arrays=[*_SIGLIP_ARRAYS, linear(_PATCHES, "img/embedding/kernel")],
  rules=dict(towers=_towers(_SIGLIP2_VISION, _SIGLIP2_TEXT)),
)
FAMILIES = {family.model_type: family for family in (_CLIP, _SIGLIP, _SIGLIP2)}
_IGNORED = {r".*\.position_ids": "a constant that the model computes"}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts published arrays; None for a file in another layout."""
  kernel = flat.get(f"{_PATCHES}.weight")
  of_patches = kernel is not None and len(kernel.shape) == 2
  names = [n for n in FAMILIES if of_patches == (n == "siglip2")]
  arrays = {name: FAMILIES[name].arrays for name in names}
  result = tables.load(arrays, flat, like, param_dims, ignored=_IGNORED)
  known = result is not None and "txt/Embed_0/embedding" in result
  return result if known and "txt/Embed_0/embedding" not in flat else None
