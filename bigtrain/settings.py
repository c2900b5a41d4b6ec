"""Configs that cannot hide a misspelled key.

The program reads a config through `Config`, which records every name that is
read; `Config.unread` then lists the keys that were never read.
"""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import pathlib
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_MISSING = object()
_NOT_BOOLEANS = ("true", "false", "yes", "no", "on", "off")
# Words of annotations without texts, as in "<class 'int'>".
_NOT_TEXTS = {"class", "bool", "int", "float", "None", "NoneType"}


class ConfigError(Exception):
  """A mistake in the config, explained in one line; the exit code is 2."""


class DataError(ConfigError):
  """Data that cannot be used: empty, damaged or of the wrong shape."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
  """Returns " Did you mean 'x'?" for the nearest option, else lists them all.

  >>> did_you_mean("learning_rat", ["learning_rate", "wd"])
  " Did you mean 'learning_rate'?"
  """
  options = sorted(set(map(str, options)))
  by_lower_case = {option.lower(): option for option in options}
  typed = str(name).lower()
  # "max_steps" and "epochs" are other programs' names of a run's length.
  total = "total_" + re.sub("^(num|max)_", "", typed)
  near = [o for o in by_lower_case if o == total or sorted(o) == sorted(typed)]
  near = near or difflib.get_close_matches(typed, by_lower_case, n=1)
  near = [by_lower_case[option] for option in near]
  if not near:  # Abbreviations and longer forms: "lr" against "lr_mults".
    near = [o for o in options if o.startswith(str(name)) and name][:1]
  if near:
    return f" Did you mean {near[0]!r}?"
  if not options:
    return ""
  shown = ", ".join(options[:20]) + (", ..." if len(options) > 20 else "")
  return f" There are: {shown}."


def check_choice(
  key: str, value: Any, options: Iterable[str], problem: str = "unknown"
) -> Any:
  if value in (options := tuple(options)):
    return value
  hint = did_you_mean(str(value), options)
  raise ConfigError(f"{key}: {problem} {value!r}.{hint}")


def regex(key: str, pattern: Any) -> re.Pattern[str]:
  try:
    return re.compile(pattern)
  except (re.error, TypeError) as e:
    raise ConfigError(f"{key}: bad regex {pattern!r}: {e}.") from e


def read_table(module: str, name: str) -> dict[str, Any]:
  """Reads a .toml file beside a module, whose `__file__` is given."""
  return tomllib.loads(pathlib.Path(module).with_name(name).read_text())


def import_package(name: str, needed_by: str, install: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as e:
    raise ConfigError(
      f"{needed_by} needs {name.partition('.')[0]} ({e}); pip install "
      f"{install}."
    ) from e


def check_keys(path: str, given: Iterable[str], known: Iterable[str]) -> None:
  known = {*known}
  for name in given:
    if name not in known:
      hint = did_you_mean(name, known)
      raise ConfigError(f"{path}.{name}: unknown key.{hint}")


def check_kwargs(
  fn: Callable[..., Any],
  kwargs: Mapping[str, Any],
  path: str,
  given: Iterable[str] = (),
  others: Iterable[str] = (),
) -> None:
  """Raises ConfigError if `fn(**given, **kwargs)` has a wrong name.

  Texts in place of numbers and booleans are errors too: "no" would be true.
  """
  if not isinstance(kwargs, Mapping):
    raise ConfigError(f"{path}: expected a dict of options, got {kwargs!r}.")
  given = set(given)
  parameters = dict(inspect.signature(fn).parameters)
  takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
  parameters = {
    name: p
    for name, p in parameters.items()
    if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL, p.POSITIONAL_ONLY)
    and name not in given
  }
  options = set(parameters)
  if {"parent", "name"} <= options:
    # flax adds these two to every module; configs do not set them.
    options -= {"parent", "name"}
  for name in kwargs:
    if name in given or (name not in options and not takes_any):
      raise ConfigError(
        f"{path}.{name}: unknown key.{did_you_mean(name, options | {*others})}"
      )
    annotation = getattr(parameters.get(name), "annotation", "")
    kinds = set(re.findall(r"\w+", str(annotation)))
    if isinstance(kwargs[name], str) and kinds and kinds <= _NOT_TEXTS:
      kind = "True or False" if "bool" in kinds else "a number"
      raise ConfigError(
        f"{path}.{name}: expected {kind}, got {kwargs[name]!r}."
      )
  for name in sorted(options - set(kwargs)):
    if parameters[name].default is inspect.Parameter.empty:
      raise ConfigError(f"{path}.{name}: missing, and it has no default.")


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


def load(path: str, changes: Iterable[str] = ()) -> dict[str, Any]:
  """Loads the config of `path.py`, `path.py:argument` or `path.json`.

  Values that refer to a changed one (`ConfigDict.get_ref`) follow it.
  """
  config = _load(path)
  if hasattr(config, "ignore_type"):  # A ConfigDict checks types in its way.
    with config.ignore_type(), config.unlocked():
      for change in changes:
        override(config, change)
  else:
    config = plain(config)
    for change in changes:
      override(config, change)
  return plain(config)


def _load(path: str) -> Any:
  file = os.path.expanduser(path)
  if file.endswith(".json") and os.path.isfile(file):
    try:
      with open(file) as content:
        return dict(json.load(content))
    except (ValueError, TypeError) as e:
      raise ConfigError(f"--config={file}: expected a dict: {e}") from e
  config = call(path, "get_config")
  if not isinstance(plain(config), dict):
    raise ConfigError(f"--config={path}: get_config returned no config.")
  return config


def call(path: str, name: str) -> Any:
  """Calls `get_config` or `get_sweep` of "FILE.py" or "FILE.py:argument"."""
  file, colon, argument = path.partition(".py:")
  file = os.path.expanduser(file + ".py" if colon else file)
  if not os.path.isfile(file):
    raise ConfigError(f"--config={file}: no such file.{_nearest(file)}")
  folder = os.path.dirname(os.path.abspath(file))
  if folder not in sys.path:  # For imports of neighbours, also later ones.
    sys.path.append(folder)
  spec = importlib.util.spec_from_file_location("bigtrain_config", file)
  if spec is None or spec.loader is None:
    raise ConfigError(
      f"--config={file}: expected a .py file or a run's config.json."
    )
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    if not hasattr(module, name):
      raise ConfigError(f"--config={file}: has no function {name}(arg).")
    takes = inspect.signature(getattr(module, name)).parameters
    if colon and not takes and name == "get_config":
      raise ConfigError(f"--config={path}: {file} takes no argument.")
    return getattr(module, name)(*[argument] if colon and takes else [])
  except ConfigError:
    raise
  except Exception as e:
    message = " ".join(f"{type(e).__name__}: {e}".split())
    raise ConfigError(f"{_where(e, file)}: {message}") from e


def _nearest(file: str) -> str:
  as_module = file.removesuffix(".py").replace(".", os.sep) + ".py"
  # "configs.digits", as for imports, or only "digits".
  for guess in (as_module, os.path.join("configs", as_module)):
    if os.path.isfile(guess):
      return f" Did you mean {guess!r}?"
  folder = os.path.dirname(file) or "."
  names = os.listdir(folder) if os.path.isdir(folder) else []
  configs = [name for name in names if name.endswith((".py", ".json"))]
  return did_you_mean(file, [os.path.join(folder, name) for name in configs])


def _where(error: Exception, file: str) -> str:
  if isinstance(error, SyntaxError):
    return f"{error.filename}:{error.lineno}"
  frames = traceback.extract_tb(error.__traceback__)
  path = os.path.abspath(file)
  own = [f for f in frames if os.path.abspath(f.filename) == path]
  return f"{file}:{own[-1].lineno}" if own else file


def override(config: Any, assignment: str) -> None:
  """Applies "a.b.c=value" in place, to a dict or a ConfigDict.

  The value takes the type of the value it replaces: `1e-3` for a float, `1e5`
  for an int, a bare word for a string; anything else must be a Python literal.
  A new key is added; if it is never read, `Config.unread` reports it.
  """
  path, equals, text = assignment.partition("=")
  if not equals:
    raise ConfigError(f"--config.{path}: expected --config.{path}=VALUE.")
  *parents, last = path.split(".")
  node = config
  for i, parent in enumerate(parents):
    if parent not in node:
      node[parent] = {}
    node = node[parent]
    if not hasattr(node, "keys"):
      at = ".".join(parents[: i + 1])
      raise ConfigError(f"--config.{path}: config.{at} is {node!r}, no dict.")
  node[last] = plain(_typed(text, plain(node.get(last)), f"--config.{path}"))


def _typed(text: str, old: Any, where: str) -> Any:
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError):
    value = text
  if text.lower() in ("true", "false"):
    value = text.lower() == "true"
  if isinstance(old, str) and value is not None:
    # Names and folders may be switched off, or to a default.
    if text in ("True", "False"):
      return value
    return text if not isinstance(value, str) else value
  if old is None or value is None:
    return value
  if isinstance(old, bool):
    if value in (0, 1):
      return bool(value)
  elif isinstance(value, bool):
    pass  # True is an int to Python, and a mistake here.
  elif isinstance(old, int | float) and isinstance(value, int | float):
    # 0.5 for an int is an error, 1e5 is not.
    if isinstance(old, float) or isinstance(value, int) or value.is_integer():
      return type(old)(value)
  elif isinstance(old, list | tuple) and isinstance(value, list | tuple):
    return type(old)(value)
  elif isinstance(old, dict) and isinstance(value, dict | list | tuple | str):
    return value
  kind = type(old).__name__
  raise ConfigError(f"{where}={text}: expected {kind}, as in {old!r}.")


def check_number(
  path: str,
  value: Any,
  *,
  least: float | None = None,
  most: float | None = None,
  above: float | None = None,
  below: float | None = None,
  whole: bool = False,
  error: type[Exception] = ConfigError,
) -> Any:
  """Returns `value` if it is a finite number in range; bools are not numbers.

  >>> check_number("config.dropout", 0.1, least=0, below=1)
  0.1
  """
  number = isinstance(value, numbers.Integral if whole else numbers.Real)
  if (
    number
    and not isinstance(value, bool)
    and math.isfinite(value)
    and (least is None or value >= least)
    and (most is None or value <= most)
    and (above is None or value > above)
    and (below is None or value < below)
  ):
    return value
  limits = {"at least": least, "at most": most, "above": above, "below": below}
  given = [f"{words} {n}" for words, n in limits.items() if n is not None]
  kind = "a whole number" if whole else "a number"
  if number and not math.isfinite(value):
    kind = "a finite number"
  expected = f"{kind} {' and '.join(given)}".rstrip()
  raise error(f"{path}: expected {expected}, got {value!r}.")


def whole_number(cfg: Config, key: str, default: int, least: int) -> int:
  value = cfg.get(key, default)
  return check_number(f"{cfg.path}.{key}", value, least=least, whole=True)


def to_json(config: Mapping[str, Any], **kwargs: Any) -> str:
  """JSON of a plain config; values unknown to JSON are written as repr."""
  return json.dumps(plain(config), default=repr, sort_keys=True, **kwargs)


def digest(config: Mapping[str, Any]) -> str:
  return hashlib.sha256(to_json(config).encode()).hexdigest()


_choices: dict[str, dict[str, dict[str, str]]] = {}


def note_choice(key: str, case: str, value: str, reason: str) -> bool:
  """Notes what the program chose for an "auto" in the config; True if new."""
  cases = _choices.setdefault(key, {})
  entry = {"choice": value, "reason": reason}
  news = cases.get(case) != entry
  cases[case] = entry
  return news


def choices() -> dict[str, dict[str, dict[str, str]]]:
  """Returns {key: {case: {"choice": ..., "reason": ...}}} since the start."""
  return {key: dict(cases) for key, cases in list(_choices.items())}


def forget_choices() -> None:
  _choices.clear()
