"""bigtrain: one config-driven program that trains large models in JAX.

`bigtrain.load` returns a trained model to use, see bigtrain/inference.
"""

import importlib
from typing import Any

__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
  # Imported when it is first used: a training run does without it.
  if name == "load":
    return importlib.import_module("bigtrain.inference.load").load
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
