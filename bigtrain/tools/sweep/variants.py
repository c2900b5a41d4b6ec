"""Makes the variants of a sweep: their changes, names and configs."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.tools.arguments import split_at_commas

# Largest number of characters in a variant's name. File systems allow 255, but
# terminals do not.
_MAX_NAME_LENGTH = 80


class Variant(NamedTuple):
  """One run of a sweep."""

  name: str  # Name of its folder, such as "lr=0.0001,depth=6".
  changes: dict[str, Any]  # {"dotted.key": value}.
  flags: list[str]  # The changes as flags of bigtrain.main.
  digest: str  # A hash of its config.


def make(
  config: str, changes: Sequence[str], grid: Sequence[str]
) -> list[Variant]:
  """Returns the variants of a grid or, without one, of the file's get_sweep.

  Args:
    changes: "KEY=VALUE" for all variants.
    grid: "KEY=VALUE,VALUE" for each key; the last key varies fastest.
  """
  base = loading.load(config, changes)
  where = "--grid" if grid else "get_sweep"
  if grid:
    chosen = product(parse_grid(grid))
  elif config.endswith(".json"):
    raise ConfigError("--grid: missing; a config.json has no get_sweep.")
  else:
    chosen = _listed(loading.call(config, "get_sweep"))
  for key in _keys(chosen):
    _check_key(base, key, where)
  # The values as the config has them, after the command line's parser.
  all_changes: list[dict[str, Any]] = []
  all_flags = []
  digests: list[str] = []
  for variant in chosen:
    words = _words(base, variant, where)
    loaded = loading.load(config, [*changes, *words])
    digest = settings.digest(loaded)
    if digest in digests:
      raise ConfigError(
        f"{where}: two variants are the same: {' '.join(words)}."
      )
    all_changes.append({key: _at(loaded, key) for key in variant})
    all_flags.append([f"--config.{word}" for word in words])
    digests.append(digest)
  return [
    Variant(*fields)
    for fields in zip(_names(all_changes), all_changes, all_flags, digests)
  ]


def parse_grid(items: Iterable[str]) -> dict[str, list[str]]:
  """Parses "KEY=VALUE,VALUE" items; commas in brackets do not separate.

  >>> parse_grid(["lr=1e-4,3e-4", "betas=(0.9,0.95),(0.9,0.999)"])
  {'lr': ['1e-4', '3e-4'], 'betas': ['(0.9,0.95)', '(0.9,0.999)']}
  """
  grid: dict[str, list[str]] = {}
  for item in items:
    key, _, text = item.partition("=")
    key = key.removeprefix("config.")
    values = split_at_commas(text)
    if not key or not all(values):
      raise ConfigError(
        f"--grid {item}: expected KEY=VALUE,VALUE, such as lr=1e-4,3e-4."
      )
    if key in grid:
      raise ConfigError(f"--grid {item}: {key} is in two grids; join them.")
    grid[key] = values
  return grid


def product(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
  combinations = itertools.product(*grid.values())
  return [dict(zip(grid, values)) for values in combinations]


def _listed(sweep: Any) -> list[dict[str, Any]]:
  """The variants that get_sweep returns: a grid, or a list of changes."""
  sweep = settings.plain(sweep)
  if isinstance(sweep, dict) and sweep:
    wrong = [key for key, value in sweep.items() if not _is_list(value)]
    if not wrong:
      return product(sweep)
    key = wrong[0]
    raise ConfigError(
      f"get_sweep: {key}: expected a list of values, got {sweep[key]!r}."
    )
  if _is_list(sweep) and all(isinstance(v, dict) and v for v in sweep):
    return list(sweep)
  raise ConfigError(
    "get_sweep: expected {KEY: [VALUE, ...]} or a list of {KEY: VALUE}, got "
    f"{sweep!r}."
  )


def _is_list(value: Any) -> bool:
  return isinstance(value, list | tuple) and bool(value)


def _check_key(config: Mapping[str, Any], key: str, where: str) -> None:
  node: Any = config
  path = "config"
  for part in key.split("."):
    if not isinstance(node, Mapping) or part not in node:
      hint = did_you_mean(part, node) if isinstance(node, Mapping) else ""
      raise ConfigError(
        f"{where} {key}: {path} has no {part!r}.{hint} To sweep over a key "
        f"that the config lacks, add it with --config.{key}=VALUE."
      )
    node = node[part]
    path += f".{part}"


def _words(
  config: Mapping[str, Any], variant: Mapping[str, Any], where: str
) -> list[str]:
  """Returns "KEY=VALUE" for each change; the values keep their types."""
  words = []
  for key, value in variant.items():
    text = value if isinstance(value, str) else repr(value)
    # An error of a value that does not fit names the grid, not the flag.
    trial = {"it": _at(config, key)}
    try:
      loading.override(trial, f"it={text}")
    except ConfigError as e:
      expected = str(e).partition(": ")[2]
      raise ConfigError(f"{where} {key}={text}: {expected}") from e
    words.append(f"{key}={text}")
  return words


def _at(config: Mapping[str, Any], key: str) -> Any:
  for part in key.split("."):
    config = config[part]
  return config


def _names(variants: Sequence[Mapping[str, Any]]) -> list[str]:
  """Names of folders, distinct and short enough."""
  keys = _keys(variants)
  short_keys = {key: _shortest(key, keys) for key in keys}
  names = []
  for variant in variants:
    pairs = [f"{short_keys[k]}={_value(v)}" for k, v in variant.items()]
    names.append(",".join(pairs))
  distinct = []
  for name, variant in zip(names, variants):
    if len(name) > _MAX_NAME_LENGTH or names.count(name) > 1:
      text = json.dumps(variant, default=repr, sort_keys=True)
      digest = hashlib.sha256(text.encode()).hexdigest()[:6]
      name = f"{name[: _MAX_NAME_LENGTH - 7]}-{digest}"
    distinct.append(name)
  return distinct


def _keys(variants: Iterable[Mapping[str, Any]]) -> list[str]:
  return list(dict.fromkeys(key for variant in variants for key in variant))


def _shortest(key: str, keys: Sequence[str]) -> str:
  """As many of the last parts of a key as are needed to distinguish it."""
  parts = key.split(".")
  for n in range(1, len(parts)):
    end = parts[-n:]
    if sum(k.split(".")[-n:] == end for k in keys) == 1:
      return ".".join(end)
  return key


def _value(value: Any) -> str:
  """A value in a folder's name, without the characters that shells treat."""
  if isinstance(value, float):
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)
  text = value if isinstance(value, str) else repr(value)
  return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-") or "empty"
