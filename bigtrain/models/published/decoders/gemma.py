"""Gemma 1 to 4, and VaultGemma.

Each version is the one before it with changes, except Gemma 4, which begins
with Llama again: its layers differ in so much (windows, heads, rotations, MLPs)
that rules of its own read them by layer.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders.activation_rules import (
  GATED,
  activation,
)
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  SparseLayers,
  experts,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import (
  of_type,
  read_scaling,
  rope,
  written_scaling,
)
from bigtrain.models.published.decoders.shared_arrays import (
  ATTENTION,
  ENDS,
  MLP,
  NORMS_AFTER,
)
from bigtrain.models.published.decoders.window_rules import (
  FULL,
  SLIDING,
  full_every,
  windows,
)
from bigtrain.models.published.families import (
  ConfigJson,
  Key,
  Rule,
  converted,
)
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import (
  linear,
  norm,
  plain,
  table,
  transposed,
)

# Each branch has a norm before and after it, arXiv 2408.00118, section 2.
_SANDWICH_ARRAYS = table(
  ENDS,
  ATTENTION,
  NORMS_AFTER,
  MLP,
  norm("model.layers.{i}.input_layernorm", "blocks/attention_norm"),
  norm("model.layers.{i}.pre_feedforward_layernorm", "blocks/mlp_norm"),
)


def _query_scalar() -> Rule:
  """The attention's scale, as the number whose inverse root it is."""
  return converted(
    "attention_scale",
    Key("query_pre_attn_scalar", 256),
    read=lambda number: number**-0.5,
    write=lambda scales: round(scales[0] ** -2),  # The library's is an int.
  )


