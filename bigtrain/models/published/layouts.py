"""Published layouts of a model: its families, used to load and to export.

`Layouts.fields` reads the fields of a model from config.json, which `Fields`
merges into config.model or compares with it. `Layouts.export` finds a family
that expresses a model.
"""

import logging
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.models.published import array_files, tables, timm
from bigtrain.models.published.families import FILE, Family, Field, read_json
from bigtrain.models.published.layer_patterns import ByLayer

# Fields of a tower or another part that do not change what it computes.
NOT_COMPUTED = (
  "parent",
  "name",
  "variant",
  "dropout",
  "drop_path",
  "scan",
  "attention",
  "remat_policy",
  "dtype",
  "head_zeroinit",
  "head_bias_init",
  "num_classes",
)


class Layouts(NamedTuple):
  """The published layouts of a module in bigtrain/models."""

  families: Mapping[str, Family]  # By name, see `name_of`.
  # From a model's fields to comparable ones.
  canonical: Callable[[Mapping[str, Any]], dict[str, Any]]
  # From a model to {name of a layout: family}; an export takes the first that
  # fits. None for `families`.
  of_model: Callable[[Any], Mapping[str, Family]] | None = None
  # {model_type of a known family that is not computed: the part it needs}.
  missing_parts: Mapping[str, str] = {}
  # Name of the family of a config.json, where it is not the model_type alone.
  name_of: Callable[[Mapping[str, Any]], str] = operator.itemgetter(
    "model_type"
  )

  def fields(self, path: str, unread: Collection[str] = ()) -> "Fields | None":
    """Returns the fields that config.json, or its `text_config`, determines.

    Args:
      path: folder of the config.json, or a file beside it.
      unread: keys of config.json to leave out if nothing reads them.
    """
    file, values = read_json(path)
    if values is None:
      return None
    given = values["model_type"]
    if given not in self.families:
      values = _text_part(values)
    kind = self.name_of(values)
    if kind not in self.families:
      names = values.get("architectures") or []
      for name in (given, kind):
        if name in self.missing_parts:
          raise ConfigError(
            f"{file}: model_type={name!r} {tuple(names)}: config.model_name "
            f"does not compute this family. It needs "
            f"{self.missing_parts[name]}."
          )
      raise ConfigError(
        f"{file}: config.model_name does not compute the architecture {kind!r} "
        f"{tuple(names)}; it computes {', '.join(self.families)}."
      )
    fields = self.families[kind].read(file, values, unread)
    return Fields(file, kind, fields, self.canonical)

  def export(
    self,
    param_dims: dims.Table,
    model: Any,
    shapes: tables.Shapes,
    layout: str | None = None,
    origin: str | None = None,
  ) -> tuple[dict[str, Any], list[tables.Tensor]]:
    """Returns (contents of config.json, arrays) of a model.

    Without `layout`, it is the first that expresses the model exactly: reading
    its config.json gives the same fields again.

    Args:
      origin: model_type of the folder that the model began with. Its layouts
        come first, and a warning says why none of them fits.
    """
    families = self.of_model(model) if self.of_model else self.families
    if layout:
      check_choice("--layout", layout, families)
      families = {layout: families[layout]}
    in_order = sorted(
      families.items(), key=lambda item: item[1].model_type != origin
    )
    ours = self.canonical(fields_of(model))
    ours["shapes"] = shapes
    errors = []
    errors_of_origin = []
    for name, family in in_order:
      key = f"--layout={name}"
      try:
        config = self.config_json(key, family, ours)
        arrays = array_files.export(key, family.arrays, shapes, param_dims)
        if family.model_type == timm.MODEL_TYPE:
          config = timm.folded(config)
      except ConfigError as e:
        errors.append(e)
        if family.model_type == origin:
          errors_of_origin.append(e)
        continue
      if errors_of_origin and family.model_type != origin:
        logging.warning(
          "The model began as %s, which no longer expresses it; its layout is "
          "now %s. %s",
          origin,
          name,
          _shortest(errors_of_origin),
        )
      return config, arrays
    # The family that is nearest to the model has the fewest problems with it.
    shortest = _shortest(errors)
    if layout:
      raise shortest
    raise ConfigError(
      f"--format=hf: no published layout computes this model. {shortest}"
    ) from shortest

  def config_json(
    self, key: str, family: Family, ours: Mapping[str, Any]
  ) -> dict[str, Any]:
    """The config.json of a model in a family, if the family expresses it."""
    config = family.write(ours)
    read = family.read(key, config)
    theirs = self.canonical({name: x.value for name, x in read.items()})
    texts = []
    for name, difference in _differences(ours, theirs, read).items():
      value, expected = _narrowed(difference.ours, difference.theirs)
      texts.append(f"{name}={expected!r}, got {value!r}{difference.where}")
    if texts:
      raise ConfigError(f"{key}: expected a model with {'; '.join(texts)}.")
    return config


