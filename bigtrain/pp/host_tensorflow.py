"""Imports tensorflow as a library for the host, without access to accelerators.

`tf` is the module tensorflow, imported when it is first used.
"""

import ast
import functools
import os
import re
from typing import Any

from bigtrain.config.errors import ConfigError, import_package

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@functools.cache
def load() -> Any:
  """Imports tensorflow and hides the accelerators from it, which jax uses."""
  # Its C++ code also prints the errors that it raises, in five lines for a
  # damaged picture, and messages about its build and threads that end. jax sets
  # the level to 1; another one is the user's.
  if os.environ.get(_LOG_LEVEL, "1") == "1":
    os.environ[_LOG_LEVEL] = "3"
  tf = import_package("tensorflow", "input: preprocessing", "tensorflow-cpu")
  for kind in ("GPU", "TPU"):
    try:
      tf.config.set_visible_devices([], kind)
    except RuntimeError as e:
      if tf.config.get_visible_devices(kind):
        raise ConfigError(
          f"input: tensorflow was used earlier and holds the {kind}s: {e}"
        ) from e
  return tf


class _Lazy:
  """The module tensorflow, imported when an attribute is first used."""

  def __getattr__(self, name: str) -> Any:
    return getattr(load(), name)


tf: Any = _Lazy()


def _unquoted(line: str) -> str:
  try:
    return ast.literal_eval(line).decode("utf-8", "backslashreplace")
  except (ValueError, SyntaxError, AttributeError):
    return line


def one_line(error: Exception) -> str:
  """Returns the message of an op's error without tensorflow's details."""
  text = getattr(error, "message", None) or str(error)
  _, asserted, shown = text.partition("to be true. Summarized data: ")
  if asserted:  # Outside a graph, an Assert shows the repr of strings.
    text = " ".join(map(_unquoted, shown.splitlines()))
  text = re.sub(r"\{\{[^}]*\}\}|\[Op:[^\]]*\].*|\[\[[^\]]*\]\]", "", text)
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if lines and lines[0].startswith("Graph execution error"):
    lines = lines[-1:]  # The lines between are locations in the graph.
  text = " ".join(lines) or type(error).__name__
  if isinstance(error, KeyError | IndexError | TypeError | AttributeError):
    text = f"{type(error).__name__}: {text}"
  return text[:300].rstrip(". ") + "."
