"""Rules of decoders' config.json: rotations, windows, experts, biases.

Each rule reads keys into fields of models.decoder and writes them again.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.config import settings
from bigtrain.config.errors import did_you_mean
from bigtrain.models.published.families import ConfigJson, Rule, converted
from bigtrain.models.published.layer_patterns import ByLayer, by_layer

_SITES = ("qkv", "out", "mlp", "norm", "experts", "router", "head")
_SLIDING, _FULL = "sliding_attention", "full_attention"

_ORIGINAL = "original_max_position_embeddings"
_TYPES = settings.read_table(os.path.dirname(__file__), "rope_scalings.toml")
# Options of scaled rotary embeddings, {type: {ours: theirs}}.
_SCALINGS = {
  kind: {
    name: _ORIGINAL if name == "original_len" else name
    for name in (*x["required"], *x.get("optional", ()), *x.get("defaults", ()))
  }
  for kind, x in _TYPES.items()
}


def canonical(values: Mapping[str, Any], neutral: Mapping[str, Any]) -> Any:
  """Comparable fields of a decoder: defaults filled in, layers one by one."""
  given = {name: x for name, x in values.items() if x is not None}
  result = {**values, **neutral, **given}
  layers = [_layer(layer, result) for layer in by_layer(result)]
  for name in layers[0]:
    result[name] = ByLayer(layer[name] for layer in layers)
  if isinstance(result["qk_norm"], bool):
    result["qk_norm"] = "head" if result["qk_norm"] else None
  result["use_bias"] = _sites(result)
  if not result["num_classes"]:  # Then `pool` is of the user's task alone.
    result["pool"] = "last"
  result["mlp_clip"] = _plain(result["mlp_clip"])
  for name in ("kinds", "layers", "first_layers"):
    result.pop(name, None)
  return result


def _plain(options: Any) -> Any:
  """Options that are a mapping or a named tuple, as a dict."""
  return options and dict(getattr(options, "_asdict", lambda: options)())


def _sites(fields: Mapping[str, Any]) -> tuple[str, ...]:
  """Sites of biases, without those that the model does not have."""
  sites = fields["use_bias"]
  if isinstance(sites, bool):
    sites = _SITES[:4] if sites else ()
  elsewhere = {
    "norm": fields["norm"] == "rmsnorm",
    "mlp": None not in fields["moe"],
    "experts": not any(fields["moe"]),
    "router": not any(fields["moe"]),
    "head": fields["tied_head"],
  }
  return tuple(s for s in _SITES if s in sites and not elsewhere.get(s))


def _layer(layer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
  layer = {**layer, "moe": _experts(layer["moe"], layer["mlp_dim"])}
  if layer["moe"] is not None:
    layer["mlp_dim"] = None
  if layer["query_scale"]:
    layer["query_scale"] = {"log": "log", **_plain(layer["query_scale"])}
  if layer["attention_scale"] is None:
    layer["attention_scale"] = layer["head_dim"] ** -0.5
  if layer["posemb"] != "rope":
    nothing = dict(rope_theta=None, rope_scaling=None, rope_fraction=None)
    return {**layer, **nothing}
  given = layer["rope_scaling"] or {}
  scaling = {name: x for name, x in given.items() if x is not None}
  kind = scaling.get("type")
  scaling = _TYPES.get(str(kind), {}).get("defaults", {}) | scaling
  if kind == "longrope" and "factor" not in scaling:
    scaling["factor"] = fields["max_len"] / scaling["original_len"]
  return {**layer, "rope_scaling": scaling or None}


def _experts(options: Any, mlp_dim: int) -> dict[str, Any] | None:
  if options is None:
    return None
  options = _plain(options) or {}
  get = lambda name, default: (
    default if options.get(name) is None else options[name]
  )
  top_k, width = get("top_k", 2), get("mlp_dim", mlp_dim)
  score, normalize = get("score", "softmax"), get("normalize", top_k > 1)
  if score == "softmax" and normalize:  # Equal, over all and over the chosen.
    score = "softmax_of_top"
  shared = get("shared_dim", get("shared_experts", 0) * width)
  return dict(
    num_experts=options["num_experts"],
    top_k=top_k,
    score=score,
    normalize=True if score == "softmax_of_top" else normalize,
    scale=get("scale", 1.0),
    selection_bias=get("selection_bias", False),
    groups=_plain(options.get("groups")),
    mlp_dim=width,
    shared_dim=shared,
    shared_gate=bool(shared) and get("shared_gate", False),
  )


def heads() -> Rule:
  """Heads of keys and values, and the width of heads, that may be absent."""
  num, key_heads = "num_attention_heads", "num_key_value_heads"
  width = "head_dim"
  return Rule(
    {key_heads: None, width: None},
    lambda config: {
      "num_kv_heads": config[key_heads] or config[num],
      width: config[width] or config["hidden_size"] // config[num],
    },
    lambda fields: {
      key_heads: fields["num_kv_heads"][0],
      width: fields[width][0],
    },
  )


def biases(always: Sequence[str] = (), **keys: Sequence[str]) -> Rule:
  """Sites that always have biases, and sites that keys add."""

  def read(config: ConfigJson) -> dict[str, Any]:
    sites = {*always}
    for key, of_key in keys.items():
      sites |= {*of_key} if config[key] else set()
    return {"use_bias": [site for site in _SITES if site in sites] or False}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    sites = fields["use_bias"]
    return {key: {*of_key} <= {*sites} for key, of_key in keys.items()}

  return Rule(dict.fromkeys(keys, False), read, write)


LayerTypes = Callable[[ConfigJson], list[str]]


def types_by_period(default: int, key: str | None = None) -> LayerTypes:
  """layer_types where the last layer of each period has no window."""
  period = lambda config: config[key] if key else default
  return types_by(lambda config, i: (i + 1) % period(config) != 0)


def types_where(sliding: str) -> LayerTypes:
  """layer_types by one of _SLIDES."""
  return types_by(_SLIDES[sliding])


def types_by(is_sliding: Callable[[ConfigJson, int], Any]) -> LayerTypes:
  """layer_types, of a function of a layer's number for files without them."""

  def types(config: ConfigJson) -> list[str]:
    given, depth = config["layer_types"], config["num_hidden_layers"]
    if given is None:
      slides = [is_sliding(config, i) for i in range(depth)]
      return [_SLIDING if x else _FULL for x in slides]
    if len(given) != depth or not {*given} <= {_SLIDING, _FULL}:
      raise config.error(
        f"layer_types={given!r}: expected {_SLIDING!r} or {_FULL!r} for each "
        f"of the {depth} layers."
      )
    return list(given)

  return types


