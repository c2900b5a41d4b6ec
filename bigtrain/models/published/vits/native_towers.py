"""Image towers for pictures of any shape: of Qwen-VL, Gemma 4 and Pixtral.

They are of models/native_vit.py, and have no files of their own: their configs
are `vision_config` of models that read pictures and texts.
"""

import math
from collections.abc import Mapping
from typing import Any

from bigtrain.models.published import encoder_rules
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Key,
  Rule,
  choice,
  converted,
)
from bigtrain.models.published.tables import (
  Table,
  conv,
  dense,
  linear,
  norm,
  plain,
  table,
  within,
)

_ATTENTION = "MultiHeadDotProductAttention_0"
_MLP = "MlpBlock_0"


def _arrays(*of_mlp: Table) -> Table:
  return table(
    conv("patch_embed.proj", "patch_embedding"),
    plain("pos_embed.weight", "pos_embedding", ndim=2),
    within(
      "blocks.{i}.",
      "Transformer/encoderblock/",
      norm("norm1", "LayerNorm_0"),
      norm("norm2", "LayerNorm_1"),
      dense(
        "attn.qkv",
        f"{_ATTENTION}/query",
        f"{_ATTENTION}/key",
        f"{_ATTENTION}/value",
      ),
      dense("attn.proj", f"{_ATTENTION}/out"),
      *of_mlp,
    ),
  )


def _theta(default: float = 1e4) -> Rule:
  """The base of the rotary wavelengths, which hardly any file says."""
  key = "rope_parameters"

  def read(config: ConfigJson) -> dict[str, Any]:
    values = config[key] or {}
    kind = values.get("rope_type", "axial")
    if kind != "axial":
      raise config.error(f"{key}: rope_type={kind!r}: expected 'axial'.")
    return {"rope_theta": values.get("rope_theta", default)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: {"rope_type": "axial", "rope_theta": fields["rope_theta"]}}

  return Rule(("rope_theta",), {key: None}, read, write)


