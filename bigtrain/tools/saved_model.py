"""Builds the model of a checkpoint from the config that is saved with it."""

from typing import Any, NamedTuple

from bigtrain.checkpoints.manifest import Manifest
from bigtrain.settings import ConfigError


class SavedModel(NamedTuple):
  """The model of a checkpoint, without its parameters.

  Attributes:
    module: module of config.model_name.
    model: its Model, with the arguments of config.model.
  """

  module: Any
  model: Any


def build(manifest: Manifest, directory: str) -> SavedModel:
  """Returns the model that a checkpoint's config names.

  Raises:
    ConfigError: the checkpoint has no config, or there is no such model.
  """
  # Imports jax, which `checkpoint show` does without.
  from bigtrain import parts, settings

  config = manifest.host_state.config
  if not config or "model_name" not in config:
    raise ConfigError(f"{directory}: no config with a model_name is saved.")
  return SavedModel(*parts.model(settings.Config(config)))
