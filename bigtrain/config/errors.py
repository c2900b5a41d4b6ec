"""Exceptions for users' mistakes, with the hints and the common checks.

A message is one line. It names the key or the file, what was expected, what
was found, and the nearest valid name. Most checks take `path` or `key`, the
place in the config with which their message begins: "config.model.dropout".
"""

import difflib
import importlib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Words in the annotations of parameters that cannot be strings, such as
# "<class 'int'>" and "float | None".
_WORDS_WITHOUT_STRINGS = {"class", "bool", "int", "float", "None", "NoneType"}
# Options that a hint without a near one lists.
_NUM_LISTED = 20
# Names of options in other programs, whose letters say nothing about ours.
_OTHER_NAMES = {
  "gradient_accumulation_steps": "microbatches",
  "learning_rate": "lr",
  "max_grad_norm": "grad_clip_norm",
  "weight_decay": "wd",
}


class ConfigError(Exception):
  """A mistake in the config, explained in one line; the exit code is 2."""


class DataError(ConfigError):
  """Data that the run cannot use: empty, damaged or of the wrong shape."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
  """Returns " Did you mean 'x'?" for the nearest option, or lists the options.

  >>> did_you_mean("learning_rat", ["learning_rate", "wd"])
  " Did you mean 'learning_rate'?"
  """
  options = sorted(set(map(str, options)))
  if not options:
    return ""
  nearest = _nearest(str(name), options)
  if nearest is not None:
    return f" Did you mean {nearest!r}?"
  listed = ", ".join(options[:_NUM_LISTED])
  if len(options) > _NUM_LISTED:
    listed += f" and {len(options) - _NUM_LISTED} more"
  return f" There are: {listed}."


def _nearest(name: str, options: Sequence[str]) -> str | None:
  by_lower_case = {option.lower(): option for option in options}
  typed = name.lower()
  if _OTHER_NAMES.get(typed) in options:
    return _OTHER_NAMES[typed]
  # Other programs call the length of a run "max_steps" or "epochs".
  total = "total_" + re.sub("^(num|max)_", "", typed)
  for option in by_lower_case:
    has_the_same_letters = sorted(option) == sorted(typed)
    if option == total or has_the_same_letters:
      return by_lower_case[option]
  if close := difflib.get_close_matches(typed, by_lower_case, n=1):
    return by_lower_case[close[0]]
  # Abbreviations are far from the full name by their letters: "lr", "lr_mults".
  longer = [option for option in options if name and option.startswith(name)]
  return longer[0] if longer else None


def check_choice(
  key: str, value: Any, options: Iterable[str], problem: str = "unknown"
) -> Any:
  """Returns `value` if it is one of the options."""
  options = tuple(options)
  if value in options:
    return value
  hint = did_you_mean(str(value), options)
  raise ConfigError(f"{key}: {problem} {value!r}.{hint}")


def check_keys(path: str, given: Iterable[str], known: Iterable[str]) -> None:
  known = set(known)
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
  """Checks keyword arguments of the config before the call `fn(**kwargs)`.

  It is an error if `fn` has no argument of that name, if an argument without a
  default is missing, and if a number or boolean is given as a string ("no"
  would be true).

  Args:
    given: names of the arguments that the program itself passes; a config must
      not set them.
    others: further names that the hint may suggest.
  """
  if not isinstance(kwargs, Mapping):
    raise ConfigError(f"{path}: expected a dict of options, got {kwargs!r}.")
  given = set(given)
  parameters = dict(inspect.signature(fn).parameters)
  takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
  parameters = {
    name: p
    for name, p in parameters.items()
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in given
  }
  options = set(parameters)
  if {"parent", "name"} <= options:
    # flax adds these two to every module; configs do not set them.
    options -= {"parent", "name"}
  for name, value in kwargs.items():
    if name in given or (name not in options and not takes_any):
      hint = did_you_mean(name, {*options, *others})
      raise ConfigError(f"{path}.{name}: unknown key.{hint}")
    if isinstance(value, str) and name in parameters:
      annotation = str(parameters[name].annotation)
      words = set(re.findall(r"\w+", annotation))
      if words and words <= _WORDS_WITHOUT_STRINGS:
        kind = "True or False" if "bool" in words else "a number"
        raise ConfigError(f"{path}.{name}: expected {kind}, got {value!r}.")
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
  if hasattr(value, "aval"):  # A number of the step, inside a program.
    raise error(f"{path}: expected one number for all steps, not a schedule.")
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
  kind = "a whole number" if whole else "a number"
  if number and not math.isfinite(value):
    kind = "a finite number"
  limits = {"at least": least, "at most": most, "above": above, "below": below}
  bounds = [f"{words} {n}" for words, n in limits.items() if n is not None]
  expected = f"{kind} {' and '.join(bounds)}".rstrip()
  raise error(f"{path}: expected {expected}, got {value!r}.")


def nearest_divisors(number: int, size: int) -> str:
  """The divisors of `size` that are nearest to `number`, as text.

  >>> nearest_divisors(4, 6), nearest_divisors(3, 50257)
  ('3 and 6', '1 and 29')
  """
  divisors = [n for n in range(1, size + 1) if size % n == 0]
  below = [n for n in divisors if n < number]
  above = [n for n in divisors if n > number]
  return " and ".join(str(n) for n in below[-1:] + above[:1])


def regex(key: str, pattern: Any) -> re.Pattern[str]:
  """Compiles a pattern of the config."""
  try:
    return re.compile(pattern)
  except (re.error, TypeError) as e:
    raise ConfigError(f"{key}: bad regex {pattern!r}: {e}.") from e


def import_package(name: str, needed_by: str, install: str) -> Any:
  """Imports an optional package; `install` is the argument of pip install."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as e:
    raise ConfigError(
      f"{needed_by} needs {name.partition('.')[0]} ({e}); pip install "
      f"{install}."
    ) from e
