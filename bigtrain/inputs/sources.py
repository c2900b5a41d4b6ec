"""The parts of an input as a config describes them: sources, ops, weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain import parts, settings
from bigtrain.pp import parse, registry
from bigtrain.settings import ConfigError, DataError, did_you_mean


def make_source(options: Mapping[str, Any], key: str) -> Any:
  """The source that `dict(type=..., **arguments)` describes.

  Raises:
    ConfigError: no such module, or arguments that it does not take.
    DataError: it is empty.
  """
  module, arguments = find_source(options, key)
  try:
    source = module.Source(**arguments)
  except ConfigError as e:
    raise type(e)(f"{key}: {e}") from e
  if not len(source):
    raise DataError(f"{key}: the source {options['type']!r} has no examples.")
  return source


def find_source(
  options: Mapping[str, Any], key: str
) -> tuple[Any, dict[str, Any]]:
  """The module of `dict(type=..., **arguments)`, and the arguments."""
  if not isinstance(options, Mapping):
    raise ConfigError(f"{key}: expected dict(type=..., ...), got {options!r}.")
  if "type" not in options:
    raise ConfigError(f"{key}.type: missing; it names a module of data/.")
  arguments = {k: v for k, v in options.items() if k != "type"}
  name = options["type"]
  module = parts.find_module("data", name, f"{key}.type")
  if not hasattr(module, "Source"):
    raise ConfigError(f"{key}.type={name!r}: the module has no Source.")
  settings.check_kwargs(module.Source, arguments, key, others=("type",))
  return module, arguments


def entries(cfg: settings.Config) -> dict[str, dict[str, Any]]:
  """{where it is: dict(data, pp, weight)} for each source of the input."""
  path = cfg.path
  pp = cfg.get("pp", "")
  if ("data" in cfg) == ("mixture" in cfg):
    raise ConfigError(f"{path}: give either {path}.data or {path}.mixture.")
  if "data" in cfg:
    return {path: {"data": cfg.kwargs("data"), "pp": pp, "weight": 1.0}}
  mixture = cfg.kwargs("mixture")
  if not mixture:
    raise ConfigError(f"{path}.mixture: expected at least one source.")
  found = {}
  for name, given in mixture.items():
    key = f"{path}.mixture.{name}"
    if not isinstance(given, Mapping):
      raise ConfigError(f"{key}: expected dict(data=..., weight=...).")
    entry = {"pp": pp, **given}
    for option in entry:
      if option not in ("data", "pp", "weight"):
        hint = did_you_mean(option, ("data", "pp", "weight"))
        raise ConfigError(f"{key}.{option}: unknown key.{hint}")
    for option in ("data", "weight"):
      if option not in entry:
        raise ConfigError(f"{key}.{option}: missing.")
    weight = entry["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float):
      raise ConfigError(f"{key}.weight: expected a number, got {weight!r}.")
    found[key] = entry
  return found


def parse_ops(
  spec: str, modules: Sequence[str], key: str
) -> tuple[registry.Op, ...]:
  """The ops of a preprocessing string; the empty one has none.

  Raises:
    ConfigError: it cannot be parsed; `key` says where it stands.
  """
  if spec == "":
    return ()
  try:
    return tuple(parse.parse(spec, modules))
  except ConfigError as e:
    raise type(e)(f"{key}: {e}") from e


def whole_number(value: Any, key: str, least: int = 0) -> int:
  """`value`, or ConfigError if it is no whole number of at least `least`."""
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise ConfigError(
      f"{key}: expected a whole number of at least {least}, got {value!r}."
    )
  return value