GEMMA = LLAMA.but(
  "gemma",
  "GemmaForCausalLM",
  # Scales of norms are stored without the 1 that is added to them.
  constants={"norm_offset": 1.0, "embed_multiplier": "sqrt_width"},
  rules=(
    # In the first files "gelu" means the tanh form too.
    activation({**GATED, "gelu": "geglu"}, "gelu_pytorch_tanh"),
    biases(attention_bias=("qkv", "out")),
  ),
  requires={
    "hidden_activation": (None, "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
  },
  defaults={
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "intermediate_size": 24576,
    "tie_word_embeddings": True,
  },
)

GEMMA2 = GEMMA.but(
  "gemma2",
  "Gemma2ForCausalLM",
  arrays=_SANDWICH_ARRAYS,
  keys={
    "attention_softcap": Key("attn_logit_softcapping", 50.0),
    "logits_softcap": Key("final_logit_softcapping", 30.0),
  },
  constants={"norm_at": "sandwich"},
  rules=(
    activation(GATED, "gelu_pytorch_tanh", "hidden_activation"),
    _query_scalar(),
    windows(full_every(2)),
  ),
  requires={"hidden_activation": tuple(GATED)},
  harmless=("hidden_act", "sliding_window_size"),
  defaults={
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
  },
)

# Gemma 2 without the norms after attention and MLP.
VAULTGEMMA = GEMMA2.but(
  "vaultgemma",
  "VaultGemmaForCausalLM",
  without=("norm_at",),
  arrays=[x for x in _SANDWICH_ARRAYS if x not in NORMS_AFTER],
)

_GEMMA3_LAYERS = full_every(6, key="sliding_window_pattern")
GEMMA3 = GEMMA.but(
  "gemma3_text",
  "Gemma3ForCausalLM",
  arrays=_SANDWICH_ARRAYS,
  keys={"logits_softcap": Key("final_logit_softcapping")},
  constants={"norm_at": "sandwich", "qk_norm": "head"},
  rules=(
    activation(GATED, "gelu_pytorch_tanh", "hidden_activation"),
    _query_scalar(),
    windows(_GEMMA3_LAYERS),
    # Layers with a window rotate faster.
    rope(theta=1e6, types=_GEMMA3_LAYERS, local_theta=1e4),
  ),
  requires={"hidden_activation": tuple(GATED)},
  # The library stores the softcap of attention but never applies it.
  harmless=("hidden_act", "attn_logit_softcapping", "_sliding_window_pattern"),
  defaults={
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
  },
)

_GEMMA4_ARRAYS = table(
  _SANDWICH_ARRAYS,
  plain("model.layers.{i}.layer_scalar", "blocks/layer_scalar"),
  plain("model.embed_tokens_per_layer.weight", "layer_inputs/embedding"),
  linear("model.per_layer_model_projection", "layer_inputs/projection"),
  norm("model.per_layer_projection_norm", "layer_inputs/norm"),
  linear("model.layers.{i}.per_layer_input_gate", "blocks/layer_input_gate"),
  linear("model.layers.{i}.per_layer_projection", "blocks/layer_input_out"),
  norm("model.layers.{i}.post_per_layer_input_norm", "blocks/layer_input_norm"),
  norm(
    "model.layers.{i}.post_feedforward_layernorm_1", "blocks/mlp_own_post_norm"
  ),
  norm("model.layers.{i}.pre_feedforward_layernorm_2", "blocks/experts_norm"),
  norm(
    "model.layers.{i}.post_feedforward_layernorm_2", "blocks/experts_post_norm"
  ),
  linear("model.layers.{i}.router.proj", "blocks/moe/router"),
  plain("model.layers.{i}.router.scale", "blocks/moe/router_scale"),
  plain("model.layers.{i}.router.per_expert_scale", "blocks/moe/expert_scale"),
  # All experts of a layer are in one array.
  transposed(
    "model.layers.{i}.experts.gate_up_proj",
    "blocks/moe/gate/kernel",
    "blocks/moe/up/kernel",
  ),
  transposed("model.layers.{i}.experts.down_proj", "blocks/moe/down/kernel"),
)
# Rotations of files without `rope_parameters`.
_GEMMA4_ROPE: Mapping[str, Mapping[str, Any]] = {
  SLIDING: {"rope_type": "default", "rope_theta": 1e4},
  FULL: {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e6,
  },
}
_LAYERS = full_every(6)


def _types_of_layers(config: ConfigJson) -> list[str]:
  """Every sixth layer sees all positions, and so does the last one."""
  return [*_LAYERS.read(config)[:-1], FULL]


def _gemma4_rotation(config: ConfigJson, kind: str) -> dict[str, Any]:
  stored = of_type(config["rope_parameters"] or _GEMMA4_ROPE, kind)
  if not stored.get("rope_theta"):
    raise config.error(f"rope_parameters: {kind}: rope_theta: missing.")
  if stored.get("rope_type") == "proportional":
    scaling: dict[str, Any] | None = {
      "type": "proportional",
      "fraction": stored.get("partial_rotary_factor", 1.0),
      "factor": stored.get("factor", 1.0),
    }
  else:
    if (share := stored.get("partial_rotary_factor", 1.0)) != 1.0:
      raise config.error(
        f"rope_parameters: {kind}: partial_rotary_factor={share}: expected 1.0 "
        "with this rope_type."
      )
    scaling = read_scaling(config, stored)
  return {"rope_theta": stored["rope_theta"], "rope_scaling": scaling}


def _gemma4_layers() -> Rule:
  """Windows, rotations and heads by type of layer.

  Published files have the global layers' heads in keys of their own; those that
  the library writes have them by layer, in `per_layer_config`.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    same = bool(config["attention_k_eq_v"])
    global_heads = {"head_dim": config["global_head_dim"]}
    if same and config["num_global_key_value_heads"]:
      number = config["num_global_key_value_heads"]
      global_heads["num_key_value_heads"] = number
    by_number = config["per_layer_config"]
    layers = []
    for i, kind in enumerate(_types_of_layers(config)):
      is_global = kind == FULL
      own = global_heads if is_global else {}
      if by_number is not None:
        own = by_number.get(str(i)) or {}
      layer = {
        "window": None if is_global else config["sliding_window"],
        "head_dim": own.get("head_dim", config["head_dim"]),
        "num_kv_heads": own.get(
          "num_key_value_heads", config["num_key_value_heads"]
        ),
        "keys_as_values": is_global and same,
      }
      layers.append(layer | _gemma4_rotation(config, kind))
    return {name: ByLayer(x[name] for x in layers) for name in layers[0]}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    types = [FULL if x is None else SLIDING for x in fields["window"]]
    first = {kind: types.index(kind) for kind in sorted({*types})}
    rope = {}
    for kind, i in first.items():
      scaling = fields["rope_scaling"][i]
      rope[kind] = {"rope_theta": fields["rope_theta"][i]}
      if scaling and scaling["type"] == "proportional":
        rope[kind] |= {
          "rope_type": "proportional",
          "partial_rotary_factor": scaling["fraction"],
        }
        if scaling["factor"] != 1:
          rope[kind]["factor"] = scaling["factor"]
      else:
        rope[kind] |= written_scaling(scaling)
    i = first.get(SLIDING, 0)
    j = first.get(FULL, 0)
    return {
      "layer_types": types,
      "sliding_window": fields["window"][i] or 512,
      "rope_parameters": {**_GEMMA4_ROPE, **rope},
      "head_dim": fields["head_dim"][i],
      "global_head_dim": fields["head_dim"][j],
      "num_key_value_heads": fields["num_kv_heads"][i],
      "num_global_key_value_heads": fields["num_kv_heads"][j],
      "attention_k_eq_v": any(fields["keys_as_values"]),
    }

  keys = {
    "layer_types": None,
    "sliding_window": 512,
    "rope_parameters": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "per_layer_config": None,
  }
  names = ("window", "head_dim", "num_kv_heads", "keys_as_values")
  return Rule((*names, "rope_theta", "rope_scaling"), keys, read, write)


def _sharing_layers() -> Rule:
  """The last layers have no keys and values; their MLPs may be twice as wide.

  They read those of the last layer of their type before them.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    depth, number = config["num_hidden_layers"], config["num_kv_shared_layers"]
    width = shared_width = config["intermediate_size"]
    if config["use_double_wide_mlp"]:
      shared_width = 2 * width
    shares = [i >= depth - number for i in range(depth)]
    return {
      "shares_kv": ByLayer(shares),
      "mlp_dim": ByLayer(shared_width if x else width for x in shares),
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    number, widths = sum(fields["shares_kv"]), fields["mlp_dim"]
    # Layers of other families may have no MLP.
    is_double = None not in widths and widths[-1] == 2 * widths[0]
    return {
      "num_kv_shared_layers": number,
      "intermediate_size": widths[0],
      "use_double_wide_mlp": number > 0 and is_double,
    }

  keys = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "intermediate_size": 9216,
  }
  return Rule(("shares_kv", "mlp_dim"), keys, read, write)


def _layer_inputs() -> Rule:
  """Embeddings of each layer, in the models for devices."""
  width, vocabulary = (
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
  )

  def read(config: ConfigJson) -> dict[str, Any]:
    if not config[width]:
      return {"layer_inputs": None}
    options = {"dim": config[width]}
    # The layers' input for an image token.
    if config["pad_token_id"]:
      options["image_id"] = config["pad_token_id"]
    # Without its own size, the table grows with the model's vocabulary.
    if config[vocabulary] != config["vocab_size"]:
      options["vocab_size"] = config[vocabulary]
    return {"layer_inputs": options}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    options = fields["layer_inputs"]
    if options is None:
      return {width: 0}
    return {
      width: options["dim"],
      vocabulary: options["vocab_size"],
      "pad_token_id": options.get("image_id", 0),
    }

  keys = {width: 256, vocabulary: 262144, "pad_token_id": 0}
  return Rule(("layer_inputs",), keys, read, write)


def _experts_everywhere() -> SparseLayers:
  """Experts in all layers, if a key says so."""
  key = "enable_moe_block"
  return SparseLayers(
    {key: False},
    lambda config: [bool(config[key])] * config["num_hidden_layers"],
    lambda sparse: {key: any(sparse)},
  )


GEMMA4 = LLAMA.but(
  "gemma4_text",
  "Gemma4ForCausalLM",
  # These are by layer.
  without=("num_kv_heads", "head_dim", "rope_theta", "mlp_dim"),
  arrays=_GEMMA4_ARRAYS,
  keys={"logits_softcap": Key("final_logit_softcapping")},
  # Norms have plain scales, unlike in Gemma 1 to 3.
  constants={
    "norm_at": "sandwich",
    "embed_multiplier": "sqrt_width",
    "qk_norm": "head",
    "v_norm": True,
    "attention_scale": 1.0,
    "layer_scalar": True,
  },
  rules=(
    activation(GATED, "gelu_pytorch_tanh", "hidden_activation"),
    biases(attention_bias=("qkv", "out")),
    _gemma4_layers(),
    _sharing_layers(),
    _layer_inputs(),
    experts(
      num_experts=Key("num_experts"),
      top_k=Key("top_k_experts"),
      mlp_dim=Key("moe_intermediate_size"),
      normalize=True,
      scaled_router=True,
      beside_mlp=True,
      layers=_experts_everywhere(),
    ),
  ),
  requires={
    # "vision" lets tokens of an image see each other; text is causal.
    "use_bidirectional_attention": (False, None, "vision"),
  },
  defaults={
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
  },
)

# Reads pictures without an encoder; its text model is Gemma 4's dense one.
GEMMA4_UNIFIED = GEMMA4.but(
  "gemma4_unified_text",
  "Gemma4UnifiedForCausalLM",
  without=("moe", "layer_inputs"),
  arrays=table(
    _SANDWICH_ARRAYS,
    plain("model.layers.{i}.layer_scalar", "blocks/layer_scalar"),
  ),
  defaults={"max_position_embeddings": 262144, "sliding_window": 1024},
)