class Rope(NamedTuple):
  """Rotary embeddings, as `rope_parameters` or in the older keys."""

  theta: float  # Base of files without one.
  # Share of the features that rotates without a key for it; None where all do.
  fraction: float | None = None
  nested: LayerTypes | None = None  # Types of layers, where each has its own.
  local_theta: float | None = None  # Older files' theta with a window.
  rotary_dim: bool = False  # Whether older files count rotating features.
  original_len: int | None = None  # Default of files that have it outside.
  query_scale: bool = False  # Whether queries grow with their position.

  def keys(self) -> dict[str, Any]:
    keys: dict[str, Any] = dict.fromkeys(
      ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")
    )
    if self.local_theta:
      keys["rope_local_base_freq"] = self.local_theta
    if self.rotary_dim:
      keys["rotary_dim"] = None
    if self.original_len:
      keys[_ORIGINAL] = self.original_len
    return keys

  def read(self, config: ConfigJson) -> dict[str, Any]:
    if not self.nested:
      return self._rotation(config, self._stored(config, _FULL))
    stored = {kind: self._stored(config, kind) for kind in (_FULL, _SLIDING)}
    rows = {kind: self._rotation(config, x) for kind, x in stored.items()}
    kinds = self.nested(config)
    return {n: ByLayer(rows[kind][n] for kind in kinds) for n in rows[_FULL]}

  def _stored(self, config: ConfigJson, kind: str) -> dict[str, Any]:
    """The rotation of a type of layer, in one form for all files."""
    values = config["rope_scaling"] or config["rope_parameters"] or {}
    by_type = any(isinstance(value, dict) for value in values.values())
    if by_type != bool(self.nested and config["rope_parameters"]):
      raise config.error(
        f"rope_parameters={values!r}: expected "
        f"{'a dict for each type of layer' if self.nested else 'one dict'}."
      )
    base = {"rope_theta": config["rope_theta"] or self.theta}
    share = config["partial_rotary_factor"]
    if self.rotary_dim and share is None and config["rotary_dim"]:
      share = config["rotary_dim"] / config["head_dim"]
    base["partial_rotary_factor"] = share or self.fraction or 1.0
    if by_type:
      return base | (values.get(kind) or {})
    if not self.nested or kind != _SLIDING:
      return base | values
    # In older files only the layers without a window are scaled.
    if self.local_theta:
      base["rope_theta"] = config["rope_local_base_freq"]
    return base

  def _rotation(
    self, config: ConfigJson, values: Mapping[str, Any]
  ) -> dict[str, Any]:
    share = values["partial_rotary_factor"]
    if share != 1.0 and self.fraction is None:
      raise config.error(f"partial_rotary_factor={share}: expected 1.0.")
    scaling = _scaling(config, values, self.original_len)
    theta = values["rope_theta"]
    result = dict(rope_theta=theta, rope_fraction=share, rope_scaling=scaling)
    if self.query_scale:
      beta = values.get("llama_4_scaling_beta")
      longest = config["max_position_embeddings"]
      length = (scaling or {}).get("original_len", longest)
      scale = {"beta": beta, "original_len": length, "log": "log"}
      result["query_scale"] = None if beta is None else scale
    return result

  def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = ("rope_theta", "rope_scaling", "rope_fraction")
    rows = [*zip(*(fields[name] for name in names))]
    if self.nested:
      types = [_FULL if x is None else _SLIDING for x in fields["window"]]
      scaled = [(theta, _written(scaling)) for theta, scaling, _ in rows]
      values = [written | {"rope_theta": theta} for theta, written in scaled]
      return {"rope_parameters": dict(zip(types, values))}
    # Layers that do not rotate have no values.
    rotating = [row for row in rows if row[0] is not None]
    theta, scaling, share = [*rotating, rows[0]][0]
    written = _written(scaling)
    scale = fields["query_scale"][0]
    if self.query_scale and scale and scaling:
      written["llama_4_scaling_beta"] = scale["beta"]
    config = {"rope_theta": theta, "rope_scaling": written if scaling else None}
    if self.original_len and _ORIGINAL in written:
      config[_ORIGINAL] = written[_ORIGINAL]
    if self.fraction is not None:
      config["partial_rotary_factor"] = share
    return config


