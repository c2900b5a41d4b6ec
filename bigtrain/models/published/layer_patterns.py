"""Layers of several kinds: fields of a decoder by layer, and as a pattern.

config.json lists what differs between layers; models.decoder repeats a period
of kinds: `first_layers`, then `layers` again and again, each a name in `kinds`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

# Fields that a kind of layer may override, and neutral values of them.
FIELDS: dict[str, Any] = dict(posemb="rope", rope_theta=1e4, rope_fraction=1.0)
FIELDS |= dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "mlp_dim"))
FIELDS |= dict.fromkeys(("window", "moe", "attention_scale"))
FIELDS |= dict.fromkeys(("rope_scaling", "query_scale"))


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
  choices = [
    # Layers that are compiled: leading ones, a period, and those left over.
    (first + period + (N - first) % period, first, period)
    for first in range(N)
    for period in range(1, N - first + 1)
    if list(names[first + period :]) == list(names[first : N - period])
  ]
  _, first, period = min(choices)
  return list(names[:first]), list(names[first : first + period])


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
  """Replaces each `ByLayer` by a value, or kinds, the most general as base."""
  varied = {n: x for n, x in values.items() if isinstance(x, ByLayer)}
  for name, of_layers in list(varied.items()):
    if all(value == of_layers[0] for value in of_layers):
      values = {**values, name: of_layers[0]}
      del varied[name]
  if not varied:
    return dict(values)
  layers = [dict(zip(varied, row)) for row in zip(*varied.values())]
  names = _names(layers)
  kinds = dict(zip(names, layers))
  base = min(kinds.values(), key=_specialty)
  own = lambda kind: {n: x for n, x in kind.items() if x != base[n]}
  overrides = {name: own(kind) for name, kind in kinds.items()}
  first, period = periodic(names)
  pattern = {"first_layers": first} if first else {}
  return {**values, **base, "kinds": overrides, "layers": period, **pattern}


def _specialty(kind: Mapping[str, Any]) -> tuple[bool, bool, bool]:
  is_dense = "moe" in kind and kind["moe"] is None
  has_window = kind.get("window") is not None
  return kind.get("posemb", "rope") != "rope", has_window, is_dense


def _names(layers: Sequence[Mapping[str, Any]]) -> list[str]:
  words = [
    ("window", lambda x: "global" if x is None else "local"),
    ("posemb", lambda x: "nope" if x == "none" else x),
    ("moe", lambda x: "dense" if x is None else "experts"),
  ]
  kinds: list[tuple[str, Mapping[str, Any]]] = []
  result = []
  for layer in layers:
    name = next((name for name, kind in kinds if kind == layer), None)
    if name is None:
      parts = [word(layer[field]) for field, word in words if field in layer]
      name = "_".join(parts) or "kind"
      if name in dict(kinds):
        name = f"{name}_{len(kinds)}"
      kinds.append((name, layer))
    result.append(name)
  return result


def by_layer(values: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The FIELDS of each layer, from all fields of a decoder."""
  depth, kinds = values["depth"], values.get("kinds") or {}
  base = {name: values.get(name, x) for name, x in FIELDS.items()}
  names = itertools.chain(
    values.get("first_layers") or (),
    itertools.cycle(values.get("layers") or (None,)),
  )
  of_layers = itertools.islice(names, depth)
  layers = [base | dict(kinds[name] if name else {}) for name in of_layers]
  for number, layer in enumerate(layers):
    moe = layer["moe"]
    every = moe.get("every", 1) if isinstance(moe, Mapping) else 1
    every = getattr(moe, "every", every)
    if (number + 1) % every:
      layer["moe"] = None
  return layers
