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
from bigtrain.models.published.families import Family, choice, inverse

# Fields of the architecture, and the values that the model has by itself.
_NEUTRAL: dict[str, Any] = dict(
  window=None,
  moe=None,
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
  unless={"tied_head": "lm_head.weight"},
  neutral=_NEUTRAL,
)
LLAMA = Family(
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
  defaults=dict(
    vocab_size=32000,
    max_position_embeddings=2048,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=11008,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
  ),
  constants=dict(posemb="rope", norm="rmsnorm"),
  rules=dict(
    mlp=choice("mlp", "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
    bias=biases(attention_bias=("qkv", "out"), mlp_bias=("mlp",)),
    heads=heads(),
    rope=rope(),
  ),
  in_shapes=_IN_SHAPES,
  limits=("max_len",),
  unless={"tied_head": "lm_head.weight"},
  neutral=_NEUTRAL,
)

_ATTENTION_BIAS = biases(attention_bias=("qkv", "out"))
_NO_BIAS = dict(
  rules=dict(bias=biases()),
  requires={"attention_bias": (False,), "mlp_bias": (False,)},
)
_MISTRAL_SIZES = dict(
  max_position_embeddings=131_072,
  num_key_value_heads=8,
  intermediate_size=14_336,
)
MISTRAL = LLAMA.but(
  "mistral",
  "MistralForCausalLM",
  keys=dict(window="sliding_window"),
  defaults=_MISTRAL_SIZES | dict(sliding_window=4096),
  **_NO_BIAS,
)
_ALL_SLIDING = types_by(lambda config, _: config["sliding_window"] is not None)
MINISTRAL = LLAMA.but(
  "ministral",
  "MinistralForCausalLM",
  defaults=_MISTRAL_SIZES,
  rules=dict(bias=biases(), window=windows(_ALL_SLIDING)),
  requires=_NO_BIAS["requires"],
)
MINISTRAL3 = MISTRAL.but(
  "ministral3",
  "Ministral3ForCausalLM",
  defaults=dict(
    vocab_size=131_072,
    num_hidden_layers=34,
    head_dim=128,
    max_position_embeddings=262_144,
    rms_norm_eps=1e-5,
    sliding_window=None,
    rope_parameters=dict(
      rope_type="yarn",
      factor=16.0,
      original_max_position_embeddings=16_384,
      beta_fast=32.0,
      beta_slow=1.0,
      mscale_all_dim=1.0,
      mscale=1.0,
      llama_4_scaling_beta=0.1,
    ),
  ),
  rules=dict(rope=rope(1e6, query_scale=True)),
)
_TOP_K = dict(num_experts="num_local_experts", top_k="num_experts_per_tok")
_MIXTRAL_EXPERTS = experts(
  _TOP_K,
  dict(normalize=True),
  dict(num_local_experts=8, num_experts_per_tok=2),
)
MIXTRAL = MISTRAL.but(
  "mixtral",
  "MixtralForCausalLM",
  arrays=decoder_arrays.MIXTRAL,
  defaults=dict(sliding_window=None, rms_norm_eps=1e-5),
  rules=dict(rope=rope(1e6), mlp_dim=expert_width(), moe=_MIXTRAL_EXPERTS),
)
_QWEN_TYPES = types_by(
  lambda config, i: (
    bool(config["sliding_window"])
    and config["use_sliding_window"]
    and i >= config["max_window_layers"]
  )
)
_QWEN_SIZES = dict(
  vocab_size=151_936,
  max_position_embeddings=32_768,
  intermediate_size=22_016,
)
QWEN2 = LLAMA.but(
  "qwen2",
  "Qwen2ForCausalLM",
  defaults=_QWEN_SIZES | dict(num_key_value_heads=32),
  rules=dict(
    bias=biases("qkv"),
    window=windows(_QWEN_TYPES, "use_sliding_window", max_window_layers=28),
  ),
)
QWEN3 = QWEN2.but(
  "qwen3",
  "Qwen3ForCausalLM",
  defaults=dict(head_dim=128),
  constants=dict(qk_norm="head"),
  rules=dict(bias=_ATTENTION_BIAS),
)
_QWEN_EXPERTS = dict(
  num_experts="num_experts",
  top_k="num_experts_per_tok",
  mlp_dim="moe_intermediate_size",
  normalize="norm_topk_prob",
)
_QWEN_MOE_SIZES = dict(hidden_size=2048, num_hidden_layers=24)
QWEN2_MOE = QWEN2.but(
  "qwen2_moe",
  "Qwen2MoeForCausalLM",
  arrays=decoder_arrays.QWEN_MOE,
  defaults=_QWEN_MOE_SIZES
  | dict(
    num_attention_heads=16,
    num_key_value_heads=16,
    intermediate_size=5632,
    qkv_bias=True,
  ),
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
      _QWEN_EXPERTS | dict(shared_dim="shared_expert_intermediate_size"),
      dict(shared_gate=True),
      dict(
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        shared_expert_intermediate_size=5632,
      ),
      sparse_by_step(),
    ),
  ),
)
QWEN3_MOE = LLAMA.but(
  "qwen3_moe",
  "Qwen3MoeForCausalLM",
  arrays=decoder_arrays.QWEN_MOE,
  defaults=_QWEN_SIZES
  | _QWEN_MOE_SIZES
  | dict(intermediate_size=6144, num_key_value_heads=4),
  constants=dict(qk_norm="head"),
  rules=dict(
    bias=_ATTENTION_BIAS,
    window=window_everywhere("use_sliding_window"),
    mlp_dim=dense_width(),
    moe=experts(
      _QWEN_EXPERTS,
      {},
      dict(
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=False,
      ),
      sparse_by_step(),
    ),
  ),
  aliases={"num_local_experts": "num_experts"},
  harmless=("max_window_layers",),
)
GEMMA = LLAMA.but(
  "gemma",
  "GemmaForCausalLM",
  defaults=dict(
    vocab_size=256_000,
    max_position_embeddings=8192,
    hidden_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=256,
    intermediate_size=24_576,
    tie_word_embeddings=True,
  ),
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
GEMMA2 = GEMMA.but(
  "gemma2",
  "Gemma2ForCausalLM",
  arrays=decoder_arrays.GEMMA2,
  keys=dict(
    attention_softcap="attn_logit_softcapping",
    logits_softcap="final_logit_softcapping",
  ),
  defaults=dict(
    hidden_size=2304,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=9216,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
  ),
  constants=dict(norm_at="sandwich"),
  rules=_GEMMA2_RULES | dict(window=windows(types_by_period(2))),
  harmless=("hidden_act", "sliding_window_size"),
)
_GEMMA3_TYPES = types_by_period(6, "sliding_window_pattern")
GEMMA3 = GEMMA.but(
  "gemma3_text",
  "Gemma3ForCausalLM",
  arrays=decoder_arrays.GEMMA2,
  keys=dict(logits_softcap="final_logit_softcapping"),
  defaults=dict(
    vocab_size=262_208,
    max_position_embeddings=131_072,
    hidden_size=2304,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=9216,
    final_logit_softcapping=None,
  ),
  constants=dict(norm_at="sandwich", qk_norm="head"),
  rules=_GEMMA2_RULES
  | dict(
    window=windows(_GEMMA3_TYPES, sliding_window_pattern=6),
    rope=rope(1e6, nested=_GEMMA3_TYPES, local_theta=1e4),
  ),
  # The library stores the softcap of attention but never applies it.
  harmless=(
    *("hidden_act", "attn_logit_softcapping", "_sliding_window_pattern"),
  ),
)
OLMO2 = LLAMA.but(
  "olmo2",
  "Olmo2ForCausalLM",
  arrays=decoder_arrays.OLMO2,
  defaults=dict(vocab_size=50_304, rms_norm_eps=1e-5),
  constants=dict(norm_at="post", qk_norm="projection"),
  rules=dict(bias=_ATTENTION_BIAS),
)
_OLMO3_TYPES = types_by_period(4)
OLMO3 = OLMO2.but(
  "olmo3",
  "Olmo3ForCausalLM",
  rules=dict(window=windows(_OLMO3_TYPES), rope=rope(5e5, nested=_OLMO3_TYPES)),
)
OLMOE = LLAMA.but(
  "olmoe",
  "OlmoeForCausalLM",
  arrays=decoder_arrays.QWEN_MOE,
  keys=dict(qkv_clip="clip_qkv"),
  defaults=dict(
    vocab_size=50_304,
    max_position_embeddings=4096,
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    intermediate_size=2048,
    rms_norm_eps=1e-5,
    clip_qkv=None,
  ),
  constants=dict(qk_norm="projection"),
  rules=dict(
    bias=_ATTENTION_BIAS,
    mlp_dim=expert_width(),
    moe=experts(
      {n: _QWEN_EXPERTS[n] for n in ("num_experts", "top_k", "normalize")},
      {},
      dict(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
    ),
  ),
)
SMOLLM3 = LLAMA.but(
  "smollm3",
  "SmolLM3ForCausalLM",
  defaults=dict(
    vocab_size=128_256,
    max_position_embeddings=32_768,
    hidden_size=2048,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=4,
    tie_word_embeddings=True,
  ),
  rules=dict(
    rope=rope(2e6),
    posemb=rotating_layers(),
    window=windows(
      types_by(
        lambda config, i: (
          bool(config["sliding_window"])
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
PHI3 = LLAMA.but(
  "phi3",
  "Phi3ForCausalLM",
  arrays=decoder_arrays.PHI3,
  keys=dict(window="sliding_window"),
  defaults=dict(
    vocab_size=32_064,
    max_position_embeddings=4096,
    hidden_size=3072,
    intermediate_size=8192,
    rms_norm_eps=1e-5,
    sliding_window=None,
  ),
  rules=dict(bias=biases(), rope=rope(fraction=1.0, original_len=4096)),
  requires=_NO_BIAS["requires"],
  harmless=("embd_pdrop", "resid_pdrop"),
)
COHERE2 = LLAMA.but(
  "cohere2",
  "Cohere2ForCausalLM",
  keys=dict(norm_eps="layer_norm_eps", logits_multiplier="logit_scale"),
  defaults=dict(
    vocab_size=256_000,
    max_position_embeddings=8192,
    hidden_size=8192,
    num_hidden_layers=40,
    num_attention_heads=64,
    intermediate_size=22_528,
    layer_norm_eps=1e-5,
    logit_scale=0.0625,
    tie_word_embeddings=True,
  ),
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
_GLM_SIZES = dict(
  vocab_size=151_552, max_position_embeddings=131_072, num_hidden_layers=40
)
_QKV_BIAS = biases(attention_bias=("qkv",))
GLM4 = LLAMA.but(
  "glm4",
  "Glm4ForCausalLM",
  arrays=decoder_arrays.GLM4,
  defaults=_GLM_SIZES
  | dict(
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=13_696,
    rms_norm_eps=1.5625e-7,
    attention_bias=True,
  ),
  constants=dict(norm_at="sandwich", rope_interleaved=True),
  rules=dict(bias=_QKV_BIAS, rope=rope(fraction=0.5)),
)
GLM4_MOE = LLAMA.but(
  "glm4_moe",
  "Glm4MoeForCausalLM",
  arrays=decoder_arrays.GLM4_MOE,
  defaults=_GLM_SIZES
  | dict(
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    intermediate_size=10_944,
    rms_norm_eps=1e-5,
  ),
  rules=dict(
    bias=_QKV_BIAS,
    rope=rope(fraction=0.5),
    qk_norm=choice("qk_norm", "use_qk_norm", {False: None, True: "head"}),
    mlp_dim=dense_width(),
    moe=experts(
      dict(
        num_experts="n_routed_experts",
        top_k="num_experts_per_tok",
        mlp_dim="moe_intermediate_size",
        normalize="norm_topk_prob",
        scale="routed_scaling_factor",
      ),
      dict(score="sigmoid", selection_bias=True),
      dict(
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
      ),
      sparse_after("first_k_dense_replace"),
      expert_groups(),
      shared_experts("n_shared_experts"),
    ),
  ),
  harmless=("num_nextn_predict_layers",),
)
GRANITE = LLAMA.but(
  "granite",
  "GraniteForCausalLM",
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
GRANITE_MOE = GRANITE.but(
  "granitemoe",
  "GraniteMoeForCausalLM",
  arrays=decoder_arrays.GRANITE_MOE,
  rules=dict(
    bias=_ATTENTION_BIAS, mlp_dim=expert_width(), moe=_MIXTRAL_EXPERTS
  ),
)
NEMOTRON = LLAMA.but(
  "nemotron",
  "NemotronForCausalLM",
  keys=dict(norm_eps="norm_eps"),
  defaults=dict(
    vocab_size=256_000,
    max_position_embeddings=4096,
    hidden_size=6144,
    num_attention_heads=48,
    intermediate_size=24_576,
    norm_eps=1e-5,
  ),
  constants=dict(norm="layernorm", norm_offset=1.0),
  rules=dict(
    mlp=choice("mlp", "hidden_act", {"relu2": "relu2"}),
    bias=biases("norm", attention_bias=("qkv", "out"), mlp_bias=("mlp",)),
    rope=rope(fraction=0.5),
  ),
)
MINIMAX_M2 = LLAMA.but(
  "minimax_m2",
  "MiniMaxM2ForCausalLM",
  arrays=decoder_arrays.MIXTRAL,
  defaults=dict(
    vocab_size=200_064,
    max_position_embeddings=196_608,
    hidden_size=3072,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=1536,
    rms_norm_eps=1e-6,
  ),
  constants=dict(qk_norm="projection"),
  rules=dict(
    bias=biases(),
    rope=rope(5e6, fraction=1.0, rotary_dim=True),
    mlp_dim=expert_width(),
    moe=experts(
      _TOP_K,
      dict(score="sigmoid", normalize=True, selection_bias=True),
      dict(num_local_experts=256, num_experts_per_tok=8),
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
    "sliding_window",
    *(
      "mlp_intermediate_size",
      "attn_type_list",
      "layernorm_full_attention_beta",
    ),
  ),
)
GPT_OSS = LLAMA.but(
  "gpt_oss",
  "GptOssForCausalLM",
  arrays=decoder_arrays.GPT_OSS,
  defaults=dict(
    vocab_size=201_088,
    max_position_embeddings=131_072,
    hidden_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2880,
    rms_norm_eps=1e-5,
    sliding_window=128,
    attention_bias=True,
    rope_parameters=dict(
      rope_type="yarn",
      factor=32.0,
      beta_fast=32.0,
      beta_slow=1.0,
      truncate=False,
      original_max_position_embeddings=4096,
    ),
  ),
  constants=dict(sinks=True),
  rules=dict(
    bias=biases("experts", "router", attention_bias=("qkv", "out")),
    rope=rope(150_000.0),
    window=windows(types_by_period(2)),
    mlp_dim=expert_width(),
    clip=decoder_rules.clipped_mlp(),
    moe=experts(
      _TOP_K,
      dict(score="softmax_of_top", normalize=True),
      dict(num_local_experts=128, num_experts_per_tok=4),
    ),
  ),
  harmless=("initial_context_length", "experts_per_token"),
  quantised=("mxfp4",),
)
LAYOUTS: dict[str, Family] = {
  family.model_type: family
  for family in (
    *(
      GPT2,
      LLAMA,
      MISTRAL,
      MINISTRAL,
      MINISTRAL3,
      MIXTRAL,
      QWEN2,
      QWEN3,
      QWEN2_MOE,
      QWEN3_MOE,
    ),
    *(GEMMA, GEMMA2, GEMMA3, OLMO2, OLMO3, OLMOE, SMOLLM3, PHI3, COHERE2),
    *(GLM4, GLM4_MOE, GRANITE, GRANITE_MOE, NEMOTRON, MINIMAX_M2, GPT_OSS),
  )
}

_CONSTANTS = (
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids"
)
# Of models that read images too.
_IMAGES = r"(.*\.)?(vision_tower|vision_model|multi_modal_projector)\..*"
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
      **_prediction_layers(names),
    },
  )
  if result is None:
    return None
  # A file may have a name with and without the prefix.
  twice = {name: flat[name] for name in set(flat) - set(names.values())}
  ours = {name: x for name, x in result.items() if name in like}
  theirs = {
    names.get(name, name): x for name, x in result.items() if name not in like
  }
  return ours | theirs | twice


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


def read(path: str, unread: Collection[str] = ()) -> families.Fields | None:
  return families.fields(path, LAYOUTS, canonical, unread)


def export(
  model: Any,
  shapes: tables.Shapes,
  layout: str | None,
  param_dims: dims.Table,
) -> tuple[dict[str, Any], list[tables.Tensor]]:
  """Returns (contents of config.json, arrays) in a published layout."""
  return families.express(model, LAYOUTS, canonical, shapes, param_dims, layout)
