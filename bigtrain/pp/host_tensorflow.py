"""tensorflow as a library for the host, without access to accelerators."""

import functools
from typing import Any

from bigtrain.settings import ConfigError


@functools.cache
def load() -> Any:
  """Imports tensorflow and hides all accelerators from it.

  Call this before any other use of tensorflow.

  Raises:
    ConfigError: tensorflow is not installed, or already uses an accelerator.
  """
  try:
    import tensorflow as tf
  except ModuleNotFoundError as e:
    raise ConfigError(
      f"input: preprocessing needs tensorflow ({e}); pip install "
      "tensorflow-cpu."
    ) from e
  for kind in ("GPU", "TPU"):
    try:
      tf.config.set_visible_devices([], kind)
    except RuntimeError as e:
      if tf.config.get_visible_devices(kind):
        raise ConfigError(
          f"input: tensorflow was used earlier and holds the {kind}s: {e}"
        ) from e
  return tf
