"""Tables of decoders' arrays: Hugging Face's names and ours.

They are put together from parts: attention, norms, MLPs and experts. A model
lacks what it has no use for, such as biases.
"""

from bigtrain.models.published import tables
from bigtrain.models.published.tables import Entry, Table, linear, norm, plain

_LAYER = "model.layers.{i}"
_BLOCK = "blocks"
_HEADS = [linear("lm_head", "head/kernel"), linear("score", "score/kernel")]


def _gpt2_layer(published: str, *ours: str) -> list[Entry]:
  """Returns the entries of a weight (inputs, outputs) and a bias."""
  kernels = (f"blocks/{name}/kernel" for name in ours)
  biases = (f"blocks/{name}/bias" for name in ours)
  return [
    plain(f"h.{{i}}.{published}.weight", *kernels),
    plain(f"h.{{i}}.{published}.bias", *biases),
  ]


def dense(published: str, *ours: str) -> list[Entry]:
  """A torch.nn.Linear in layers, of one of ours or of several joined."""
  parts = [f"{_BLOCK}/{part}" for part in ours]
  return tables.dense(f"{_LAYER}.{published}", *parts)


def mlp(
  published: str = "mlp",
  ours: str = "mlp",
  names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Entry]:
  parts = zip(names, ("gate", "up", "down"))
  return [
    entry
    for theirs, part in parts
    for entry in dense(f"{published}.{theirs}", f"{ours}/{part}")
  ]


def attention(fused: bool = False) -> list[Entry]:
  """Projections, norms of queries and keys, and sinks."""
  at = "attention"
  query, key, value = f"{at}/query", f"{at}/key", f"{at}/value"
  scale = f"{_BLOCK}/{at}/{{}}_norm/scale".format
  return [
    *(
      dense("self_attn.qkv_proj", query, key, value)
      if fused
      else [
        *dense("self_attn.q_proj", query),
        *dense("self_attn.k_proj", key),
        *dense("self_attn.v_proj", value),
      ]
    ),
    *dense("self_attn.o_proj", f"{at}/out"),
    plain(f"{_LAYER}.self_attn.q_norm.weight", scale("query")),
    plain(f"{_LAYER}.self_attn.k_norm.weight", scale("key")),
    plain(f"{_LAYER}.self_attn.sinks", f"{_BLOCK}/{at}/sinks"),
  ]


def table(*parts: list[Entry], **norms: str) -> list[Entry]:
  """The table of a decoder: parts of its layers, and {our norm: theirs}."""
  of_layers = [
    entry
    for ours, theirs in norms.items()
    for entry in norm(f"{_LAYER}.{theirs}", f"{_BLOCK}/{ours}")
  ]
  return [
    plain("model.embed_tokens.weight", "token_embedding"),
    *(entry for part in parts for entry in part),
    *of_layers,
    *norm("model.norm", "norm"),
    *_HEADS,
  ]


def experts(
  published: str,
  names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Entry]:
  """Experts in arrays of their own, and the router."""
  parts = zip(names, ("gate", "up", "down"))
  bias = "e_score_correction_bias"
  state = f"router_state/{_BLOCK}/moe/selection_bias"
  return [
    linear(f"{_LAYER}.{published}.gate", f"{_BLOCK}/moe/router/kernel"),
    *(
      linear(
        f"{_LAYER}.{published}.experts.{{e}}.{theirs}",
        f"{_BLOCK}/moe/{part}/kernel",
      )
      for theirs, part in parts
    ),
    # One of the two; GLM has it in the router, MiniMax beside it.
    plain(
      f"{_LAYER}.{published}.gate.{bias}"
      if published == "mlp"
      else f"{_LAYER}.{published}.{bias}",
      state,
    ),
  ]


_OF_GPT_OSS = [
  *dense("mlp.router", "moe/router"),
  *(
    Entry(f"{_LAYER}.mlp.experts.{theirs}", ours, interleaved=True)
    for theirs, ours in (
      (
        "gate_up_proj",
        (f"{_BLOCK}/moe/gate/kernel", f"{_BLOCK}/moe/up/kernel"),
      ),
      (
        "gate_up_proj_bias",
        (f"{_BLOCK}/moe/gate/bias", f"{_BLOCK}/moe/up/bias"),
      ),
      ("down_proj", (f"{_BLOCK}/moe/down/kernel",)),
      ("down_proj_bias", (f"{_BLOCK}/moe/down/bias",)),
    )
  ),
]
_OF_GRANITE_MOE = [
  linear(
    f"{_LAYER}.block_sparse_moe.router.layer", f"{_BLOCK}/moe/router/kernel"
  ),
  linear(
    f"{_LAYER}.block_sparse_moe.input_linear",
    f"{_BLOCK}/moe/gate/kernel",
    f"{_BLOCK}/moe/up/kernel",
  ),
  linear(
    f"{_LAYER}.block_sparse_moe.output_linear", f"{_BLOCK}/moe/down/kernel"
  ),
]
_FUSED_MLP = [
  *dense("mlp.gate_up_proj", "mlp/gate", "mlp/up"),
  *dense("mlp.down_proj", "mlp/down"),
]
_MIXTRAL = experts("block_sparse_moe", ("w1", "w3", "w2"))
_PRE = dict(
  attention_norm="input_layernorm", mlp_norm="post_attention_layernorm"
)
_AFTER = dict(
  attention_post_norm="post_attention_layernorm",
  mlp_post_norm="post_feedforward_layernorm",
)
GPT2: Table = [
  plain("wte.weight", "token_embedding"),
  plain("wpe.weight", "pos_embedding"),
  *norm("h.{i}.ln_1", "blocks/attention_norm"),
  *_gpt2_layer(
    "attn.c_attn", "attention/query", "attention/key", "attention/value"
  ),
  *_gpt2_layer("attn.c_proj", "attention/out"),
  *norm("h.{i}.ln_2", "blocks/mlp_norm"),
  *_gpt2_layer("mlp.c_fc", "mlp/up"),
  *_gpt2_layer("mlp.c_proj", "mlp/down"),
  *norm("ln_f", "norm"),
  *_HEADS,
]
LLAMA: Table = table(attention(), mlp(), **_PRE)
MIXTRAL: Table = table(attention(), _MIXTRAL, **_PRE)
_EXPERTS = attention(), mlp(), experts("mlp")
QWEN_MOE: Table = table(
  *_EXPERTS,
  mlp("mlp.shared_expert", "shared_experts"),
  dense("mlp.shared_expert_gate", "shared_gate"),
  **_PRE,
)
_SHARED = mlp("mlp.shared_experts", "shared_experts")
GLM4_MOE: Table = table(*_EXPERTS, _SHARED, **_PRE)
_BEFORE = dict(_PRE, mlp_norm="pre_feedforward_layernorm")
GEMMA2: Table = table(attention(), mlp(), **_BEFORE, **_AFTER)
OLMO2: Table = table(attention(), mlp(), **_AFTER)
PHI3: Table = table(attention(fused=True), _FUSED_MLP, **_PRE)
GLM4: Table = table(
  attention(),
  _FUSED_MLP,
  attention_post_norm="post_self_attn_layernorm",
  mlp_post_norm="post_mlp_layernorm",
  **_PRE,
)
GRANITE_MOE: Table = table(attention(), _OF_GRANITE_MOE, **_PRE)
GPT_OSS: Table = table(attention(), _OF_GPT_OSS, **_PRE)
