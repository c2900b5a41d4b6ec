"""Tables of arrays that several families of decoders share.

Names are as in transformers' Llama. A model lacks the arrays that it has no use
for: the biases, the norms of queries and keys, the head if it is tied.
"""

from bigtrain.models.published.tables import (
  Entry,
  Table,
  dense,
  linear,
  norm,
  plain,
  table,
  transposed,
)

ENDS = table(
  plain("model.embed_tokens.weight", "token_embedding"),
  norm("model.norm", "norm"),
  dense("lm_head", "head"),
  linear("score", "score"),
)
ATTENTION_OUT = table(
  dense("model.layers.{i}.self_attn.o_proj", "blocks/attention/out"),
  plain(
    "model.layers.{i}.self_attn.q_norm.weight",
    "blocks/attention/query_norm/scale",
  ),
  plain(
    "model.layers.{i}.self_attn.k_norm.weight",
    "blocks/attention/key_norm/scale",
  ),
  plain("model.layers.{i}.self_attn.sinks", "blocks/attention/sinks"),
)
ATTENTION = table(
  dense("model.layers.{i}.self_attn.q_proj", "blocks/attention/query"),
  dense("model.layers.{i}.self_attn.k_proj", "blocks/attention/key"),
  dense("model.layers.{i}.self_attn.v_proj", "blocks/attention/value"),
  ATTENTION_OUT,
)
# Norms before attention and MLP, as in Llama.
NORMS_BEFORE = table(
  norm("model.layers.{i}.input_layernorm", "blocks/attention_norm"),
  norm("model.layers.{i}.post_attention_layernorm", "blocks/mlp_norm"),
)
# Norms after attention and MLP, as in Gemma 2 and OLMo 2.
NORMS_AFTER = table(
  norm(
    "model.layers.{i}.post_attention_layernorm", "blocks/attention_post_norm"
  ),
  norm("model.layers.{i}.post_feedforward_layernorm", "blocks/mlp_post_norm"),
)
MLP = table(
  dense("model.layers.{i}.mlp.gate_proj", "blocks/mlp/gate"),
  dense("model.layers.{i}.mlp.up_proj", "blocks/mlp/up"),
  dense("model.layers.{i}.mlp.down_proj", "blocks/mlp/down"),
)
# Gate and up-projection in one array, as in Phi 3 and GLM 4.
FUSED_MLP = table(
  dense(
    "model.layers.{i}.mlp.gate_up_proj", "blocks/mlp/gate", "blocks/mlp/up"
  ),
  dense("model.layers.{i}.mlp.down_proj", "blocks/mlp/down"),
)
# Experts as in Qwen and GLM.
EXPERTS = table(
  linear("model.layers.{i}.mlp.gate", "blocks/moe/router"),
  linear("model.layers.{i}.mlp.experts.{e}.gate_proj", "blocks/moe/gate"),
  linear("model.layers.{i}.mlp.experts.{e}.up_proj", "blocks/moe/up"),
  linear("model.layers.{i}.mlp.experts.{e}.down_proj", "blocks/moe/down"),
  plain(
    "model.layers.{i}.mlp.gate.e_score_correction_bias",
    "router_state/blocks/moe/selection_bias",
  ),
)
# MLPs for all tokens in addition to the experts, as in GLM and DeepSeek.
SHARED_EXPERTS = table(
  dense(
    "model.layers.{i}.mlp.shared_experts.gate_proj",
    "blocks/shared_experts/gate",
  ),
  dense(
    "model.layers.{i}.mlp.shared_experts.up_proj", "blocks/shared_experts/up"
  ),
  dense(
    "model.layers.{i}.mlp.shared_experts.down_proj",
    "blocks/shared_experts/down",
  ),
)
# Latent attention, of DeepSeek.
LATENT_ATTENTION = table(
  linear("model.layers.{i}.self_attn.q_proj", "blocks/attention/query"),
  dense("model.layers.{i}.self_attn.q_a_proj", "blocks/attention/query_down"),
  norm(
    "model.layers.{i}.self_attn.q_a_layernorm",
    "blocks/attention/query_down_norm",
  ),
  linear("model.layers.{i}.self_attn.q_b_proj", "blocks/attention/query_up"),
  dense(
    "model.layers.{i}.self_attn.kv_a_proj_with_mqa", "blocks/attention/kv_down"
  ),
  norm(
    "model.layers.{i}.self_attn.kv_a_layernorm", "blocks/attention/kv_down_norm"
  ),
  linear("model.layers.{i}.self_attn.kv_b_proj", "blocks/attention/kv_up"),
  dense("model.layers.{i}.self_attn.o_proj", "blocks/attention/out"),
)
# Experts as in Mixtral.
SPARSE_MOE = table(
  linear("model.layers.{i}.block_sparse_moe.gate", "blocks/moe/router"),
  linear("model.layers.{i}.block_sparse_moe.experts.{e}.w1", "blocks/moe/gate"),
  linear("model.layers.{i}.block_sparse_moe.experts.{e}.w3", "blocks/moe/up"),
  linear("model.layers.{i}.block_sparse_moe.experts.{e}.w2", "blocks/moe/down"),
  plain(
    "model.layers.{i}.block_sparse_moe.e_score_correction_bias",
    "router_state/blocks/moe/selection_bias",
  ),
)
LLAMA = table(ENDS, ATTENTION, NORMS_BEFORE, MLP)
MIXTRAL = table(ENDS, ATTENTION, NORMS_BEFORE, SPARSE_MOE)
# An MLP for all tokens, with its own gate.
SHARED_EXPERT = table(
  dense(
    "model.layers.{i}.mlp.shared_expert.gate_proj", "blocks/shared_experts/gate"
  ),
  dense(
    "model.layers.{i}.mlp.shared_expert.up_proj", "blocks/shared_experts/up"
  ),
  dense(
    "model.layers.{i}.mlp.shared_expert.down_proj", "blocks/shared_experts/down"
  ),
  dense("model.layers.{i}.mlp.shared_expert_gate", "blocks/shared_gate"),
)
# All experts of a layer in one array, as in Qwen3-VL.
FUSED_EXPERTS = table(
  linear("model.layers.{i}.mlp.gate", "blocks/moe/router"),
  *(
    tuple(
      entry._replace(either_order=True)
      for entry in transposed(f"model.layers.{{i}}.mlp.experts.{name}", *ours)
    )
    for name, ours in (
      ("gate_up_proj", ("blocks/moe/gate/kernel", "blocks/moe/up/kernel")),
      ("down_proj", ("blocks/moe/down/kernel",)),
    )
  ),
)
QWEN_MOE = table(ENDS, ATTENTION, NORMS_BEFORE, MLP, EXPERTS, SHARED_EXPERT)


