"""Decoders: GPT-2, Llama and their relatives, a table each.

Keys, and the values of absent ones, follow Hugging Face's transformers.
decoder_rules.py has what takes more than a key, decoder_arrays.py the arrays.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from bigtrain import dims
from bigtrain.models.published import (
  decoder_arrays,
  decoder_rules,
  families,
  mxfp4,
  tables,
)
from bigtrain.models.published.decoder_rules import (
  biases,
  clipped_mlp,
  dense_width,
  expert_groups,
  expert_width,
  experts,
  gpt2_sizes,
  heads,
  query_scalar,
  rope,
  rotating_layers,
  shared_experts,
  sparse_after,
  sparse_by_step,
  types_by,
  types_by_period,
  window_everywhere,
  windows,
)
from bigtrain.models.published.families import (
  Family,
  choice,
  classes,
  inverse,
)

# Fields of the architecture, and the values that the model has by itself.
_NEUTRAL: dict[str, Any] = dict(
  window=None,
  moe=None,
  num_classes=None,
  pool="last",
  rope_scaling=None,
  rope_fraction=1.0,
  query_scale=None,
  attention_scale=None,
  norm_offset=0.0,
  norm_at="pre",
  parallel=False,
  qk_norm=None,
  qk_norm_after_rope=False,
  qkv_clip=None,
  rope_interleaved=False,
  attention_softcap=None,
  logits_softcap=None,
  sinks=False,
  mlp_clip=None,
  embed_multiplier=1.0,
  residual_multiplier=1.0,
  logits_multiplier=1.0,
)
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_IN_SHAPES = ("vocab_size", "width", "depth", "mlp_dim")

GPT2 = Family(
  "gpt2",
  "GPT2LMHeadModel",
  decoder_arrays.GPT2,
  keys=dict(
    vocab_size="vocab_size",
    max_len="n_positions",
    width="n_embd",
    depth="n_layer",
    num_heads="n_head",
    norm_eps="layer_norm_epsilon",
    tied_head="tie_word_embeddings",
  ),
  defaults=dict(
    vocab_size=50257,
    n_positions=1024,
    n_embd=768,
    n_layer=12,
    n_head=12,
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
  ),
  constants=dict(posemb="learn", norm="layernorm", use_bias=True),
  rules=dict(
    mlp=choice("mlp", "activation_function", dict.fromkeys(_GELU, "gelu")),
    sizes=gpt2_sizes(),
    classes=classes("GPT2"),
  ),
  requires={
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
  },
  harmless=(
    *("n_ctx", "reorder_and_upcast_attn", "gradient_checkpointing"),
    *("summary_type", "summary_use_proj", "summary_activation"),
    *("summary_first_dropout", "summary_proj_to_labels"),
  ),
  in_shapes=(*_IN_SHAPES, "max_len"),
  limits=("num_classes", "pool"),
  unless={"tied_head": "lm_head.weight"},
  neutral=_NEUTRAL,
)
_LLAMA = Family(
  "llama",
  "LlamaForCausalLM",
  decoder_arrays.LLAMA,
  keys=dict(
    vocab_size="vocab_size",
    max_len="max_position_embeddings",
    width="hidden_size",
    depth="num_hidden_layers",
    num_heads="num_attention_heads",
    mlp_dim="intermediate_size",
    norm_eps="rms_norm_eps",
    tied_head="tie_word_embeddings",
  ),
  defaults={},
  constants=dict(posemb="rope", norm="rmsnorm"),
  rules=dict(
    mlp=choice("mlp", "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
    bias=biases(attention_bias=("qkv", "out"), mlp_bias=("mlp",)),
    heads=heads(),
    rope=rope(),
  ),
  in_shapes=_IN_SHAPES,
  limits=("max_len", "num_classes", "pool"),
  unless={"tied_head": "lm_head.weight"},
  neutral=_NEUTRAL,
)

# model_type, class, and values of absent keys: vocab_size,
# max_position_embeddings, hidden_size, num_hidden_layers, num_attention_heads,
# num_key_value_heads, head_dim, intermediate_size, the norms' epsilon, and
# whether the head is tied.
_SIZES = """
llama       Llama       32000   2048 4096 32 32  -   - 11008      1e-6 -
mistral     Mistral     32000 131072 4096 32 32  8   - 14336      1e-6 -
ministral   Ministral   32000 131072 4096 32 32  8   - 14336      1e-6 -
ministral3  Ministral3 131072 262144 4096 34 32  8 128 14336      1e-5 -
mixtral     Mixtral     32000 131072 4096 32 32  8   - 14336      1e-5 -
qwen2       Qwen2      151936  32768 4096 32 32 32   - 22016      1e-6 -
qwen3       Qwen3      151936  32768 4096 32 32 32 128 22016      1e-6 -
qwen2_moe   Qwen2Moe   151936  32768 2048 24 16 16   -  5632      1e-6 -
qwen3_moe   Qwen3Moe   151936  32768 2048 24 32  4   -  6144      1e-6 -
gemma       Gemma      256000   8192 3072 28 16 16 256 24576      1e-6 tied
gemma2      Gemma2     256000   8192 2304 26  8  4 256  9216      1e-6 tied
gemma3_text Gemma3     262208 131072 2304 26  8  4 256  9216      1e-6 tied
olmo2       Olmo2       50304   2048 4096 32 32  -   - 11008      1e-5 -
olmo3       Olmo3       50304   2048 4096 32 32  -   - 11008      1e-5 -
olmoe       Olmoe       50304   4096 2048 16 16  -   -  2048      1e-5 -
smollm3     SmolLM3    128256  32768 2048 36 16  4   - 11008      1e-6 tied
phi3        Phi3        32064   4096 3072 32 32  -   -  8192      1e-5 -
cohere2     Cohere2    256000   8192 8192 40 64  -   - 22528      1e-5 tied
glm4        Glm4       151552 131072 4096 40 32  2 128 13696 1.5625e-7 -
glm4_moe    Glm4Moe    151552 131072 4096 46 96  8   - 10944      1e-5 -
granite     Granite     32000   2048 4096 32 32  -   - 11008      1e-6 -
granitemoe  GraniteMoe  32000   2048 4096 32 32  -   - 11008      1e-6 -
nemotron    Nemotron   256000   4096 6144 32 48  -   - 24576      1e-5 -
minimax_m2  MiniMaxM2  200064 196608 3072 62 48  8 128  1536      1e-6 -
gpt_oss     GptOss     201088 131072 2880 36 64  8  64  2880      1e-5 -
"""


def _family(name: str, base: Family | None = None, **changes: Any) -> Family:
  """A family like another one, by default Llama, with sizes of its own."""
  base = base or LAYOUTS["llama"]
  (row,) = [x.split() for x in _SIZES.splitlines() if x.startswith(name + " ")]
  architecture, *sizes, eps, tied = row[1:]
  keys = {**base.keys, **changes.get("keys", {})}
  names = """
    vocab_size max_position_embeddings hidden_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim intermediate_size
  """.split()
  defaults = {n: None if x == "-" else int(x) for n, x in zip(names, sizes)}
  defaults |= {keys["norm_eps"]: float(eps), keys["tied_head"]: tied != "-"}
  changes["defaults"] = defaults | changes.get("defaults", {})
  rules = changes.get("rules", {})
  changes["rules"] = {"classes": classes(architecture), **rules}
  LAYOUTS[name] = base.but(name, f"{architecture}ForCausalLM", **changes)
  return LAYOUTS[name]


# An export takes the first of these that expresses the model.
LAYOUTS: dict[str, Family] = {GPT2.model_type: GPT2}
LLAMA = _family("llama", _LLAMA)
_ATTENTION_BIAS = biases(attention_bias=("qkv", "out"))
_NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}
MISTRAL = _family(
  "mistral",
  keys=dict(window="sliding_window"),
  defaults=dict(sliding_window=4096),
  rules=dict(bias=biases()),
  requires=_NO_BIAS,
)
_family(
  "ministral",
  rules=dict(
    bias=biases(),
    window=windows(types_by(lambda config, _: config["sliding_window"])),
  ),
  requires=_NO_BIAS,
)
_family(
  "ministral3",
  MISTRAL,
  defaults=dict(
    sliding_window=None,
    rope_parameters=dict(
      rope_type="yarn",
      factor=16.0,
      original_max_position_embeddings=16_384,
      mscale_all_dim=1.0,
      mscale=1.0,
      llama_4_scaling_beta=0.1,
    ),
  ),
  rules=dict(rope=rope(1e6, query_scale=True)),
)
_MIXTRAL_EXPERTS = experts(
  dict(normalize=True),
  num_experts=("num_local_experts", 8),
  top_k=("num_experts_per_tok", 2),
)
_family(
  "mixtral",
  MISTRAL,
  arrays=decoder_arrays.MIXTRAL,
  defaults=dict(sliding_window=None),
  rules=dict(rope=rope(1e6), mlp_dim=expert_width(), moe=_MIXTRAL_EXPERTS),
)
_QWEN_WINDOWS = windows(
  types_by(
    lambda config, i: (
      config["sliding_window"]
      and config["use_sliding_window"]
      and i >= config["max_window_layers"]
    )
  ),
  "use_sliding_window",
  max_window_layers=28,
)
_family("qwen2", rules=dict(bias=biases("qkv"), window=_QWEN_WINDOWS))
_QWEN3_RULES = dict(bias=_ATTENTION_BIAS, window=_QWEN_WINDOWS)
_family("qwen3", constants=dict(qk_norm="head"), rules=_QWEN3_RULES)
_family(
  "qwen2_moe",
  arrays=decoder_arrays.QWEN_MOE,
  defaults=dict(qkv_bias=True),
  rules=dict(
    bias=biases(qkv_bias=("qkv",)),
    window=windows(
      types_by(
        lambda config, i: (
          (i + 1) % 2
          and i < config["max_window_layers"]
          and config["use_sliding_window"]
        )
      ),
      "use_sliding_window",
      max_window_layers=28,
    ),
    mlp_dim=dense_width(),
    moe=experts(
      dict(shared_gate=True),
      sparse_by_step(),
      num_experts=("num_experts", 60),
      top_k=("num_experts_per_tok", 4),
      mlp_dim=("moe_intermediate_size", 1408),
      normalize=("norm_topk_prob", False),
      shared_dim=("shared_expert_intermediate_size", 5632),
    ),
  ),
)
_family(
  "qwen3_moe",
  arrays=decoder_arrays.QWEN_MOE,
  constants=dict(qk_norm="head"),
  rules=dict(
    bias=_ATTENTION_BIAS,
    window=window_everywhere("use_sliding_window"),
    mlp_dim=dense_width(),
    moe=experts(
      {},
      sparse_by_step(),
      num_experts=("num_experts", 128),
      top_k=("num_experts_per_tok", 8),
      mlp_dim=("moe_intermediate_size", 768),
      normalize=("norm_topk_prob", False),
    ),
  ),
  aliases={"num_local_experts": "num_experts"},
  harmless=("max_window_layers",),
)
GEMMA = _family(
  "gemma",
  constants=dict(norm_offset=1.0, embed_multiplier="sqrt_width"),
  rules=dict(
    # "gelu" means its tanh form.
    mlp=choice(
      "mlp", "hidden_act", dict.fromkeys((*_GELU[1:], "gelu"), "geglu")
    ),
    bias=_ATTENTION_BIAS,
  ),
  requires={"hidden_activation": (None, *_GELU)},
)
_GEMMA2_RULES = dict(
  mlp=choice("mlp", "hidden_activation", dict.fromkeys(_GELU[1:], "geglu")),
  scale=query_scalar(256),
)
_family(
  "gemma2",
  GEMMA,
  arrays=decoder_arrays.GEMMA2,
  keys=dict(
    attention_softcap="attn_logit_softcapping",
    logits_softcap="final_logit_softcapping",
  ),
  defaults=dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
  constants=dict(norm_at="sandwich"),
  rules=_GEMMA2_RULES | dict(window=windows(types_by_period(2))),
  harmless=("hidden_act", "sliding_window_size"),
)
_GEMMA3_TYPES = types_by_period(6, "sliding_window_pattern")
_family(
  "gemma3_text",
  GEMMA,
  arrays=decoder_arrays.GEMMA2,
  keys=dict(logits_softcap="final_logit_softcapping"),
  constants=dict(norm_at="sandwich", qk_norm="head"),
  rules=_GEMMA2_RULES
  | dict(
    window=windows(_GEMMA3_TYPES, sliding_window_pattern=6),
    rope=rope(1e6, nested=_GEMMA3_TYPES, local_theta=1e4),
  ),
  # The library stores the softcap of attention but never applies it.
  harmless=("hidden_act", "attn_logit_softcapping", "_sliding_window_pattern"),
)
OLMO2 = _family(
  "olmo2",
  arrays=decoder_arrays.OLMO2,
  constants=dict(norm_at="post", qk_norm="projection"),
  rules=dict(bias=_ATTENTION_BIAS),
)
_OLMO3_TYPES = types_by_period(4)
_OLMO3_ROPE = rope(5e5, nested=_OLMO3_TYPES)
_OLMO3_RULES = dict(window=windows(_OLMO3_TYPES), rope=_OLMO3_ROPE)
_family("olmo3", OLMO2, rules=_OLMO3_RULES)
_family(
  "olmoe",
  arrays=decoder_arrays.QWEN_MOE,
  keys=dict(qkv_clip="clip_qkv"),
  constants=dict(qk_norm="projection"),
  rules=dict(
    bias=_ATTENTION_BIAS,
    mlp_dim=expert_width(),
    moe=experts(
      {},
      num_experts=("num_experts", 64),
      top_k=("num_experts_per_tok", 8),
      normalize=("norm_topk_prob", False),
    ),
  ),
)
_family(
  "smollm3",
  rules=dict(
    rope=rope(2e6),
    posemb=rotating_layers(),
    window=windows(
      types_by(
        lambda config, i: (
          config["sliding_window"]
          and config["use_sliding_window"]
          and not decoder_rules.rotates(config)[i]
        )
      ),
      "use_sliding_window",
      default=None,
    ),
  ),
  harmless=("max_window_layers",),
)
_family(
  "phi3",
  arrays=decoder_arrays.PHI3,
  keys=dict(window="sliding_window"),
  rules=dict(bias=biases(), rope=rope(fraction=1.0, original_len=4096)),
  requires={
    **_NO_BIAS,
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
  },
)
_family(
  "cohere2",
  keys=dict(norm_eps="layer_norm_eps", logits_multiplier="logit_scale"),
  defaults=dict(logit_scale=0.0625),
  constants=dict(norm="layernorm", parallel=True, rope_interleaved=True),
  rules=dict(
    bias=_ATTENTION_BIAS,
    window=windows(
      types_by_period(4, "sliding_window_pattern"),
      rotates="sliding_attention",
      sliding_window_pattern=4,
    ),
  ),
  requires={
    "use_qk_norm": (False, None),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "order_of_interleaved_layers": ("local_attn_first",),
  },
  harmless=(
    *("layer_switch", "_sliding_window_pattern", "use_embedding_sharing"),
    *("use_parallel_embedding", "rms_norm_eps"),
  ),
)
_QKV_BIAS = biases(attention_bias=("qkv",))
_family(
  "glm4",
  arrays=decoder_arrays.GLM4,
  defaults=dict(attention_bias=True),
  constants=dict(norm_at="sandwich", rope_interleaved=True),
  rules=dict(bias=_QKV_BIAS, rope=rope(fraction=0.5)),
)
_family(
  "glm4_moe",
  arrays=decoder_arrays.GLM4_MOE,
  rules=dict(
    bias=_QKV_BIAS,
    rope=rope(fraction=0.5),
    qk_norm=choice("qk_norm", "use_qk_norm", {False: None, True: "head"}),
    mlp_dim=dense_width(),
    moe=experts(
      dict(score="sigmoid", selection_bias=True),
      sparse_after("first_k_dense_replace"),
      expert_groups(),
      shared_experts("n_shared_experts"),
      num_experts=("n_routed_experts", 128),
      top_k=("num_experts_per_tok", 8),
      mlp_dim=("moe_intermediate_size", 1408),
      normalize=("norm_topk_prob", True),
      scale=("routed_scaling_factor", 1.0),
    ),
  ),
  harmless=("num_nextn_predict_layers",),
)
GRANITE = _family(
  "granite",
  keys=dict(
    embed_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    attention_scale="attention_multiplier",
  ),
  defaults=dict(
    embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0
  ),
  rules=dict(logits=inverse("logits_multiplier", "logits_scaling")),
)
_family(
  "granitemoe",
  GRANITE,
  arrays=decoder_arrays.GRANITE_MOE,
  rules=dict(
    bias=_ATTENTION_BIAS, mlp_dim=expert_width(), moe=_MIXTRAL_EXPERTS
  ),
)
_family(
  "nemotron",
  keys=dict(norm_eps="norm_eps"),
  constants=dict(norm="layernorm", norm_offset=1.0),
  rules=dict(
    mlp=choice("mlp", "hidden_act", {"relu2": "relu2"}),
    bias=biases("norm", attention_bias=("qkv", "out"), mlp_bias=("mlp",)),
    rope=rope(fraction=0.5),
  ),
)
_family(
  "minimax_m2",
  arrays=decoder_arrays.MIXTRAL,
  constants=dict(qk_norm="projection"),
  rules=dict(
    bias=biases(),
    rope=rope(5e6, fraction=1.0, rotary_dim=True),
    mlp_dim=expert_width(),
    moe=experts(
      dict(score="sigmoid", normalize=True, selection_bias=True),
      num_experts=("num_local_experts", 256),
      top_k=("num_experts_per_tok", 8),
    ),
  ),
  requires={
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
  },
  harmless=(
    *("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    *("mlp_intermediate_size", "attn_type_list", "sliding_window"),
    "layernorm_full_attention_beta",
  ),
)
_family(
  "gpt_oss",
  arrays=decoder_arrays.GPT_OSS,
  defaults=dict(
    attention_bias=True,
    rope_parameters=dict(
      rope_type="yarn",
      factor=32.0,
      truncate=False,
      original_max_position_embeddings=4096,
    ),
  ),
  constants=dict(sinks=True),
  rules=dict(
    bias=biases("experts", "router", attention_bias=("qkv", "out")),
    rope=rope(150_000.0),
    window=windows(types_by_period(2), default=128),
    mlp_dim=expert_width(),
    clip=clipped_mlp(),
    moe=experts(
      dict(score="softmax_of_top", normalize=True),
      num_experts=("num_local_experts", 128),
      top_k=("num_experts_per_tok", 4),
    ),
  ),
  harmless=("initial_context_length", "experts_per_token"),
  quantised=("mxfp4",),
)

_CONSTANTS = (
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids"
)
# Of models that read images too.
_IMAGES = r"(.*\.)?(vision_tower|vision_model|multi_modal_projector)\..*"
_CLASSES = "the model has a head of classes"
# Starts of names that some files have.
_PREFIXES = (
  (r"transformer\.", ""),
  (r"(model\.)?language_model\.(model\.)?", "model."),
)


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts published arrays to our names and shapes."""
  names: dict[str, str] = {}  # {name without a prefix: name in the file}.
  for name in sorted(flat, key=lambda name: _short(name) != name):
    names[_short(name)] = name  # Of two, the one with a prefix wins.
  result = tables.load(
    {name: family.arrays for name, family in LAYOUTS.items()},
    mxfp4.joined({short: flat[name] for short, name in names.items()}),
    like,
    param_dims,
    ignored={
      _CONSTANTS: "a constant that the model computes",
      _IMAGES: "the model reads text alone",
      **({r"lm_head\..*": _CLASSES} if "score/kernel" in like else {}),
      **_prediction_layers(names),
    },
  )
  if result is None:
    return None
  # A file may have a name with and without the prefix.
  twice = {name: flat[name] for name in set(flat) - set(names.values())}
  return tables.with_names_of_file(result, names, like) | twice


def _short(name: str) -> str:
  for start, new in _PREFIXES:
    if match := re.match(start, name):
      rest = name[match.end() :]
      return rest if rest.startswith("lm_head.") else new + rest
  return name


def _prediction_layers(names: Collection[str]) -> dict[str, str]:
  """Layers after the last one, which predict a token beyond the next."""
  own = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight").fullmatch
  starts = [match[1] for match in map(own, names) if match]
  reason = "a layer for the prediction of several tokens"
  return {re.escape(start) + ".*": reason for start in starts}


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  return decoder_rules.canonical(values, _NEUTRAL)


PUBLISHED = families.Layouts(LAYOUTS, canonical)
