"""Published architectures: the fields of a model that a config.json determines.

Hugging Face's transformers writes this file beside the weights. The arrays do
not show the number of heads, the base of rotary embeddings, windows, epsilons
or activations: these are known from this file only. A `Family` is a table of an
architecture; decoder_families.py and t5_families.py have those of the models of
the same name.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from bigtrain import settings

FILE = "config.json"


class Family(NamedTuple):
  """A kind of published model, a `model_type` of config.json.

  Attributes:
    defaults: {key: value of an absent key}, as in transformers' configuration
      classes.
    keys: {our field: key}; None in the file means that the field is derived.
    constants: {our field: value of all these models}.
    requires: {key: values that the model computes, if the key is there}.
    in_shapes: fields whose values show in the arrays' shapes or names.
    others: the fields that take more than a key.
  """

  defaults: Mapping[str, Any]
  keys: Mapping[str, str]
  constants: Mapping[str, Any]
  requires: Mapping[str, tuple[Any, ...]]
  in_shapes: Collection[str]
  others: "Callable[[ConfigJson, dict[str, Field]], dict[str, Field]]"


class Field(NamedTuple):
  """The value of a model's field, as a config.json determines it.

  Attributes:
    value: value in our terms.
    key: key in config.json, for messages.
    in_shapes: whether another value shows in the arrays' shapes or names.
    is_limit: whether other values change no result.
    unless_array: name of an array; a file that has it decides by itself.
  """

  value: Any
  key: str
  in_shapes: bool = False
  is_limit: bool = False
  unless_array: str | None = None


def keys_and_defaults(
  table: Mapping[str, tuple[str, Any]],
) -> tuple[dict[str, str], dict[str, Any]]:
  """Splits a table {our field: (key, value of an absent key)}."""
  return {name: key for name, (key, _) in table.items()}, dict(table.values())


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

  def error(self, text: str) -> settings.ConfigError:
    return settings.ConfigError(f"{self.path}: {text}")


def file_beside(path: str) -> str:
  path = os.path.abspath(os.path.expanduser(path))
  folder = path if os.path.isdir(path) else os.path.dirname(path)
  return os.path.join(folder, FILE)


def fields(path: str, families: Mapping[str, Family]) -> "Fields | None":
  """Returns the fields that a config.json determines, of a known family.

  None without such a file, or if it describes a run and not a published model.
  """
  file = file_beside(path)
  if not os.path.isfile(file):
    return None
  try:
    with open(file) as f:
      values = json.load(f)
  except (OSError, ValueError) as e:
    raise settings.ConfigError(f"{file}: cannot be read: {e}") from e
  kind = values.get("model_type") if isinstance(values, dict) else None
  if not isinstance(kind, str):
    return None
  if kind not in families:
    names = values.get("architectures") or []
    raise settings.ConfigError(
      f"{file}: config.model_name does not compute the architecture {kind!r} "
      f"{tuple(names)}; it computes {', '.join(families)}."
    )
  family = families[kind]
  config = ConfigJson(file, {**family.defaults, **values})
  for key, expected in family.requires.items():
    config.require(key, *expected)
  source = f"model_type={kind!r}"
  result = {name: Field(x, source) for name, x in family.constants.items()}
  for name, key in family.keys.items():
    result[name] = Field(config[key], key, name in family.in_shapes)
  return Fields(config, result | family.others(config, result))


def check_layout(
  layout: str, model: Any, needs: Mapping[str, Mapping[str, Any]]
) -> None:
  """Checks the model against needs, {layout: {field: value}}."""
  settings.check_choice("--layout", layout, needs)
  for field, value in needs[layout].items():
    if getattr(model, field) != value:
      raise settings.ConfigError(
        f"--layout={layout}: expected a model with {field}={value!r}, got "
        f"{getattr(model, field)!r}."
      )


class Fields(dict[str, Field]):
  """The fields of a model that a config.json determines, by name."""

  def __init__(self, config: ConfigJson, fields: Mapping[str, Field]):
    super().__init__(fields)
    self.path = config.path

  def contradictions(
    self, model: Any, arrays: Collection[str], key: str
  ) -> dict[str, str]:
    """Returns {name of a field: message} of the fields with another value."""
    messages = {}
    for name, field in self.items():
      value = getattr(model, name)
      if name == "moe":
        value = _experts(value)
      elif isinstance(value, Mapping):
        value = dict(value)
      decides = field.unless_array is not None and field.unless_array in arrays
      if value != field.value and not field.is_limit and not decides:
        messages[name] = _message(f"{key}.{name}", value, field)
    return messages

  def merge(
    self, options: Mapping[str, Any], allowed: Collection[str], key: str
  ) -> dict[str, Any]:
    """Returns `options`, of config.model, with the fields of the file."""
    result = {n: f.value for n, f in self.items() if f.value is not None}
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
      raise settings.ConfigError(f"{self.path}: {'; '.join(wrong)}.")
    return result


def _message(key: str, value: Any, field: Field) -> str:
  return f"{key}={value!r}, but {FILE} has {field.value!r} ({field.key})"


def _experts(options: Any) -> dict[str, Any] | None:
  if options is None:
    return None
  return {
    "num_experts": options.num_experts,
    "top_k": options.top_k,
    "every": options.every,
    "normalize": options.normalizes(),
  }
