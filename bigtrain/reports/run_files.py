"""Reads and writes config.json, run.json and other JSON files of a run.

Tools that only look at runs import this module, which does not import jax.
record.py defines what a run writes.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.files import paths


def write_json(path: str, content: Mapping[str, Any]) -> None:
  with paths.replacing(path) as file:
    file.write(settings.to_json(content, indent=2) + "\n")


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
  return json.loads(settings.to_json(config))


def read_json(path: str) -> dict[str, Any] | None:
  try:
    return json.loads(paths.read_bytes(path))
  except (FileNotFoundError, NotADirectoryError):
    return None


def read_config(workdir: str, key: str = "") -> dict[str, Any]:
  """The config.json of a run; ConfigError if it has none."""
  config = read_json(os.path.join(workdir, "config.json"))
  if config is None:
    raise ConfigError(
      f"{key}{workdir}: expected the folder of a run, with a config.json."
    )
  return config
