"""Kinds of layers: a decoder's layers that differ in some fields.

  kinds=dict(local=dict(window=512), full={}), layers=("local", "local", "full")

A kind overrides some of the model's fields, `layers` names the kinds of one
period, and `first_layers` those before the first period. This module checks
these fields, and `of_model` returns the options of each layer's block. Things
that several layers can share (rotary tables, query scales, caches) are in
tuples, and a block's options have indices into the tuples.
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
  deltanet,
  kv_cache,
  latent_attention,
  mlp,
  moe,
  options,
  positions,
  recurrent_cache,
  short_conv,
)

QK_NORMS = ("head", "projection", "l2", "layernorm", "layernorm_by_head")
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "mlp_dim")
# Fields of the model that a kind may override.
FIELDS = (
  "window",
  "chunk",
  "posemb",
  "rope_theta",
  "rope_scaling",
  "rope_fraction",
  *_SIZES,
  "mla",
  "moe",
  "deltanet",
  "short_conv",
  "norm_at",
  "qk_norm",
  "keys_as_values",
  "shares_kv",
  "query_scale",
  "attention_scale",
)


_Cache = kv_cache.Kind | recurrent_cache.Kind


class Layers(NamedTuple):
  """Options of all layers, and the things that they share."""

  first: tuple[causal_block.Options, ...]  # Options of the leading layers.
  # Options of the layers that repeat after them.
  period: tuple[causal_block.Options, ...]
  # Shared by layers: `rope`, `query_scale` and `cache` in their options are
  # indices into these.
  ropes: tuple[positions.Rope, ...]
  query_scales: tuple[positions.QueryScale, ...]
  caches: tuple[_Cache, ...]

  def of_all(self, depth: int) -> list[causal_block.Options]:
    """Options of each layer of a model."""
    result = list(self.first)
    for number in range(depth - len(self.first)):
      result.append(self.period[number % len(self.period)])
    return result

  def tables(
    self,
    positions_BL: jax.Array,
    lengths: jax.Array | int,
    added_BNLD: jax.Array | None = None,
  ) -> causal_block.Tables:
    """Tables that depend on positions, computed once for all layers of a call.

    Args:
      lengths: one for each token's text (B, L), or one for all texts.
    """
    return causal_block.Tables(
      tuple(rope.rotation(positions_BL, lengths) for rope in self.ropes),
      tuple(scale.factors(positions_BL) for scale in self.query_scales),
      added_BNLD=added_BNLD,
    )

  def depends_on_length(self) -> bool:
    """Whether rotations depend on the length of a text."""
    return any(rope.by_length() is not None for rope in self.ropes)

  def switches(self) -> tuple[int, ...]:
    """Lengths above which all tokens of a text have other frequencies."""
    lengths = {rope.switch() for rope in self.ropes}
    return tuple(sorted(x for x in lengths if x is not None))

  def experts(self) -> moe.Options | None:
    """Options of the first layer with experts, if any."""
    return next(iter(self._experts()), None)

  def bias_rate(self) -> float:
    """The rate of all selection biases that change."""
    return max((options.bias_rate for options in self._experts()), default=0.0)

  def has_recurrence(self) -> bool:
    return any(
      block.deltanet or block.short_conv
      for block in (*self.period, *self.first)
    )

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
    return [block.moe for block in (*self.period, *self.first) if block.moe]

  def without_drops(self) -> "Layers":
    """The same layers, but with experts that serve all choices."""

    def without(block: causal_block.Options) -> causal_block.Options:
      if block.moe is None:
        return block
      return block._replace(moe=block.moe.without_drops())

    return self._replace(
      first=tuple(without(block) for block in self.first),
      period=tuple(without(block) for block in self.period),
    )


def read_names(model: Any) -> dict[str, Any]:
  """Checks the names in `kinds`, `layers` and `first_layers`; hashable."""
  kinds = model.kinds or {}
  if not isinstance(kinds, Mapping):
    raise ConfigError(
      "config.model.kinds: expected a dict of names and the fields they "
      f"override, got {kinds!r}."
    )
  for name, fields in kinds.items():
    key = f"config.model.kinds.{name}"
    if not isinstance(fields, Mapping):
      raise ConfigError(f"{key}: expected a dict, got {fields!r}.")
    check_keys(key, fields, FIELDS)
  names = {
    field: options.read_names(
      f"config.model.{field}", getattr(model, field), kinds
    )
    for field in ("layers", "first_layers")
  }
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


class _Shared:
  """What layers share; a block's options have an index into each list."""

  def __init__(self) -> None:
    self.ropes: list[positions.Rope] = []
    self.query_scales: list[positions.QueryScale] = []
    self.caches: list[_Cache] = []

  @staticmethod
  def index(shared: list[Any], value: Any) -> int | None:
    """Index of a value in one of the lists; a new value is appended."""
    if value is None:
      return None
    if value not in shared:
      shared.append(value)
    return shared.index(value)


