"""The decoder in Hugging Face's layouts of GPT-2, Llama and Mixtral.

See layouts.py for the tables.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain import settings
from bigtrain.models.published import layouts
from bigtrain.models.published.layouts import Entry, linear


def _gpt2_layer(published: str, *ours: str, inputs: int = 1) -> list[Entry]:
  """Returns the entries of a weight (inputs, outputs) and a bias."""
  kernels = tuple(f"blocks/{name}/kernel" for name in ours)
  biases = tuple(f"blocks/{name}/bias" for name in ours)
  return [
    Entry(f"h.{{i}}.{published}.weight", kernels, inputs),
    Entry(f"h.{{i}}.{published}.bias", biases),
  ]


def _gpt2_norm(published: str, ours: str) -> list[Entry]:
  return [
    Entry(f"{published}.weight", (f"{ours}/scale",)),
    Entry(f"{published}.bias", (f"{ours}/bias",)),
  ]


_QKV = ("attention/query", "attention/key", "attention/value")
_GPT2 = [
  Entry("wte.weight", ("token_embedding",), 1),
  Entry("wpe.weight", ("pos_embedding",), 1),
  *_gpt2_norm("h.{i}.ln_1", "blocks/attention_norm"),
  *_gpt2_layer("attn.c_attn", *_QKV),
  *_gpt2_layer("attn.c_proj", "attention/out", inputs=2),
  *_gpt2_norm("h.{i}.ln_2", "blocks/mlp_norm"),
  *_gpt2_layer("mlp.c_fc", "mlp/up"),
  *_gpt2_layer("mlp.c_proj", "mlp/down"),
  *_gpt2_norm("ln_f", "norm"),
]


def _layer(published: str, ours: str, inputs: int = 1) -> Entry:
  """Returns the entry of a matrix in each of Llama's layers."""
  return linear(
    f"model.layers.{{i}}.{published}", f"blocks/{ours}/kernel", inputs=inputs
  )


def _layer_norm(published: str, ours: str) -> Entry:
  name = f"model.layers.{{i}}.{published}.weight"
  return Entry(name, (f"blocks/{ours}/scale",))


_LLAMA_ATTENTION = [
  Entry("model.embed_tokens.weight", ("token_embedding",), 1),
  _layer("self_attn.q_proj", "attention/query"),
  _layer("self_attn.k_proj", "attention/key"),
  _layer("self_attn.v_proj", "attention/value"),
  _layer("self_attn.o_proj", "attention/out", inputs=2),
  _layer_norm("input_layernorm", "attention_norm"),
  _layer_norm("post_attention_layernorm", "mlp_norm"),
  Entry("model.norm.weight", ("norm/scale",)),
]
_LLAMA_HEAD = linear("lm_head", "head/kernel")
_LLAMA_MLP = [
  _layer("mlp.gate_proj", "mlp/gate"),
  _layer("mlp.up_proj", "mlp/up"),
  _layer("mlp.down_proj", "mlp/down"),
]
_MIXTRAL_MOE = [
  _layer("block_sparse_moe.gate", "moe/router"),
  _layer("block_sparse_moe.experts.{e}.w1", "moe/gate"),
  _layer("block_sparse_moe.experts.{e}.w3", "moe/up"),
  _layer("block_sparse_moe.experts.{e}.w2", "moe/down"),
]
LAYOUTS: dict[str, layouts.Table] = {
  "gpt2": _GPT2,
  "llama": [*_LLAMA_ATTENTION, *_LLAMA_MLP, _LLAMA_HEAD],
  "mixtral": [*_LLAMA_ATTENTION, *_MIXTRAL_MOE, _LLAMA_HEAD],
}

