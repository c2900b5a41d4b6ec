"""Makes published/: a small random model of each family, by transformers.

Also published_mtp*/, with modules that predict further tokens.

Each folder has the output of save_pretrained; gradients.safetensors, the
gradients of the mean cross-entropy in the same layout; and reference.npz:
tokens, their logits, and the tokens that greedy generation adds to `prompt`.
Attention is eager, everything is float32. The weights are random, so the
folders contain no published ones. requirements.txt has the library's version.

  python tests/golden/make_published.py   # writes the folders anew
"""

import pathlib
import shutil
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers import modeling_layers
from transformers.models import mistral4

EAGER = dict(attn_implementation="eager", experts_implementation="eager")
BATCH, LENGTH, PROMPT, NEW = 2, 24, 14, 10
SIZES = dict(
  vocab_size=67,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  tie_word_embeddings=False,
)
DEFAULT = dict(rope_type="default", rope_theta=1e4)
YARN = dict(
  rope_type="yarn",
  rope_theta=1e4,
  factor=4.0,
  original_max_position_embeddings=16,
  beta_fast=32.0,
  beta_slow=1.0,
)
LLAMA3 = dict(
  rope_type="llama3",
  rope_theta=5e3,
  factor=4.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=32,
)


def longrope(original_len):
  rope = dict(
    rope_type="longrope",
    rope_theta=1e4,
    partial_rotary_factor=0.75,
    short_factor=[1.0, 1.1, 1.3],
    long_factor=[1.0, 1.9, 3.5],
  )
  return dict(
    rope_parameters=rope, original_max_position_embeddings=original_len
  )


