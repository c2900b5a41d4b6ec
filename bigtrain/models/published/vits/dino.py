"""DINOv2, with registers or with SwiGLUs, and DINOv3."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.encoder_rules import layer_scale, mlp, use
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.tables import (
  conv,
  dense,
  norm,
  plain,
  table,
  within,
)
from bigtrain.models.published.vits.plain_vit import (
  EMBEDDINGS,
  PROJECTIONS,
  VIT,
)

_DINOV2_BLOCK = table(
  EMBEDDINGS,
  PROJECTIONS,
  within(
    "encoder.layer.{i}.",
    "Transformer/encoderblock/",
    norm("norm1", "LayerNorm_0"),
    norm("norm2", "LayerNorm_1"),
    plain("layer_scale1.lambda1", "layer_scale_0"),
    plain("layer_scale2.lambda1", "layer_scale_1"),
  ),
)


def _dinov2_width() -> Rule:
  """The hidden width of MLPs, as a ratio; of SwiGLUs two thirds of it."""

  def of_swiglu(size: int) -> int:
    return (int(size * 2 / 3) + 7) // 8 * 8

  def read(config: ConfigJson) -> dict[str, Any]:
    size = int(config["hidden_size"] * config["mlp_ratio"])
    gated = config["use_swiglu_ffn"]
    return {"mlp_dim": of_swiglu(size) if gated else size}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, size = fields["width"], fields["mlp_dim"]
    if fields["mlp"] != "swiglu":
      return {"mlp_ratio": size // width if size % width == 0 else size / width}
    for ratio in (*range(1, 9), size * 1.5 / width):
      if of_swiglu(int(width * ratio)) == size:
        return {"mlp_ratio": ratio}
    return {"mlp_ratio": 0}  # None gives this width: no layout expresses it.

  return Rule(("mlp_dim",), {"mlp_ratio": 4}, read, write)


DINOV2 = VIT.but(
  "dinov2",
  "Dinov2Model",
  without=("mlp_dim",),
  arrays=table(
    _DINOV2_BLOCK,
    within(
      "encoder.layer.{i}.mlp.",
      "Transformer/encoderblock/MlpBlock_0/",
      dense("fc1", "Dense_0"),
      dense("fc2", "Dense_1"),
    ),
  ),
  rules=(
    mlp(gated={"use_swiglu_ffn": True}),
    _dinov2_width(),
    layer_scale("layerscale_value", 1.0),
    use("Dinov2", pool_type="tok_gap"),
  ),
  harmless=("intermediate_size",),
  defaults={"layer_norm_eps": 1e-6, "patch_size": 14},
)

# The same model_type, with other arrays.
DINOV2_SWIGLU = DINOV2.but(
  "dinov2",
  "Dinov2Model",
  arrays=table(
    _DINOV2_BLOCK,
    within(
      "encoder.layer.{i}.mlp.",
      "Transformer/encoderblock/MlpBlock_0/",
      dense("weights_in", "gate", "Dense_0"),
      dense("weights_out", "Dense_1"),
    ),
  ),
)

DINOV2_WITH_REGISTERS = DINOV2.but(
  "dinov2_with_registers",
  "Dinov2WithRegistersModel",
  keys={"registers": Key("num_register_tokens", 4)},
  rules=(use("Dinov2WithRegisters", pool_type="tok_gap"),),
)


def _dinov3_biases() -> Rule:
  """Biases by a key for each site; queries and values have theirs together."""

  def read(config: ConfigJson) -> dict[str, Any]:
    query, key = bool(config["query_bias"]), bool(config["key_bias"])
    value, out = bool(config["value_bias"]), bool(config["proj_bias"])
    if query != value or (key and not query):
      raise config.error(
        "query_bias, key_bias, value_bias: the model computes only biases of "
        "all three, of queries and values, or of none."
      )
    sites = {
      "qkv": key,
      "qv": query and not key,
      "out": out,
      "mlp": config["mlp_bias"],
      "patch": True,
    }
    return {"use_bias": tuple(site for site, has in sites.items() if has)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    sites = fields["use_bias"]
    key = "qkv" in sites
    query = key or "qv" in sites
    return {
      "query_bias": query,
      "value_bias": query,
      "key_bias": key,
      "proj_bias": "out" in sites,
      "mlp_bias": "mlp" in sites,
    }

  keys = {
    "query_bias": True,
    "key_bias": False,
    "value_bias": True,
    "proj_bias": True,
    "mlp_bias": True,
  }
  return Rule(("use_bias",), keys, read, write)


def _dinov3_rope() -> Rule:
  """Rotary embeddings of patches, with augmentations of their coordinates."""
  options = {
    "rope_theta": "theta",
    "pos_embed_shift": "shift",
    "pos_embed_jitter": "jitter",
    "pos_embed_rescale": "rescale",
  }

  def read(config: ConfigJson) -> dict[str, Any]:
    rope = {name: config[key] for key, name in options.items()}
    return {"rope": {name: x for name, x in rope.items() if x is not None}}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = fields["rope"] or {}
    return {key: rope.get(name) or None for key, name in options.items()}

  keys = {
    "rope_theta": 100.0,
    "pos_embed_shift": None,
    "pos_embed_jitter": None,
    "pos_embed_rescale": 2.0,
  }
  return Rule(("rope",), keys, read, write)


DINOV3 = VIT.but(
  "dinov3_vit",
  "DINOv3ViTModel",
  arrays=table(
    EMBEDDINGS,
    within(
      "layer.{i}.",
      "Transformer/encoderblock/",
      dense("attention.q_proj", "MultiHeadDotProductAttention_0/query"),
      dense("attention.k_proj", "MultiHeadDotProductAttention_0/key"),
      dense("attention.v_proj", "MultiHeadDotProductAttention_0/value"),
      dense("attention.o_proj", "MultiHeadDotProductAttention_0/out"),
      norm("norm1", "LayerNorm_0"),
      norm("norm2", "LayerNorm_1"),
      plain("layer_scale1.lambda1", "layer_scale_0"),
      plain("layer_scale2.lambda1", "layer_scale_1"),
      dense("mlp.up_proj", "MlpBlock_0/Dense_0"),
      dense("mlp.down_proj", "MlpBlock_0/Dense_1"),
      dense("mlp.gate_proj", "MlpBlock_0/gate"),
    ),
    conv("embeddings.patch_embeddings", "embedding"),
    norm("norm", "Transformer/encoder_norm"),
  ),
  keys={"registers": Key("num_register_tokens", 0)},
  constants={"posemb": "none", "posemb_class": False},
  rules=(
    mlp(gated={"use_gated_mlp": True, "hidden_act": "silu"}),
    _dinov3_biases(),
    _dinov3_rope(),
    layer_scale("layerscale_value", 1.0),
    use("DINOv3ViT", pool_type="tok"),
  ),
  defaults={
    "layer_norm_eps": 1e-5,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 6,
  },
)
