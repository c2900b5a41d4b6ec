"""Command lines of tools that change a config, like bigtrain.main."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from bigtrain.runtime import jax_flags
from bigtrain.settings import ConfigError, did_you_mean

_PREFIX = "--config."


class Parser(argparse.ArgumentParser):
  """An argument parser with --config.KEY=VALUE and one-line errors.

  It hands the flags of jax and absl to their owners, see jax_flags.py.
  """

  def __init__(self, *, changes_config: bool = True, **options: Any):
    """See argparse.ArgumentParser.

    Args:
      changes_config: whether the tool takes --config.KEY=VALUE.
    """
    super().__init__(**options)
    self._changes_config = changes_config

  def error(self, message: str) -> NoReturn:
    """Raises ConfigError."""
    raise ConfigError(message)

  def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses a command line.

    Args:
      argv: arguments without the program's name.

    Returns:
      (arguments, changes of the config as "KEY=VALUE").

    Raises:
      ConfigError: unknown, missing or wrong arguments.
    """
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
