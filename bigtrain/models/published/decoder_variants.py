"""Architecture and sizes of each `config.model.variant` of models/decoder.py.

A lineage's common fields come first, then VARIANTS, which adds the sizes.
Variants that end in `_mu` are tiny, for tests. config.json of a published model
needs no entry here: decoders/ converts it.
"""

from typing import Any

# Fields that all models of a lineage share.
_GPT2: dict[str, Any] = dict(
  norm_eps=1e-5,
  posemb="learn",
  norm="layernorm",
  mlp="gelu",
  use_bias=True,
  tied_head=True,
)
_LLAMA: dict[str, Any] = dict(
  norm_eps=1e-5,
  posemb="rope",
  norm="rmsnorm",
  mlp="swiglu",
  use_bias=False,
  tied_head=False,
)
_QWEN3: dict[str, Any] = dict(
  _LLAMA, norm_eps=1e-6, qk_norm="head", rope_theta=1e6, tied_head=True
)
_QWEN3_MOE: dict[str, Any] = dict(_QWEN3, tied_head=False)
# https://arxiv.org/abs/2503.19786. Five layers with a window, then one without.
_GEMMA3: dict[str, Any] = dict(
  _QWEN3,
  mlp="geglu",
  norm_offset=1.0,
  norm_at="sandwich",
  embed_multiplier="sqrt_width",
  attention_scale=0.0625,  # 1 / sqrt(256), the width of a head.
  kinds={"local": dict(window=512, rope_theta=1e4), "global": {}},
  layers=("local",) * 5 + ("global",),
)
_GEMMA4: dict[str, Any] = dict(
  _GEMMA3,
  norm_offset=0.0,
  v_norm=True,
  layer_scalar=True,
  attention_scale=1.0,
  rope_theta=1e4,
  logits_softcap=30.0,
)
# https://arxiv.org/abs/2508.10925.
_GPT_OSS: dict[str, Any] = dict(
  _LLAMA,
  use_bias=("qkv", "out", "experts", "router"),
  mlp_clip=dict(limit=7.0, alpha=1.702, up_offset=1.0),
  sinks=True,
  rope_theta=150000.0,
  rope_scaling=dict(
    type="yarn", factor=32.0, original_len=4096, truncate=False
  ),
  kinds={"local": dict(window=128), "global": {}},
  layers=("local", "global"),
)
# Every fourth layer is attention; the others are recurrent.
_QWEN3_NEXT: dict[str, Any] = dict(
  _LLAMA,
  norm_eps=1e-6,
  norm_offset=1.0,
  qk_norm="head",
  output_gate=True,
  rope_theta=1e7,
  rope_fraction=0.25,
  kinds={
    "linear": dict(deltanet=dict(num_heads=32, num_key_heads=16)),
    "full": {},
  },
  layers=("linear",) * 3 + ("full",),
)
# Every fourth layer has no positions.
_SMOLLM3: dict[str, Any] = dict(
  _LLAMA,
  norm_eps=1e-6,
  rope_theta=5e6,
  tied_head=True,
  kinds={"rope": {}, "plain": dict(posemb="none")},
  layers=("rope", "rope", "rope", "plain"),
)
_MIXTRAL_EXPERTS = dict(num_experts=8, top_k=2)
# https://arxiv.org/abs/2412.19437. Experts in all layers but the first ones.
_DEEPSEEK_EXPERTS: dict[str, Any] = dict(
  score="sigmoid",
  scale=2.5,
  selection_bias=True,
  bias_rate=0.001,
  shared_experts=1,
)
_DEEPSEEK: dict[str, Any] = dict(
  _LLAMA,
  norm_eps=1e-6,
  rope_interleaved=True,
  mla=dict(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128),
  head_dim=192,
  kinds={"dense": dict(moe=None), "experts": {}},
  layers=("experts",),
)

# Tiny sizes, for tests.
_MU: dict[str, Any] = dict(width=32, depth=2, num_heads=4, max_len=128)
_LLAMA_MU: dict[str, Any] = dict(_MU, num_kv_heads=2, mlp_dim=64)

