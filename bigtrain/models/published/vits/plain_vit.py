"""ViT, and the encoder of MAE."""

from bigtrain.models.published import encoder_rules
from bigtrain.models.published.encoder_rules import (
  biases,
  image_size,
  mlp,
  patch,
  use,
)
from bigtrain.models.published.families import Family
from bigtrain.models.published.tables import (
  conv,
  dense,
  norm,
  plain,
  table,
  within,
)

EMBEDDINGS = table(
  plain("embeddings.cls_token", "cls", ndim=3),
  plain("embeddings.position_embeddings", "pos_embedding", ndim=3),
  plain("embeddings.register_tokens", "registers", ndim=3),
  dense("classifier", "head"),
)
PROJECTIONS = table(
  within(
    "encoder.layer.{i}.attention.",
    "Transformer/encoderblock/MultiHeadDotProductAttention_0/",
    dense("attention.query", "query"),
    dense("attention.key", "key"),
    dense("attention.value", "value"),
    dense("output.dense", "out"),
  ),
  conv("embeddings.patch_embeddings.projection", "embedding"),
  norm("layernorm", "Transformer/encoder_norm"),
)
ARRAYS = table(
  EMBEDDINGS,
  PROJECTIONS,
  within(
    "encoder.layer.{i}.",
    "Transformer/encoderblock/",
    norm("layernorm_before", "LayerNorm_0"),
    norm("layernorm_after", "LayerNorm_1"),
    dense("intermediate.dense", "MlpBlock_0/Dense_0"),
    dense("output.dense", "MlpBlock_0/Dense_1"),
  ),
  dense("pooler.dense", "pre_logits"),
)

VIT = Family(
  model_type="vit",
  architecture="ViTModel",
  arrays=ARRAYS,
  keys=encoder_rules.TRANSFORMER_KEYS,
  constants={"class_token": True, "posemb_class": True},
  rules=(
    patch(),
    image_size(),
    mlp(),
    biases(qkv="qkv_bias"),
    use("ViT", pool_type="tok", rep_size=True),
  ),
  harmless=encoder_rules.HARMLESS,
  neutral={
    "registers": 0,
    "posemb": "learn",
    "posemb_class": False,
    "posemb_grid": None,
    "rope": None,
    "relative_bias": None,
    "rep_size": False,
    "pre_norm": False,
    "norm_pooled": False,
    "head_bias": True,
    "layer_scale": None,
  },
  in_shapes=("width", "depth", "mlp_dim", "patch_size", "num_classes"),
)

VIT_MAE = VIT.but(
  "vit_mae", "ViTMAEModel", rules=(use("ViTMAE", pool_type="tok"),)
)
