"""timm's ViTs: the arguments of its VisionTransformer are keys (../timm.py)."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published import encoder_rules, timm
from bigtrain.models.published.encoder_rules import (
  biases,
  image_size,
  mlp,
  patch,
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
  norm,
  plain,
  table,
  within,
)
from bigtrain.models.published.vits.plain_vit import VIT

_ATTENTION = "MultiHeadDotProductAttention_0"
_BLOCK = table(
  plain("cls_token", "cls", ndim=3),
  plain("pos_embed", "pos_embedding", ndim=3),
  plain("reg_token", "registers", ndim=3),
  conv("patch_embed.proj", "embedding"),
  norm("norm_pre", "pre_norm"),
  within(
    "blocks.{i}.",
    "Transformer/encoderblock/",
    norm("norm1", "LayerNorm_0"),
    dense(
      "attn.qkv",
      f"{_ATTENTION}/query",
      f"{_ATTENTION}/key",
      f"{_ATTENTION}/value",
    ),
    dense("attn.proj", f"{_ATTENTION}/out"),
    plain("ls1.gamma", "layer_scale_0"),
    norm("norm2", "LayerNorm_1"),
    dense("mlp.fc2", "MlpBlock_0/Dense_1"),
    plain("ls2.gamma", "layer_scale_1"),
  ),
  norm("norm", "Transformer/encoder_norm"),
  within(
    "attn_pool.",
    "MAPHead_0/",
    plain("latent", "probe", ndim=3),
    dense("q", f"{_ATTENTION}/query"),
    dense("kv", f"{_ATTENTION}/key", f"{_ATTENTION}/value"),
    dense("proj", f"{_ATTENTION}/out"),
    norm("norm", "LayerNorm_0"),
    dense("mlp.fc1", "MlpBlock_0/Dense_0"),
    dense("mlp.fc2", "MlpBlock_0/Dense_1"),
  ),
  norm("fc_norm", "pooled_norm"),
  dense("head", "head"),
)


def _width() -> Rule:
  """The hidden width of MLPs, as a ratio; of SwiGLUs that of both products."""

  def read(config: ConfigJson) -> dict[str, Any]:
    size = int(config["embed_dim"] * config["mlp_ratio"])
    return {"mlp_dim": size // 2 if config["swiglu"] else size}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    size = fields["mlp_dim"] * (2 if fields["mlp"] == "swiglu" else 1)
    ratio = size / fields["width"]
    if int(fields["width"] * ratio) != size:
      ratio = (size + 0.5) / fields["width"]
    return {"mlp_ratio": ratio, "mlp_size": size}

  return Rule(("mlp_dim",), {"mlp_ratio": 4, "mlp_size": None}, read, write)


def _positions() -> Rule:
  """The class token, and which tokens have position embeddings."""

  def read(config: ConfigJson) -> dict[str, Any]:
    learned = config["pos_embed"] == "learn"
    first = learned and not config["no_embed_class"]
    if first and config["reg_tokens"]:
      raise config.error("no_embed_class: expected true with reg_tokens.")
    return {
      "class_token": config["class_token"],
      "posemb": "learn" if learned else "none",
      "posemb_class": first and config["class_token"],
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    has_class = fields["class_token"]
    without = not fields["posemb_class"] and (has_class or fields["registers"])
    return {
      "class_token": has_class,
      "pos_embed": fields["posemb"],
      "no_embed_class": bool(without),
    }

  keys = {"class_token": True, "pos_embed": "learn", "no_embed_class": False}
  return Rule(("class_token", "posemb", "posemb_class"), keys, read, write)


def _pooling() -> Rule:
  """The pooling, the norm after it, and the number of classes."""
  pools = choice(
    "pool_type", "global_pool", {"token": "tok", "avg": "gap", "map": "map"}
  )

  def read(config: ConfigJson) -> dict[str, Any]:
    norm_pooled = config["fc_norm"]
    if norm_pooled is None:
      norm_pooled = config["global_pool"] == "avg"
    return {
      **pools.read(config),
      "norm_pooled": norm_pooled,
      "num_classes": config["num_classes"] or None,
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    norm_pooled = fields["norm_pooled"]
    is_default = norm_pooled == (fields["pool_type"] == "gap")
    return {
      **pools.write(fields),
      "fc_norm": None if is_default else norm_pooled,
      "num_classes": fields["num_classes"] or 0,
    }

  keys = {**pools.keys, "fc_norm": None, "num_classes": 1000}
  return Rule(("pool_type", "norm_pooled", "num_classes"), keys, read, write)


TIMM = Family(
  model_type=timm.MODEL_TYPE,
  architecture="",
  arrays=table(
    _BLOCK,
    dense("blocks.{i}.mlp.fc1", "Transformer/encoderblock/MlpBlock_0/Dense_0"),
  ),
  keys={
    "width": Key("embed_dim"),
    "depth": Key("depth"),
    "num_heads": Key("num_heads"),
    "norm_eps": Key("norm_eps"),
    "registers": Key("reg_tokens"),
    "pre_norm": Key("pre_norm"),
    "layer_scale": Key("init_values"),
  },
  rules=(
    patch(),
    image_size(),
    mlp("act_layer", tanh="gelu_tanh", gated={"swiglu": True}),
    _width(),
    biases(
      qkv="qkv_bias", out="proj_bias", mlp="proj_bias", patch="patch_bias"
    ),
    _positions(),
    _pooling(),
  ),
  harmless=(
    *encoder_rules.HARMLESS,
    "img_size",
    "in_chans",
    "dynamic_img_size",
    "dynamic_img_pad",
    "strict_img_size",
    "drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "weight_init",
    "fix_init",
    "pretrained_cfg",
  ),
  neutral=VIT.neutral,
  in_shapes=VIT.in_shapes,
)

# The same architectures, with other arrays.
TIMM_SWIGLU = TIMM.but(
  timm.MODEL_TYPE,
  "",
  arrays=table(
    _BLOCK,
    within(
      "blocks.{i}.mlp.",
      "Transformer/encoderblock/MlpBlock_0/",
      dense("fc1", "gate", "Dense_0"),
    ),
  ),
)
