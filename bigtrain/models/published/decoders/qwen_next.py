"""Qwen3-Next and the text models of Qwen 3.5, dense and with experts.

Three of four layers are Gated DeltaNet, and attention has output gates.
"""

from typing import Any

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.activation_rules import (
  GATED,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.deltanet_rules import deltanet
from bigtrain.models.published.decoders.expert_rules import experts, mlp_width
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.qwen import sparse_by_step
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.tables import (
  Table,
  dense,
  dense_by_head,
  depthwise_conv1d,
  linear,
  norm,
  plain,
  table,
)

_OURS = "blocks/deltanet/"
_THEIRS = "model.layers.{i}.linear_attn."
# Each head of queries is followed by its gate.
_ATTENTION = table(
  dense_by_head(
    "model.layers.{i}.self_attn.q_proj",
    "blocks/attention/query",
    "blocks/attention/output_gate",
  ),
  dense("model.layers.{i}.self_attn.k_proj", "blocks/attention/key"),
  dense("model.layers.{i}.self_attn.v_proj", "blocks/attention/value"),
  shared_arrays.ATTENTION_OUT,
)
_DELTANET = table(
  depthwise_conv1d(
    _THEIRS + "conv1d",
    _OURS + "query_conv",
    _OURS + "key_conv",
    _OURS + "value_conv",
  ),
  plain(_THEIRS + "A_log", _OURS + "log_rate"),
  plain(_THEIRS + "dt_bias", _OURS + "time_step"),
  norm(_THEIRS + "norm", _OURS + "norm"),
  linear(_THEIRS + "out_proj", _OURS + "out"),
)


def _arrays(*projections: Table) -> Table:
  return shared_arrays.with_prediction(
    table(
      shared_arrays.ENDS,
      shared_arrays.NORMS_BEFORE,
      _ATTENTION,
      _DELTANET,
      *projections,
      shared_arrays.MLP,
      shared_arrays.EXPERTS,
      shared_arrays.SHARED_EXPERT,
    )
  )


def _rope_of_text() -> Rule:
  """A rotation in which three kinds of positions are equal for text."""
  rule = rope(fraction=0.25)

  def read(config: ConfigJson) -> Any:
    stored = config["rope_parameters"]
    if stored:
      names = stored.keys() - {"mrope_section", "mrope_interleaved"}
      values = {**config, "rope_parameters": {x: stored[x] for x in names}}
      config = ConfigJson(config.path, values)
    return rule.read(config)

  return rule._replace(read=read)


QWEN3_NEXT = LLAMA.but(
  "qwen3_next",
  "Qwen3NextForCausalLM",
  # Projections of DeltaNet are in one array by head of keys.
  arrays=_arrays(
    dense_by_head(
      _THEIRS + "in_proj_qkvz",
      _OURS + "query",
      _OURS + "key",
      _OURS + "value",
      _OURS + "gate",
    ),
    dense_by_head(_THEIRS + "in_proj_ba", _OURS + "beta", _OURS + "decay"),
  ),
  # Scales of norms are stored without the 1 that is added to them, except for
  # DeltaNet's.
  constants={"qk_norm": "head", "norm_offset": 1.0, "output_gate": True},
  rules=(
    activation(GATED, "silu"),
    biases(attention_bias=("qkv", "out")),
    rope(fraction=0.25),
    mlp_width(),
    deltanet(
      num_heads=Key("linear_num_value_heads", 32),
      num_key_heads=Key("linear_num_key_heads", 16),
      key_dim=Key("linear_key_head_dim", 128),
      value_dim=Key("linear_value_head_dim", 128),
      conv_width=Key("linear_conv_kernel_dim", 4),
    ),
    experts(
      num_experts=Key("num_experts", 512),
      top_k=Key("num_experts_per_tok", 10),
      mlp_dim=Key("moe_intermediate_size", 512),
      normalize=Key("norm_topk_prob", True),
      shared_dim=Key("shared_expert_intermediate_size", 512),
      shared_gate=True,
      layers=sparse_by_step(),
    ),
  ),
  requires={"attn_output_gate": (True,), "use_sliding_window": (False,)},
  harmless=(
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
  ),
  defaults={
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5632,
  },
)

_SEPARATE = _arrays(
  linear(
    _THEIRS + "in_proj_qkv", _OURS + "query", _OURS + "key", _OURS + "value"
  ),
  linear(_THEIRS + "in_proj_z", _OURS + "gate"),
  linear(_THEIRS + "in_proj_b", _OURS + "beta"),
  linear(_THEIRS + "in_proj_a", _OURS + "decay"),
)

QWEN3_5 = QWEN3_NEXT.but(
  "qwen3_5_text",
  "Qwen3_5ForCausalLM",
  without=("moe", "mlp_dim"),
  arrays=_SEPARATE,
  keys={"mlp_dim": Key("intermediate_size")},
  rules=(_rope_of_text(),),
  defaults={
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
  },
)

QWEN3_5_MOE = QWEN3_NEXT.but(
  "qwen3_5_moe_text",
  "Qwen3_5MoeForCausalLM",
  arrays=_SEPARATE,
  rules=(
    _rope_of_text(),
    experts(
      num_experts=Key("num_experts", 256),
      top_k=Key("num_experts_per_tok", 8),
      mlp_dim=Key("moe_intermediate_size", 512),
      normalize=True,
      shared_dim=Key("shared_expert_intermediate_size", 512),
      shared_gate=True,
    ),
  ),
  defaults={"vocab_size": 248320, "num_hidden_layers": 40},
)

# The same below pictures, whose tokens have positions in three axes.
_AXES = rope(fraction=0.25, sections=(11, 11, 10), axes_interleaved=True)
WITH_PICTURES = {
  family.model_type: family.but(
    family.model_type, family.architecture, rules=(_AXES,)
  )
  for family in (QWEN3_5, QWEN3_5_MOE)
}
