"""A config that cannot hide a misspelled key.

The program reads a config through `Config`, which records every name that is
read; `Config.unread` then lists the keys that were never read.
"""

import difflib
import hashlib
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from bigtrain.config.errors import ConfigError, check_number, did_you_mean

_MISSING = object()
_NOT_BOOLEANS = ("true", "false", "yes", "no", "on", "off")


class Config:
  """A read-tracked view of a nested config.

  `kwargs` returns a whole subtree as a plain dict, whose names the receiver
  checks; all other access returns nested dicts as Configs.
  """

  def __init__(self, data: Mapping[str, Any], path: str = "config"):
    self._data = plain(data)
    self.path = path  # Such as "config.input".
    self._asked: set[str] = set()
    self._whole: set[str] = set()  # Subtrees that `kwargs` returned.
    self._children: dict[str, Config] = {}

  def get(self, key: str, default: Any = None) -> Any:
    """Returns the value at `key` or the default; `key` then counts as read."""
    self._asked.add(key)
    value = self._data.get(key, default)
    words = value.lower() if isinstance(value, str) else ""
    if isinstance(default, bool) and words in _NOT_BOOLEANS:
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
    unused = [k for k in self._data if k not in self._asked]
    # Above the likeness of two keys of the program, as log_ and total_steps.
    near = difflib.get_close_matches(key, unused, n=1, cutoff=0.75)
    return f" (is {self.path}.{near[0]} a misspelling of it?)" if near else ""

  def __getattr__(self, key: str) -> Any:
    if key.startswith("_"):
      raise AttributeError(key)
    return self[key]

  def __contains__(self, key: str) -> bool:
    self._asked.add(key)
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
    self._asked.add(key)
    self._whole.add(key)
    missing = default if default is not None else {}
    value = plain(self[key]) if required else self._data.get(key, missing)
    if not isinstance(value, Mapping):
      raise ConfigError(
        f"{self.path}.{key}: expected a dict of keyword arguments, got "
        f"{value!r}."
      )
    return plain(value)

  def to_dict(self) -> dict[str, Any]:
    """Returns a plain copy; this does not count as reading."""
    return plain(self._data)

  def check_all_read(self) -> None:
    if lines := self.unread():
      raise ConfigError(" ".join(lines))

  def unread(self) -> list[str]:
    """One line for every key that was never read, at any depth."""
    lines = []
    for key, value in self._data.items():
      if key not in self._asked:
        # Names in the config count too: the command line may have meant one.
        inside = [k for k in flatten(self._data) if k.endswith(f".{key}")]
        inside.sort(key=lambda name: name.count("."))
        names = inside[:1] or self._asked
        hint = did_you_mean(inside[0] if inside else key, names)
        lines.append(f"{self.path}.{key}: unknown key.{hint}")
      elif isinstance(value, dict) and key not in self._whole:
        lines += self.get(key).unread()
    return lines


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Values by dotted key; an empty dict is a value.

  >>> flatten({"model": {"width": 64}, "evals": {}})
  {'model.width': 64, 'evals': {}}
  """
  flat: dict[str, Any] = {}
  for key, value in config.items():
    nested = isinstance(value, Mapping) and value
    name = f"{prefix}{key}"
    flat |= flatten(value, f"{name}.") if nested else {name: value}
  return flat


def plain(value: Any) -> Any:
  """Converts ConfigDicts and mappings to plain dicts, recursively."""
  if hasattr(value, "to_dict"):
    value = value.to_dict()
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(map(plain, value))
  return value


def whole_number(cfg: Config, key: str, default: int, least: int) -> int:
  value = cfg.get(key, default)
  return check_number(f"{cfg.path}.{key}", value, least=least, whole=True)


def to_json(config: Mapping[str, Any], **kwargs: Any) -> str:
  """JSON of a plain config; values unknown to JSON are written as repr."""
  return json.dumps(plain(config), default=repr, sort_keys=True, **kwargs)


def digest(config: Mapping[str, Any]) -> str:
  return hashlib.sha256(to_json(config).encode()).hexdigest()


def read_table(module: str, name: str) -> dict[str, Any]:
  """Reads a .toml file beside a module, whose `__file__` is given."""
  return tomllib.loads(pathlib.Path(module).with_name(name).read_text())
