"""A config in which no misspelled key goes unnoticed.

The program reads its config through `Config`, which records the name of every
key that is read. Before the first step, `Config.check_all_read` raises an error
for each key that nothing has read, with the nearest name that was.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bigtrain.config.errors import ConfigError, check_number, did_you_mean

_MISSING = object()
# Strings that were meant as a boolean. As strings, all of them are true.
_MEANT_AS_BOOLEANS = ("true", "false", "yes", "no", "on", "off")
# How similar a key must be to a missing one to be called its misspelling. The
# names of two keys of the program, such as log_steps and total_steps, are less.
_SIMILAR = 0.75
# Units of lengths, the last words of keys such as log_steps; see lengths.py.
UNITS = ("steps", "epochs", "examples", "tokens", "percent")


class Config:
  """A nested config that records which keys are read.

  `config.input.batch_size`, `config["input"]` and `config.get("input")` read
  one key each, and return a nested dict as another Config. `kwargs` returns a
  whole subtree as a plain dict, whose names the receiver checks.
  """

  def __init__(self, data: Mapping[str, Any], path: str = "config"):
    self._data = plain(data)
    self.path = path  # Where it is in the whole, such as "config.input".
    self._names_read: set[str] = set()  # Absent keys too.
    self._read_as_kwargs: set[str] = set()
    self._children: dict[str, Config] = {}

  def get(self, key: str, default: Any = None) -> Any:
    """Returns the value at `key` or the default; `key` then counts as read."""
    self._names_read.add(key)
    value = self._data.get(key, default)
    if isinstance(default, bool) and isinstance(value, str):
      if value.lower() in _MEANT_AS_BOOLEANS:
        raise ConfigError(
          f"{self.path}.{key}: expected True or False, got {value!r}."
        )
    if not isinstance(value, dict):
      return value
    if key not in self._children:
      self._children[key] = Config(value, f"{self.path}.{key}")
    return self._children[key]

  def __getitem__(self, key: str) -> Any:
    value = self.get(key, _MISSING)
    if value is _MISSING:
      raise ConfigError(f"{self.path}.{key}: missing{self.misspelled(key)}.")
    return value

  def misspelled(self, key: str) -> str:
    """Returns a hint if an unread key looks like the missing `key`, else ""."""
    unread = [name for name in self._data if name not in self._names_read]
    near = difflib.get_close_matches(key, unread, n=1, cutoff=_SIMILAR)
    return f" (is {self.path}.{near[0]} a misspelling of it?)" if near else ""

  def __getattr__(self, key: str) -> Any:
    if key.startswith("_"):
      raise AttributeError(key)
    return self[key]

  def __contains__(self, key: str) -> bool:
    self._names_read.add(key)
    return key in self._data

  def __iter__(self) -> Iterator[str]:
    return iter(self._data)

  def __len__(self) -> int:
    return len(self._data)

  def kwargs(
    self,
    key: str,
    default: Mapping[str, Any] | None = None,
    *,
    required: bool = False,
  ) -> dict[str, Any]:
    """Returns the subtree at `key` as a plain dict; it counts as read."""
    self._names_read.add(key)
    self._read_as_kwargs.add(key)
    if default is None:
      default = {}
    value = plain(self[key]) if required else self._data.get(key, default)
    if not isinstance(value, Mapping):
      raise ConfigError(
        f"{self.path}.{key}: expected a dict of keyword arguments, got "
        f"{value!r}."
      )
    return plain(value)

  def with_values(self, values: Mapping[str, Any]) -> "Config":
    """Returns a copy with other values; what was read stays read."""
    copy = Config({**self._data, **values}, self.path)
    copy._names_read = self._names_read
    copy._read_as_kwargs = self._read_as_kwargs
    copy._children = {
      key: child for key, child in self._children.items() if key not in values
    }
    return copy

  def to_dict(self) -> dict[str, Any]:
    """Returns a plain copy; this does not count as reading."""
    return plain(self._data)

  def check_all_read(self) -> None:
    """Raises ConfigError if there are keys that were never read."""
    if lines := self.unread():
      raise ConfigError(" ".join(lines))

  def unread(self) -> list[str]:
    """Returns a line for every key that was never read, at any depth."""
    return self._unread(self._known_keys())

  def _unread(self, known: set[str]) -> list[str]:
    lines = []
    for key, value in self._data.items():
      if key not in self._names_read:
        siblings = self._names_read
        # --config.batch_size in place of --config.input.batch_size: the key
        # that was meant may be anywhere in the config.
        elsewhere = _nearest_elsewhere(key, siblings, known)
        hint = f" Did you mean {elsewhere!r}?"
        if not elsewhere:
          hint = did_you_mean(key, siblings)
        lines.append(f"{self.path}.{key}: unknown key.{hint}")
      elif isinstance(value, dict) and key not in self._read_as_kwargs:
        lines += self.get(key)._unread(known)
    return lines

  def _known_keys(self) -> set[str]:
    """Whole names of the keys, at any depth, that the program knows."""
    keys = {f"{self.path}.{name}" for name in self._names_read}
    for name in self._read_as_kwargs:
      options = self._data.get(name)
      if isinstance(options, Mapping):
        keys |= {*flatten(options, f"{self.path}.{name}.")}
    for child in self._children.values():
      keys |= child._known_keys()
    return keys


def _nearest_elsewhere(
  key: str, siblings: Iterable[str], known: Iterable[str]
) -> str | None:
  """The whole name of the known key that is most similar to `key`.

  None if no name is similar, or if one beside `key` is as similar.
  """
  best, best_similarity = None, _SIMILAR
  for name in siblings:
    if (similarity := _similarity(key, name)) >= best_similarity:
      best_similarity = similarity
  # The shallowest of several: config.input.x rather than config.evals.val.x.
  for name in sorted(known, key=lambda name: (name.count("."), name)):
    similarity = _similarity(key, name.rpartition(".")[2])
    if similarity > best_similarity:
      best, best_similarity = name, similarity
  return best


def _similarity(typed: str, name: str) -> float:
  """How similar two keys are, from 0 to 1."""
  length, _, unit = typed.rpartition("_")
  other_length, _, other_unit = name.rpartition("_")
  if length == other_length and {unit, other_unit} <= {*UNITS}:
    # The same length in another unit, such as warmup_steps and warmup_percent.
    return 1.0 if unit == other_unit else 0.99
  return difflib.SequenceMatcher(None, typed.lower(), name.lower()).ratio()


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns the values by dotted key; an empty dict is a value.

  >>> flatten({"model": {"width": 64}, "evals": {}})
  {'model.width': 64, 'evals': {}}
  """
  flat: dict[str, Any] = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[f"{prefix}{key}"] = value
  return flat


def plain(value: Any) -> Any:
  """Converts ConfigDicts and mappings to plain dicts, recursively."""
  if hasattr(value, "to_dict"):
    value = value.to_dict()
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(plain(item) for item in value)
  return value


def whole_number(cfg: Config, key: str, default: int, least: int) -> int:
  """Reads a whole number of at least `least`."""
  value = cfg.get(key, default)
  return check_number(f"{cfg.path}.{key}", value, least=least, whole=True)


def to_json(config: Mapping[str, Any], **kwargs: Any) -> str:
  """Returns JSON with sorted keys; values that JSON lacks become their repr."""
  return json.dumps(plain(config), default=repr, sort_keys=True, **kwargs)


def digest(config: Mapping[str, Any]) -> str:
  """Returns the SHA-256 of a config, to see whether it has changed."""
  return hashlib.sha256(to_json(config).encode()).hexdigest()