def _shortest(errors: Sequence[ConfigError]) -> ConfigError:
  return min(errors, key=lambda e: len(str(e)))


def _text_part(values: dict[str, Any]) -> dict[str, Any]:
  """The text model's part of the config.json of a model that also sees images.

  Other files are returned as they are.
  """
  part = values.get("text_config")
  if not isinstance(part, dict):
    return values
  result = {"model_type": f"{values['model_type']}_text", **part}
  if "tie_word_embeddings" in values:
    result["tie_word_embeddings"] = values["tie_word_embeddings"]
  return result


def fields_of(model: Any) -> dict[str, Any]:
  return {
    name: getattr(model, name) for name in type(model).__dataclass_fields__
  }


# Fields with options that need not all be given: experts, and parts of a model.
_WITH_OPTIONS = ("moe", "image", "text", "projector")


class _Difference(NamedTuple):
  """Two values of a field."""

  ours: Any
  theirs: Any
  where: str  # " in layer i" if only some layers differ, else "".


def _differences(
  ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Iterable[str]
) -> dict[str, _Difference]:
  """Returns the fields of `names` that differ, if both sides have them."""
  result = {}
  for name in names:
    if name not in theirs or name not in ours:
      continue
    x, y = ours[name], theirs[name]
    if _same(x, y):
      continue
    layer, where = 0, ""
    if isinstance(y, ByLayer):
      layers = [i for i, pair in enumerate(zip(x, y)) if not _same(*pair)]
      if not layers:
        continue  # Only their numbers differ, and depth with them.
      layer = layers[0]
      if len(layers) < len(y):
        where = f" in layer {layer}"
      y = y[layer]
    if isinstance(x, ByLayer):
      x = x[layer]
    result[name] = _Difference(x, y, where)
  return result


def _same(x: Any, y: Any) -> bool:
  if isinstance(x, Mapping) and isinstance(y, Mapping):
    return set(x) == set(y) and all(_same(x[key], y[key]) for key in x)
  if isinstance(x, Sequence) and isinstance(y, Sequence) and type(x) is not str:
    return len(x) == len(y) and all(map(_same, x, y))
  if isinstance(x, float) and isinstance(y, float):
    return math.isclose(x, y, rel_tol=1e-9)
  return bool(x == y)


class Fields(dict[str, Field]):
  """The fields of a model that a config.json determines, by name."""

  def __init__(
    self,
    path: str,
    model_type: str,
    fields: Mapping[str, Field],
    canonical: Callable[[Mapping[str, Any]], dict[str, Any]],
  ):
    super().__init__(fields)
    self.path = path
    self.model_type = model_type  # Name of the family.
    self._canonical = canonical

  def contradictions(
    self, model: Any, arrays: Collection[str], key: str
  ) -> dict[str, str]:
    """Returns {name of a field: message} of the fields with another value.

    Args:
      arrays: names of the file's arrays, which decide some fields.
      key: the model's place in the config, for messages.
    """
    ours = self._canonical(fields_of(model))
    theirs = self._canonical({name: x.value for name, x in self.items()})
    messages = {}
    for name, difference in _differences(ours, theirs, self).items():
      field = self[name]
      if not field.is_limit and field.unless_array not in arrays:
        expected = field._replace(value=difference.theirs)
        message = _message(f"{key}.{name}", difference.ours, expected)
        messages[name] = message + difference.where
    return messages

  def merge(
    self, options: Mapping[str, Any], allowed: Collection[str], key: str
  ) -> dict[str, Any]:
    """Returns `options`, of config.model, with the fields of the file.

    Args:
      allowed: names of fields that may have another value than in the file.
      key: the model's place in the config, for messages.
    """
    result = {
      name: field.value for name, field in self.items() if not field.is_neutral
    }
    wrong = []
    for name, value in options.items():
      if name not in self:
        result[name] = value
        continue
      if value is None:
        continue
      result[name] = value
      field = self[name]
      if isinstance(field.value, dict) and isinstance(value, Mapping):
        # Options of the training, such as a capacity, may be added.
        if name in _WITH_OPTIONS:
          result[name] = {**field.value, **value}
        value = {x: result[name].get(x) for x in field.value}
      arrays_decide = field.unless_array is not None or field.is_limit
      if value != field.value and not arrays_decide and name not in allowed:
        wrong.append(_message(f"{key}.{name}", value, field))
    if wrong:
      raise ConfigError(f"{self.path}: {'; '.join(wrong)}.")
    return result


def _message(key: str, value: Any, field: Field) -> str:
  value, expected = _narrowed(value, field.value)
  return f"{key}={value!r}, but {FILE} has {expected!r} ({field.key})"


def _narrowed(x: Any, y: Any) -> tuple[Any, Any]:
  """The two values, or where they are dicts, what differs in them."""
  if not isinstance(x, Mapping) or not isinstance(y, Mapping):
    return x, y
  names = [name for name in y if not _same(x.get(name), y[name])]
  return {n: x.get(n) for n in names}, {n: y[n] for n in names}
