"""Names of classes: read from a list or a file, and put into prompts."""

import os
from collections.abc import Sequence

from bigtrain.files import paths
from bigtrain.settings import ConfigError


def read(names: Sequence[str] | str, key: str) -> list[str]:
  """Returns the names, reading them from a file if `names` is a path.

  Args:
    names: names in the order of their class numbers, or the path of a text file
      with one name per line.
    key: key of the names in the config, for error messages.

  Raises:
    ConfigError: no such file, no names, or a name that is empty or no string.
  """
  if isinstance(names, str):
    path = paths.absolute(names)
    if not os.path.isfile(path):
      raise ConfigError(f"{key}: no such file: {path}.")
    with open(path, encoding="utf-8") as file:
      names = file.read().removesuffix("\n").split("\n")
  for number, name in enumerate(names):
    if not isinstance(name, str) or not name.strip():
      raise ConfigError(
        f"{key}: class {number}: expected a name, got {name!r}."
      )
  if not names:
    raise ConfigError(f"{key}: expected at least one name, got none.")
  return [name.strip() for name in names]


def fill(prompt: str, names: Sequence[str], key: str) -> list[str]:
  """Returns the prompt once per name, with the name in place of {}.

  Raises:
    ConfigError: the prompt does not have exactly one {}.
  """
  if prompt.count("{}") != 1:
    raise ConfigError(
      f"{key}: expected a prompt with one {{}} for the name, got {prompt!r}."
    )
  return [prompt.replace("{}", name) for name in names]
