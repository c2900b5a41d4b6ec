"""Builds hooks for tests in the same way as the program."""

from bigtrain import settings
from bigtrain.runtime import hooks


def build(workdir="w", **entries):
  """Builds the hooks of config.hooks = entries."""
  config = settings.Config({"hooks": entries})
  built = hooks.from_config(config, workdir)
  assert config.unread() == []
  return built
