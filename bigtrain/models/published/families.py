"""Published architectures: a table each, for config.json and for arrays.

The config.json that Hugging Face's transformers writes beside the weights has
what the arrays do not show, such as the number of heads. A `Family` is a table
that is read in both directions: config.json to a model's fields, and back.
"""

import json
import math
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.arrays import dims
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_choice, did_you_mean
from bigtrain.models.published import layer_patterns, tables, timm
from bigtrain.models.published.layer_patterns import ByLayer

FILE = "config.json"
IGNORED = settings.read_table(__file__, "ignored.toml")


class Rule(NamedTuple):
  """Fields that take more than a key each."""

  keys: Mapping[str, Any]  # {key: value of an absent key}.
  # From the config.json to {our field: value}; `ByLayer` where layers differ.
  read: Callable[["ConfigJson"], Mapping[str, Any]]
  # From canonical fields to {key: value}.
  write: Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Family(NamedTuple):
  """A kind of published model."""

  model_type: str  # Its name in config.json.
  architecture: str  # Its class in transformers.
  arrays: tables.Table  # Its table of arrays.
  keys: Mapping[str, str]  # {our field: key}.
  # {key: value of an absent key}, as in transformers' configuration classes;
  # also replaces values of `rules`.
  defaults: Mapping[str, Any]
  constants: Mapping[str, Any]  # {our field: value of all these models}.
  rules: Mapping[str, Rule]  # By any name, so that others can replace them.
  requires: Mapping[str, tuple[Any, ...]] = {}  # {key: values we compute}.
  aliases: Mapping[str, str] = {}  # {other name of a key: key}.
  harmless: Collection[str] = ()  # Keys beside _HARMLESS that change nothing.
  in_shapes: Collection[str] = ()  # Fields that the arrays' shapes show.
  limits: Collection[str] = ()  # Without effect, or a user's choice.
  # {field: array}: a file with it decides, whatever a key that is true says.
  unless: Mapping[str, str] = {}
  quantised: Collection[str] = ()  # Readable quantization_config.quant_method.
  neutral: Mapping[str, Any] = {}  # {our field: value that needs no key}.

  def but(
    self,
    model_type: str,
    architecture: str,
    without: Collection[str] = (),
    **changes: Any,
  ) -> "Family":
    """A copy with changes; given mappings and `harmless` add to its own.

    `without` are names that its keys, constants and rules lose, or
    those of whole fields.
    """
    kept = {n: x for n, x in self._asdict().items() if n not in without}
    for name in {"keys", "constants", "rules"} & {*kept}:
      values = kept[name].items()
      kept[name] = {n: x for n, x in values if n not in without}
    for name, value in changes.items():
      if isinstance(value, Mapping):
        value = {**kept.get(name, {}), **value}
      elif name == "harmless":
        value = (*kept.get(name, ()), *value)
      kept[name] = value
    kept |= dict(model_type=model_type, architecture=architecture)
    return _EMPTY._replace(**kept)

  def absent(self) -> dict[str, Any]:
    """{key that is read: its value if absent}."""
    result: dict[str, Any] = dict.fromkeys(self.keys.values())
    for rule in self.rules.values():
      result |= rule.keys
    return {key: self.defaults.get(key, x) for key, x in result.items()}

  def read(
    self, path: str, values: Mapping[str, Any], unread: Collection[str] = ()
  ) -> "dict[str, Field]":
    values = {self.aliases.get(key, key): x for key, x in values.items()}
    config = ConfigJson(path, {**self.absent(), **values})
    method = (values.get("quantization_config") or {}).get("quant_method")
    if method is not None and method not in self.quantised:
      raise config.error(
        f"quantization_config: quant_method={method!r}: expected weights of "
        f"{' or '.join(['no quantisation', *self.quantised])}."
      )
    known = {
      *self.absent(),
      *self.requires,
      *_COMMON["requires"],
      "quantization_config",
    }
    for key in values:
      if key not in known and not {key} & (_HARMLESS | {*self.harmless}):
        if key not in unread:
          hint = did_you_mean(key, known)
          raise config.error(
            f"{key}={values[key]!r}: unknown key of model_type="
            f"{self.model_type!r}; config.model_init = dict(path=..., "
            f"allow_unread=[{key!r}]) leaves it out.{hint}"
          )
    for key, expected in {**_COMMON["requires"], **self.requires}.items():
      config.require(key, *expected)
    source = f"model_type={self.model_type!r}"
    constants = {**self.neutral, **self.constants}
    with_keys = {name: (x, source) for name, x in constants.items()}
    with_keys |= {name: (config[key], key) for name, key in self.keys.items()}
    for rule in self.rules.values():
      keys = [key for key in rule.keys if key in values] or [*rule.keys][:1]
      read = rule.read(config)
      with_keys |= {name: (x, ", ".join(keys)) for name, x in read.items()}
    plain = layer_patterns.fields({n: x for n, (x, _) in with_keys.items()})
    return {
      name: Field(
        value,
        with_keys.get(name, ("", "layers"))[1],
        name in self.in_shapes,
        name in self.limits,
        self.unless.get(name) if value else None,
        name in self.neutral and value == self.neutral[name],
      )
      for name, value in plain.items()
    }

  def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    first = lambda x: x[0] if isinstance(x, ByLayer) else x
    config = {
      "architectures": [self.architecture],
      "model_type": self.model_type,
      **{key: first(fields[name]) for name, key in self.keys.items()},
    }
    for rule in self.rules.values():
      config |= rule.write(fields)
    return config


