"""Checks of the fields of models; the messages name them as config keys."""

from collections.abc import Iterable, Sequence
from typing import Any

from bigtrain import settings

# Default of a field that the variant or other fields determine: None until the
# construction, which gives the field a value of its type.
DERIVED: Any = None

DTYPES = ("float32", "bfloat16", "float16")


def check_option(key: str, value: Any, options: Sequence[Any]) -> None:
  """Raises ConfigError if the value of config.model.`key` is not an option."""
  settings.check_choice(f"config.model.{key}", value, options)


def check_sizes(model: Any, names: Iterable[str]) -> None:
  """Raises ConfigError unless these fields are whole numbers from 1 on."""
  for name in names:
    value = getattr(model, name)
    settings.check_number(f"config.model.{name}", value, least=1, whole=True)


def check_rates(model: Any, *names: str) -> None:
  """Raises ConfigError unless these fields are numbers in [0, 1)."""
  for name in names:
    check_rate(f"config.model.{name}", getattr(model, name))


def check_rate(key: str, value: Any) -> None:
  """Raises ConfigError unless the value is in [0, 1)."""
  settings.check_number(key, value, least=0, below=1)
