"""Command lines of tools that change a config, like bigtrain.main."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from bigtrain.settings import ConfigError, did_you_mean

_PREFIX = "--config."


class Parser(argparse.ArgumentParser):
  """An argument parser with --config.KEY=VALUE and one-line errors."""

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
    args, unknown = self.parse_known_args(
      [w for w in argv if not w.startswith(_PREFIX)]
    )
    if unknown:
      name = unknown[0].partition("=")[0]
      hint = did_you_mean(name, self._option_string_actions)
      raise ConfigError(f"{unknown[0]!r}: unknown argument.{hint}")
    return args, changes
