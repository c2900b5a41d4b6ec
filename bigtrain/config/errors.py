"""Mistakes of users: their errors, hints, and the checks that raise them.

Every message is one line that names the key or file, what was expected, and the
nearest valid value.
"""

import difflib
import importlib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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


def regex(key: str, pattern: Any) -> re.Pattern[str]:
  try:
    return re.compile(pattern)
  except (re.error, TypeError) as e:
    raise ConfigError(f"{key}: bad regex {pattern!r}: {e}.") from e


def import_package(name: str, needed_by: str, install: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as e:
    raise ConfigError(
      f"{needed_by} needs {name.partition('.')[0]} ({e}); pip install "
      f"{install}."
    ) from e