_EMPTY = Family("", "", (), {}, {}, {}, {})


class Field(NamedTuple):
  """The value of a model's field, as a config.json determines it."""

  value: Any  # Value in our terms.
  key: str  # Key in config.json, for messages.
  in_shapes: bool = False  # Whether the arrays' shapes show another value.
  is_limit: bool = False  # Whether other values change no result.
  unless_array: str | None = None  # A file with this array decides by itself.
  is_neutral: bool = False  # Whether a model that does not name it has it.


def load(
  name: str, rules: types.ModuleType, families: Mapping[str, Family] = {}
) -> tuple[dict[str, Family], dict[str, tables.Table]]:
  """Reads the families and tables of a file beside this one."""
  sections = settings.read_table(__file__, f"{name}.toml")
  return parse(sections, rules, families)


def parse(
  sections: dict[str, Any],
  rules: types.ModuleType,
  families: Mapping[str, Family],
  arrays: Mapping[str, tables.Table] = {},
) -> tuple[dict[str, Family], dict[str, tables.Table]]:
  """Returns a file's families and tables, which may refer to those given.

  A section is the arguments of `Family.but`: `like` names the base, "null" is
  None, and {rule = "name", ...} calls a function of `rules`.
  """
  functions = dict(vars(rules), choice=choice, classes=classes, inverse=inverse)
  families, arrays, own = {**families}, {**arrays}, {}
  for name, rows in sections.pop("arrays", {}).items():
    arrays[name] = tables.parse(rows, arrays)
  sizes = _rows(**sections.pop("sizes", {"columns": "", "rows": ""}))
  for name, section in sections.items():
    changes = _built(section, functions, families)
    base = families[changes.pop("like")] if "like" in changes else _EMPTY
    keys = {**base.keys, **changes.get("keys", {})}
    row = {keys.get(x, x): value for x, value in sizes.get(name, {}).items()}
    changes["defaults"] = row | changes.get("defaults", {})
    if "arrays" in changes:
      changes["arrays"] = arrays[changes["arrays"]]
    if "harmless" in changes:
      changes["harmless"] = changes["harmless"].split()
    kind = changes.pop("model_type", name)
    own[name] = base.but(kind, changes.pop("class", ""), **changes)
    families[name] = own[name]
  return own, arrays


def _rows(columns: str, rows: str) -> dict[str, dict[str, Any]]:
  """{name: {column: value}} of lines that begin with the name."""
  value = lambda text: None if text == "-" else json.loads(text)
  return {
    name: dict(zip(columns.split(), map(value, values)))
    for name, *values in map(str.split, rows.strip().splitlines())
  }


def _built(
  value: Any,
  rules: Mapping[str, Callable[..., Any]],
  families: Mapping[str, Family],
) -> Any:
  if isinstance(value, list):
    return tuple(_built(x, rules, families) for x in value)
  if isinstance(value, dict):
    value = {name: _built(x, rules, families) for name, x in value.items()}
    if "family" in value:
      return families[value["family"]]
    if "rule" in value:
      return rules[value.pop("rule")](**value)
  return None if value == "null" else value


