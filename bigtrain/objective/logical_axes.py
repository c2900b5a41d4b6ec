"""config.logical_axes: maps axes that flax names to axes of the mesh.

A user's model may name the axes of its arrays in flax's way
(nn.with_logical_partitioning, nn.with_logical_constraint). These rules say
which axes of the mesh split them. A name without a rule is an error.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.models.layers import options


def logical_axes(config: settings.Config) -> tuple[tuple[str, Any], ...]:
  """Reads config.logical_axes as flax's rules: (name, axes of the mesh).

  It is a dict or a list of pairs. If two names in an array map to the same axis
  of the mesh, the first gets it.
  """
  key = f"{config.path}.logical_axes"
  rules = config.get("logical_axes") or ()
  if isinstance(rules, settings.Config):
    rules = tuple(config.kwargs("logical_axes").items())
  on_mesh = jax.sharding.get_abstract_mesh().axis_names
  result = []
  for rule in rules if isinstance(rules, list | tuple) else [rules]:
    if not isinstance(rule, list | tuple) or len(rule) != 2:
      raise ConfigError(
        f"{key}: expected a dict or a list of (name, axis of the mesh), got "
        f"{rule!r}."
      )
    name, axes = rule
    for axis in jax.tree.leaves(axes):
      if on_mesh and axis not in on_mesh:
        raise ConfigError(
          f"{key}.{name}: expected None or axes of the mesh, got {axes!r}."
          f"{did_you_mean(axis, on_mesh)}"
        )
    result.append((name, tuple(axes) if isinstance(axes, list) else axes))
  return tuple(result)


def no_rule(
  key: str, axis: str, names: Iterable[str], where: str
) -> ConfigError:
  return ConfigError(
    f"{key}: expected a rule for {axis!r}, an axis of {where}, such as "
    f"{{{axis!r}: None}}.{did_you_mean(axis, names)}"
  )


class _Unknown:
  """First of flax's rules: raises ConfigError for a name without a rule.

  Flax compares it with the names of a constraint. By default, flax would treat
  a name without a rule as None.
  """

  def __init__(self, key: str, rules: Iterable[tuple[str, Any]]):
    self._key = key
    self._names = [name for name, _ in rules]

  def __eq__(self, axis: object) -> bool:
    if isinstance(axis, str) and axis not in self._names:
      raise no_rule(self._key, axis, self._names, "an activation or parameter")
    return self is axis

  __hash__ = object.__hash__


def no_logical_axes() -> contextlib.AbstractContextManager[None]:
  """Refuses nn.with_logical_constraint unless config.logical_axes has rules."""
  unknown: Any = _Unknown("config.logical_axes", ())
  return nn.logical_axis_rules([(unknown, None)])


@functools.cache
def with_rules(
  cls: type[nn.Module], key: str, rules: tuple[tuple[str, Any], ...]
) -> type[nn.Module]:
  """A subclass whose methods set flax's rules, which are thread-local."""
  unknown: Any = _Unknown(key, rules)
  with_check = [(unknown, None), *rules]

  def under_rules(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
      with nn.logical_axis_rules(with_check):
        return method(*args, **kwargs)

    return nn.nowrap(call)

  names = ("apply", "init_with_output")
  members = {name: under_rules(getattr(cls, name)) for name in names}
  return options.subclass(cls, members)