def _table_of_positions() -> Rule:
  key = "num_position_embeddings"

  def read(config: ConfigJson) -> dict[str, Any]:
    side = math.isqrt(config[key])
    if side**2 != config[key]:
      raise config.error(f"{key}={config[key]}: expected a square.")
    return {"posemb_grid": (side, side)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    rows, columns = fields["posemb_grid"] or (0, 0)
    return {key: rows * columns}

  return Rule(("posemb_grid",), {key: 2304}, read, write)


def _window() -> Rule:
  """The side of windows in pixels, and the layers without."""
  size, layers = "window_size", "fullatt_block_indexes"

  def read(config: ConfigJson) -> dict[str, Any]:
    # In whole squares of patches.
    merge = config["spatial_merge_size"]
    squares = config[size] // merge // config["patch_size"]
    return {"window": squares * merge, "whole_layers": tuple(config[layers])}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    window = fields["window"] or 0
    return {
      size: window * fields["patch_size"],
      layers: list(fields["whole_layers"]),
    }

  keys = {size: 112, layers: (7, 15, 23, 31)}
  return Rule(("window", "whole_layers"), keys, read, write)


# Fields that most towers do not use.
_NEUTRAL: Mapping[str, Any] = {
  "ready": "squares",
  "partial_squares": False,
  "centred": False,
  "posemb_sides": None,
  "rope_by_halves": False,
  "rope_alternates": False,
  "pre_norm": False,
  "use_bias": ("mlp", "out", "qkv"),
  "head_dim": None,
  "num_kv_heads": None,
  "qk_norm": None,
  "v_norm": False,
  "attention_scale": None,
  "branch_norm": False,
  "clipped": False,
  "root_scale": False,
  "standardize": False,
}
_PLAIN_MLP = table(
  dense("mlp.linear_fc1", f"{_MLP}/Dense_0"),
  dense("mlp.linear_fc2", f"{_MLP}/Dense_1"),
)
QWEN3_VL = Family(
  model_type="qwen3_vl_vision",
  architecture="",
  arrays=_arrays(_PLAIN_MLP),
  keys={
    "width": Key("hidden_size", 1152),
    "depth": Key("depth", 27),
    "num_heads": Key("num_heads", 16),
    "mlp_dim": Key("intermediate_size", 4304),
    "patch_size": Key("patch_size", 16),
    "frames": Key("temporal_patch_size", 2),
    "channels": Key("in_channels", 3),
    "merge": Key("spatial_merge_size", 2),
  },
  constants={
    "norm": "layernorm",
    "norm_eps": 1e-6,
    "patch_bias": True,
    "window": None,
    "whole_layers": (),
  },
  rules=(
    encoder_rules.mlp(),
    _table_of_positions(),
    _theta(),
    converted(
      "taps", Key("deepstack_visual_indexes", (8, 16, 24)), tuple, list
    ),
  ),
  harmless=(*encoder_rules.HARMLESS, "out_hidden_size", "initializer_range"),
  aliases={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
  defaults={"hidden_act": "gelu_pytorch_tanh"},
  neutral=_NEUTRAL,
)
QWEN3_VL_MOE = QWEN3_VL.but("qwen3_vl_moe_vision", "")
# Without features of inner layers.
QWEN3_5 = QWEN3_VL.but(
  "qwen3_5_vision",
  "",
  without=("taps",),
  constants={"taps": ()},
  harmless=("deepstack_visual_indexes",),
)
QWEN3_5_MOE = QWEN3_5.but("qwen3_5_moe_vision", "")
QWEN2_5_VL = QWEN3_VL.but(
  "qwen2_5_vl_vision",
  "",
  without=(
    "mlp",
    "posemb_grid",
    "taps",
    "window",
    "whole_layers",
    "norm",
    "patch_bias",
  ),
  arrays=_arrays(
    dense("mlp.gate_proj", f"{_MLP}/gate"),
    dense("mlp.up_proj", f"{_MLP}/Dense_0"),
    dense("mlp.down_proj", f"{_MLP}/Dense_1"),
  ),
  constants={
    "norm": "rmsnorm",
    "patch_bias": False,
    "posemb_grid": None,
    "taps": (),
  },
  rules=(choice("mlp", "hidden_act", {"silu": "swiglu"}), _window()),
  harmless=("tokens_per_second", "in_chans", "spatial_patch_size"),
  defaults={
    "hidden_size": 3584,
    "depth": 32,
    "intermediate_size": 3420,
    "patch_size": 14,
  },
)


EXAONE4_5 = QWEN2_5_VL.but(
  "exaone4_5_vision",
  "",
  keys={"num_kv_heads": Key("num_key_value_heads", 8)},
)


def _mlp_ratio() -> Rule:
  """The width of MLPs, a multiple of the tower's."""
  return Rule(
    ("mlp_dim",),
    {"mlp_ratio": 4},
    lambda config: {"mlp_dim": int(config["embed_dim"] * config["mlp_ratio"])},
    lambda fields: {"mlp_ratio": fields["mlp_dim"] // fields["width"]},
  )


QWEN2_VL = QWEN3_VL.but(
  "qwen2_vl_vision",
  "",
  without=("posemb_grid", "taps", "patch_bias", "width", "mlp_dim"),
  arrays=_arrays(
    dense("mlp.fc1", f"{_MLP}/Dense_0"), dense("mlp.fc2", f"{_MLP}/Dense_1")
  ),
  keys={"width": Key("embed_dim", 1280)},
  constants={"patch_bias": False, "posemb_grid": None, "taps": ()},
  rules=(_mlp_ratio(),),
  # The width of the decoder, which its own config says too.
  harmless=("hidden_size", "in_chans", "spatial_patch_size"),
  defaults={"depth": 32, "patch_size": 14, "hidden_act": "quick_gelu"},
)


def _clipped(published: str, ours: str) -> Table:
  """A linear layer with bounds, which some models lack."""
  bounds = [
    plain(f"{published}.{name}", f"{ours}_bounds/{name}", ndim=0)
    for name in ("input_min", "input_max", "output_min", "output_max")
  ]
  return table(linear(f"{published}.linear", ours), *bounds)


GEMMA4 = Family(
  model_type="gemma4_vision",
  architecture="",
  arrays=table(
    linear("patch_embedder.input_proj", "patch_embedding"),
    plain("patch_embedder.position_embedding_table", "side_embedding"),
    within(
      "encoder.layers.{i}.",
      "Transformer/encoderblock/",
      norm("input_layernorm", "LayerNorm_0"),
      norm("post_attention_layernorm", "branch_norm_0"),
      norm("pre_feedforward_layernorm", "LayerNorm_1"),
      norm("post_feedforward_layernorm", "branch_norm_1"),
      _clipped("self_attn.q_proj", f"{_ATTENTION}/query"),
      _clipped("self_attn.k_proj", f"{_ATTENTION}/key"),
      _clipped("self_attn.v_proj", f"{_ATTENTION}/value"),
      _clipped("self_attn.o_proj", f"{_ATTENTION}/out"),
      norm("self_attn.q_norm", f"{_ATTENTION}/query_norm"),
      norm("self_attn.k_norm", f"{_ATTENTION}/key_norm"),
      _clipped("mlp.gate_proj", f"{_MLP}/gate"),
      _clipped("mlp.up_proj", f"{_MLP}/Dense_0"),
      _clipped("mlp.down_proj", f"{_MLP}/Dense_1"),
    ),
    plain("std_bias", "standard_mean"),
    plain("std_scale", "standard_scale"),
  ),
  keys={
    "width": Key("hidden_size", 768),
    "depth": Key("num_hidden_layers", 16),
    "num_heads": Key("num_attention_heads", 12),
    "num_kv_heads": Key("num_key_value_heads", 12),
    "head_dim": Key("head_dim", 64),
    "mlp_dim": Key("intermediate_size", 3072),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "patch_size": Key("patch_size", 16),
    "merge": Key("pooling_kernel_size", 3),
    "posemb_sides": Key("position_embedding_size", 10240),
    "clipped": Key("use_clipped_linears", False),
    "standardize": Key("standardize", False),
  },
  constants={
    "frames": 1,
    "channels": 3,
    "norm": "rmsnorm",
    "patch_bias": False,
    "use_bias": (),
    "posemb_grid": None,
    "window": None,
    "whole_layers": (),
    "taps": (),
    "ready": "rows",
    "centred": True,
    "rope_by_halves": True,
    "qk_norm": "head",
    "v_norm": True,
    "attention_scale": 1.0,
    "branch_norm": True,
    "root_scale": True,
  },
  rules=(
    choice(
      "mlp",
      "hidden_activation",
      {"gelu_pytorch_tanh": "geglu", "gelu_fast": "geglu", "silu": "swiglu"},
    ),
    _theta(100.0),
  ),
  # The library's layers have no biases, even if `attention_bias` is true.
  harmless=(
    *encoder_rules.HARMLESS,
    "attention_bias",
    "max_position_embeddings",
  ),
  neutral=_NEUTRAL,
)
_IN_PIXTRAL = within(
  "transformer.layers.{i}.",
  "Transformer/encoderblock/",
  norm("attention_norm", "LayerNorm_0"),
  norm("ffn_norm", "LayerNorm_1"),
  dense("attention.q_proj", f"{_ATTENTION}/query"),
  dense("attention.k_proj", f"{_ATTENTION}/key"),
  dense("attention.v_proj", f"{_ATTENTION}/value"),
  dense("attention.o_proj", f"{_ATTENTION}/out"),
  dense("feed_forward.gate_proj", f"{_MLP}/gate"),
  dense("feed_forward.up_proj", f"{_MLP}/Dense_0"),
  dense("feed_forward.down_proj", f"{_MLP}/Dense_1"),
)
PIXTRAL = Family(
  model_type="pixtral",
  architecture="",
  arrays=table(
    # Of torch: without frames.
    [
      entry._replace(ndim=4)
      for entry in conv("patch_conv", "patch_embedding")[:1]
    ],
    norm("ln_pre", "pre_norm"),
    _IN_PIXTRAL,
  ),
  keys={
    "width": Key("hidden_size", 1024),
    "depth": Key("num_hidden_layers", 24),
    "num_heads": Key("num_attention_heads", 16),
    "mlp_dim": Key("intermediate_size", 4096),
    "patch_size": Key("patch_size", 16),
  },
  constants={
    "frames": 1,
    "channels": 3,
    "merge": 1,
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "patch_bias": False,
    "pre_norm": True,
    "use_bias": (),
    "posemb_grid": None,
    "rope_alternates": True,
    "window": None,
    "whole_layers": (),
    "taps": (),
  },
  rules=(
    choice(
      "mlp",
      "hidden_act",
      {"gelu": "geglu_erf", "silu": "swiglu", "gelu_pytorch_tanh": "geglu"},
    ),
    _theta(),
  ),
  # Pictures may be as large as `image_size`, or larger.
  harmless=(*encoder_rules.HARMLESS, "head_dim", "initializer_range"),
  neutral=_NEUTRAL,
)
FAMILIES: Mapping[str, Family] = {
  family.model_type: family
  for family in (
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN2_5_VL,
    QWEN2_VL,
    EXAONE4_5,
    GEMMA4,
    PIXTRAL,
  )
}


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """Comparable fields of a tower."""
  window = values.get("window")
  H = values["num_heads"]
  heads = {
    "head_dim": values.get("head_dim") or values["width"] // H,
    "num_kv_heads": values.get("num_kv_heads") or H,
  }
  return {
    **values,
    **heads,
    "use_bias": tuple(sorted(values["use_bias"])),
    "whole_layers": tuple(values.get("whole_layers") or ()) if window else (),
    "taps": tuple(values.get("taps") or ()),
  }