# Constants in the files that the model computes itself.
_CONSTANTS = re.compile(
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids"
)
# An array that only this layout has.
_SIGNATURES = {
  "gpt2": "h.0.attn.c_attn.weight",
  "llama": "model.layers.0.mlp.gate_proj.weight",
  "mixtral": "model.layers.0.block_sparse_moe.gate.weight",
}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Converts a published model's arrays to our names and shapes.

  Args:
    flat: arrays of the file, by name; GPT-2's may start with "transformer.".
    like: our parameters by name; gives shapes, and whether layers are stacked.

  Returns:
    See layouts.load; None for a file in another layout.
  """
  flat = {name.removeprefix("transformer."): x for name, x in flat.items()}
  layout = next((k for k, name in _SIGNATURES.items() if name in flat), None)
  if layout is None:
    return None
  flat = {n: x for n, x in flat.items() if not _CONSTANTS.fullmatch(n)}
  if "head/kernel" not in like:
    flat.pop("lm_head.weight", None)  # A copy of the embedding.
  return layouts.load(LAYOUTS[layout], flat, like)


def export(
  model: Any, shapes: Mapping[str, Sequence[int]], layout: str
) -> tuple[dict[str, Any], list[layouts.Tensor]]:
  """Returns the contents of a published folder, for tools/published_export.py.

  Args:
    model: the decoder.
    shapes: shapes of its parameters, by name.
    layout: a name in LAYOUTS.

  Returns:
    (contents of config.json, arrays).

  Raises:
    ConfigError: unknown layout, or one that cannot represent the model.
  """
  layouts.check_model(layout, LAYOUTS, model, _NEEDS)
  config = _config(model, layout)
  return config, layouts.export(layout, LAYOUTS[layout], shapes)


# Values of a model's fields that each layout requires.
_PLAIN = dict(qk_norm=False, attention_softcap=None, logits_softcap=None)
_NEEDS: dict[str, dict[str, Any]] = {
  "gpt2": dict(
    posemb="learn",
    norm="layernorm",
    mlp="gelu",
    use_bias=True,
    tied_head=True,
    window=None,
    **_PLAIN,
  ),
  "llama": dict(
    posemb="rope",
    norm="rmsnorm",
    mlp="swiglu",
    use_bias=False,
    window=None,
    **_PLAIN,
  ),
  "mixtral": dict(
    posemb="rope", norm="rmsnorm", mlp="swiglu", use_bias=False, **_PLAIN
  ),
}


def _config(model: Any, layout: str) -> dict[str, Any]:
  """Returns the contents of config.json."""
  if (model.moe is not None) != (layout == "mixtral"):
    raise settings.ConfigError(
      f"--layout={layout}: expected config.model.moe for the layout mixtral "
      f"and None for all others, got {model.moe}."
    )
  if layout == "gpt2":
    heads = (model.num_kv_heads, model.num_heads * model.head_dim)
    if heads != (model.num_heads, model.width):
      raise settings.ConfigError(
        f"--layout=gpt2: expected num_kv_heads={model.num_heads} and num_heads "
        f"x head_dim={model.width}, got {heads[0]} and {heads[1]}."
      )
    return {
      "architectures": ["GPT2LMHeadModel"],
      "model_type": "gpt2",
      "vocab_size": model.vocab_size,
      "n_positions": model.max_len,
      "n_embd": model.width,
      "n_layer": model.depth,
      "n_head": model.num_heads,
      "n_inner": model.mlp_dim,
      "activation_function": "gelu_new",
      "layer_norm_epsilon": model.norm_eps,
      "tie_word_embeddings": True,
      "bos_token_id": None,
      "eos_token_id": None,
    }
  scaling = model.rope_scaling and dict(model.rope_scaling)
  if scaling:
    scaling["rope_type"] = scaling.pop("type")
    if "original_len" in scaling:
      old = scaling.pop("original_len")
      scaling["original_max_position_embeddings"] = old
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": model.vocab_size,
    "max_position_embeddings": model.max_len or 2048,
    "hidden_size": model.width,
    "intermediate_size": model.mlp_dim,
    "num_hidden_layers": model.depth,
    "num_attention_heads": model.num_heads,
    "num_key_value_heads": model.num_kv_heads,
    "head_dim": model.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": model.norm_eps,
    "rope_theta": model.rope_theta,
    "rope_scaling": scaling,
    "tie_word_embeddings": model.tied_head,
    "bos_token_id": None,
    "eos_token_id": None,
  }
  if layout == "llama":
    return config
  experts = {
    "num_local_experts": model.moe.num_experts,
    "num_experts_per_tok": model.moe.top_k,
  }
  return config | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": model.window,
    **experts,
  }