def of_model(model: Any) -> Layers:
  """Checks the fields that kinds may override; returns the layers' options."""
  shared = _Shared()
  first = tuple(_block(model, kind, shared) for kind in model.first_layers)
  if model.layers:
    period = tuple(_block(model, kind, shared) for kind in model.layers)
  else:
    # Without kinds, only experts can make a period: moe=dict(every=2).
    period = tuple(moe.kinds(_block(model, None, shared)))
  has_periods_of_experts = any(
    block.moe is not None and block.moe.every > 1 for block in (*first, *period)
  )
  if model.kinds and has_periods_of_experts:
    raise ConfigError(
      "config.model.moe.every: not with config.model.kinds; a kind with "
      "moe=None has no experts."
    )
  first, period = _with_views(first, period)
  layers = Layers(
    first,
    period,
    tuple(shared.ropes),
    tuple(shared.query_scales),
    tuple(shared.caches),
  )
  layers.check_experts()
  for kind in set(model.kinds) - {*model.layers, *model.first_layers}:
    _block(model, kind, _Shared())  # No layer uses it, but it should be right.
  return layers


def _block(
  model: Any, kind: str | None, shared: _Shared
) -> causal_block.Options:
  """Options of the layers of a kind; None means the model's own fields."""
  key = "config.model"
  values = {field: getattr(model, field) for field in FIELDS}
  if kind is not None:
    key = f"config.model.kinds.{kind}"
    values |= model.kinds[kind]

  # Options of attention and of the layers that take its place.
  values["mla"] = latent_attention.read(values["mla"], f"{key}.mla")
  rope, query_scale = _check(model, values, key)
  recurrent = deltanet.read(values["deltanet"], f"{key}.deltanet")
  convolution = short_conv.read(values["short_conv"], f"{key}.short_conv")
  if convolution is not None and recurrent is not None:
    raise ConfigError(f"{key}.short_conv: expected None with deltanet.")
  latents = values["mla"]
  if latents is not None and values["attention_scale"] is None:
    scaling = None if rope is None else rope.scaling
    values["attention_scale"] = latent_attention.scale(latents, scaling)

  # What generation keeps of the tokens so far.
  cache: _Cache
  if convolution is not None:
    cache = convolution.cache(model.width)
  elif recurrent is not None:
    cache = recurrent.cache()
  elif latents is not None:
    cache = kv_cache.Kind(1, latents.cached_width, values["window"], True)
  else:
    cache = kv_cache.Kind(
      values["num_kv_heads"],
      values["head_dim"],
      values["window"] or values["chunk"],
      in_chunks=values["chunk"] is not None,
    )

  values |= dict(
    qk_norm=read_qk_norm(values["qk_norm"], f"{key}.qk_norm"),
    deltanet=recurrent,
    short_conv=convolution,
    moe=moe.read(values["moe"], f"{key}.moe"),
    rope=shared.index(shared.ropes, rope),
    query_scale=shared.index(shared.query_scales, query_scale),
    cache=shared.index(shared.caches, cache),
    # _with_views sets these, once it knows all layers.
    view=None,
    reads_view=_check_shares_kv(values, key),
    drops_view=False,
  )
  names = causal_block.Options._fields
  own = {name: value for name, value in values.items() if name in names}
  return options.pick(causal_block.Options, model, **own)


