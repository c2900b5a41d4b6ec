"""Which rule of a list decides for which parameter.

Lists of (regular expression, value) are how configs speak about parameters. A
regular expression matches whole names ("/"-joined), the first match decides,
and one that decides nothing is an error: it is a misspelling.
"""

import re
from collections.abc import Sequence
from typing import Any

from bigtrain.settings import Config, ConfigError, did_you_mean


def read_pairs(
  cfg: Config,
  key: str,
  kinds: tuple[type, ...],
  expected: str,
  default: Sequence[tuple[str, Any]] = (),
) -> list[tuple[str, Any]]:
  """The list of (regex, value) at cfg[key], the default if it is None.

  Args:
    cfg: the config that holds the list.
    key: its name there.
    kinds: types that a value may have; bool is never meant by int.
    expected: what the values are, in words.
    default: the list where the config has none.

  Raises:
    ConfigError: it is no such list.
  """
  pairs = cfg.get(key)
  if pairs is None:
    return list(default)
  wanted = f"expected a list of (regex, {expected}), got"
  if not isinstance(pairs, list | tuple):
    raise ConfigError(f"{cfg.path}.{key}: {wanted} {pairs!r}.")
  for i, pair in enumerate(pairs):
    if (
      not isinstance(pair, list | tuple)
      or len(pair) != 2
      or not isinstance(pair[0], str)
      or not isinstance(pair[1], kinds)
      or isinstance(pair[1], bool)
    ):
      raise ConfigError(f"{cfg.path}.{key}[{i}]: {wanted} {pair!r} in it.")
  return [(regex, value) for regex, value in pairs]


def first_match(
  regexes: Sequence[str], names: Sequence[str], key: str
) -> dict[str, int]:
  """{name: index of the first regex that matches it}; others are left out.

  Raises:
    ConfigError: a regex that cannot be read, or that decides for no name; it
      tells the nearest names.
  """
  try:
    patterns = [re.compile(regex) for regex in regexes]
  except (re.error, TypeError) as e:
    raise ConfigError(f"{key}: bad regex in {list(regexes)}: {e}.") from e
  which: dict[str, int] = {}
  for name in names:
    for i, pattern in enumerate(patterns):
      if pattern.fullmatch(name):
        which[name] = i
        break
  for i, regex in enumerate(regexes):
    if i in which.values():
      continue
    if any(patterns[i].fullmatch(name) for name in names):
      why = "earlier ones take every parameter it matches."
    else:
      why = "matches no parameter." + _nearest(regex, names)
    raise ConfigError(f"{key}[{i}]: {regex!r}: {why}")
  return which


def _nearest(regex: str, names: Sequence[str]) -> str:
  """A hint for the first word of a regex that is in no name."""
  parts = {part for name in names for part in name.split("/")}
  for word in re.findall(r"[a-zA-Z]\w*", re.sub(r"\\.", " ", regex)):
    if not any(word in part for part in parts):
      return did_you_mean(word, parts)
  return did_you_mean(regex, names)
