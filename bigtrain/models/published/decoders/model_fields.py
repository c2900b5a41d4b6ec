"""Fields of models/decoder.py: their neutral values, and a form to compare."""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays.rope_scalings import ROPE_SCALINGS
from bigtrain.models.published.decoders.bias_rules import SITES
from bigtrain.models.published.layer_patterns import ByLayer, by_layer

# Fields of the architecture, and the values that a model has by itself.
NEUTRAL: Mapping[str, Any] = {
  "window": None,
  "chunk": None,
  "moe": None,
  "mla": None,
  "deltanet": None,
  "short_conv": None,
  "v_norm": False,
  "keys_as_values": False,
  "shares_kv": False,
  "layer_inputs": None,
  "layer_scalar": False,
  "output_gate": False,
  "num_classes": None,
  "pool": "last",
  "rope_scaling": None,
  "rope_fraction": 1.0,
  "query_scale": None,
  "attention_scale": None,
  "norm_offset": 0.0,
  "norm_scaled": True,
  "embed_norm": False,
  "norm_at": "pre",
  "parallel": False,
  "parallel_norms": False,
  "qk_norm": None,
  "qk_norm_after_rope": False,
  "qkv_clip": None,
  "rope_interleaved": False,
  "rope_reversed": False,
  "rope_axes": None,
  "attention_softcap": None,
  "logits_softcap": None,
  "sinks": False,
  "mlp_clip": None,
  "embed_multiplier": 1.0,
  "residual_multiplier": 1.0,
  "logits_multiplier": 1.0,
}


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """Comparable fields of a decoder: defaults filled in, layers one by one."""
  given = {name: x for name, x in values.items() if x is not None}
  result = {**values, **NEUTRAL, **given}
  layers = [_layer(layer, result) for layer in by_layer(result)]
  for name in layers[0]:
    result[name] = ByLayer(layer[name] for layer in layers)
  if not any(result["qk_norm"]):
    result["qk_norm_after_rope"] = False
  result["use_bias"] = _bias_sites(result)
  if not result["num_classes"]:  # Then only the user's task uses `pool`.
    result["pool"] = "last"
  result["mlp_clip"] = _as_dict(result["mlp_clip"])
  if result["layer_inputs"] is not None:
    vocab_size = {"vocab_size": result["vocab_size"]}
    given = _without_none(_as_dict(result["layer_inputs"]))
    if not given.get("image_id"):  # The default.
      given.pop("image_id", None)
    result["layer_inputs"] = {**vocab_size, **given}
  if result["rope_axes"]:
    axes = {"interleaved": False, **_as_dict(result["rope_axes"])}
    result["rope_axes"] = {**axes, "sections": tuple(axes["sections"])}
  for scaling in filter(None, result["rope_scaling"]):
    if scaling["type"] == "dynamic":
      # Files have one key for both lengths.
      result["max_len"] = scaling["original_len"]
  for name in ("kinds", "layers", "first_layers"):
    result.pop(name, None)
  return result


def _as_dict(options: Any) -> Any:
  """Options that are a mapping or a named tuple, as a dict; None stays."""
  if not options:
    return options
  return dict(options._asdict() if hasattr(options, "_asdict") else options)


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
  return {name: x for name, x in options.items() if x is not None}


def _bias_sites(fields: Mapping[str, Any]) -> tuple[str, ...]:
  """Sites of biases, without those that the model does not have."""
  sites = fields["use_bias"]
  if isinstance(sites, bool):
    sites = ("qkv", "out", "mlp", "norm") if sites else ()
  if "qkv_without_gate" in sites and not fields["output_gate"]:
    sites = ("qkv", *sites)
  has_mlps = any(
    moe is None or moe["shared_dim"] or moe["beside_mlp"]
    for moe in fields["moe"]
  )
  has_experts = any(fields["moe"])
  exists = {
    "qkv_without_gate": "qkv" not in sites,
    "qkv": True,
    "out": True,
    "mlp": has_mlps,
    "norm": fields["norm"] != "rmsnorm",
    "experts": has_experts,
    "router": has_experts,
    "head": True,
  }
  return tuple(site for site in SITES if site in sites and exists[site])


