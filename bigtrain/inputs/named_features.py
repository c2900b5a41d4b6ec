"""A batch for tasks and evaluators, in which a missing feature is an error."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from bigtrain.config.errors import ConfigError, did_you_mean


class Features(dict[str, Any]):
  """The features of a batch, by name; a missing one is a ConfigError.

  Args:
    path: location of the input in the config, such as "config.evals.val".
  """

  def __init__(
    self, batch: Mapping[str, Any] | Iterable[tuple[str, Any]], path: str
  ):
    super().__init__(batch)
    self.path = path

  def __missing__(self, name: str) -> Any:
    features = [feature for feature in self if not feature.startswith("_")]
    raise ConfigError(
      f"{self.path}: after pp, the examples have no feature {name!r}."
      f"{did_you_mean(name, features)}"
    )


def _flatten(
  features: Features,
) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, ...], str]]:
  names = tuple(sorted(features))
  children = [(jax.tree_util.DictKey(name), features[name]) for name in names]
  return children, (names, features.path)


def _unflatten(
  names_and_path: tuple[tuple[str, ...], str], values: Iterable[Any]
) -> Features:
  names, path = names_and_path
  return Features(zip(names, values), path)


# Without this, jax would treat a Features as a leaf: it is a subclass of dict.
jax.tree_util.register_pytree_with_keys(Features, _flatten, _unflatten)
