"""Assigns parameters to rules of the config by regular expression.

A regular expression must match a parameter's whole "/"-joined name. The first
match applies. A rule that applies to no parameter is an error.
"""

import re
from collections.abc import Sequence
from typing import Any

from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.config.settings import Config


def read_pairs(
  cfg: Config,
  key: str,
  kinds: tuple[type, ...],
  expected: str,
  default: Sequence[tuple[str, Any]] = (),
) -> list[tuple[str, Any]]:
  """Reads a list of (regular expression, value of one of `kinds`) pairs."""
  pairs = cfg.get(key)
  if pairs is None:
    return list(default)
  message = f"expected a list of (regex, {expected}), got"
  if not isinstance(pairs, list | tuple):
    raise ConfigError(f"{cfg.path}.{key}: {message} {pairs!r}.")
  for i, pair in enumerate(pairs):
    if (
      not isinstance(pair, list | tuple)
      or len(pair) != 2
      or not isinstance(pair[0], str)
      or not isinstance(pair[1], kinds)
      or isinstance(pair[1], bool)  # In Python, a bool is also an int.
    ):
      raise ConfigError(f"{cfg.path}.{key}[{i}]: {message} the item {pair!r}.")
  return [(regex, value) for regex, value in pairs]


def first_match(
  regexes: Sequence[str], names: Sequence[str], key: str
) -> dict[str, int]:
  """{name: index of the first regex that matches it}.

  Names without a match are left out.

  Raises:
    ConfigError: if a regex is the first match of no name.
  """
  try:
    patterns = [re.compile(regex) for regex in regexes]
  except (re.error, TypeError) as e:
    raise ConfigError(f"{key}: bad regex in {list(regexes)}: {e}.") from e
  index_by_name: dict[str, int] = {}
  for name in names:
    for i, pattern in enumerate(patterns):
      if pattern.fullmatch(name):
        index_by_name[name] = i
        break
  for i, regex in enumerate(regexes):
    if i in index_by_name.values():
      continue
    if any(patterns[i].fullmatch(name) for name in names):
      reason = "earlier ones match every parameter that it matches."
    else:
      reason = "matches no parameter." + _nearest(regex, names)
    raise ConfigError(f"{key}[{i}]: {regex!r}: {reason}")
  return index_by_name


def _nearest(regex: str, names: Sequence[str]) -> str:
  """A hint: the name that is nearest to the first unknown word of the regex."""
  parts = {part for name in names for part in name.split("/")}
  for word in re.findall(r"[a-zA-Z]\w*", re.sub(r"\\.", " ", regex)):
    if not any(word in part for part in parts):
      return did_you_mean(word, parts)
  return did_you_mean(regex, names)
