"""Layers of several kinds: fields of a decoder by layer, and as a pattern.

config.json lists what differs between layers. models/decoder.py has a pattern:
`first_layers`, then `layers` again and again, each of them a name in `kinds`,
which has the fields of that kind of layer. `fields` finds the pattern, and
`by_layer` undoes it.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

# Fields that a kind of layer may override, and their neutral values.
FIELDS: Mapping[str, Any] = {
  "posemb": "rope",
  "rope_theta": 1e4,
  "rope_fraction": 1.0,
  "num_heads": None,
  "num_kv_heads": None,
  "head_dim": None,
  "mlp_dim": None,
  "mla": None,
  "window": None,
  "chunk": None,
  "qk_norm": None,
  "moe": None,
  "deltanet": None,
  "short_conv": None,
  "norm_at": "pre",
  "keys_as_values": False,
  "shares_kv": False,
  "attention_scale": None,
  "rope_scaling": None,
  "query_scale": None,
}


class ByLayer(tuple[Any, ...]):
  """The values of a field in all layers."""


def periodic(names: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits layers into leading ones and a period, with few layers in all.

  The last repetition of the period may be cut short.

  >>> periodic(["dense", "moe", "moe", "moe"])
  (['dense'], ['moe'])
  >>> periodic(["local", "global", "local", "global", "local"])
  ([], ['local', 'global'])
  """
  N = len(names)
  choices = []
  for first in range(N):
    for period in range(1, N - first + 1):
      if list(names[first + period :]) == list(names[first : N - period]):
        # Layers to compile: leading ones, a period, and those left over.
        compiled = first + period + (N - first) % period
        choices.append((compiled, first, period))
  _, first, period = min(choices)
  return list(names[:first]), list(names[first : first + period])


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
  """Replaces each `ByLayer` by a value, or kinds, the most general as base."""
  result = dict(values)
  varied: dict[str, ByLayer] = {}
  for name, value in values.items():
    if isinstance(value, ByLayer):
      if all(x == value[0] for x in value):
        result[name] = value[0]
      else:
        varied[name] = value
  if not varied:
    return result
  layers = [dict(zip(varied, layer)) for layer in zip(*varied.values())]
  names = _names(layers)
  kinds = dict(zip(names, layers))
  base = min(kinds.values(), key=_specialty)
  overrides = {
    name: {field: x for field, x in kind.items() if x != base[field]}
    for name, kind in kinds.items()
  }
  first_layers, period = periodic(names)
  result |= {**base, "kinds": overrides, "layers": period}
  if first_layers:
    result["first_layers"] = first_layers
  return result


def _specialty(kind: Mapping[str, Any]) -> tuple[bool, bool, bool, bool]:
  """Sorts kinds of layers; the least special one is the base."""
  is_recurrent = bool(kind.get("deltanet") or kind.get("short_conv"))
  has_no_rope = kind.get("posemb", "rope") != "rope"
  has_window = (kind.get("window") or kind.get("chunk")) is not None
  is_dense = "moe" in kind and kind["moe"] is None
  return is_recurrent, has_no_rope, has_window, is_dense


def _names(layers: Sequence[Mapping[str, Any]]) -> list[str]:
  """Names each layer by its kind, such as "local_experts"."""
  kinds: dict[str, Mapping[str, Any]] = {}
  result = []
  for layer in layers:
    known = [name for name, kind in kinds.items() if kind == layer]
    if known:
      result.append(known[0])
      continue
    name = "_".join(_words(layer)) or "kind"
    if name in kinds:
      name = f"{name}_{len(kinds)}"
    kinds[name] = layer
    result.append(name)
  return result


def _words(layer: Mapping[str, Any]) -> list[str]:
  words = []
  if "deltanet" in layer:
    words.append("full" if layer["deltanet"] is None else "linear")
  if "short_conv" in layer:
    words.append("full" if layer["short_conv"] is None else "conv")
  if "window" in layer:
    words.append("global" if layer["window"] is None else "local")
  if "chunk" in layer:
    words.append("global" if layer["chunk"] is None else "chunked")
  if "posemb" in layer:
    words.append("nope" if layer["posemb"] == "none" else layer["posemb"])
  if "moe" in layer:
    words.append("dense" if layer["moe"] is None else "experts")
  if layer.get("shares_kv"):
    words.append("sharing")
  return words


def by_layer(values: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The FIELDS of each layer, from all fields of a decoder."""
  kinds = values.get("kinds") or {}
  base = {name: values.get(name, x) for name, x in FIELDS.items()}
  names = itertools.chain(
    values.get("first_layers") or (),
    itertools.cycle(values.get("layers") or (None,)),
  )
  of_layers = itertools.islice(names, values["depth"])
  layers = [{**base, **(kinds[name] if name else {})} for name in of_layers]
  for number, layer in enumerate(layers):
    moe = layer["moe"]
    if isinstance(moe, Mapping):
      every = moe.get("every", 1)
    else:
      every = getattr(moe, "every", 1)
    if (number + 1) % every:
      layer["moe"] = None
  return layers
