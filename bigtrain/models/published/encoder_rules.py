"""Keys and rules of config.json that several families of encoders share."""

import math
from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.families import (
  ConfigJson,
  Key,
  Rule,
  classes,
  converted,
)

# Sizes of transformers in transformers' files.
TRANSFORMER_KEYS = {
  "width": Key("hidden_size", 768),
  "depth": Key("num_hidden_layers", 12),
  "num_heads": Key("num_attention_heads", 12),
  "mlp_dim": Key("intermediate_size", 3072),
  "norm_eps": Key("layer_norm_eps", 1e-12),
}

# Keys of vision models that change no feature.
HARMLESS = (
  # Of images, which may have any size.
  "image_size",
  "num_channels",
  # Of training.
  "attention_probs_dropout_prob",
  "hidden_dropout_prob",
  "drop_path_rate",
  "dropout",
  "use_mask_token",
  # Of MAE's decoder and its objective.
  "decoder_hidden_size",
  "decoder_num_attention_heads",
  "decoder_num_hidden_layers",
  "decoder_intermediate_size",
  "mask_ratio",
  "norm_pix_loss",
  # Of backbones, and of heads for segmentation.
  "encoder_stride",
  "apply_layernorm",
  "reshape_hidden_states",
  "out_features",
  "out_indices",
  "stage_names",
  "backbone_out_indices",
  "auxiliary_channels",
  "use_auxiliary_head",
  "auxiliary_loss_weight",
  "auxiliary_num_convs",
  "auxiliary_concat_input",
  "semantic_loss_ignore_index",
  "pool_scales",
  "add_fpn",
  "use_decoder_layers",
  # Of poolers, and of the model around a tower.
  "pooler_act",
  "pooler_output_size",
  "vocab_size",
  "projection_dim",
  "model_type",
  "vision_use_head",
)

# {activation in transformers and timm: ours, of models/layers/mlp.py}. Of
# several names for one of ours, the first is written.
_GELUS = {
  "gelu": "gelu_erf",
  "gelu_pytorch_tanh": "gelu",
  "gelu_tanh": "gelu",
  "gelu_new": "gelu",
  "quick_gelu": "gelu_quick",
}

# Where a ViT may have biases, in the order of its field `use_bias`.
_SITES = ("qkv", "out", "mlp", "patch")


def patch() -> Rule:
  """The patches' size: a number, or height and width."""

  def read(size: Any) -> tuple[int, int]:
    return tuple(size) if isinstance(size, list) else (size, size)

  def write(sizes: Any) -> Any:
    return sizes[0] if len({*sizes}) == 1 else sizes

  return converted("patch_size", Key("patch_size", 16), read, write)


def image_size() -> Rule:
  """The images' size, which the grid of positions determines.

  It is written and not read, since a model takes images of any size.
  """

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    shapes = {
      name.rpartition("/")[2]: shape
      for name, shape in fields.get("shapes", {}).items()
    }
    if "pos_embedding" in shapes:
      num_patches = shapes["pos_embedding"][1] - fields["posemb_class"]
    elif "table" in shapes:  # Relative biases of a square grid.
      num_patches = (math.isqrt(shapes["table"][-2]) + 1) ** 2 // 4
    else:
      return {}
    side = math.isqrt(num_patches)
    grid = fields["posemb_grid"] or (side, side)
    size = [n * pixels for n, pixels in zip(grid, fields["patch_size"])]
    return {"image_size": size[0] if len({*size}) == 1 else size}

  # No ViT has this field; with the name, a family can do without the rule.
  return Rule(("image_size",), {"image_size": 224}, lambda config: {}, write)


def mlp(
  key: str = "hidden_act",
  *,
  tanh: str = "gelu_pytorch_tanh",
  gated: Mapping[str, Any] = {},
) -> Rule:
  """The kind of MLP: a GELU by its name in `key`, or a SwiGLU.

  Args:
    tanh: the library's name of the GELU by tanh.
    gated: {key: value} of files whose MLPs are SwiGLUs.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    if gated and all(config[name] == value for name, value in gated.items()):
      return {"mlp": "swiglu"}
    config.require(key, *_GELUS)
    return {"mlp": _GELUS[config[key]]}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["mlp"] == "swiglu" and gated:
      return {key: "gelu", **gated}
    named = {tanh: "gelu", **_GELUS}
    names = [name for name, kind in named.items() if kind == fields["mlp"]]
    return {key: names[0] if names else "gelu", **not_gated}

  not_gated = {name: False for name in gated if name != key}
  return Rule(("mlp",), {key: "gelu", **not_gated}, read, write)


def use(
  stem: str, pool_type: str, features: str = "tok", rep_size: bool = False
) -> Rule:
  """The pooling and the number of classes, by the class of the model.

  Args:
    pool_type: pooling of {stem}ForImageClassification.
    features: pooling of {stem}Model, which has no classes.
    rep_size: whether {stem}Model has a tanh layer after the pooling.
  """
  num_classes = classes(stem, "Image")

  def read(config: ConfigJson) -> dict[str, Any]:
    number = num_classes.read(config)["num_classes"]
    has_head = number is not None
    return {
      "num_classes": number,
      "pool_type": pool_type if has_head else features,
      "rep_size": rep_size and not has_head,
    }

  fields = ("num_classes", "pool_type", "rep_size")
  return Rule(fields, num_classes.keys, read, num_classes.write)


def biases(**sites: str) -> Rule:
  """Biases; `sites` are {site: key that is false if it has none}."""

  def read(config: ConfigJson) -> dict[str, Any]:
    off = [site for site, key in sites.items() if not config[key]]
    return {"use_bias": tuple(site for site in _SITES if site not in off)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: site in fields["use_bias"] for site, key in sites.items()}

  keys = dict.fromkeys(sites.values(), True)
  return Rule(("use_bias",), keys, read, write)


def layer_scale(key: str, default: float) -> Rule:
  """The initial value of the scales of branches."""
  return converted(
    "layer_scale",
    Key(key, default),
    read=lambda value: value or default,
    write=lambda value: value,
  )
