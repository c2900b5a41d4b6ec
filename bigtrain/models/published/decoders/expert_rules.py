"""Experts of decoders: the options of their field `moe`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.models.published.families import ConfigJson, Key, Rule
from bigtrain.models.published.layer_patterns import ByLayer


class SparseLayers(NamedTuple):
  """The keys that say which layers have experts, if not all have."""

  keys: Mapping[str, Any]  # {key: value if absent}.
  read: Callable[[ConfigJson], list[bool]]
  write: Callable[[list[bool]], Mapping[str, Any]]


def experts(
  *,
  layers: SparseLayers | None = None,
  rules: Sequence[Rule] = (),
  **options: Key | str | float | bool,
) -> Rule:
  """Experts in all layers, or in `layers`.

  Args:
    layers: which layers have experts, if not all.
    rules: rules whose fields are further options.
    **options: options of `moe`: the `Key` that has it, or its value in all
      models of the family.
  """
  option_keys = {x: key for x, key in options.items() if isinstance(key, Key)}
  constants = {x: y for x, y in options.items() if x not in option_keys}

  def read(config: ConfigJson) -> dict[str, Any]:
    moe = {name: config[key.name] for name, key in option_keys.items()}
    moe |= constants
    for rule in rules:
      moe |= rule.read(config)
    if layers is None:
      return {"moe": moe}
    return {"moe": ByLayer(moe if x else None for x in layers.read(config))}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    moe = next((x for x in fields["moe"] if x is not None), None)
    config: dict[str, Any] = {}
    if layers is not None:
      config |= layers.write([x is not None for x in fields["moe"]])
    if moe is None:
      return config
    config |= {key.name: moe[name] for name, key in option_keys.items()}
    for rule in rules:
      config |= rule.write(moe)
    return config

  keys = {key.name: key.default for key in option_keys.values()}
  if layers is not None:
    keys |= layers.keys
  for rule in rules:
    keys |= rule.keys
  return Rule(("moe",), keys, read, write)


def mlp_width(key: str = "intermediate_size") -> Rule:
  """The width of MLPs, and of experts if all layers have some."""

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    for width in fields["mlp_dim"]:
      if width is not None:
        return {key: width}
    return {key: (fields["moe"][0] or {}).get("mlp_dim")}

  return Rule(
    ("mlp_dim",),
    {key: None},
    lambda config: {"mlp_dim": config[key]},
    write,
  )


def sparse_after_first(
  key: str = "first_k_dense_replace", default: int = 1
) -> SparseLayers:
  """All layers after the first ones have experts."""

  def read(config: ConfigJson) -> list[bool]:
    return [i >= config[key] for i in range(config["num_hidden_layers"])]

  def write(sparse: list[bool]) -> dict[str, Any]:
    return {key: sparse.index(True) if True in sparse else len(sparse)}

  return SparseLayers({key: default}, read, write)


def sparse_everywhere() -> SparseLayers:
  """All layers have experts."""
  return SparseLayers(
    {}, lambda config: [True] * config["num_hidden_layers"], lambda sparse: {}
  )


def sparse_by_types(otherwise: SparseLayers) -> SparseLayers:
  """A list of the layers with experts; without it, what `otherwise` says."""
  key, types = "mlp_layer_types", ("dense", "sparse")

  def read(config: ConfigJson) -> list[bool]:
    given = config[key]
    if given is None:
      return otherwise.read(config)
    if len(given) != config["num_hidden_layers"] or not {*given} <= {*types}:
      raise config.error(
        f"{key}={given!r}: expected 'dense' or 'sparse' for each layer."
      )
    return [kind == "sparse" for kind in given]

  def write(sparse: list[bool]) -> dict[str, Any]:
    return {key: [types[x] for x in sparse]}

  return SparseLayers({key: None, **otherwise.keys}, read, write)


def expert_groups(key: str = "n_group") -> Rule:
  """Groups of experts: a token chooses some by the sum of their top two."""

  def read(config: ConfigJson) -> dict[str, Any]:
    num, top = config[key], config["topk_group"]
    groups = {"num": num, "top": top, "score": "top2"}
    return {"groups": groups} if num and num > 1 else {}

  def write(moe: Mapping[str, Any]) -> dict[str, Any]:
    groups = moe["groups"] or {"num": 1, "top": 1}
    return {key: groups["num"], "topk_group": groups["top"]}

  return Rule(("groups",), {key: 1, "topk_group": 1}, read, write)


def shared_experts(key: str = "n_shared_experts", default: int = 1) -> Rule:
  """The width of an MLP for all tokens, in experts."""
  return Rule(
    ("shared_experts",),
    {key: default},
    lambda config: {"shared_experts": config[key]},
    lambda moe: {key: moe["shared_dim"] // moe["mlp_dim"]},
  )