def with_fused_experts(arrays: Table) -> Table:
  """A table in which all experts of a layer are one array, as in memory.

  transformers opens such files of any family. The releases of Qwen 3.5 and 3.6
  with experts are some.
  """
  end = ".{e}.gate_proj.weight"
  stems = [
    entry.published.removesuffix(end)
    for entry in arrays
    if entry.published.endswith(end)
  ]
  if not stems:
    return arrays
  ours = {entry.published: entry.ours for entry in arrays}
  fused: list[Entry] = []
  for stem in stems:
    gate, up, down = (
      ours[f"{stem}.{{e}}.{name}.weight"]
      for name in ("gate_proj", "up_proj", "down_proj")
    )
    fused += transposed(f"{stem}.gate_up_proj", *gate, *up)
    fused += transposed(f"{stem}.down_proj", *down)
  rest = [x for x in arrays if not x.published.startswith(tuple(stems))]
  return table(rest, fused)


# Where layers that predict further tokens are in these tables. Files name them
# otherwise: see prediction_layers.py.
PREDICTION_LAYER = "model.mtp.{i}."


def with_prediction(arrays: Table) -> Table:
  """A table, with layers that predict further tokens, as in DeepSeek V3.

  They are layers like the others, with norms and a projection before them.
  """
  layer, ours = "model.layers.{i}.", "blocks/"
  of_layers = [
    entry._replace(
      published=entry.published.replace(layer, PREDICTION_LAYER),
      ours=tuple(x.replace(ours, "mtp/blocks/block/", 1) for x in entry.ours),
    )
    for entry in arrays
    if entry.published.startswith(layer)
  ]
  return table(
    arrays,
    of_layers,
    norm(PREDICTION_LAYER + "enorm", "mtp/blocks/embedding_norm"),
    norm(PREDICTION_LAYER + "hnorm", "mtp/blocks/hidden_norm"),
    linear(PREDICTION_LAYER + "eh_proj", "mtp/blocks/projection"),
    norm(PREDICTION_LAYER + "shared_head.norm", "mtp/blocks/norm"),
  )
