"""Splits and slices of a data set, in the syntax of tensorflow-datasets.

  "train"  "train[:80%]"  "test[1000:]"  "[-10%:]"

A bound is a number of examples or a percentage. Negative bounds count from the
end.
"""

import re
from collections.abc import Mapping
from typing import Any

from bigtrain.config.errors import ConfigError, check_choice

_BOUND = r"\s*(-?\d+(?:\.\d+)?%|-?\d+)?\s*"
_SLICE = re.compile(rf"([^\[\]]*)(?:\[{_BOUND}:{_BOUND}\])?")


def _match(text: str, key: str) -> re.Match[str]:
  match = _SLICE.fullmatch(text.strip()) if isinstance(text, str) else None
  if not match:
    raise ConfigError(f"{key}={text!r}: expected a slice such as '[:80%]'.")
  return match


def split_name(text: str, key: str) -> tuple[str, str]:
  """Splits "train[:80%]" into ("train", "[:80%]"); either may be empty."""
  name = _match(text, key)[1]
  return name.strip(), text.strip()[len(name) :]


def choose(text: str, splits: Mapping[str, Any], key: str) -> tuple[Any, str]:
  """Returns (the value for the split, the slice) of "train[:80%]"."""
  name, part = split_name(text, key)
  check_choice(key, name, splits)
  return splits[name], part


def bounds(text: str, length: int, key: str) -> tuple[int, int]:
  """Returns (start, stop) of a slice "[:80%]" of `length` examples."""
  match = _match(text, key)
  if name := match[1].strip():
    raise ConfigError(f"{key}: expected a slice like '[:80%]', got {name!r}.")
  if not match[0]:
    return 0, length
  start = _position(match[2], 0, length, key)
  stop = _position(match[3], length, length, key)
  if start >= stop:
    raise ConfigError(
      f"{key}={text!r} selects no examples: [{start}:{stop}] of {length}."
    )
  return start, stop


def _position(bound: str | None, default: int, length: int, key: str) -> int:
  if bound is None:
    return default
  percent = bound.endswith("%")
  size = 100 if percent else length
  value = float(bound[:-1]) if percent else int(bound)
  if abs(value) > size:
    most = "100%" if percent else f"the {length} examples"
    raise ConfigError(f"{key}: {bound} is more than {most}.")
  if value < 0:
    value += size
  return round(value * length / 100) if percent else int(value)
