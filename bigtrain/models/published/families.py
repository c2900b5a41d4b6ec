"""Families of published models: how config.json determines a model's fields.

Next to the weights, Hugging Face's transformers writes a config.json. It says
what the arrays do not show, such as the number of heads. A `Family` converts in
both directions: from config.json to the fields of a model, and back. Most
fields have a key each (`Key`). Where that is not enough, there is a `Rule`.
layouts.py uses families to load, compare and export models.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.models.published import (
  common_keys,
  fp8_blocks,
  layer_patterns,
  tables,
  timm,
)
from bigtrain.models.published.layer_patterns import ByLayer

FILE = "config.json"


class Key(NamedTuple):
  """A key of config.json whose value is a field of ours, or an option of it."""

  name: str
  default: Any = None  # Value in transformers if the file lacks the key.


class Rule(NamedTuple):
  """Fields for which one key each is not enough."""

  fields: tuple[str, ...]  # Fields of ours that `read` returns.
  keys: Mapping[str, Any]  # {key of config.json: value if absent}.
  # From config.json to {our field: value}; `ByLayer` where layers differ.
  read: Callable[["ConfigJson"], Mapping[str, Any]]
  # From canonical fields to {key: value}.
  write: Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Family(NamedTuple):
  """Published models that differ only in sizes and options, such as Qwen 3.

  If several of them determine a field, a rule wins over a key, and a key over a
  constant.
  """

  model_type: str  # Name of the family in config.json.
  architecture: str  # Name of its class in transformers.
  arrays: tables.Table = ()
  keys: Mapping[str, Key] = {}
  # {our field: its value in all models of the family}.
  constants: Mapping[str, Any] = {}
  rules: Sequence[Rule] = ()
  # {key: value if absent} in place of those of keys and rules.
  defaults: Mapping[str, Any] = {}
  # {key: the only values that our model computes}.
  requires: Mapping[str, tuple[Any, ...]] = {}
  aliases: Mapping[str, str] = {}  # {other name of a key: key}.
  # Keys that change no output, in addition to common_keys.HARMLESS.
  harmless: Collection[str] = ()
  # {our field: its value where a config need not name it}.
  neutral: Mapping[str, Any] = {}
  in_shapes: Collection[str] = ()  # Fields that the arrays' shapes show.
  # Fields that change no result, or that are the user's choice.
  limits: Collection[str] = ()
  # {field: array}: if the file has the array, it decides, and not a true key.
  unless: Mapping[str, str] = {}
  # Values of quantization_config.quant_method whose weights can be read.
  quantised: Collection[str] = ()

  def but(
    self,
    model_type: str,
    architecture: str,
    *,
    without: Collection[str] = (),
    arrays: tables.Table | None = None,
    keys: Mapping[str, Key] = {},
    constants: Mapping[str, Any] = {},
    rules: Sequence[Rule] = (),
    defaults: Mapping[str, Any] = {},
    requires: Mapping[str, tuple[Any, ...]] = {},
    aliases: Mapping[str, str] = {},
    harmless: Collection[str] = (),
    quantised: Collection[str] = (),
  ) -> "Family":
    """A copy of this family with changes.

    Mappings and `harmless` add to those of this family. A rule replaces the
    rules for the same fields.

    Args:
      without: fields whose keys, constants and rules the new family does not
        have.
    """
    _check_known(f"{model_type}: without", without, self.fields())
    kept_keys = {x: key for x, key in self.keys.items() if x not in without}
    kept_constants = {
      x: value for x, value in self.constants.items() if x not in without
    }
    kept_rules = [x for x in self.rules if not {*x.fields} & {*without}]
    of_rules = {field for rule in kept_rules for field in rule.fields}
    _check_free(f"{model_type}: keys", keys, of_rules)
    _check_free(f"{model_type}: constants", constants, of_rules | {*kept_keys})
    family = self._replace(
      model_type=model_type,
      architecture=architecture,
      arrays=self.arrays if arrays is None else arrays,
      keys={**kept_keys, **keys},
      constants={**kept_constants, **constants},
      rules=_with_replacements(kept_rules, rules),
      requires={**self.requires, **requires},
      aliases={**self.aliases, **aliases},
      harmless=(*self.harmless, *harmless),
      quantised=(*self.quantised, *quantised),
      defaults={},
    )
    known = family.absent()
    _check_known(f"{model_type}: defaults", defaults, known)
    inherited = {x: y for x, y in self.defaults.items() if x in known}
    return family._replace(defaults={**inherited, **defaults})

  def fields(self) -> set[str]:
    """Names of the fields that config.json determines."""
    names = {*self.keys, *self.constants}
    for rule in self.rules:
      names |= {*rule.fields}
    return names

  def absent(self) -> dict[str, Any]:
    """{key that is read: its value if config.json lacks it}."""
    values: dict[str, Any] = {}
    for rule in self.rules:
      values |= rule.keys
    values |= {key.name: key.default for key in self.keys.values()}
    return {**values, **self.defaults}

  def read(
    self, path: str, values: Mapping[str, Any], unread: Collection[str] = ()
  ) -> "dict[str, Field]":
    """Returns the fields that `values`, the config.json at `path`, determines.

    Args:
      unread: unknown keys to leave out; all others are errors.
    """
    values = {self.aliases.get(key, key): x for key, x in values.items()}
    config = ConfigJson(path, {**self.absent(), **values}, unread)
    self._check(config, values, unread)
    # {field: (value, keys that it is read from)}
    read: dict[str, tuple[Any, str]] = {}
    for name, value in {**self.neutral, **self.constants}.items():
      read[name] = value, f"model_type={self.model_type!r}"
    for name, key in self.keys.items():
      read[name] = config[key.name], key.name
    for rule in self.rules:
      given = [key for key in rule.keys if key in values]
      source = ", ".join(given or [*rule.keys][:1])
      for name, value in rule.read(config).items():
        read[name] = value, source
    plain = layer_patterns.fields({name: x for name, (x, _) in read.items()})
    return {
      name: Field(
        value,
        key=read[name][1] if name in read else "layers",
        in_shapes=name in self.in_shapes,
        is_limit=name in self.limits,
        unless_array=self.unless.get(name) if value else None,
        is_neutral=name in self.neutral and value == self.neutral[name],
      )
      for name, value in plain.items()
    }

  def _check(
    self,
    config: "ConfigJson",
    given: Mapping[str, Any],
    unread: Collection[str],
  ) -> None:
    """Refuses what the model does not compute, and keys that nobody reads."""
    quantisation = given.get("quantization_config") or {}
    method = quantisation.get("quant_method")
    if method is not None and method not in self.quantised:
      raise config.error(
        f"quantization_config: quant_method={method!r}: expected weights of "
        f"{' or '.join(['no quantisation', *self.quantised])}."
      )
    if method == fp8_blocks.METHOD:
      fp8_blocks.check(quantisation, config.error)
    absent = self.absent()
    required = {
      key: values
      for key, values in common_keys.REQUIRES.items()
      if key not in absent
    }
    required |= self.requires
    known = {*absent, *required, "quantization_config"}
    harmless = {*common_keys.HARMLESS, *self.harmless}
    for key in given:
      if key not in known | harmless and key not in unread:
        hint = did_you_mean(key, known)
        raise config.error(
          f"{key}={given[key]!r}: unknown key of model_type="
          f"{self.model_type!r}; config.model_init = dict(path=..., "
          f"allow_unread=[{key!r}]) leaves it out.{hint}"
        )
    for key, expected in required.items():
      config.require(key, *expected)

  def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of config.json for a model's canonical fields."""
    config: dict[str, Any] = {
      "architectures": [self.architecture],
      "model_type": self.model_type,
    }
    for name, key in self.keys.items():
      value = fields[name]
      config[key.name] = value[0] if isinstance(value, ByLayer) else value
    for rule in self.rules:
      config |= rule.write(fields)
    return config


