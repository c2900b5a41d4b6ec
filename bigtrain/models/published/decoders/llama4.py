"""Llama 4 (text): chunks of attention, and experts with scaled inputs."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import (
  SparseLayers,
  experts,
  mlp_width,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import dense, linear, plain, table

CHUNKED, FULL = "chunked_attention", "full_attention"
_LAYER = "model.layers.{i}.feed_forward."

_ARRAYS = table(
  shared_arrays.ENDS,
  shared_arrays.ATTENTION,
  shared_arrays.NORMS_BEFORE,
  dense(_LAYER + "gate_proj", "blocks/mlp/gate"),
  dense(_LAYER + "up_proj", "blocks/mlp/up"),
  dense(_LAYER + "down_proj", "blocks/mlp/down"),
  linear(_LAYER + "router", "blocks/moe/router"),
  # All experts of a layer are in one array.
  plain(
    _LAYER + "experts.gate_up_proj",
    "blocks/moe/gate/kernel",
    "blocks/moe/up/kernel",
  ),
  plain(_LAYER + "experts.down_proj", "blocks/moe/down/kernel"),
  dense(_LAYER + "shared_expert.gate_proj", "blocks/shared_experts/gate"),
  dense(_LAYER + "shared_expert.up_proj", "blocks/shared_experts/up"),
  dense(_LAYER + "shared_expert.down_proj", "blocks/shared_experts/down"),
)


def _layers() -> Rule:
  """Chunks, rotation and the scale of queries, by layer.

  By default every fourth layer sees all positions and does not rotate. Its
  queries grow with their position; the others have norms of queries and keys.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    depth, period = (
      config["num_hidden_layers"],
      config["no_rope_layer_interval"],
    )
    rotates = config["no_rope_layers"] or [
      (i + 1) % period != 0 for i in range(depth)
    ]
    rotates = [bool(x) for x in rotates[:depth]]
    types = config["layer_types"]
    if types is None:
      types = [CHUNKED if x else FULL for x in rotates]
    for name, values in {
      "no_rope_layers": rotates,
      "layer_types": types,
    }.items():
      if len(values) != depth:
        raise config.error(f"{name}={values!r}: expected {depth} layers.")
    if not {*types} <= {CHUNKED, FULL}:
      raise config.error(
        f"layer_types={types!r}: expected {CHUNKED!r} or {FULL!r} for each of "
        f"the {depth} layers."
      )
    chunk = config["attention_chunk_size"]
    norm = "l2" if config["use_qk_norm"] else None
    scale = None
    if config["attn_temperature_tuning"]:
      scale = {
        "beta": config["attn_scale"],
        "original_len": int(config["floor_scale"]),
        "log": "log1p",
      }
    return {
      "chunk": ByLayer(chunk if x == CHUNKED else None for x in types),
      "posemb": ByLayer("rope" if x else "none" for x in rotates),
      "qk_norm": ByLayer(norm if x else None for x in rotates),
      "query_scale": ByLayer(None if x else scale for x in rotates),
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    chunks, rotates = fields["chunk"], [x == "rope" for x in fields["posemb"]]
    scale = next(filter(None, fields["query_scale"]), None)
    config = {
      "layer_types": [FULL if x is None else CHUNKED for x in chunks],
      "no_rope_layers": [int(x) for x in rotates],
      # The library makes a mask of chunks, whether layers use it or not.
      "attention_chunk_size": next(filter(None, chunks), 8192),
      "use_qk_norm": any(fields["qk_norm"]),
      "attn_temperature_tuning": scale is not None,
    }
    if scale is not None:
      config["attn_scale"] = scale["beta"]
      config["floor_scale"] = scale["original_len"]
    return config

  keys = {
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
  }
  return Rule(("chunk", "posemb", "qk_norm", "query_scale"), keys, read, write)


def _sparse_layers() -> SparseLayers:
  """The layers in a list; else every so-manieth has experts."""

  def read(config: ConfigJson) -> list[bool]:
    given, step = config["moe_layers"], config["interleave_moe_layer_step"]
    depth = config["num_hidden_layers"]
    if given is None:
      return [(i + 1) % step == 0 for i in range(depth)]
    return [i in given for i in range(depth)]

  return SparseLayers(
    {"moe_layers": None, "interleave_moe_layer_step": 1},
    read,
    lambda sparse: {"moe_layers": [i for i, x in enumerate(sparse) if x]},
  )


LLAMA4 = LLAMA.but(
  "llama4_text",
  "Llama4ForCausalLM",
  without=("posemb", "mlp_dim"),
  arrays=_ARRAYS,
  constants={"rope_interleaved": True, "qk_norm_after_rope": True},
  rules=(
    biases(attention_bias=("qkv", "out")),
    rope(theta=5e5),
    _layers(),
    mlp_width("intermediate_size_mlp"),
    experts(
      num_experts=Key("num_local_experts", 16),
      top_k=Key("num_experts_per_tok", 1),
      mlp_dim=Key("intermediate_size", 8192),
      score="sigmoid",
      normalize=False,
      scale_input=True,
      shared_experts=1,
      layers=_sparse_layers(),
    ),
  ),
  harmless=(
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "for_llm_compressor",
  ),
  defaults={
    "vocab_size": 202048,
    "max_position_embeddings": 131072,
    "hidden_size": 5120,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
  },
)
