"""Models that a loss learns from: one, or several by name with weights.

This module also updates a teacher that follows the student.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax

from bigtrain.arrays.types import Variables
from bigtrain.config.errors import ConfigError, check_number


def by_name(
  teacher: Any, variables: Variables
) -> Iterator[tuple[str, Any, Variables]]:
  """Yields (name, model, its variables without gradient).

  A single teacher, which has no name, is "teacher".
  """
  models = teacher or {}
  their_variables = variables.get("teacher", {})
  if not isinstance(models, Mapping):
    models = {"teacher": models}
    their_variables = {"teacher": their_variables}
  for name, model in models.items():
    yield name, model, jax.lax.stop_gradient(their_variables[name])


def weights_of(
  names: Collection[str], weights: Mapping[str, float] | None, key: str
) -> Mapping[str, float]:
  """The teachers' weights in a config; by default all are equal."""
  weights = weights or dict.fromkeys(names, 1 / len(names))
  if {*weights} != {*names}:
    raise ConfigError(
      f"{key}: expected weights of {', '.join(names)}, got {weights}."
    )
  for name, weight in weights.items():
    check_number(f"{key}.{name}", weight, least=0)
  return weights


def follow(teacher: Any, student: Any, momentum: Any) -> Any:
  """The next teacher: an exponential moving average of the student."""

  def average(old: jax.Array, new: jax.Array) -> jax.Array:
    return momentum * old + (1 - momentum) * new

  return jax.tree.map(average, teacher, student)