# Keys of any family: those that change no output of a model, such as the file's
# own, of training and generation; and those of which models compute one value.
_COMMON = _built(settings.read_table(__file__, "families.toml"), {}, {})
_HARMLESS = frozenset(_COMMON["harmless"].split())


def choice(field: str, key: str, values: Any) -> Rule:
  """A field by pairs (value of the key, of it); the first if it is absent."""
  values = dict(values)

  def read(config: ConfigJson) -> dict[str, Any]:
    config.require(key, *values)
    return {field: values[config[key]]}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    named = [name for name, x in values.items() if x == fields[field]]
    return {key: [*named, *values][0]}

  return Rule({key: next(iter(values))}, read, write)


def converted(
  field: str,
  key: str,
  absent: Any,
  read: Callable[[Any], Any],
  write: Callable[[Any], Any],
) -> Rule:
  """A field of one key, with functions between their values."""
  return Rule(
    {key: absent},
    lambda config: {field: read(config[key])},
    lambda fields: {key: write(fields[field])},
  )


def classes(stem: str, kind: str = "Sequence") -> Rule:
  """The number of classes of {stem}For{kind}Classification; else None."""
  suffix = f"For{kind}Classification"

  def read(config: ConfigJson) -> dict[str, Any]:
    if not str((config["architectures"] or [""])[0]).endswith(suffix):
      return {"num_classes": None}
    number = config.get("num_labels") or len(config.get("id2label") or "ab")
    return {"num_classes": number}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    if not (number := fields["num_classes"]):
      return {}
    return {
      "architectures": [stem + suffix],
      "id2label": {str(i): f"LABEL_{i}" for i in range(number)},
      "label2id": {f"LABEL_{i}": i for i in range(number)},
    }

  return Rule({"architectures": None}, read, write)


def inverse(field: str, key: str) -> Rule:
  """A field whose inverse is the key's value."""
  return converted(field, key, 1.0, lambda x: 1 / x, lambda x: 1 / x)


class ConfigJson(dict[str, Any]):
  """The values of the config.json at `path`."""

  def __init__(self, path: str, values: Mapping[str, Any]):
    super().__init__(values)
    self.path = path

  def __missing__(self, key: str) -> Any:
    raise self.error(f"{key}: missing.")

  def require(self, key: str, *expected: Any) -> None:
    if key in self and self[key] not in expected:
      raise self.error(
        f"{key}={self[key]!r}: the model computes only "
        f"{' or '.join(map(repr, expected))}."
      )

  def error(self, text: str) -> ConfigError:
    return ConfigError(f"{self.path}: {text}")


def file_beside(path: str) -> str:
  path = os.path.abspath(os.path.expanduser(path))
  folder = path if os.path.isdir(path) else os.path.dirname(path)
  return os.path.join(folder, FILE)


def read_json(path: str) -> tuple[str, dict[str, Any] | None]:
  """(the config.json beside a path, its values; None without, or of a run)."""
  file = file_beside(path)
  if not os.path.isfile(file):
    return file, None
  try:
    with open(file) as f:
      values = json.load(f)
  except (OSError, ValueError) as e:
    raise ConfigError(f"{file}: cannot be read: {e}") from e
  if isinstance(values, dict) and "architecture" in values:
    values = timm.flat(file, values)
  kind = values.get("model_type") if isinstance(values, dict) else None
  return file, values if isinstance(kind, str) else None