def rope(theta: float = 1e4, **options: Any) -> Rule:
  rule = Rope(theta, **options)
  return Rule(rule.keys(), rule.read, rule.write)


def _scaling(
  config: ConfigJson, values: Mapping[str, Any], original_len: int | None
) -> dict[str, Any] | None:
  kind = values.get("rope_type", values.get("type", "default"))
  others = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
  if "llama_4_scaling_beta" in values:
    others |= {"llama_4_scaling_beta", "max_position_embeddings"}
  if original_len and kind in ("su", "yarn"):
    kind = "longrope"  # Names in older files of the family.
  if kind != "default" and kind not in _SCALINGS:
    hint = did_you_mean(str(kind), ("default", *_SCALINGS))
    raise config.error(f"rope_type={kind!r}: not computed by the model.{hint}")
  names = _SCALINGS.get(kind, {})
  unused = {_ORIGINAL} if kind in ("default", "linear") else set()
  for key in values.keys() - others - unused - {*names.values()}:
    hint = did_you_mean(key, {*names.values()})
    raise config.error(f"{key}: unknown key of rope_type={kind!r}.{hint}")
  if kind == "default":
    return None
  length = config["max_position_embeddings"]
  if original_len:
    length = config[_ORIGINAL]
    values = {**values, _ORIGINAL: length}
  result: dict[str, Any] = {"type": kind}
  for ours, theirs in names.items():
    value = values.get(theirs)
    if ours == "original_len":
      value = length if value is None else value
    elif value is None and ours == "factor" and kind in ("yarn", "longrope"):
      original = values.get(_ORIGINAL, length)
      value = config["max_position_embeddings"] / original
    elif value is None and ours in _TYPES[kind]["required"]:
      raise config.error(f"{theirs}: missing beside rope_type={kind!r}.")
    if value is not None:
      result[ours] = value
  return result


