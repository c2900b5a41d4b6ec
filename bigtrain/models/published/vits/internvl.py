"""The image tower of InternVL, which has no files of its own."""

from bigtrain.models.published.encoder_rules import biases, layer_scale
from bigtrain.models.published.families import choice
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

INTERNVL = VIT.but(
  "internvl_vision",
  "",
  without=("num_classes", "pool_type", "rep_size"),
  arrays=table(
    plain("embeddings.cls_token", "cls", ndim=3),
    plain("embeddings.position_embeddings", "pos_embedding", ndim=3),
    conv("embeddings.patch_embeddings.projection", "embedding"),
    within(
      "encoder.layer.{i}.",
      "Transformer/encoderblock/",
      norm("layernorm_before", "LayerNorm_0"),
      norm("layernorm_after", "LayerNorm_1"),
      dense("attention.q_proj", f"{_ATTENTION}/query"),
      dense("attention.k_proj", f"{_ATTENTION}/key"),
      dense("attention.v_proj", f"{_ATTENTION}/value"),
      dense("attention.projection_layer", f"{_ATTENTION}/out"),
      dense("mlp.fc1", "MlpBlock_0/Dense_0"),
      dense("mlp.fc2", "MlpBlock_0/Dense_1"),
      plain("lambda_1", "layer_scale_0"),
      plain("lambda_2", "layer_scale_1"),
    ),
    norm("layernorm", "Transformer/encoder_norm"),
  ),
  constants={"pool_type": "none"},
  rules=(
    biases(qkv="attention_bias"),
    layer_scale("layer_scale_init_value", 0.1),
    # Features that are averaged have no norm behind the blocks.
    choice("final_norm", "use_mean_pooling", {True: False, False: True}),
  ),
  requires={
    "use_qk_norm": (False,),
    "norm_type": ("layer_norm",),
    "use_absolute_position_embeddings": (True,),
    "use_mask_token": (False,),
  },
  harmless=("projection_dropout",),
  defaults={
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-6,
    "attention_bias": False,
    "patch_size": 14,
    "image_size": 448,
  },
)
