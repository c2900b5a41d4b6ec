"""Arcee's Trinity, in which attention has output gates."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  experts,
  mlp_width,
  shared_experts,
  sparse_after_first,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  EXPERTS,
  MLP,
  SHARED_EXPERTS,
)
from bigtrain.models.published.decoders.window_rules import (
  SLIDING,
  full_every,
  windows,
)
from bigtrain.models.published.families import Key, choice
from bigtrain.models.published.tables import dense, norm, renamed, table

_LAYER = "model.layers.{i}."
AFMOE = LLAMA.but(
  "afmoe",
  "AfmoeForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION,
    dense(_LAYER + "self_attn.gate_proj", "blocks/attention/output_gate"),
    norm(_LAYER + "input_layernorm", "blocks/attention_norm"),
    norm(_LAYER + "post_attention_layernorm", "blocks/attention_post_norm"),
    norm(_LAYER + "pre_mlp_layernorm", "blocks/mlp_norm"),
    norm(_LAYER + "post_mlp_layernorm", "blocks/mlp_post_norm"),
    MLP,
    renamed(
      EXPERTS,
      {
        "mlp.gate.weight": "mlp.router.gate.weight",
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
      },
    ),
    SHARED_EXPERTS,
  ),
  constants={"qk_norm": "head", "norm_at": "sandwich", "output_gate": True},
  rules=(
    # The output gate has none.
    biases(attention_bias=("qkv_without_gate", "out")),
    choice("embed_multiplier", "mup_enabled", {False: 1.0, True: "sqrt_width"}),
    # Layers without a window have no positions.
    windows(
      full_every(4, key="global_attn_every_n_layers"),
      default=1024,
      rotates=SLIDING,
    ),
    mlp_width(),
    experts(
      num_experts=Key("num_experts", 64),
      top_k=Key("num_experts_per_tok", 6),
      mlp_dim=Key("moe_intermediate_size", 1408),
      normalize=True,
      scale=Key("route_scale", 1.0),
      score="sigmoid",
      selection_bias=True,
      layers=sparse_after_first("num_dense_layers"),
      rules=(shared_experts("num_shared_experts", 2),),
    ),
  ),
  requires={
    "mlp_bias": (False,),
    "score_func": ("sigmoid",),
    "route_norm": (True,),
    "n_group": (1,),
    "topk_group": (1,),
    "num_expert_groups": (1,),
    "num_limited_groups": (1,),
  },
  harmless=("load_balance_coeff", "use_grouped_mm"),
  defaults={
    "vocab_size": 200192,
    "max_position_embeddings": 16384,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "head_dim": 128,
    "intermediate_size": 6144,
    "rms_norm_eps": 1e-5,
  },
)
