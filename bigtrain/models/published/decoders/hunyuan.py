"""Tencent's Hunyuan (version 1), dense and with experts."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders import shared_arrays
from bigtrain.models.published.decoders.bias_rules import biases
from bigtrain.models.published.decoders.expert_rules import mlp_width
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.decoders.rope_rules import rope
from bigtrain.models.published.families import ConfigJson, Rule
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.models.published.tables import renamed, table

_NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
# Of a scaling with `alpha`, which reads none of them.
_UNREAD = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _stretched_rope() -> Rule:
  """Rotary embeddings whose base `alpha` may stretch.

  Files call this scaling "dynamic", although it does not depend on the length
  of a text. An exported file has the resulting base, and no scaling.
  """
  plain = rope()

  def stretched(stored: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    kind = stored.get("rope_type", stored.get("type"))
    if kind != "dynamic" or not stored.get("alpha"):
      return dict(stored)
    rest = {x: y for x, y in stored.items() if x not in ("alpha", *_UNREAD)}
    rest |= {"rope_type": "default", "type": "default"}
    stretch = stored["alpha"] ** (head_dim / (head_dim - 2))
    return rest | {"rope_theta": stored["rope_theta"] * stretch}

  def read(config: ConfigJson) -> Mapping[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    values = ConfigJson(config.path, config)
    for key in ("rope_parameters", "rope_scaling"):
      if stored := config[key]:
        with_base = {"rope_theta": config["rope_theta"] or 1e4, **stored}
        values[key] = stretched(with_base, head_dim)
    return plain.read(values)

  return plain._replace(read=read)


HUNYUAN_DENSE = LLAMA.but(
  "hunyuan_v1_dense",
  "HunYuanDenseV1ForCausalLM",
  arrays=renamed(shared_arrays.LLAMA, _NORMS),
  constants={"qk_norm": "head", "qk_norm_after_rope": True},
  rules=(biases(attention_bias=("qkv", "out")), _stretched_rope()),
  requires={
    "mlp_bias": (False,),
    "use_qk_norm": (True,),
    "use_cla": (False,),
    "use_mla": (False,),
    "norm_type": ("rms",),
    "use_rotary_pos_emb": (True,),
  },
  harmless=("eod_token_id", "attention_head_dim", "cla_share_factor"),
  defaults={"vocab_size": 290943, "rms_norm_eps": 1e-5},
)


def _experts() -> Rule:
  """Experts as wide as an MLP, which stands beside them."""
  number, top_k = "num_experts", "moe_topk"

  def read(config: ConfigJson) -> dict[str, Any]:
    depth = config["num_hidden_layers"]
    tops = config[top_k]
    if isinstance(tops, int):
      tops = [tops] * depth
    if len(tops) < depth:
      raise config.error(f"{top_k}={tops!r}: expected one of {depth} layers.")
    if isinstance(config[number], list):
      raise config.error(
        f"{number}={config[number]!r}: expected one number for all layers."
      )
    experts = {"num_experts": config[number], "normalize": True}
    experts["shared_experts"] = 1
    return {"moe": ByLayer({**experts, "top_k": k} for k in tops[:depth])}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = [x for x in fields["moe"] if x is not None]
    if not layers:
      return {}
    tops = [x["top_k"] for x in layers]
    return {
      number: layers[0]["num_experts"],
      top_k: tops[0] if len({*tops}) == 1 else tops,
    }

  return Rule(("moe",), {number: 1, top_k: 1}, read, write)


_THEIRS = "model.layers.{i}.mlp."
HUNYUAN_MOE = HUNYUAN_DENSE.but(
  "hunyuan_v1_moe",
  "HunYuanMoEV1ForCausalLM",
  arrays=renamed(
    table(
      shared_arrays.ENDS,
      shared_arrays.ATTENTION,
      shared_arrays.NORMS_BEFORE,
      shared_arrays.EXPERTS,
      shared_arrays.SHARED_EXPERTS,
    ),
    {
      **_NORMS,
      _THEIRS + "gate.weight": _THEIRS + "gate.wg.weight",
      _THEIRS + "shared_experts": _THEIRS + "shared_mlp",
    },
  ),
  rules=(mlp_width(), _experts()),
  aliases={
    "num_experts_per_tok": "moe_topk",
    "num_local_experts": "num_experts",
  },
)