PHI3 = dict(
  model_type="phi3",
  hidden_size=32,
  intermediate_size=16,
  num_hidden_layers=2,
  sliding_window=7,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
GRANITE = dict(
  embedding_multiplier=3.0,
  residual_multiplier=0.4,
  attention_multiplier=0.3,
  logits_scaling=2.5,
)
# Widths of a key with and without rotation, and of a value, all differ.
LATENTS = dict(
  num_key_value_heads=4,
  q_lora_rank=10,
  kv_lora_rank=8,
  qk_nope_head_dim=6,
  qk_rope_head_dim=4,
  v_head_dim=5,
)
LATENT_EXPERTS = dict(
  n_routed_experts=6,
  num_experts_per_tok=2,
  n_shared_experts=2,
  moe_intermediate_size=6,
  routed_scaling_factor=1.5,
)
DEEPSEEK_YARN = YARN | dict(mscale=0.7, mscale_all_dim=0.4)
# The last layer is always global.
GEMMA4 = dict(
  model_type="gemma4_text",
  num_hidden_layers=5,
  head_dim=6,
  global_head_dim=8,
  sliding_window=5,
  hidden_size_per_layer_input=0,
  final_logit_softcapping=3.0,
  tie_word_embeddings=True,
)
# Sizes that a family has no keys for.
NO_KEYS = dict(without=("intermediate_size", "num_key_value_heads"))
NO_GROUPS = dict(without=("num_key_value_heads",))
GPT_OSS = dict(
  model_type="gpt_oss",
  num_local_experts=3,
  num_experts_per_tok=2,
  swiglu_limit=0.5,
  sliding_window=5,
  rope_parameters=YARN | dict(truncate=False, rope_theta=150_000.0),
)

DELTANET = dict(
  head_dim=8,
  linear_num_key_heads=2,
  linear_num_value_heads=4,
  linear_key_head_dim=6,
  linear_value_head_dim=5,
  max_position_embeddings=128,
  # Norms of outputs near zero would enlarge what rounding does.
  rms_norm_eps=1e-2,
)
# Texts of more than one chunk, whose size does not divide them.
LENGTHS = dict.fromkeys(
  (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "olmo_hybrid_nope",
    "kimi_linear",
  ),
  71,
)


def hybrid(pattern):
  """layer_types by letters: l for linear attention, f for full attention."""
  names = dict(l="linear_attention", f="full_attention")
  return [names[letter] for letter in pattern]


def kinds(period, depth):
  """layer_types of a model whose period ends in full attention."""
  sliding, full = "sliding_attention", "full_attention"
  return [sliding if (i + 1) % period else full for i in range(depth)]


# {folder: differences from SIZES}. Windows are shorter than the text, and
# depths are more than one period and a remainder.
FAMILIES = {
  "llama": dict(
    model_type="llama",
    head_dim=8,
    hidden_act="gelu",
    attention_bias=True,
    mlp_bias=True,
    rope_parameters=LLAMA3,
  ),
  "mistral": dict(
    model_type="mistral",
    head_dim=6,
    hidden_act="quick_gelu",
    sliding_window=7,
  ),
  "ministral": dict(
    model_type="ministral",
    num_hidden_layers=5,
    head_dim=6,
    sliding_window=5,
    layer_types=kinds(2, 5),
  ),
  "ministral3": dict(
    model_type="ministral3",
    head_dim=8,
    rope_parameters=YARN
    | dict(mscale=0.7, mscale_all_dim=0.4, llama_4_scaling_beta=0.3),
  ),
  "mixtral": dict(
    model_type="mixtral",
    **LOCAL_EXPERTS,
    intermediate_size=8,
    sliding_window=9,
  ),
  "qwen2": dict(
    model_type="qwen2",
    num_hidden_layers=4,
    use_sliding_window=True,
    max_window_layers=2,
    sliding_window=5,
    rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e6),
  ),
  "qwen3": dict(
    model_type="qwen3",
    head_dim=8,
    attention_bias=True,
    tie_word_embeddings=True,
    rope_parameters=YARN,
  ),
  "qwen2_moe": dict(
    model_type="qwen2_moe",
    num_hidden_layers=4,
    **EXPERTS,
    shared_expert_intermediate_size=12,
    mlp_only_layers=[0],
    use_sliding_window=True,
    max_window_layers=3,
    sliding_window=5,
  ),
  "qwen3_moe": dict(
    model_type="qwen3_moe",
    num_hidden_layers=5,
    intermediate_size=16,
    head_dim=6,
    **EXPERTS,
    norm_topk_prob=True,
    decoder_sparse_step=2,
    attention_bias=True,
  ),
  "gemma": dict(model_type="gemma", head_dim=6, tie_word_embeddings=True),
  "gemma2": dict(
    model_type="gemma2",
    num_hidden_layers=5,
    head_dim=6,
    sliding_window=5,
    query_pre_attn_scalar=5,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    tie_word_embeddings=True,
  ),
  "gemma3_text": dict(
    model_type="gemma3_text",
    num_hidden_layers=7,
    intermediate_size=16,
    head_dim=6,
    sliding_window=5,
    layer_types=kinds(3, 7),
    query_pre_attn_scalar=5,
    tie_word_embeddings=True,
    rope_parameters=dict(
      sliding_attention=DEFAULT,
      full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    ),
  ),
  "gemma4": GEMMA4 | dict(attention_k_eq_v=False, layer_types=kinds(3, 5)),
  "gemma4_moe": GEMMA4
  | dict(
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
    layer_types=kinds(2, 5),
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=8,
  ),
  # Four layers of both types share keys and values of the three before them.
  "gemma4_devices": GEMMA4
  | dict(
    num_hidden_layers=7,
    layer_types=kinds(2, 7),
    num_kv_shared_layers=4,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=5,
    vocab_size_per_layer_input=75,
    attention_bias=True,
  ),
  "olmo2": dict(model_type="olmo2", attention_bias=True),
  "olmo3": dict(
    model_type="olmo3",
    num_hidden_layers=5,
    sliding_window=5,
    layer_types=kinds(2, 5),
    rope_parameters=dict(sliding_attention=DEFAULT, full_attention=YARN),
  ),
  "olmoe": dict(
    model_type="olmoe",
    num_experts=4,
    num_experts_per_tok=2,
    intermediate_size=8,
    clip_qkv=0.6,
  ),
  "smollm3": dict(
    model_type="smollm3",
    num_hidden_layers=5,
    no_rope_layer_interval=2,
    tie_word_embeddings=True,
  ),
  "phi3": PHI3 | longrope(8),
  "phi3_short": PHI3 | longrope(48),
  "cohere2": dict(
    model_type="cohere2",
    num_hidden_layers=5,
    sliding_window=5,
    layer_types=kinds(2, 5),
    logit_scale=0.3,
    tie_word_embeddings=True,
  ),
  "glm4": dict(model_type="glm4", head_dim=8, attention_bias=True),
  "glm4_moe": dict(
    model_type="glm4_moe",
    head_dim=8,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=2,
    moe_intermediate_size=6,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
    use_qk_norm=True,
    attention_bias=True,
  ),
  "granite": dict(
    model_type="granite", **GRANITE, attention_bias=True, mlp_bias=True
  ),
  "granitemoe": dict(
    model_type="granitemoe",
    hidden_act="relu2",
    **GRANITE,
    **LOCAL_EXPERTS,
    intermediate_size=8,
  ),
  "nemotron": dict(
    model_type="nemotron", head_dim=8, attention_bias=True, mlp_bias=True
  ),
  "minimax_m2": dict(
    model_type="minimax_m2",
    head_dim=8,
    **LOCAL_EXPERTS,
    intermediate_size=8,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
  ),
  "deepseek_v2": dict(
    model_type="deepseek_v2",
    **LATENTS,
    **LATENT_EXPERTS,
    topk_method="group_limited_greedy",
    n_group=3,
    topk_group=2,
    first_k_dense_replace=1,
    attention_bias=True,
    mlp_bias=True,
    rope_parameters=DEEPSEEK_YARN,
  ),
  "deepseek_v2_lite": dict(
    model_type="deepseek_v2",
    **LATENTS | dict(q_lora_rank=None),
    **LATENT_EXPERTS,
    first_k_dense_replace=2,
  ),
  "deepseek_v3": dict(
    model_type="deepseek_v3",
    num_hidden_layers=4,
    **LATENTS,
    **LATENT_EXPERTS | dict(routed_scaling_factor=2.5),
    n_group=3,
    topk_group=2,
    first_k_dense_replace=1,
    attention_bias=True,
    rope_parameters=DEEPSEEK_YARN | dict(mscale=1.0, mscale_all_dim=1.0),
  ),
  "glm4_moe_lite": dict(
    model_type="glm4_moe_lite",
    num_hidden_layers=4,
    **LATENTS,
    **LATENT_EXPERTS,
    mlp_layer_types=["dense", "sparse", "dense", "sparse"],
  ),
  "mistral4": dict(
    model_type="mistral4",
    **LATENTS,
    **LATENT_EXPERTS,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    rope_parameters=DEEPSEEK_YARN
    | dict(llama_4_scaling_beta=0.3, partial_rotary_factor=0.4),
  ),
  "qwen3_next": DELTANET
  | EXPERTS
  | dict(
    model_type="qwen3_next",
    num_hidden_layers=5,
    layer_types=hybrid("lflfl"),
    shared_expert_intermediate_size=12,
    mlp_only_layers=[2],
    attention_bias=True,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
  ),
  "qwen3_5_text": DELTANET
  | dict(
    model_type="qwen3_5_text",
    num_hidden_layers=5,
    layer_types=hybrid("llfll"),
    linear_conv_kernel_dim=3,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.25),
  ),
  "qwen3_5_moe_text": DELTANET
  | EXPERTS
  | dict(
    model_type="qwen3_5_moe_text",
    num_hidden_layers=4,
    layer_types=hybrid("lflf"),
    shared_expert_intermediate_size=12,
    linear_num_value_heads=2,
    tie_word_embeddings=True,
    # Of experts, and after the convolution.
    hidden_act="gelu",
  ),
  "olmo_hybrid": DELTANET
  | dict(
    model_type="olmo_hybrid",
    num_hidden_layers=5,
    layer_types=hybrid("llfll"),
    linear_key_head_dim=10,  # The library saves kernels in three equal parts.
    rope_parameters=DEFAULT,
  ),
  "olmo_hybrid_nope": DELTANET
  | dict(
    model_type="olmo_hybrid",
    layer_types=hybrid("lfl"),
    linear_allow_neg_eigval=False,
    linear_key_head_dim=10,
    hidden_act="gelu_pytorch_tanh",
    attention_bias=True,
    rope_parameters=DEFAULT | dict(rope_theta=None),
  ),
  "seed_oss": dict(
    model_type="seed_oss",
    head_dim=8,
    attention_bias=True,
    mlp_bias=True,
    rope_parameters=YARN,
  ),
  "ernie4_5": dict(
    model_type="ernie4_5",
    head_dim=8,
    use_bias=True,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=5e5),
  ),
  "ernie4_5_moe": dict(
    model_type="ernie4_5_moe",
    num_hidden_layers=5,
    use_bias=True,
    moe_num_experts=6,
    moe_k=2,
    moe_intermediate_size=6,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_layer_end_index=3,
    moe_layer_interval=2,
    moe_norm_min=0.6,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT,
  ),
  "dots1": dict(
    model_type="dots1",
    num_hidden_layers=4,
    head_dim=8,
    attention_bias=True,
    sliding_window=5,
    max_window_layers=2,
    **LATENT_EXPERTS,
    norm_topk_prob=True,
    n_group=3,
    topk_group=2,
    first_k_dense_replace=1,
  ),
  "hunyuan_v1_dense": dict(
    model_type="hunyuan_v1_dense",
    head_dim=8,
    attention_bias=True,
    tie_word_embeddings=True,
    rope_parameters=dict(
      rope_type="dynamic", alpha=9.0, factor=1.0, rope_theta=1e4
    ),
  ),
  "hunyuan_v1_moe": dict(
    model_type="hunyuan_v1_moe",
    head_dim=8,
    intermediate_size=8,
    num_experts=4,
    moe_topk=[2, 1, 2],
    rope_parameters=DEFAULT,
  ),
  "exaone4": dict(
    model_type="exaone4",
    num_hidden_layers=5,
    head_dim=8,
    sliding_window=5,
    layer_types=kinds(2, 5),
    rope_parameters=LLAMA3,
  ),
  "exaone4_full": dict(
    model_type="exaone4",
    sliding_window=None,
    layer_types=["full_attention"] * 3,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT,
  ),
  "apertus": dict(
    model_type="apertus",
    head_dim=6,
    attention_bias=True,
    rope_parameters=LLAMA3,
  ),
  "nanochat": dict(
    model_type="nanochat",
    head_dim=8,
    attention_bias=True,
    final_logit_softcapping=3.0,
    rope_parameters=YARN,
  ),
  "lfm2": dict(
    model_type="lfm2",
    num_hidden_layers=5,
    intermediate_size=36,
    block_ffn_dim_multiplier=1.2,
    block_multiple_of=10,
    conv_bias=True,
    conv_L_cache=4,
    layer_types=["conv", "conv", "full_attention", "conv", "conv"],
    rope_parameters=DEFAULT,
  ),
  "lfm2_moe": dict(
    model_type="lfm2_moe",
    num_hidden_layers=4,
    **EXPERTS,
    num_dense_layers=1,
    routed_scaling_factor=1.5,
    layer_types=["conv", "full_attention"] * 2,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT,
  ),
  "glm": dict(
    model_type="glm",
    head_dim=8,
    attention_bias=True,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
  ),
  "cohere": dict(
    model_type="cohere",
    hidden_act="relu",
    attention_bias=True,
    use_qk_norm=True,
    logit_scale=0.3,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT,
  ),
  "olmo": dict(
    model_type="olmo", attention_bias=True, clip_qkv=0.6, rope_parameters=YARN
  ),
  "flex_olmo": dict(
    model_type="flex_olmo",
    intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=2,
    attention_bias=True,
    norm_topk_prob=True,
    rope_parameters=DEFAULT,
  ),
  "vaultgemma": dict(
    model_type="vaultgemma",
    num_hidden_layers=5,
    head_dim=6,
    sliding_window=5,
    query_pre_attn_scalar=5,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    attention_bias=True,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT,
  ),
  "phi": dict(
    model_type="phi",
    hidden_size=32,
    intermediate_size=16,
    hidden_act="silu",
    qk_layernorm=True,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
  ),
  "starcoder2": dict(
    model_type="starcoder2",
    sliding_window=7,
    use_bias=True,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT,
  ),
  "stablelm": dict(
    model_type="stablelm",
    use_qkv_bias=True,
    qk_layernorm=True,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
  ),
  "stablelm_parallel": dict(
    model_type="stablelm",
    hidden_size=32,
    intermediate_size=16,
    use_parallel_residual=True,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.25),
  ),
  "granitemoeshared": dict(
    model_type="granitemoeshared",
    **GRANITE,
    **LOCAL_EXPERTS,
    intermediate_size=8,
    shared_intermediate_size=12,
    attention_bias=True,
    rope_parameters=DEFAULT,
  ),
  "granite_swa": dict(
    model_type="granite_swa",
    num_hidden_layers=5,
    **GRANITE,
    attention_bias=True,
    mlp_bias=True,
    sliding_window=5,
    layer_types=kinds(2, 5),
    layer_rope_theta=[1e4, 0, 1e4, 5e5, 0],
    rope_parameters=DEFAULT,
  ),
  "granitemoe_swa": dict(
    model_type="granitemoe_swa",
    num_hidden_layers=4,
    **GRANITE,
    **LOCAL_EXPERTS,
    intermediate_size=8,
    shared_intermediate_size=12,
    sliding_window=5,
    layer_rope_theta=[1e4, 0, 1e4, 1e4],
    rope_parameters=YARN,
  ),
  "hyperclovax": dict(
    model_type="hyperclovax",
    **GRANITE | dict(attention_multiplier=None),
    attention_bias=True,
    mlp_bias=True,
    head_dim=8,
    rope_parameters=DEFAULT,
  ),
  "arcee": dict(
    model_type="arcee",
    attention_bias=True,
    mlp_bias=True,
    rope_parameters=YARN,
  ),
  "jais2": dict(model_type="jais2", rope_parameters=DEFAULT),
  "helium": dict(
    model_type="helium",
    head_dim=4,
    attention_bias=True,
    mlp_bias=True,
    rope_parameters=DEFAULT,
  ),
  "internlm3": dict(
    model_type="internlm3",
    head_dim=8,
    attention_bias=True,
    mlp_bias=True,
    max_position_embeddings=24,
    rope_parameters=DEFAULT | dict(rope_type="dynamic", factor=3.0),
  ),
  "iquestcoder": dict(
    model_type="iquestcoder", head_dim=8, rope_parameters=DEFAULT
  ),
  "cwm": dict(
    model_type="cwm",
    num_hidden_layers=6,
    head_dim=6,
    sliding_window=5,
    rope_parameters=LLAMA3,
    bos_token_id=0,  # The library refuses None.
  ),
  "exaone_moe": dict(
    model_type="exaone_moe",
    num_hidden_layers=5,
    head_dim=8,
    sliding_window=5,
    sliding_window_pattern=3,
    mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"],
    num_experts=6,
    num_experts_per_tok=2,
    num_shared_experts=2,
    moe_intermediate_size=6,
    n_group=3,
    topk_group=2,
    rope_parameters=DEFAULT,
  ),
  "solar_open": dict(
    model_type="solar_open",
    head_dim=8,
    **LATENT_EXPERTS,
    n_group=3,
    topk_group=2,
    attention_bias=True,
    rope_parameters=YARN,
  ),
  "mellum": dict(
    model_type="mellum",
    num_hidden_layers=5,
    head_dim=8,
    **EXPERTS,
    sliding_window=5,
    layer_types=kinds(2, 5),
    mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"],
    attention_bias=True,
    rope_parameters=dict(sliding_attention=DEFAULT, full_attention=YARN),
  ),
  "afmoe": dict(
    model_type="afmoe",
    num_hidden_layers=5,
    head_dim=6,
    attention_bias=True,
    **EXPERTS,
    num_shared_experts=2,
    route_scale=1.5,
    num_dense_layers=2,
    global_attn_every_n_layers=2,
    sliding_window=5,
    mup_enabled=True,
    rope_parameters=DEFAULT,
  ),
  "youtu": dict(
    model_type="youtu",
    **LATENTS,
    attention_bias=True,
    rope_interleave=False,
    rope_parameters=DEEPSEEK_YARN,
  ),
  "llama4_text": dict(
    model_type="llama4_text",
    num_hidden_layers=5,
    head_dim=6,
    intermediate_size=8,
    intermediate_size_mlp=20,
    num_local_experts=4,
    interleave_moe_layer_step=2,
    no_rope_layer_interval=3,
    attention_chunk_size=5,
    floor_scale=4,
    attn_scale=0.3,
    attention_bias=True,
    rope_parameters=LLAMA3,
  ),
  # Layers of each kind that do not follow a period, without norms of queries.
  "llama4_mixed": dict(
    model_type="llama4_text",
    num_hidden_layers=4,
    head_dim=6,
    intermediate_size=8,
    intermediate_size_mlp=20,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_layers=[1, 2],
    no_rope_layers=[1, 0, 1, 1],
    layer_types=["full_attention", "chunked_attention"] * 2,
    attention_chunk_size=7,
    attn_temperature_tuning=False,
    use_qk_norm=False,
    tie_word_embeddings=True,
    # As in Scout, no frequency is between the two factors.
    rope_parameters=LLAMA3 | dict(low_freq_factor=1.0, high_freq_factor=1.0),
  ),
  "minicpm3": dict(
    model_type="minicpm3",
    **LATENTS | dict(v_head_dim=None),
    attention_bias=True,
    scale_emb=3,
    scale_depth=0.7,
    dim_model_base=6,
    tie_word_embeddings=True,
    rope_parameters=DEEPSEEK_YARN,
  ),
  "flint": dict(
    model_type="flint",
    num_hidden_layers=6,
    head_dim=8,
    **EXPERTS,
    shared_expert_intermediate_size=12,
    sliding_window=5,
    attention_bias=True,
    rope_parameters=DEFAULT,
  ),
  "hy_v3": dict(
    model_type="hy_v3",
    num_hidden_layers=4,
    head_dim=8,
    **EXPERTS,
    num_shared_experts=2,
    mlp_layer_types=["dense", "sparse", "dense", "sparse"],
    attention_bias=True,
    mlp_bias=True,
    rope_parameters=DEFAULT,
  ),
  "granitemoehybrid": dict(
    model_type="granitemoehybrid",
    **GRANITE,
    num_local_experts=0,
    shared_intermediate_size=12,
    layer_types=["full_attention"] * 3,
    mamba_n_heads=1,
    position_embedding_type="rope",
    attention_bias=True,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT,
  ),
  "granitemoehybrid_moe": dict(
    model_type="granitemoehybrid",
    **GRANITE,
    **LOCAL_EXPERTS,
    intermediate_size=8,
    shared_intermediate_size=12,
    layer_types=["full_attention"] * 3,
    mamba_n_heads=1,
    position_embedding_type=None,
    rope_parameters=DEFAULT,
  ),
  "gptj": dict(model_type="gptj", **NO_KEYS, rotary_dim=2, n_inner=24),
  "gpt_bigcode": dict(model_type="gpt_bigcode", **NO_KEYS),
  "gpt_bigcode_heads": dict(
    model_type="gpt_bigcode",
    **NO_KEYS,
    multi_query=False,
    activation_function="relu2",
  ),
  "gpt2_scaled": dict(
    model_type="gpt2",
    **NO_KEYS,
    scale_attn_weights=False,
    scale_attn_by_inverse_layer_idx=True,
    activation_function="gelu",
  ),
  "gpt_neo": dict(
    model_type="gpt_neo",
    **NO_GROUPS,
    num_hidden_layers=5,
    attention_types=[[["global", "local"], 2], [["local"], 1]],
    window_size=5,
    tie_word_embeddings=True,
  ),
  "gpt_neox": dict(
    model_type="gpt_neox",
    **NO_GROUPS,
    hidden_size=32,
    attention_bias=True,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
  ),
  "gpt_neox_serial": dict(
    model_type="gpt_neox",
    **NO_GROUPS,
    attention_bias=False,
    use_parallel_residual=False,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=1.0),
  ),
  "falcon": dict(
    model_type="falcon",
    **NO_KEYS,
    bias=True,
    ffn_hidden_size=24,
    tie_word_embeddings=True,
    rope_parameters=YARN,
  ),
  # Groups of heads, and norms of attention and MLP side by side.
  "falcon_new": dict(
    model_type="falcon",
    **NO_KEYS,
    new_decoder_architecture=True,
    num_kv_heads=2,
    ffn_hidden_size=24,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=False,
    rope_parameters=DEFAULT,
  ),
  "persimmon": dict(
    model_type="persimmon",
    **NO_GROUPS,
    hidden_size=32,
    intermediate_size=16,
    rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5),
  ),
  "aria_text": dict(
    model_type="aria_text",
    head_dim=8,
    intermediate_size=8,
    moe_num_experts=4,
    attention_bias=True,
    rope_parameters=DEFAULT,
  ),
  "gemma4_unified": GEMMA4
  | dict(
    model_type="gemma4_unified_text",
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
    num_kv_shared_layers=2,
    layer_types=kinds(2, 5),
    without=("hidden_size_per_layer_input",),
  ),
  "kimi_linear": dict(
    model_type="kimi_linear",
    max_position_embeddings=128,
    num_hidden_layers=5,
    layer_types=hybrid("llfll"),
    **LATENTS | dict(q_lora_rank=None),
    linear_num_heads=3,
    linear_head_dim=6,
    linear_conv_kernel_dim=3,
    num_local_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=2,
    moe_intermediate_size=6,
    routed_scaling_factor=1.5,
    n_group=3,
    topk_group=2,
    mlp_layer_types=["dense"] + ["sparse"] * 4,
    # Norms of outputs near zero would enlarge what rounding does.
    rms_norm_eps=1e-2,
  ),
  "gpt_oss": GPT_OSS
  | dict(num_hidden_layers=5, head_dim=6, intermediate_size=8),
  "gpt_oss_mxfp4": GPT_OSS
  | dict(hidden_size=32, intermediate_size=32, head_dim=8),
}


