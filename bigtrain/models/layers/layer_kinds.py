"""Kinds of layers: a decoder's layers that differ in some fields.

The fields `kinds`, `layers` and `first_layers` of models.decoder.Model say
which. This module checks them, and returns the options of each layer's block.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_keys,
  check_number,
)
from bigtrain.models.layers import (
  causal_block,
  kv_cache,
  moe,
  options,
  positions,
)

_SIZES = ("num_heads", "num_kv_heads", "head_dim", "mlp_dim")
# Fields of the model that a kind may override.
FIELDS = (
  *("window", "posemb", "rope_theta", "rope_scaling", "rope_fraction"),
  *(*_SIZES, "moe", "query_scale", "attention_scale"),
)


class Layers(NamedTuple):
  """Options of all layers, and what they share."""

  first: tuple[causal_block.Options, ...]  # Options of the leading layers.
  # Options of the layers that repeat after them.
  period: tuple[causal_block.Options, ...]
  # The numbers in the options are indices into these.
  ropes: tuple[positions.Rope, ...]
  query_scales: tuple[positions.QueryScale, ...]
  # Number and shapes of the arrays in the cache of keys and values.
  caches: tuple[kv_cache.Kind, ...]

  def of_all(self, depth: int) -> list[causal_block.Options]:
    rest = range(depth - len(self.first))
    return [*self.first, *(self.period[i % len(self.period)] for i in rest)]

  def tables(
    self, positions_BL: jax.Array, lengths: jax.Array | int
  ) -> causal_block.Tables:
    """`lengths`: one for each token's text (B, L), or one for all texts."""
    return causal_block.Tables(
      tuple(rope.rotation(positions_BL, lengths) for rope in self.ropes),
      tuple(scale.factors(positions_BL) for scale in self.query_scales),
    )

  def experts(self) -> moe.Options | None:
    return next(iter(self._experts()), None)

  def bias_rate(self) -> float:
    """The rate of all selection biases that change."""
    return max((options.bias_rate for options in self._experts()), default=0.0)

  def check_experts(self) -> None:
    for name in ("num_experts", "axis", "bias_rate"):
      values = {getattr(options, name) for options in self._experts()}
      if name == "bias_rate":
        values -= {0}
      if len(values) > 1:
        raise ConfigError(
          f"config.model.kinds: expected the same moe.{name} in all kinds with "
          f"experts, got {', '.join(sorted(map(repr, values)))}."
        )

  def _experts(self) -> list[moe.Options]:
    every = (block.moe for block in (*self.period, *self.first))
    return [options for options in every if options]

  def without_drops(self) -> "Layers":
    drop = lambda block: block._replace(
      moe=block.moe and block.moe.without_drops()
    )
    first, period = map(drop, self.first), map(drop, self.period)
    return self._replace(first=tuple(first), period=tuple(period))


def read_names(model: Any) -> dict[str, Any]:
  kinds = model.kinds or {}
  if not isinstance(kinds, Mapping):
    raise ConfigError(
      "config.model.kinds: expected a dict of names and the fields they "
      f"override, got {kinds!r}."
    )
  for name, given in kinds.items():
    key = f"config.model.kinds.{name}"
    if not isinstance(given, Mapping):
      raise ConfigError(f"{key}: expected a dict, got {given!r}.")
    check_keys(key, given, FIELDS)
  names = {}
  for field in ("layers", "first_layers"):
    key, given = f"config.model.{field}", getattr(model, field)
    names[field] = options.read_names(key, given, kinds)
  if kinds and not any(names.values()):
    raise ConfigError(
      "config.model.layers: missing; it names the kind of each layer of a "
      f"period, such as ({next(iter(kinds))!r},)."
    )
  if len(names["first_layers"]) > model.depth:
    raise ConfigError(
      f"config.model.first_layers: {len(names['first_layers'])} layers, but "
      f"depth={model.depth}."
    )
  return names | {"kinds": options.hashable(kinds)}


def of_model(model: Any) -> Layers:
  """Checks the fields that kinds override, in the model and in each kind."""
  ropes: list[positions.Rope] = []
  scales: list[positions.QueryScale] = []
  caches: list[kv_cache.Kind] = []

  def number(of: list[Any], value: Any) -> int | None:
    if value is None:
      return None
    if value not in of:
      of.append(value)
    return of.index(value)

  def block(name: str | None) -> causal_block.Options:
    key, values = "config.model", {n: getattr(model, n) for n in FIELDS}
    if name is not None:
      key, values = f"{key}.kinds.{name}", values | dict(model.kinds[name])
    rope, scale = _check(model, values, key)
    shape = (values["num_kv_heads"], values["head_dim"], values["window"])
    values |= dict(
      rope=number(ropes, rope),
      query_scale=number(scales, scale),
      cache=number(caches, kv_cache.Kind(*shape)),
      moe=moe.read(values["moe"], f"{key}.moe"),
    )
    cls = causal_block.Options
    own = {n: x for n, x in values.items() if n in cls._fields}
    return options.pick(cls, model, **own)

  base = None if model.layers else block(None)
  first = tuple(map(block, model.first_layers))
  period = tuple(moe.kinds(base) if base else map(block, model.layers))
  if model.kinds and any(b.moe and b.moe.every > 1 for b in (*first, *period)):
    raise ConfigError(
      "config.model.moe.every: not with config.model.kinds; a kind with "
      "moe=None has no experts."
    )
  layers = Layers(first, period, tuple(ropes), tuple(scales), tuple(caches))
  layers.check_experts()
  for name in set(model.kinds) - {*model.layers, *model.first_layers}:
    block(name)  # Only its checks.
  return layers


def _check(
  model: Any, values: Mapping[str, Any], key: str
) -> tuple[positions.Rope | None, positions.QueryScale | None]:
  """Checks a layer's values; returns its rotation and scale of queries."""
  for name in (*_SIZES, "window"):
    if (size := values[name]) is not None or name != "window":
      check_number(f"{key}.{name}", size, least=1, whole=True)
  heads, kv_heads = values["num_heads"], values["num_kv_heads"]
  if heads % kv_heads:
    raise ConfigError(
      f"{key}.num_kv_heads: {kv_heads} does not divide num_heads={heads}."
    )
  if (scale := values["attention_scale"]) is not None:
    check_number(f"{key}.attention_scale", scale, above=0)
  scale = values["query_scale"]
  scale = positions.read_query_scale(scale, f"{key}.query_scale")
  if key != "config.model" and values["posemb"] != model.posemb:
    check_choice(f"{key}.posemb", values["posemb"], ("rope", "none"))
  check_number(f"{key}.rope_theta", values["rope_theta"], above=1)
  fraction = check_number(
    f"{key}.rope_fraction", values["rope_fraction"], above=0, most=1
  )
  dims = int(values["head_dim"] * fraction)
  if values["posemb"] == "rope" and (dims % 2 or not dims):
    raise ConfigError(
      f"{key}.head_dim: rotary positions need an even number of features, got "
      f"{dims}, of head_dim={values['head_dim']} and rope_fraction={fraction}."
    )
  scaling = positions.read_scaling(
    values["rope_scaling"], f"{key}.rope_scaling", dims, model.max_len
  )
  if values["posemb"] != "rope":
    return None, scale
  theta = values["rope_theta"]
  return positions.Rope(dims, theta, scaling, model.rope_interleaved), scale
