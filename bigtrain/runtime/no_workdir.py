"""Runs without a workdir: they keep no files and no checkpoints."""

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

from absl import logging

from bigtrain.config.settings import plain

# Keys that have no effect in such a run begin with these.
_PREFIXES = ("ckpt_", "keep_ckpt", "local_ckpt", "save_at_start")


@contextlib.contextmanager
def folder(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
  """(the config of a run that saves nothing, a temporary folder)."""
  config = plain(config)
  unused = [
    key for key, value in config.items() if value and key.startswith(_PREFIXES)
  ]
  message = "Without a workdir, this run keeps no files and no checkpoints."
  if unused:
    message += f" Without effect: config.{', config.'.join(unused)}."
  logging.warning("%s", message)
  kept = {key: value for key, value in config.items() if key not in unused}
  with tempfile.TemporaryDirectory(
    prefix="bigtrain-", ignore_cleanup_errors=True
  ) as path:
    yield {**kept, "keep_ckpts": 0}, path
