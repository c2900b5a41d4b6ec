"""Reads the entries of config.input: sources, ops and weights."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bigtrain.config import flexi, settings
from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_keys,
  check_kwargs,
)
from bigtrain.config.modules import find_module
from bigtrain.pp import parse, registry


@contextlib.contextmanager
def at(key: str) -> Iterator[None]:
  """Begins the messages of ConfigErrors with a location in the config."""
  try:
    yield
  except ConfigError as e:
    raise type(e)(f"{key}: {e}") from e


def make_source(options: Mapping[str, Any], key: str) -> Any:
  """Opens the source `dict(type=..., **arguments)`."""
  module, arguments = find_source(options, key)
  with at(key):
    source = module.Source(**arguments)
  if not len(source):
    raise DataError(f"{key}: the source {options['type']!r} has no examples.")
  return source


def find_source(
  options: Mapping[str, Any], key: str
) -> tuple[Any, dict[str, Any]]:
  """Returns the module of `dict(type=..., **arguments)`, and the arguments."""
  if not isinstance(options, Mapping):
    raise ConfigError(f"{key}: expected dict(type=..., ...), got {options!r}.")
  if "type" not in options:
    raise ConfigError(f"{key}.type: missing; it names a module of data/.")
  arguments = {k: v for k, v in options.items() if k != "type"}
  name = options["type"]
  module = find_module("data", name, f"{key}.type")
  if not hasattr(module, "Source"):
    raise ConfigError(f"{key}.type={name!r}: the module has no Source.")
  check_kwargs(module.Source, arguments, key, others=("type",))
  return module, arguments


def entries(cfg: settings.Config) -> dict[str, dict[str, Any]]:
  """Returns {location in the config: dict(data, pp, weight)} of each source."""
  path = cfg.path
  pp = cfg.get("pp", "")
  if ("data" in cfg) == ("mixture" in cfg):
    raise ConfigError(f"{path}: give either {path}.data or {path}.mixture.")
  if "data" in cfg:
    return {path: {"data": cfg.kwargs("data"), "pp": pp, "weight": 1.0}}
  mixture = cfg.kwargs("mixture")
  if not mixture:
    raise ConfigError(f"{path}.mixture: expected at least one source.")
  result = {}
  for name, options in mixture.items():
    key = f"{path}.mixture.{name}"
    if not isinstance(options, Mapping):
      raise ConfigError(
        f"{key}: expected dict(data=..., weight=...), got {options!r}."
      )
    entry = {"pp": pp, **options}
    check_keys(key, entry, ("data", "pp", "weight"))
    for option in ("data", "weight"):
      if option not in entry:
        raise ConfigError(f"{key}.{option}: missing.")
    result[key] = entry
  return result


def draws(
  cfg: settings.Config, entries_by_key: Mapping[str, Mapping[str, Any]]
) -> list[tuple[dict[str, Any], float]]:
  """Returns the values that steps draw for {name} in the ops, and their shares.

  With `pp="decode|resize({size})"`, the sizes are in config.input.flexi.size.
  See `flexi.draws`.
  """
  specs = " ".join(str(entry["pp"]) for entry in entries_by_key.values())
  names = re.findall(r"{(\w+)}", specs)
  return [draw for draw in flexi.draws(cfg, names) if draw[1] > 0]


def fill(spec: str, values: Mapping[str, Any]) -> str:
  """Replaces each {name} in a spec of ops by its value."""
  for name, value in values.items():
    spec = spec.replace(f"{{{name}}}", repr(value))
  return spec


def parse_ops(
  spec: str, modules: Sequence[str], key: str
) -> tuple[registry.Op, ...]:
  if spec == "":
    return ()
  with at(key):
    return tuple(parse.parse(spec, modules))