def _check_known(
  where: str, names: Collection[str], known: Collection[str]
) -> None:
  """Refuses misspelled names where a family is defined."""
  for name in names:
    if name not in known:
      hint = did_you_mean(name, known)
      raise ValueError(f"{where}: {name}: unknown name.{hint}")


def _check_free(
  where: str, names: Collection[str], taken: Collection[str]
) -> None:
  """Refuses fields on which what is given would have no effect."""
  for name in names:
    if name in taken:
      raise ValueError(
        f"{where}: {name}: the base determines it; without=({name!r},) leaves "
        "that out."
      )


def _with_replacements(
  rules: Sequence[Rule], others: Sequence[Rule]
) -> tuple[Rule, ...]:
  """`rules`, where `others` take the places of rules for the same fields."""
  result = [*rules]
  for other in others:
    same = [x for x in result if {*x.fields} & {*other.fields}]
    if same:
      result[result.index(same[0])] = other
      result = [x for x in result if x not in same]
    else:
      result.append(other)
  return tuple(result)


class Field(NamedTuple):
  """The value of a model's field, as a config.json determines it."""

  value: Any  # Value in our terms.
  key: str  # Key in config.json, for messages.
  in_shapes: bool = False  # Whether the arrays' shapes show another value.
  is_limit: bool = False  # Whether other values change no result.
  unless_array: str | None = None  # A file with this array decides by itself.
  is_neutral: bool = False  # Whether a model that does not name it has it.