def _written(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
  if not scaling:
    return {"rope_type": "default"}
  names = {"type": "rope_type", **_SCALINGS[scaling["type"]]}
  plain = lambda x: list(x) if isinstance(x, tuple) else x
  return {names[name]: plain(x) for name, x in scaling.items()}


def windows(
  types: LayerTypes,
  on: Sequence[str] = (),
  default: int | None = 4096,
  rotates: str | None = None,
  **others: Any,
) -> Rule:
  """Windows by `layer_types`.

  Args:
    on: keys that turn windows on.
    default: window of files without the key.
    rotates: type of layer that alone has rotary embeddings.
    others: further keys that `types` reads, and their values if absent.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    window = config["sliding_window"] or None
    if not all(config[key] for key in on):
      window = None
    kinds = types(config)
    by_layer = [window if kind == _SLIDING else None for kind in kinds]
    result = {"window": ByLayer(by_layer)}
    if rotates:
      posembs = ("rope" if kind == rotates else "none" for kind in kinds)
      result["posemb"] = ByLayer(posembs)
    return result

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["window"]
    sizes = [window for window in layers if window is not None]
    return {
      "layer_types": [_FULL if x is None else _SLIDING for x in layers],
      # The library makes a mask for each type, whether layers use it or not.
      "sliding_window": sizes[0] if sizes else (None if on else 4096),
      **dict.fromkeys(on, bool(sizes)),
    }

  absent = {"sliding_window": default, "layer_types": None, **others}
  return Rule(absent | dict.fromkeys(on, False), read, write)


def window_everywhere(key: str) -> Rule:
  """A window of all layers that a key turns on."""
  size = "sliding_window"
  return Rule(
    {key: False, size: 4096},
    lambda config: {"window": config[size] if config[key] else None},
    lambda fields: {
      key: fields["window"][0] is not None,
      size: fields["window"][0],
    },
  )


def rotates(config: ConfigJson) -> list[bool]:
  """Whether each layer rotates, by one of two keys."""
  depth, flags = config["num_hidden_layers"], config["no_rope_layers"]
  if flags is None:
    period = config["no_rope_layer_interval"]
    return [(i + 1) % period != 0 for i in range(depth)]
  return [bool(flag) for flag in flags[:depth]]


# Which layers have a window in files without layer_types, by their number.
_SLIDES: dict[str, Callable[[ConfigJson, int], Any]] = {
  "all": lambda config, _: config["sliding_window"],
  "after_first": lambda config, i: (
    config["sliding_window"]
    and config["use_sliding_window"]
    and i >= config["max_window_layers"]
  ),
  "even_of_first": lambda config, i: (
    (i + 1) % 2
    and i < config["max_window_layers"]
    and config["use_sliding_window"]
  ),
  "without_rotation": lambda config, i: (
    config["sliding_window"]
    and config["use_sliding_window"]
    and not rotates(config)[i]
  ),
}


def rotating_layers() -> Rule:
  """Which layers rotate, 1 for each that does."""
  kinds = lambda config: ("rope" if x else "none" for x in rotates(config))
  flags = lambda fields: [int(x == "rope") for x in fields["posemb"]]
  return Rule(
    {"no_rope_layers": None, "no_rope_layer_interval": 4},
    lambda config: {"posemb": ByLayer(kinds(config))},
    lambda fields: {"no_rope_layers": flags(fields)},
  )


def query_scalar(default: int) -> Rule:
  """Attention's scale as a number whose inverse root it is."""
  read = lambda number: number**-0.5
  write = lambda scales: round(scales[0] ** -2)  # The library's is an int.
  key = "query_pre_attn_scalar"
  return converted("attention_scale", key, default, read, write)


def mlp_width() -> Rule:
  """The width of MLPs, and of experts where all layers have some."""
  key = "intermediate_size"

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    dense = [width for width in fields["mlp_dim"] if width is not None]
    return {key: [*dense, (fields["moe"][0] or {}).get("mlp_dim")][0]}

  return Rule({key: None}, lambda config: {"mlp_dim": config[key]}, write)


def experts(
  constants: Mapping[str, Any] = {},
  extra: Sequence[Rule] = (),
  **keys: tuple[str, Any],
) -> Rule:
  """Experts: {option: (key, value if absent)}, and rules of more options."""

  def read(config: ConfigJson) -> dict[str, Any]:
    moe = {name: config[key] for name, (key, _) in keys.items()} | {**constants}
    for rule in extra:
      moe |= rule.read(config)
    sparse = moe.pop("sparse", None)
    if sparse is None:
      return {"moe": moe}
    return {"moe": ByLayer(moe if flag else None for flag in sparse)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    moe = next((x for x in fields["moe"] if x is not None), None)
    if moe is None:
      return {}
    config = {key: moe[name] for name, (key, _) in keys.items()}
    moe = moe | {"sparse": [x is not None for x in fields["moe"]]}
    for rule in extra:
      config |= rule.write(moe)
    return config

  absent = dict(keys.values())
  for rule in extra:
    absent |= rule.keys
  return Rule(absent, read, write)


def sparse_by_step() -> Rule:
  """Every n-th layer has experts, except those in a list."""
  step, others = "decoder_sparse_step", "mlp_only_layers"

  def read(config: ConfigJson) -> dict[str, Any]:
    dense, depth = config[others] or [], config["num_hidden_layers"]
    has_some = lambda i: (i + 1) % config[step] == 0 and i not in dense
    return {"sparse": [has_some(i) for i in range(depth)]}

  def write(moe: Mapping[str, Any]) -> dict[str, Any]:
    return {step: 1, others: [i for i, x in enumerate(moe["sparse"]) if not x]}

  return Rule({step: 1, others: None}, read, write)


def sparse_after(key: str) -> Rule:
  """Layers with experts: all after the first ones."""
  layers = lambda config: range(config["num_hidden_layers"])
  return Rule(
    {key: 1},
    lambda config: {"sparse": [i >= config[key] for i in layers(config)]},
    lambda moe: {key: (*moe["sparse"], True).index(True)},
  )


def expert_groups() -> Rule:
  """Groups of which the tokens choose some, by the sum of their top two."""

  def read(config: ConfigJson) -> dict[str, Any]:
    num, top = config["n_group"], config["topk_group"]
    groups = {"num": num, "top": top, "score": "top2"}
    return {"groups": groups} if num > 1 else {}

  def write(moe: Mapping[str, Any]) -> dict[str, Any]:
    groups = moe["groups"] or {"num": 1, "top": 1}
    return {"n_group": groups["num"], "topk_group": groups["top"]}

  return Rule({"n_group": 1, "topk_group": 1}, read, write)


def shared_experts(key: str) -> Rule:
  """An MLP for all tokens, its size in experts."""
  return Rule(
    {key: 1},
    lambda config: {"shared_experts": config[key]},
    lambda moe: {key: moe["shared_dim"] // moe["mlp_dim"]},
  )


def clipped_mlp() -> Rule:
  """Bounds of the gated MLP of gpt-oss."""

  def read(config: ConfigJson) -> dict[str, Any]:
    limit, alpha = config["swiglu_limit"], config["swiglu_alpha"]
    return {"mlp_clip": {"limit": limit, "alpha": alpha, "up_offset": 1.0}}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    clip = fields["mlp_clip"] or {"limit": 7.0, "alpha": 1.702}
    return {"swiglu_limit": clip["limit"], "swiglu_alpha": clip["alpha"]}

  return Rule({"swiglu_limit": 7.0, "swiglu_alpha": 1.702}, read, write)


def gpt2_sizes() -> Rule:
  """Sizes that follow from others, or have a key of their own."""
  return Rule(
    {"n_inner": None},
    lambda config: {
      "num_kv_heads": config["n_head"],
      "head_dim": config["n_embd"] // config["n_head"],
      "mlp_dim": config["n_inner"] or 4 * config["n_embd"],
    },
    lambda fields: {"n_inner": fields["mlp_dim"][0]},
  )
