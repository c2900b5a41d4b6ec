"""CLIP, SigLIP and SigLIP 2 of transformers: config.json and arrays.

A model of two towers has the fields `image` and `text`, options of its towers,
whose families are here too.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import array_files, conversions, encoder_rules
from bigtrain.models.published.encoder_rules import TRANSFORMER_KEYS, mlp
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Key,
  Rule,
  converted,
)
from bigtrain.models.published.tables import (
  conv,
  dense,
  linear,
  norm,
  plain,
  table,
  transposed,
  within,
)
from bigtrain.models.published.vits.plain_vit import VIT

_ATTENTION = "MultiHeadDotProductAttention_0"
_BLOCK = table(
  dense("self_attn.q_proj", f"{_ATTENTION}/query"),
  dense("self_attn.k_proj", f"{_ATTENTION}/key"),
  dense("self_attn.v_proj", f"{_ATTENTION}/value"),
  dense("self_attn.out_proj", f"{_ATTENTION}/out"),
  dense("mlp.fc1", "MlpBlock_0/Dense_0"),
  dense("mlp.fc2", "MlpBlock_0/Dense_1"),
  norm("layer_norm1", "LayerNorm_0"),
  norm("layer_norm2", "LayerNorm_1"),
)
# The image tower; models that read text and pictures have the same one.
IMAGE_ARRAYS = table(
  norm("post_layernorm", "Transformer/encoder_norm"),
  within("encoder.layers.{i}.", "Transformer/encoderblock/", _BLOCK),
  plain("embeddings.position_embedding.weight", "pos_embedding", ndim=2),
)
CLIP_IMAGE_ARRAYS = table(
  IMAGE_ARRAYS,
  conv("embeddings.patch_embedding", "embedding"),
  plain("embeddings.class_embedding", "cls", ndim=1),
  norm("pre_layrnorm", "pre_norm"),  # Their spelling.
)
# The attention pooling of SigLIP.
HEAD_ARRAYS = within(
  "head.",
  "MAPHead_0/",
  plain("probe", "probe", ndim=3),
  transposed(
    "attention.in_proj_weight",
    f"{_ATTENTION}/query/kernel",
    f"{_ATTENTION}/key/kernel",
    f"{_ATTENTION}/value/kernel",
  ),
  plain(
    "attention.in_proj_bias",
    f"{_ATTENTION}/query/bias",
    f"{_ATTENTION}/key/bias",
    f"{_ATTENTION}/value/bias",
  ),
  dense("attention.out_proj", f"{_ATTENTION}/out"),
  norm("layernorm", "LayerNorm_0"),
  dense("mlp.fc1", "MlpBlock_0/Dense_0"),
  dense("mlp.fc2", "MlpBlock_0/Dense_1"),
)
_IMAGE_TOWER = within("vision_model.", "img/", IMAGE_ARRAYS)
_TEXT_TOWER = within(
  "text_model.",
  "txt/",
  norm("final_layer_norm", "Encoder_0/encoder_norm"),
  within("encoder.layers.{i}.", "Encoder_0/encoderblock/", _BLOCK),
  plain("embeddings.position_embedding.weight", "pos_embedding", ndim=2),
  plain("embeddings.token_embedding.weight", "Embed_0/embedding"),
)
_SIGLIP_HEADS = table(
  within("vision_model.", "img/", HEAD_ARRAYS),
  dense("text_model.head", "txt/head"),
  plain("logit_scale", "t"),
  plain("logit_bias", "b"),
)
# Kernels of convolutions; of SigLIP 2, whose images have patches of any number,
# of linear layers.
_PATCHES = "vision_model.embeddings.patch_embedding"

_HARMLESS = (
  *encoder_rules.HARMLESS,
  "max_position_embeddings",
  "projection_size",
  "logit_scale_init_value",
)

# Families of the towers, which have no files of their own.
CLIP_IMAGE = VIT.but(
  "clip_vision_model",
  "",
  without=("use_bias", "num_classes", "pool_type", "rep_size"),
  constants={
    "pool_type": "tok",
    "pre_norm": True,
    "head_bias": False,
    "use_bias": ("qkv", "out", "mlp"),
  },
  harmless=_HARMLESS,
  defaults={
    "layer_norm_eps": 1e-5,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
  },
)
SIGLIP_IMAGE = CLIP_IMAGE.but(
  "siglip_vision_model",
  "",
  constants={
    "pool_type": "map",
    "pre_norm": False,
    "head_bias": True,
    "class_token": False,
    "posemb_class": False,
    "use_bias": ("qkv", "out", "mlp", "patch"),
  },
  requires={"vision_use_head": (True,)},
  defaults={
    "layer_norm_eps": 1e-6,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
  },
)


def _posemb_grid() -> Rule:
  """The square grid of positions, which are resampled for each image."""
  key = "num_patches"

  def read(config: ConfigJson) -> dict[str, Any]:
    side = round(config[key] ** 0.5)
    if side**2 != config[key]:
      raise config.error(f"{key}={config[key]}: expected a square.")
    return {"posemb_grid": (side, side)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    height, width = fields["posemb_grid"] or (1, 1)
    return {key: height * width}

  return Rule(("posemb_grid",), {key: 256}, read, write)


_SIGLIP2_IMAGE = SIGLIP_IMAGE.but(
  "siglip2_vision_model",
  "",
  without=("image_size",),
  rules=(_posemb_grid(),),
)


def _end() -> Rule:
  """The token whose features are pooled: in old files the largest id."""
  key = "eos_token_id"

  def read(config: ConfigJson) -> dict[str, Any]:
    is_old = config[key] == 2
    return {"eos_id": config["vocab_size"] - 1 if is_old else config[key]}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: fields["eos_id"]}

  return Rule(("eos_id",), {key: 49407}, read, write)


_CLIP_TEXT = Family(
  model_type="clip_text_model",
  architecture="",
  keys={**TRANSFORMER_KEYS, "vocab_size": Key("vocab_size", 49408)},
  constants={"pool_type": "eos", "causal": True, "head_bias": False},
  rules=(mlp(), _end()),
  harmless=_HARMLESS,
  in_shapes=("width", "depth", "mlp_dim", "vocab_size"),
  defaults={
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "layer_norm_eps": 1e-5,
    "hidden_act": "quick_gelu",
  },
)
_SIGLIP_TEXT = _CLIP_TEXT.but(
  "siglip_text_model",
  "",
  without=("eos_id",),
  constants={"pool_type": "last", "causal": False, "head_bias": True},
  defaults={
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
  },
)
_SIGLIP2_TEXT = _SIGLIP_TEXT.but("siglip2_text_model", "")


def _towers(image: Family, text: Family) -> Rule:
  """The towers, each with the config of its own family."""
  towers = {"image": ("vision_config", image), "text": ("text_config", text)}

  def read(config: ConfigJson) -> dict[str, Any]:
    result = {}
    for name, (key, family) in towers.items():
      fields = family.read(f"{config.path}: {key}", config[key])
      result[name] = {
        name: field.value
        for name, field in fields.items()
        if not field.is_neutral
      }
    return result

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    shapes = conversions.below("img/", fields.get("shapes", {}))
    config = {}
    for name, (key, family) in towers.items():
      config[key] = family.write({**fields[name], "shapes": shapes})
      del config[key]["architectures"]
    return config

  keys: dict[str, Any] = {"vision_config": {}, "text_config": {}}
  return Rule(("image", "text"), keys, read, write)


def _clip_dim() -> Rule:
  """The width of both towers' heads."""
  return converted(
    "out_dim",
    Key("projection_dim", 512),
    read=lambda width: (width, width),
    write=lambda widths: widths[0],
  )