# Rules that families of any kind use.


def choice(field: str, key: str, values: Mapping[Any, Any]) -> Rule:
  """A field by {value of the key: value of the field}.

  A file without the key has the first. Of several values of the key for one
  value of the field, the first is written.
  """

  def read(config: ConfigJson) -> dict[str, Any]:
    config.require(key, *values)
    return {field: values[config[key]]}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    ours = fields[field]
    if isinstance(ours, ByLayer):
      ours = ours[0]
    named = [name for name, x in values.items() if x == ours]
    return {key: [*named, *values][0]}

  return Rule((field,), {key: next(iter(values))}, read, write)


def converted(
  field: str,
  key: Key,
  read: Callable[[Any], Any],
  write: Callable[[Any], Any],
) -> Rule:
  """A field that one key determines, by functions in both directions."""
  return Rule(
    (field,),
    {key.name: key.default},
    lambda config: {field: read(config[key.name])},
    lambda fields: {key.name: write(fields[field])},
  )


def inverse(field: str, key: str) -> Rule:
  """A field whose inverse is the key's value."""
  return converted(field, Key(key, 1.0), lambda x: 1 / x, lambda x: 1 / x)


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

  return Rule(("num_classes",), {"architectures": None}, read, write)


class ConfigJson(dict[str, Any]):
  """The values of the config.json at `path`."""

  def __init__(
    self, path: str, values: Mapping[str, Any], unread: Collection[str] = ()
  ):
    super().__init__(values)
    self.path = path
    self.unread = unread  # Unknown keys to leave out, also of its parts.

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
  """The config.json in a folder, or beside a file."""
  path = os.path.abspath(os.path.expanduser(path))
  folder = path if os.path.isdir(path) else os.path.dirname(path)
  return os.path.join(folder, FILE)


def read_json(path: str) -> tuple[str, dict[str, Any] | None]:
  """Returns (config.json in a folder or beside a file, its values).

  The values are None without the file, and for the config.json of a run.
  """
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
  if kind in _FLAT and "text_config" not in values:
    values = _nested(values)
  return file, values if isinstance(kind, str) else None


# Families whose older files have the decoder's keys beside `vision_config`.
_FLAT = ("qwen2_vl", "qwen2_5_vl")
# Keys of the whole model in these.
_OF_WHOLE = (
  "architectures",
  "model_type",
  "transformers_version",
  "torch_dtype",
  "vision_config",
  "tie_word_embeddings",
  "image_token_id",
  "video_token_id",
  "vision_start_token_id",
  "vision_end_token_id",
  "vision_token_id",
)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
  """Moves the decoder's keys into `text_config`."""
  text = {key: x for key, x in values.items() if key not in _OF_WHOLE}
  whole = {key: x for key, x in values.items() if key in _OF_WHOLE}
  return {**whole, "text_config": text}
