"""Builds and calls hooks for tests in the same way as the program."""

from bigtrain.config import settings
from bigtrain.runtime import hooks


def build(workdir="w", **entries):
  """Builds the hooks of config.hooks = entries."""
  config = settings.Config({"hooks": entries})
  built = hooks.from_config(config, workdir)
  assert config.unread() == []
  return built


def show(running, row):
  """Shows a row to hooks; returns their decision to stop, None without one."""
  running.stopped = None
  running.after_row(row)
  return running.stopped