# Names of selection biases, which have no gradients.
BIASES = ("correction_bias", "expert_bias")


def with_noise(model, rng):
  """Adds noise: initial scales and biases are equal, and would hide errors."""
  buffers = dict(model.named_buffers())
  biases = [x for n, x in buffers.items() if n.endswith(BIASES)]
  scalars = [x for n, x in buffers.items() if n.endswith("layer_scalar")]
  with torch.no_grad():
    for x in [*model.parameters(), *biases, *scalars]:
      std = 0.35 if x.ndim > 1 else 0.3
      noise = np.asarray(rng.normal(size=x.shape) * std)
      x.add_(torch.from_numpy(noise.astype(np.float32)))
    for name, x in [*model.named_parameters(), *buffers.items()]:
      if name.endswith(BIASES):
        x.mul_(0.2)  # Scores are in [0, 1].


def to_mxfp4(model, rng):
  """Replaces the experts' kernels by random MXFP4; returns their blocks."""
  from transformers.integrations import mxfp4

  blocks = {}
  for i, layer in enumerate(model.model.layers):
    for name in ("gate_up_proj", "down_proj"):
      E, inputs, outputs = getattr(layer.mlp.experts, name).shape
      shape = (E, outputs, inputs // 32)
      packed = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
      scales = rng.integers(123, 127, shape).astype(np.uint8)
      pair = torch.from_numpy(packed), torch.from_numpy(scales)
      kernel = mxfp4.convert_moe_packed_tensors(*pair, dtype=torch.float32)
      getattr(layer.mlp.experts, name).data.copy_(kernel)
      key = f"model.layers.{i}.mlp.experts.{name}"
      blocks |= {f"{key}_blocks": pair[0], f"{key}_scales": pair[1]}
  return blocks


def save_gradients(model, tokens, out):
  logits = model(tokens).logits
  targets = tokens[:, 1:].flatten()
  loss = torch.nn.functional.cross_entropy(
    logits[:, :-1].flatten(0, 1), targets
  )
  loss.backward()
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.grad is not None:
        parameter.copy_(parameter.grad)
    for name, buffer in model.named_buffers():
      if name.endswith(("layer_scalar", "act_fn.beta", "act_fn.eps")):
        buffer.zero_()  # It has no gradient.
  with tempfile.TemporaryDirectory() as folder:
    # The library names and splits arrays otherwise in files than in memory.
    model.save_pretrained(folder)
    arrays = safetensors.torch.load_file(f"{folder}/model.safetensors")
  arrays = {n: x for n, x in arrays.items() if not n.endswith(BIASES)}
  safetensors.torch.save_file(arrays, out / "gradients.safetensors")


def write_family(options, out):
  """Writes one folder."""
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  no_tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
  sizes = SIZES | no_tokens | options
  for name in sizes.pop("without", ()):
    del sizes[name]
  config = transformers.AutoConfig.for_model(**sizes)
  make = transformers.AutoModelForCausalLM.from_config
  if config.model_type == "mistral4":  # Not among those of the automatic class.
    make = mistral4.Mistral4ForCausalLM._from_config
  model = make(config, dtype=torch.float32, **EAGER).eval()
  with_noise(model, rng)
  blocks = to_mxfp4(model, rng) if out.name == "gpt_oss_mxfp4" else {}
  model.save_pretrained(out)
  (out / "generation_config.json").unlink(missing_ok=True)
  tokens = rng.integers(
    0, config.vocab_size, (BATCH, LENGTHS.get(out.name, LENGTH))
  )
  prompt = torch.from_numpy(tokens[:, :PROMPT])
  with torch.no_grad():
    logits = model(torch.from_numpy(tokens)).logits
    generated = model.generate(
      prompt,
      attention_mask=torch.ones_like(prompt),
      do_sample=False,
      max_new_tokens=NEW,
      eos_token_id=None,
    )
  np.savez_compressed(
    out / "reference.npz",
    tokens=tokens.astype(np.int32),
    logits=logits.numpy(),
    prompt=prompt.numpy().astype(np.int32),
    generated=generated[:, PROMPT:].numpy().astype(np.int32),
  )
  if blocks:
    file = out / "model.safetensors"
    arrays = safetensors.torch.load_file(file) | blocks
    for name in blocks:
      if name.endswith("_blocks"):
        del arrays[name.removesuffix("_blocks")]
    safetensors.torch.save_file(arrays, file, {"format": "pt"})
    config.quantization_config = {
      "quant_method": "mxfp4",
      "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    config.save_pretrained(out)
  else:
    save_gradients(model, torch.from_numpy(tokens), out)


def prediction_arrays(mtp, first):
  """The arrays of an MtpModel, as DeepSeek V3 stores them: by expert."""
  arrays = {}
  for name, x in mtp.layers.state_dict().items():
    number, _, rest = name.partition(".")
    start = f"model.layers.{first + int(number)}."
    rest = rest.removeprefix("mtp_block.")
    rest = rest.replace("post_norm.", "shared_head.norm.")
    if ".experts." not in rest:
      arrays[start + rest] = x
      continue
    stem, _, kind = rest.rpartition(".")
    parts = {kind: x}
    if kind == "gate_up_proj":
      gate, up = x.chunk(2, dim=1)
      parts = {"gate_proj": gate, "up_proj": up}
    for kind, part in parts.items():
      for e, matrix in enumerate(part):
        arrays[f"{start}{stem}.{e}.{kind}.weight"] = matrix
  return arrays


# {folder: (its options, number of modules, attributes of the library's config,
# {name of a module's array in DeepSeek V3: in this family})}.
PREDICTION = {
  "published_mtp": (
    FAMILIES["deepseek_v3"] | dict(num_mtp_layers=2),
    2,
    {},
    {},
  ),
  "published_mtp_qwen": (
    FAMILIES["qwen3_next"]
    | dict(num_hidden_layers=2, layer_types=hybrid("lf"), mlp_only_layers=[]),
    1,
    dict(num_mtp_layers=1, mtp_layer_types=hybrid("f")),
    {
      "model.layers.2.enorm": "mtp.pre_fc_norm_embedding",
      "model.layers.2.hnorm": "mtp.pre_fc_norm_hidden",
      "model.layers.2.eh_proj": "mtp.fc",
      "model.layers.2.shared_head.norm": "mtp.norm",
      "model.layers.2.": "mtp.layers.0.",
    },
  ),
}


def write_prediction(out, options, number_of_modules, attributes, names):
  """Writes a model with modules that predict further tokens.

  reference.npz also has their logits, `logits_1` for the token after the next
  one. DeepSeek's file has copies of embedding and head for them, as published
  ones.
  """
  write_family(options, out)
  (out / "gradients.safetensors").unlink()
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    out, dtype=torch.float32, **EAGER
  ).eval()
  for key, value in attributes.items():
    setattr(model.config, key, value)
  mtp = modeling_layers.MtpModel(model, number_of_modules).eval()
  with torch.no_grad():  # The class initialises nothing.
    for name, x in mtp.layers.state_dict().items():
      x.fill_(float(x.ndim == 1 and name.endswith("norm.weight")))
  with_noise(mtp.layers, np.random.default_rng(1))
  reference = dict(np.load(out / "reference.npz"))
  tokens = torch.from_numpy(reference["tokens"]).long()
  with torch.no_grad():
    hidden = model.model(tokens).last_hidden_state
    for number in range(number_of_modules):
      ahead = tokens[:, number + 1 :]
      places = torch.arange(number + 1, tokens.shape[1])[None]
      hidden = mtp.forward_layer(
        number, hidden[:, :-1], places, None, input_ids=ahead
      )
      logits = model.lm_head(hidden)
      reference[f"logits_{number + 1}"] = logits.numpy()
  np.savez_compressed(out / "reference.npz", **reference)
  file = out / "model.safetensors"
  first = model.config.num_hidden_layers
  arrays = safetensors.torch.load_file(file)
  added = prediction_arrays(mtp, first)
  if not names:
    copies = {
      "embed_tokens.weight": "model.embed_tokens.weight",
      "shared_head.head.weight": "lm_head.weight",
    }
    for name, original in copies.items():
      added[f"model.layers.{first}.{name}"] = arrays[original].clone()
  for start, new in names.items():
    added = {name.replace(start, new): x for name, x in added.items()}
  arrays = {name: x.contiguous() for name, x in (arrays | added).items()}
  safetensors.torch.save_file(arrays, file, {"format": "pt"})


def write(golden):
  """Writes all folders below `golden`."""
  for name, options in PREDICTION.items():
    write_prediction(golden / name, *options)
  shutil.rmtree(golden / "published", ignore_errors=True)
  for name, options in FAMILIES.items():
    out = golden / "published" / name
    out.mkdir(parents=True)
    write_family(options, out)


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