def _layer(layer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
  layer = {**layer, "moe": _experts(layer["moe"], layer["mlp_dim"])}
  if isinstance(layer["qk_norm"], bool):
    layer["qk_norm"] = "head" if layer["qk_norm"] else None
  if layer["shares_kv"]:  # There are no values.
    layer["keys_as_values"] = False
  if layer["moe"] is not None and not layer["moe"]["beside_mlp"]:
    layer["mlp_dim"] = None
  if layer["mla"] is not None:
    latents = {"q_rank": None, "norm_eps": 1e-6, **_as_dict(layer["mla"])}
    layer["mla"] = latents
  layer["deltanet"] = _deltanet(layer["deltanet"], fields["norm_eps"])
  if layer["short_conv"] is not None:
    layer["short_conv"] = {"bias": False, **_as_dict(layer["short_conv"])}
  if layer["query_scale"]:
    layer["query_scale"] = {"log": "log", **_as_dict(layer["query_scale"])}
  if layer["attention_scale"] is None:
    layer["attention_scale"] = layer["head_dim"] ** -0.5
  if layer["posemb"] != "rope":
    for name in ("rope_theta", "rope_scaling", "rope_fraction"):
      layer[name] = None
    return layer
  given = layer["rope_scaling"] or {}
  scaling = {name: x for name, x in given.items() if x is not None}
  kind = str(scaling.get("type"))
  if kind in ROPE_SCALINGS:
    scaling = {**ROPE_SCALINGS[kind].defaults, **scaling}
  if kind == "longrope" and "factor" not in scaling:
    scaling["factor"] = fields["max_len"] / scaling["original_len"]
  return {**layer, "rope_scaling": scaling or None}


def _deltanet(options: Any, norm_eps: float) -> dict[str, Any] | None:
  """Options with all defaults, as in models/layers/deltanet.py."""
  if options is None:
    return None
  given = {x: y for x, y in _as_dict(options).items() if y is not None}
  given.pop("backend", None)  # Every backend computes the same.
  defaults = {
    "num_key_heads": given["num_heads"],
    "key_dim": 128,
    "value_dim": 128,
    "conv_width": 4,
    "negative_eigenvalues": False,
    "decay_rank": None,
    "gate_rank": None,
    "gate": "silu",
    "activation": "silu",
    "norm_eps": norm_eps,
  }
  return {**defaults, **given}


def _experts(options: Any, mlp_dim: int) -> dict[str, Any] | None:
  """Options of experts with all defaults, as in models/layers/moe.py."""
  if options is None:
    return None
  given = {x: y for x, y in _as_dict(options).items() if y is not None}
  top_k = given.get("top_k", 2)
  width = given.get("mlp_dim", mlp_dim)
  score = given.get("score", "softmax")
  normalize = given.get("normalize", top_k > 1)
  least_total = given.get("least_total", 0.0) if normalize else 0.0
  selection_bias = given.get("selection_bias", False)
  # Equal, over all and over the chosen, unless the choice has other scores.
  others = given.get("groups") or selection_bias or least_total
  if score == "softmax" and normalize and not others:
    score = "softmax_of_top"
  shared_dim = given.get("shared_dim", given.get("shared_experts", 0) * width)
  return {
    "num_experts": given.get("num_experts"),
    "top_k": top_k,
    "score": score,
    "normalize": True if score == "softmax_of_top" else normalize,
    "scale": given.get("scale", 1.0),
    "scale_input": given.get("scale_input", False),
    "selection_bias": selection_bias,
    "least_total": least_total,
    "total_epsilon": given.get("total_epsilon", 1e-20) if normalize else 1e-20,
    "groups": _as_dict(given.get("groups")),
    "scaled_router": given.get("scaled_router", False),
    "beside_mlp": given.get("beside_mlp", False),
    "mlp_dim": width,
    "shared_dim": shared_dim,
    "shared_gate": bool(shared_dim) and given.get("shared_gate", False),
  }
