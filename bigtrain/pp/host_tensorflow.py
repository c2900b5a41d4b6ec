"""tensorflow as a library for the host: it never sees an accelerator."""

import functools
from typing import Any

from bigtrain.settings import ConfigError


@functools.cache
def load() -> Any:
  """The module tensorflow, kept away from accelerators.

  To be called before anything else imports it.

  Raises:
    ConfigError: it is not installed, or holds an accelerator already.
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
          f"input: tensorflow was used before and took the {kind}s: {e}"
        ) from e
  return tf