def _check(
  model: Any, values: Mapping[str, Any], key: str
) -> tuple[positions.Rope | None, positions.QueryScale | None]:
  """Checks a layer's values; returns its rotation and scale of queries."""
  for name in _SIZES:
    check_number(f"{key}.{name}", values[name], least=1, whole=True)
  check_choice(f"{key}.norm_at", values["norm_at"], causal_block.NORMS_AT)
  if values["moe"] is not None and model.mlp not in mlp.KINDS:
    raise ConfigError(
      f"config.model.mlp={model.mlp!r}: not supported in experts ({key}.moe); "
      f"expected one of {', '.join(mlp.KINDS)}."
    )
  if values["window"] is not None:
    check_number(f"{key}.window", values["window"], least=1, whole=True)
  if values["chunk"] is not None:
    _check_chunk(values, key)
  heads, kv_heads = values["num_heads"], values["num_kv_heads"]
  if heads % kv_heads:
    raise ConfigError(
      f"{key}.num_kv_heads: {kv_heads} does not divide num_heads={heads}."
    )
  latents = values["mla"]
  if latents is not None:
    _check_latents(model, values, key)
  if values["attention_scale"] is not None:
    check_number(f"{key}.attention_scale", values["attention_scale"], above=0)
  scale = positions.read_query_scale(
    values["query_scale"], f"{key}.query_scale"
  )
  if key != "config.model" and values["posemb"] != model.posemb:
    check_choice(f"{key}.posemb", values["posemb"], ("rope", "none"))
  check_number(f"{key}.rope_theta", values["rope_theta"], above=1)
  fraction = check_number(
    f"{key}.rope_fraction", values["rope_fraction"], above=0, most=1
  )
  width = values["head_dim"] if latents is None else latents.rope_dim
  dims = int(width * fraction)
  if values["posemb"] == "rope" and (dims % 2 or not dims):
    raise ConfigError(
      f"{key}.head_dim: rotary positions need an even number of features, got "
      f"{dims}, of {width} and rope_fraction={fraction}."
    )
  scaling = positions.read_scaling(
    values["rope_scaling"], f"{key}.rope_scaling", dims, model.max_len
  )
  if values["posemb"] != "rope":
    return None, scale
  axes = positions.read_axes(model.rope_axes, "config.model.rope_axes", dims)
  rope = positions.Rope(
    dims,
    values["rope_theta"],
    scaling,
    model.rope_interleaved,
    model.rope_reversed,
    axes and axes.of_frequencies(dims // 2),
  )
  return rope, scale


def _check_shares_kv(values: Mapping[str, Any], key: str) -> bool:
  for name in ("mla", "deltanet", "chunk"):
    if values["shares_kv"] and values[name] is not None:
      raise ConfigError(
        f"{key}.shares_kv=True: expected False with {key}.{name}."
      )
  return bool(values["shares_kv"])


_Blocks = tuple[causal_block.Options, ...]


def _with_views(first: _Blocks, period: _Blocks) -> tuple[_Blocks, _Blocks]:
  """Connects layers with `shares_kv` to those whose keys they read.

  The layers of a period read from the same period, or from `first`: a loop over
  periods does not pass keys and values from one to the next.
  """
  blocks = [*first, *period]
  source_of: dict[int, int] = {}  # {a reading layer: the layer it reads from}.
  latest: dict[int | None, int] = {}  # {cache: last layer with its own keys}.
  for number, block in enumerate(blocks):
    if not block.reads_view:
      latest[block.cache] = number
      continue
    source = latest.get(block.cache)
    # A layer of the period may read from `first` only if no layer of the period
    # has such keys: in the next turn of the loop, that one would be nearer.
    crosses = source is not None and source < len(first) <= number
    later = blocks[max(number, len(first)) :]
    has_nearer = crosses and any(
      other.cache == block.cache and not other.reads_view for other in later
    )
    if source is None or has_nearer:
      raise ConfigError(
        "config.model.shares_kv: expected a layer with keys and values of its "
        "own before each layer that shares them, with the same num_kv_heads, "
        "head_dim and window: in the same period, or in first_layers if the "
        "period has none."
      )
    source_of[number] = source

  readers_of: dict[int, list[int]] = {}  # {source: layers that read from it}.
  for reader, source in source_of.items():
    readers_of.setdefault(source, []).append(reader)
  result = []
  for number, block in enumerate(blocks):
    source = source_of.get(number, number)
    readers = readers_of.get(source)
    if readers:
      # The last reader drops the keys, unless a loop reads them in each period.
      in_one_part = source >= len(first) or readers[-1] < len(first)
      block = block._replace(
        cache=None if block.reads_view else block.cache,
        view=source,
        drops_view=number == readers[-1] and in_one_part,
      )
    result.append(block)
  return tuple(result[: len(first)]), tuple(result[len(first) :])


def read_qk_norm(given: Any, key: str) -> str | None:
  """A name in QK_NORMS or None; True is "head"."""
  if given is None or isinstance(given, bool):
    return "head" if given else None
  check_choice(key, given, QK_NORMS)
  return str(given)


def _check_chunk(values: Mapping[str, Any], key: str) -> None:
  check_number(f"{key}.chunk", values["chunk"], least=1, whole=True)
  for name in ("window", "mla", "deltanet"):
    if values[name] is not None:
      raise ConfigError(
        f"{key}.chunk={values['chunk']}: expected None with {key}.{name}."
      )


def _check_latents(model: Any, values: Mapping[str, Any], key: str) -> None:
  """Checks the fields that latent attention determines or does not support."""
  expected = {
    "head_dim": values["mla"].head_dim,
    "num_kv_heads": values["num_heads"],
  }
  for name, value in expected.items():
    if values[name] != value:
      raise ConfigError(
        f"{key}.{name}={values[name]}: expected {value} with {key}.mla."
      )
  given = {"qk_norm": values["qk_norm"], "qkv_clip": model.qkv_clip}
  for name, value in given.items():
    if value not in (None, False):
      raise ConfigError(
        f"config.model.{name}={value!r}: expected None with "
        f"{key}.mla, whose keys generation does not compute."
      )