def _siglip_dim() -> Rule:
  """The text's head is as wide as the image tower, or as the key says."""

  def read(config: ConfigJson) -> dict[str, Any]:
    text = {"hidden_size": 768, **config["text_config"]}
    size = text.get("projection_size") or text["hidden_size"]
    return {"out_dim": (None, size)}

  return Rule(("out_dim",), {}, read, lambda fields: {})


_CLIP = Family(
  model_type="clip",
  architecture="CLIPModel",
  arrays=table(
    within("vision_model.", "img/", CLIP_IMAGE_ARRAYS),
    _TEXT_TOWER,
    linear("visual_projection", "img/head"),
    linear("text_projection", "txt/head"),
    plain("logit_scale", "t", ndim=0),
  ),
  constants={"bias_init": None},
  rules=(_towers(CLIP_IMAGE, _CLIP_TEXT), _clip_dim()),
  harmless=_HARMLESS,
)
_SIGLIP = _CLIP.but(
  "siglip",
  "SiglipModel",
  arrays=table(
    _IMAGE_TOWER, _TEXT_TOWER, _SIGLIP_HEADS, conv(_PATCHES, "img/embedding")
  ),
  constants={"bias_init": -10.0},
  rules=(_towers(SIGLIP_IMAGE, _SIGLIP_TEXT), _siglip_dim()),
)
_SIGLIP2 = _SIGLIP.but(
  "siglip2",
  "Siglip2Model",
  arrays=table(
    _IMAGE_TOWER, _TEXT_TOWER, _SIGLIP_HEADS, dense(_PATCHES, "img/embedding")
  ),
  rules=(_towers(_SIGLIP2_IMAGE, _SIGLIP2_TEXT),),
)

# {model_type: family}. An export takes the first that expresses the model.
FAMILIES: Mapping[str, Family] = {
  "clip": _CLIP,
  "siglip": _SIGLIP,
  "siglip2": _SIGLIP2,
}
# {regular expression of names in a file that are not loaded: reason}.
_IGNORED = {r".*\.position_ids": "a constant that the model computes"}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts a file's arrays; see array_files.load."""
  kernel = flat.get(f"{_PATCHES}.weight")
  is_siglip2 = kernel is not None and len(kernel.shape) == 2
  names = [name for name in FAMILIES if is_siglip2 == (name == "siglip2")]
  arrays = {name: FAMILIES[name].arrays for name in names}
  result = array_files.load(arrays, flat, like, param_dims, ignored=_IGNORED)
  known = result is not None and "txt/Embed_0/embedding" in result
  return result if known and "txt/Embed_0/embedding" not in flat else None
