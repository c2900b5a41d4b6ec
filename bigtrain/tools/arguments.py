"""Command lines of tools; some change a config, like bigtrain.main."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from bigtrain import settings
from bigtrain.settings import ConfigError, did_you_mean

_PREFIX = "--config."


# {tool, or command of a tool: {argument: its options, or its help}}.
_LISTED = settings.read_table(__file__, "arguments.toml")
_TYPES = {"int": int, "float": float}


class Plain(argparse.ArgumentParser):
  """An argument parser whose --help begins with the docstring of a tool."""

  def __init__(self, tool: str = "", doc: str | None = None, **options: Any):
    if tool:  # Else a command of a tool.
      options |= {"prog": f"python -m bigtrain.tools.{tool}"}
      options |= {"description": doc}
      options["formatter_class"] = argparse.RawDescriptionHelpFormatter
    super().__init__(**options)

  def add_listed(self, tool: str, **more: Mapping[str, Any]) -> None:
    """Adds a tool's arguments in arguments.toml, with more options of some."""
    for name, entry in _LISTED[tool].items():
      options = dict(entry) if isinstance(entry, dict) else {"help": entry}
      options |= more.get(name.strip("-"), {})
      if (kind := options.get("type")) in _TYPES:
        options["type"] = _TYPES[kind]
      self.add(name, **options)

  def add(
    self, name: str, help: str, default: Any = None, **options: Any
  ) -> None:
    """Adds an argument; a default gives its type and ends its help."""
    if "action" not in options:
      if default is not None:
        options.setdefault("type", type(default))
      if default not in (None, "") and "(default: " not in help:
        help += " (default: %(default)s)"
    if default is not None:
      options["default"] = default
    self.add_argument(*name.split(), help=help, **options)


class Parser(Plain):
  """A parser with one-line errors, and --config.KEY=VALUE if wanted.

  It hands the flags of jax and absl to their owners, see jax_flags.py.
  """

  def __init__(self, tool: str, doc: str | None, *, changes_config: bool):
    epilog = "--config.KEY=VALUE changes the config, as for bigtrain.main."
    epilog = epilog if changes_config else ""
    super().__init__(tool, doc, epilog=epilog, allow_abbrev=False)
    self._changes_config = changes_config

  def error(self, message: str) -> NoReturn:
    raise ConfigError(message)

  def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns arguments, and changes of the config as "KEY=VALUE"."""
    # Imports jax, which other tools do without.
    from bigtrain.runtime import jax_flags

    changes = [w.removeprefix(_PREFIX) for w in argv if w.startswith(_PREFIX)]
    if changes and not self._changes_config:
      raise ConfigError(f"{_PREFIX}{changes[0]}: this tool changes no config.")
    args, unknown = self.parse_known_args(
      jax_flags.take([w for w in argv if not w.startswith(_PREFIX)])
    )
    if unknown:
      name = unknown[0].partition("=")[0]
      options = [*self._option_string_actions]
      hint = did_you_mean(name, [*options, *jax_flags.names()])
      if "mean" not in hint:
        hint = did_you_mean(name, options)
      raise ConfigError(f"{unknown[0]!r}: unknown argument.{hint}")
    return args, changes
