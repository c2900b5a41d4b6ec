"""Layers of Gated DeltaNet, among layers of attention."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.decoders.activation_rules import (
  plain_activation,
)
from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.layer_patterns import ByLayer

LINEAR, FULL = "linear_attention", "full_attention"
_INTERVAL = "full_attention_interval"


def deltanet(
  *, norms: Mapping[str, str] | None = None, **options: Key | float | None
) -> Rule:
  """Every fourth layer is attention, or the layers that `layer_types` says.

  The activation of MLPs also follows the convolutions.

  Args:
    norms: `norm_at` of each type of layer, if they differ.
    **options: options of `deltanet`: the `Key` that has it, or its value in all
      models of the family.
  """
  option_keys = {x: key for x, key in options.items() if isinstance(key, Key)}
  constants = {x: y for x, y in options.items() if x not in option_keys}

  def types(config: ConfigJson) -> list[str]:
    given, depth = config["layer_types"], config["num_hidden_layers"]
    if given is None:
      period = config[_INTERVAL]
      return [LINEAR if (i + 1) % period else FULL for i in range(depth)]
    if len(given) != depth or not {*given} <= {LINEAR, FULL}:
      raise config.error(
        f"layer_types={given!r}: expected {LINEAR!r} or {FULL!r} for each of "
        f"the {depth} layers."
      )
    return list(given)

  def read(config: ConfigJson) -> dict[str, Any]:
    recurrent = {name: config[key.name] for name, key in option_keys.items()}
    recurrent |= constants | {"activation": plain_activation(config)}
    kinds = types(config)
    fields: dict[str, Any] = {
      "deltanet": ByLayer(recurrent if x == LINEAR else None for x in kinds)
    }
    if norms is not None:
      fields["norm_at"] = ByLayer(norms[x] for x in kinds)
    return fields

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["deltanet"]
    config: dict[str, Any] = {
      "layer_types": [FULL if x is None else LINEAR for x in layers]
    }
    for recurrent in layers:
      if recurrent is not None:
        return config | {
          key.name: recurrent[name] for name, key in option_keys.items()
        }
    return config

  keys = {key.name: key.default for key in option_keys.values()}
  keys |= {"layer_types": None, _INTERVAL: 4, "hidden_act": "silu"}
  names = ("deltanet",) if norms is None else ("deltanet", "norm_at")
  return Rule(names, keys, read, write)