_QWEN3_5_MU: dict[str, Any] = dict(
  _QWEN3_NEXT | _LLAMA_MU,
  depth=4,
  head_dim=16,
  kinds={
    "linear": dict(
      deltanet=dict(num_heads=4, num_key_heads=2, key_dim=8, value_dim=8)
    ),
    "full": {},
  },
)


def _gemma4_kinds(window: int, **sizes: int) -> dict[str, Any]:
  """Kinds of layers of Gemma 4; `sizes` are for global layers."""
  rope = dict(
    rope_theta=1e6, rope_scaling=dict(type="proportional", fraction=0.25)
  )
  return {
    "local": dict(window=window),
    "global": dict(keys_as_values=True, **rope, **sizes),
  }


def _gemma4_experts(**sizes: int) -> dict[str, Any]:
  return dict(normalize=True, beside_mlp=True, scaled_router=True, **sizes)


def _llama3(rope_factor: float) -> dict[str, Any]:
  """Llama 3's vocabulary and positions, https://arxiv.org/abs/2407.21783."""
  return dict(
    _LLAMA,
    vocab_size=128256,
    max_len=131072,
    rope_theta=5e5,
    rope_scaling=dict(
      type="llama3",
      original_len=8192,
      factor=rope_factor,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
    ),
    num_kv_heads=8,
  )


def _deepseek_yarn(factor: float) -> dict[str, Any]:
  """Extends the 4,096 positions of the first training by `factor`."""
  return dict(
    type="yarn",
    factor=factor,
    original_len=4096,
    mscale=1.0,
    mscale_all_dim=1.0,
  )


_GPT2_SIZED = dict(_GPT2, vocab_size=50257, max_len=1024)

