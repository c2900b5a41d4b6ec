"""Rotary embeddings of decoders: `rope_parameters`, and the keys before it.

Files of transformers 5 have the base, the share of rotating features and the
scaling in one dict, or in one dict for each type of layer. Older files have a
key for each, and `rope_scaling`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bigtrain.arrays.rope_scalings import ROPE_SCALINGS
from bigtrain.config.errors import did_you_mean
from bigtrain.models.published.decoders.window_rules import (
  FULL,
  SLIDING,
  LayerTypes,
)
from bigtrain.models.published.families import ConfigJson, Rule
from bigtrain.models.published.layer_patterns import ByLayer

_ORIGINAL_LEN = "original_max_position_embeddings"
# Growth of queries with their position, in Ministral 3.
_QUERY_BETA = "llama_4_scaling_beta"
# Of positions in three axes, in Qwen's models that read pictures.
_SECTIONS, _INTERLEAVED = "mrope_section", "mrope_interleaved"
_OF_AXES = (_SECTIONS, _INTERLEAVED)
# Options of yarn whose zeros are as if they were not there.
_ABSENT_IF_ZERO = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
# {type of scaling: {our option: its name in the file}}.
_SCALING_NAMES = {
  kind: {
    name: _ORIGINAL_LEN if name == "original_len" else name
    for name in scaling.names
  }
  for kind, scaling in ROPE_SCALINGS.items()
}


def rope(
  theta: float = 1e4,
  *,
  fraction: float | None = None,
  types: LayerTypes | None = None,
  local_theta: float | None = None,
  rotary_dim: bool = False,
  original_len: int | None = None,
  query_scale: bool = False,
  scaled: bool = False,
  sections: tuple[int, int, int] | None = None,
  axes_interleaved: bool = False,
) -> Rule:
  """Rotary embeddings.

  Args:
    theta: base of files that name none.
    fraction: share of the features of a head that rotate, in files without a
      key for it. None for families in which all do.
    types: types of layers, if each has its own rotation.
    local_theta: base of the layers with a window, in older files.
    rotary_dim: whether older files have a number of rotating features.
    original_len: the length that the scaling begins with, if the file lacks
      the key for it; for families that always have this key.
    query_scale: whether the file may let queries grow with their position.
    scaled: whether files without a scaling have one, which the family's
      defaults give.
    sections: numbers of frequencies that follow time, row and column, in files
      that do not say it; None for families with one axis.
    axes_interleaved: whether the axes take turns.
  """
  fields = ["rope_theta", "rope_fraction", "rope_scaling"]
  fields += ["query_scale"] if query_scale else []
  fields += ["rope_axes"] if sections else []
  rule = _Rope(
    theta,
    fraction,
    types,
    local_theta,
    rotary_dim,
    original_len,
    query_scale,
    scaled,
    sections,
    axes_interleaved,
  )
  return Rule(
    tuple(fields),
    rule.keys(),
    rule.read,
    rule.write,
  )


class _Rope(NamedTuple):
  """The arguments of `rope`, and the functions of its rule."""

  theta: float
  fraction: float | None
  types: LayerTypes | None
  local_theta: float | None
  rotary_dim: bool
  original_len: int | None
  query_scale: bool
  scaled: bool
  sections: tuple[int, int, int] | None
  axes_interleaved: bool

  def keys(self) -> dict[str, Any]:
    keys: dict[str, Any] = {
      "rope_theta": None,
      "rope_parameters": None,
      "rope_scaling": None,
      "partial_rotary_factor": None,
    }
    if self.local_theta:
      keys["rope_local_base_freq"] = self.local_theta
    if self.rotary_dim:
      keys["rotary_dim"] = None
    if not self.types:
      keys[_ORIGINAL_LEN] = self.original_len
    return keys

  def read(self, config: ConfigJson) -> dict[str, Any]:
    if not self.types:
      return self._rotation(config, self._stored(config, FULL))
    by_type = {
      kind: self._rotation(config, self._stored(config, kind))
      for kind in (FULL, SLIDING)
    }
    kinds = self.types.read(config)
    return {
      name: ByLayer(by_type[kind][name] for kind in kinds)
      for name in by_type[FULL]
    }

  def _stored(self, config: ConfigJson, kind: str) -> dict[str, Any]:
    """The rotation of a type of layer, in the form of newer files."""
    values = config["rope_scaling"] or config["rope_parameters"] or {}
    by_type = any(isinstance(value, dict) for value in values.values())
    if by_type != bool(self.types and config["rope_parameters"]):
      raise config.error(
        f"rope_parameters={values!r}: expected "
        f"{'a dict for each type of layer' if self.types else 'one dict'}."
      )
    fraction = config["partial_rotary_factor"]
    if self.rotary_dim and fraction is None and config["rotary_dim"]:
      fraction = config["rotary_dim"] / config["head_dim"]
    stored = {
      "rope_theta": config["rope_theta"] or self.theta,
      "partial_rotary_factor": fraction or self.fraction or 1.0,
    }
    if self.local_theta and kind == SLIDING:
      stored["rope_theta"] = config["rope_local_base_freq"]
    if by_type:
      return stored | of_type(values, kind)
    # In older files only the layers without a window are scaled.
    is_local = self.types and kind == SLIDING
    return stored if is_local else stored | values

  def _rotation(
    self, config: ConfigJson, stored: Mapping[str, Any]
  ) -> dict[str, Any]:
    fraction = stored["partial_rotary_factor"]
    if fraction != 1.0 and self.fraction is None:
      raise config.error(f"partial_rotary_factor={fraction}: expected 1.0.")
    axes = None
    if self.sections:
      sections = tuple(stored.get(_SECTIONS) or self.sections)
      if self.axes_interleaved:
        number = int(config["head_dim"] * fraction) // 2
        sections = _used_sections(sections, number)
      axes = {"sections": sections, "interleaved": self.axes_interleaved}
      stored = {x: y for x, y in stored.items() if x not in _OF_AXES}
      for name in ("rope_type", "type"):
        if stored.get(name) == "mrope":  # In older files.
          stored = {**stored, name: "default"}
    original_len = None if self.types else config[_ORIGINAL_LEN]
    scaling = read_scaling(
      config, stored, original_len, bool(self.original_len)
    )
    fields = {
      "rope_theta": stored["rope_theta"],
      "rope_fraction": fraction,
      "rope_scaling": scaling,
    }
    if self.sections:
      fields["rope_axes"] = axes
    if self.query_scale:
      fields["query_scale"] = None
      if (beta := stored.get(_QUERY_BETA)) is not None:
        longest = config["max_position_embeddings"]
        # A scaling of type "dynamic" begins at the longest text instead.
        length = stored.get(_ORIGINAL_LEN)
        length = length or (scaling or {}).get("original_len", longest)
        scale = {"beta": beta, "original_len": length, "log": "log"}
        fields["query_scale"] = scale
    return fields

  def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    # (theta, scaling, fraction) of each layer.
    layers = [
      *zip(
        fields["rope_theta"], fields["rope_scaling"], fields["rope_fraction"]
      )
    ]
    if self.types:
      by_type = {}
      for window, (theta, scaling, _) in zip(fields["window"], layers):
        kind = FULL if window is None else SLIDING
        by_type[kind] = written_scaling(scaling) | {"rope_theta": theta}
      return {"rope_parameters": by_type} | _longest(fields)
    # Layers that do not rotate have no values.
    rotating = [layer for layer in layers if layer[0] is not None]
    theta, scaling, fraction = [*rotating, (self.theta, None, 1.0)][0]
    written = written_scaling(scaling)
    query_scale = fields["query_scale"][0]
    if self.query_scale and query_scale:
      written[_QUERY_BETA] = query_scale["beta"]
      written[_ORIGINAL_LEN] = query_scale["original_len"]
    if self.sections and fields["rope_axes"]:
      axes = fields["rope_axes"]
      written[_SECTIONS] = list(axes["sections"])
      if axes["interleaved"]:
        written[_INTERLEAVED] = True
    # Without a scaling, some families have one of their own.
    has_more = scaling or self.sections or query_scale or self.scaled
    config = {
      "rope_theta": theta,
      "rope_scaling": written if has_more else None,
    }
    if self.original_len and _ORIGINAL_LEN in written:
      config[_ORIGINAL_LEN] = written[_ORIGINAL_LEN]
    if self.fraction is not None:
      config["partial_rotary_factor"] = fraction
    return config | _longest(fields)


def _used_sections(
  sections: tuple[int, ...], number: int
) -> tuple[int, int, int]:
  """Sections of axes that take turns, of a head with `number` frequencies.

  What they say beyond the last frequency has no effect.
  """
  rows, columns = (
    len(range(axis, min(3 * sections[axis], number), 3)) for axis in (1, 2)
  )
  return number - rows - columns, rows, columns


def of_type(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
  """The rotation of a type of layer, from the rotations of all types."""
  stored = dict(values.get(kind) or {})
  # The library reads this option only beside the types.
  stored.pop("truncate", None)
  if stored.get("rope_type") == "yarn" and "truncate" in values:
    stored["truncate"] = values["truncate"]
  return stored


def read_scaling(
  config: ConfigJson,
  stored: Mapping[str, Any],
  original_len: int | None = None,
  is_phi: bool = False,
) -> dict[str, Any] | None:
  """Returns config.model.rope_scaling for a stored rotation.

  Args:
    original_len: the value of a key beside the rotation, which comes first.
    is_phi: whether the older names of "longrope" are those of Phi 3.
  """
  kind = stored.get("rope_type", stored.get("type", "default"))
  if is_phi and kind in ("su", "yarn"):
    kind = "longrope"  # Names in older files of the family.
  if kind != "default" and kind not in _SCALING_NAMES:
    hint = did_you_mean(str(kind), ("default", *_SCALING_NAMES))
    raise config.error(f"rope_type={kind!r}: not computed by the model.{hint}")
  names = _SCALING_NAMES.get(kind, {})
  others = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
  if _QUERY_BETA in stored:
    others |= {_QUERY_BETA, "max_position_embeddings"}
  if kind in ("default", "linear", "dynamic"):
    others.add(_ORIGINAL_LEN)  # Which files have, and nothing reads.
  for key in stored.keys() - others - {*names.values()}:
    hint = did_you_mean(key, {*names.values()})
    raise config.error(f"{key}: unknown key of rope_type={kind!r}.{hint}")
  if kind == "default":
    return None
  length = config["max_position_embeddings"]
  if kind == "dynamic":
    stored = {**stored, _ORIGINAL_LEN: length}
  elif original_len:
    stored = {**stored, _ORIGINAL_LEN: original_len}
  scaling: dict[str, Any] = {"type": kind}
  for ours, theirs in names.items():
    value = stored.get(theirs)
    if ours in _ABSENT_IF_ZERO:
      value = value or None
    if value is None:
      if ours == "original_len":
        value = length
      elif ours == "factor" and kind in ("yarn", "longrope"):
        original = stored.get(_ORIGINAL_LEN, length)
        value = config["max_position_embeddings"] / original
      elif ours in ROPE_SCALINGS[kind].required:
        raise config.error(f"{theirs}: missing beside rope_type={kind!r}.")
    if value is not None:
      scaling[ours] = value
  return scaling


def written_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
  """A scaling as in newer files."""
  if not scaling:
    return {"rope_type": "default"}
  names = {"type": "rope_type", **_SCALING_NAMES[scaling["type"]]}
  written = {
    names[name]: list(value) if isinstance(value, tuple) else value
    for name, value in scaling.items()
  }
  if scaling["type"] == "dynamic":
    del written[_ORIGINAL_LEN]  # See _longest.
  return written


def _longest(fields: Mapping[str, Any]) -> dict[str, Any]:
  """The key with the length from which a scaling of type "dynamic" changes."""
  for scaling in filter(None, fields["rope_scaling"]):
    if scaling["type"] == "dynamic":
      return {"max_position_embeddings": scaling["original_len"]}
  return {}
