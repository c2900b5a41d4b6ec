"""Command lines of tools; some change a config, like bigtrain.main."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, did_you_mean

_PREFIX = "--config."


# {tool, or command of a tool: {argument: its options, or its help}}.
_LISTED = settings.read_table(__file__, "arguments.toml")
_NAMED: dict[str, Any] = {
  "int": int,
  "float": float,
  "yes_or_no": argparse.BooleanOptionalAction,
}


def split_at_commas(text: str) -> list[str]:
  """Splits at commas outside of brackets and quotes."""
  parts, depth, quote = [""], 0, ""
  for letter in text:
    if quote:
      quote = "" if letter == quote else quote
    elif letter in "'\"":
      quote = letter
    else:
      depth += (letter in "([{") - (letter in ")]}")
    if letter == "," and not depth and not quote:
      parts.append("")
    else:
      parts[-1] += letter
  return parts


class Plain(argparse.ArgumentParser):
  """A parser of a tool's arguments in arguments.toml, with more of some.

  Its --help begins with the docstring of the tool.
  """

  def __init__(
    self,
    tool: str = "",
    doc: str | None = None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
  ):
    if tool:  # Else a command of a tool.
      options |= {"prog": f"python -m bigtrain.tools.{tool}"}
      options |= {"description": doc}
      options["formatter_class"] = argparse.RawDescriptionHelpFormatter
    super().__init__(**options)
    if tool in _LISTED:
      self.add_listed(tool, more or {})

  def add_listed(
    self, tool: str, more: Mapping[str, Mapping[str, Any]] | None = None
  ) -> None:
    for name, entry in _LISTED[tool].items():
      options = dict(entry) if isinstance(entry, dict) else {"help": entry}
      options |= (more or {}).get(name.strip("-"), {})
      for field in {"type", "action"} & set(options):
        options[field] = _NAMED.get(options[field], options[field])
      default = options.get("default")
      if default is not None and "action" not in options:
        options.setdefault("type", type(default))
        if default != "" and "(default: " not in options["help"]:
          options["help"] += " (default: %(default)s)"
      self.add_argument(*name.split(), **options)

  def add_commands(self, tool: str) -> None:
    commands = self.add_subparsers(dest="command", required=True)
    for name, text in _LISTED["commands"][tool].items():
      command = commands.add_parser(name, help=text, description=text)
      command.add_listed(f"{tool} {name}")


class Parser(Plain):
  """A parser with one-line errors, and --config.KEY=VALUE if wanted.

  It hands the flags of jax and absl to their owners, see jax_flags.py.
  """

  def __init__(self, *of_tool: Any, changes_config: bool):
    epilog = "--config.KEY=VALUE changes the config, as for bigtrain.main."
    epilog = epilog if changes_config else ""
    super().__init__(*of_tool, epilog=epilog, allow_abbrev=False)
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