# {variant: fields}. "gpt2" and "llama" have no sizes: the config gives them.
VARIANTS: dict[str, dict[str, Any]] = {
  "gpt2": _GPT2,
  "gpt2_mu": _GPT2 | _MU,
  "gpt2_124m": dict(_GPT2_SIZED, width=768, depth=12, num_heads=12),
  "gpt2_355m": dict(_GPT2_SIZED, width=1024, depth=24, num_heads=16),
  "gpt2_774m": dict(_GPT2_SIZED, width=1280, depth=36, num_heads=20),
  "gpt2_1558m": dict(_GPT2_SIZED, width=1600, depth=48, num_heads=25),
  "llama": _LLAMA,
  "llama_mu": _LLAMA | _LLAMA_MU,
  "llama_1b": dict(
    _llama3(rope_factor=32.0),
    width=2048,
    depth=16,
    num_heads=32,
    mlp_dim=8192,
    tied_head=True,
  ),
  "llama_8b": dict(
    _llama3(rope_factor=8.0), width=4096, depth=32, num_heads=32, mlp_dim=14336
  ),
  "llama_70b": dict(
    _llama3(rope_factor=8.0), width=8192, depth=80, num_heads=64, mlp_dim=28672
  ),
  "mixtral_mu": dict(_LLAMA | _LLAMA_MU, moe=_MIXTRAL_EXPERTS),
  "mixtral_8x7b": dict(
    _LLAMA,
    moe=_MIXTRAL_EXPERTS,
    width=4096,
    depth=32,
    num_heads=32,
    num_kv_heads=8,
    mlp_dim=14336,
    vocab_size=32000,
    max_len=32768,
    rope_theta=1e6,
  ),
  "qwen3_mu": _QWEN3 | _LLAMA_MU,
  "qwen3_0_6b": dict(
    _QWEN3,
    width=1024,
    depth=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=3072,
    vocab_size=151936,
    max_len=40960,
  ),
  "qwen3_moe_mu": dict(
    _QWEN3_MOE | _LLAMA_MU,
    moe=dict(num_experts=8, top_k=2, normalize=True, mlp_dim=32),
  ),
  "qwen3_235b": dict(
    _QWEN3_MOE,
    width=4096,
    depth=94,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=12288,
    vocab_size=151936,
    max_len=40960,
    moe=dict(num_experts=128, top_k=8, normalize=True, mlp_dim=1536),
  ),
  "gemma3_mu": dict(_GEMMA3 | _LLAMA_MU, depth=7),
  "gemma3_1b": dict(
    _GEMMA3,
    width=1152,
    depth=26,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    mlp_dim=6912,
    vocab_size=262144,
    max_len=32768,
  ),
  "gemma4_mu": dict(
    _GEMMA4 | _LLAMA_MU,
    depth=6,
    moe=_gemma4_experts(num_experts=8, top_k=2, mlp_dim=16),
    kinds=_gemma4_kinds(window=16, head_dim=16, num_kv_heads=1),
  ),
  "gemma4_26b_a4b": dict(
    _GEMMA4,
    width=2816,
    depth=30,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    mlp_dim=2112,
    vocab_size=262144,
    max_len=262144,
    moe=_gemma4_experts(num_experts=128, top_k=8, mlp_dim=704),
    kinds=_gemma4_kinds(window=1024, head_dim=512, num_kv_heads=2),
  ),
  "gpt_oss_mu": dict(
    _GPT_OSS | _LLAMA_MU,
    moe=dict(num_experts=4, top_k=2, score="softmax_of_top"),
  ),
  "gpt_oss_20b": dict(
    _GPT_OSS,
    width=2880,
    depth=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    mlp_dim=2880,
    vocab_size=201088,
    max_len=131072,
    moe=dict(num_experts=32, top_k=4, score="softmax_of_top"),
  ),
  "deepseek_mu": dict(
    _DEEPSEEK | _MU,
    mlp_dim=64,
    depth=3,
    first_layers=("dense",),
    mla=dict(kv_rank=16, q_rank=24, nope_dim=8, rope_dim=4, v_dim=8),
    head_dim=12,
    moe=dict(_DEEPSEEK_EXPERTS, num_experts=8, top_k=2, mlp_dim=16),
  ),
  "deepseek_v3": dict(
    _DEEPSEEK,
    width=7168,
    depth=61,
    num_heads=128,
    mlp_dim=18432,
    vocab_size=129280,
    max_len=163840,
    rope_scaling=_deepseek_yarn(40.0),
    first_layers=("dense",) * 3,
    moe=dict(
      _DEEPSEEK_EXPERTS,
      num_experts=256,
      top_k=8,
      groups=dict(num=8, top=4, score="top2"),
      mlp_dim=2048,
    ),
  ),
  # https://arxiv.org/abs/2507.20534.
  "kimi_k2": dict(
    _DEEPSEEK,
    width=7168,
    depth=61,
    num_heads=64,
    mlp_dim=18432,
    vocab_size=163840,
    max_len=131072,
    rope_theta=5e4,
    rope_scaling=_deepseek_yarn(32.0),
    first_layers=("dense",),
    moe=dict(
      _DEEPSEEK_EXPERTS, scale=2.827, num_experts=384, top_k=8, mlp_dim=2048
    ),
  ),
  "qwen3_5_mu": _QWEN3_5_MU,
  "qwen3_next_mu": dict(
    _QWEN3_5_MU,
    moe=dict(
      num_experts=8,
      top_k=2,
      normalize=True,
      mlp_dim=32,
      shared_dim=32,
      shared_gate=True,
    ),
  ),
  "qwen3_next_80b": dict(
    _QWEN3_NEXT,
    width=2048,
    depth=48,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    mlp_dim=5120,
    vocab_size=151936,
    max_len=262144,
    moe=dict(
      num_experts=512,
      top_k=10,
      normalize=True,
      mlp_dim=512,
      shared_dim=512,
      shared_gate=True,
    ),
  ),
  "qwen3_5_9b": dict(
    _QWEN3_NEXT,
    width=4096,
    depth=32,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    mlp_dim=12288,
    vocab_size=248320,
    max_len=262144,
  ),
  "smollm3_mu": dict(_SMOLLM3 | _LLAMA_MU, depth=4),
  "smollm3_3b": dict(
    _SMOLLM3,
    width=2048,
    depth=36,
    num_heads=16,
    num_kv_heads=4,
    mlp_dim=11008,
    vocab_size=128256,
    max_len=65536,
  ),
}
