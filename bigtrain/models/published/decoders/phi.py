"""Phi 3 and 4."""

from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION_OUT,
  ENDS,
  FUSED_MLP,
  NORMS_BEFORE,
)
from bigtrain.models.published.families import Key
from bigtrain.models.published.tables import dense, table

PHI3 = LLAMA.but(
  "phi3",
  "Phi3ForCausalLM",
  arrays=table(
    ENDS,
    ATTENTION_OUT,
    NORMS_BEFORE,
    FUSED_MLP,
    dense(
      "model.layers.{i}.self_attn.qkv_proj",
      "blocks/attention/query",
      "blocks/attention/key",
      "blocks/attention/value",
    ),
  ),
  keys={"window": Key("sliding_window")},
  rules=(biases(), rope(fraction=1.0, original_len=4096)),
  requires={
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
  },
  defaults={
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
  },
)