class Layouts(NamedTuple):
  """The published layouts of a module in bigtrain/models."""

  families: Mapping[str, Family]  # By model_type, as in config.json.
  # From a model's fields to comparable ones.
  canonical: Callable[[Mapping[str, Any]], dict[str, Any]]
  # From a model to {name of a layout: family}; an export takes the first that
  # fits. None for `families`.
  of_model: Callable[[Any], Mapping[str, Family]] | None = None

  def fields(self, path: str, unread: Collection[str] = ()) -> "Fields | None":
    """Returns the fields that config.json, or its `text_config`, determines."""
    file, values = read_json(path)
    if values is None:
      return None
    text = values.get("text_config")
    if values["model_type"] not in self.families and isinstance(text, dict):
      text = {"model_type": f"{values['model_type']}_text", **text}
      tied = "tie_word_embeddings"
      values = text | {tied: values[tied]} if tied in values else text
    kind = values["model_type"]
    if kind not in self.families:
      names = values.get("architectures") or []
      raise ConfigError(
        f"{file}: config.model_name does not compute the architecture {kind!r} "
        f"{tuple(names)}; it computes {', '.join(self.families)}."
      )
    fields = self.families[kind].read(file, values, unread)
    return Fields(file, fields, self.canonical)

  def export(
    self,
    param_dims: dims.Table,
    model: Any,
    shapes: tables.Shapes,
    layout: str | None = None,
  ) -> tuple[dict[str, Any], list[tables.Tensor]]:
    """Returns (contents of config.json, arrays) of a model.

    Without a layout it is the first that expresses the model exactly: reading
    its config.json gives the same fields again.
    """
    layouts = self.of_model(model) if self.of_model else self.families
    if layout:
      check_choice("--layout", layout, layouts)
    fields = type(model).__dataclass_fields__
    ours = self.canonical({name: getattr(model, name) for name in fields})
    ours["shapes"] = shapes
    problems = []
    for name in [layout] if layout else layouts:
      family, key = layouts[name], f"--layout={name}"
      try:
        config = family.write(ours)
        read = family.read(key, config)
        theirs = self.canonical({name: x.value for name, x in read.items()})
        texts = [
          f"{field}={theirs_i!r}, got {ours_i!r}{where}"
          for field, (where, pair) in _different(ours, theirs, read).items()
          for ours_i, theirs_i in [_narrowed(*pair)]
        ]
        if texts:
          raise ConfigError(f"{key}: expected a model with {'; '.join(texts)}.")
        arrays = tables.export(key, family.arrays, shapes, param_dims)
        if family.model_type == timm.MODEL_TYPE:
          config = timm.folded(config)
        return config, arrays
      except ConfigError as e:
        problems.append(e)
    shortest = min(problems, key=lambda e: len(str(e)))
    if layout:
      raise shortest
    raise ConfigError(
      f"--format=hf: no published layout computes this model. {shortest}"
    ) from shortest


def _different(
  ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Iterable[str]
) -> dict[str, tuple[str, tuple[Any, Any]]]:
  """Returns {field: (" in layer i" or "", (our value, theirs))} that differ."""
  result = {}
  for name in names:
    if name not in theirs or name not in ours:
      continue
    x, y, first, where = ours[name], theirs[name], 0, ""
    if _same(x, y):
      continue
    if isinstance(y, ByLayer):
      layers = [i for i, pair in enumerate(zip(x, y)) if not _same(*pair)]
      if not layers:
        continue  # Only their numbers differ, and depth with them.
      first = layers[0]
      where = f" in layer {first}" if len(layers) < len(y) else ""
      y = y[first]
    x = x[first] if isinstance(x, ByLayer) else x
    result[name] = (where, (x, y))
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
    fields: Mapping[str, Field],
    canonical: Callable[[Mapping[str, Any]], dict[str, Any]],
  ):
    super().__init__(fields)
    self.path = path
    self._canonical = canonical

  def contradictions(
    self, model: Any, arrays: Collection[str], key: str
  ) -> dict[str, str]:
    """Returns {name of a field: message} of the fields with another value."""
    names = type(model).__dataclass_fields__
    ours = self._canonical({name: getattr(model, name) for name in names})
    theirs = self._canonical({name: x.value for name, x in self.items()})
    messages = {}
    for name, (where, (x, y)) in _different(ours, theirs, self).items():
      field = self[name]
      if not field.is_limit and field.unless_array not in arrays:
        message = _message(f"{key}.{name}", x, field._replace(value=y))
        messages[name] = message + where
    return messages

  def merge(
    self, options: Mapping[str, Any], allowed: Collection[str], key: str
  ) -> dict[str, Any]:
    """Returns `options`, of config.model, with the fields of the file."""
    given = [name for name, field in self.items() if not field.is_neutral]
    result = {name: self[name].value for name in given}
    wrong = []
    for name, value in options.items():
      if value is None and name in self:
        continue
      result[name] = value
      if name not in self:
        continue
      field = self[name]
      if isinstance(field.value, dict) and isinstance(value, Mapping):
        # Options of the training, such as a capacity, may be added.
        if name == "moe":
          result[name] = {**field.value, **value}
        value = {key: result[name].get(key) for key in field.value}
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
