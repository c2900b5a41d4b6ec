"""Base optimizers by name, without learning rate and weight decay.

They are optimizers of optax, optax.contrib or adafactor.py, or the user's own
by dotted path. chain.py applies learning rate, weight decay and schedule.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from bigtrain.arrays import trees
from bigtrain.config import settings
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  did_you_mean,
)
from bigtrain.config.modules import find_attribute
from bigtrain.optim import adafactor, by_array, moments, views
from bigtrain.optim.patterns import first_match

_FACTS = settings.read_table(__file__, "optimizers.toml")
REFUSED, _CONFIG_KEYS = _FACTS["refused"], _FACTS["config_keys"]
_MUON_RULES = "muon_weight_dimension_numbers"

# Keys of config.optimizer that are not arguments of the optimizer.
OWN_KEYS = ("name", "view", "lr_inside", "moment_arithmetic", *moments.KEYS)


def constructors() -> dict[str, Callable[..., optax.GradientTransformation]]:
  result: dict[str, Callable[..., optax.GradientTransformation]] = {}
  for module in (optax.contrib, optax):
    for name, fn in vars(module).items():
      if name[0] == "_" or not isinstance(
        fn, types.FunctionType | functools.partial
      ):
        continue
      parameters = inspect.signature(fn).parameters
      takes_rate = "learning_rate" in parameters and (
        "base_optimizer" not in parameters or name == "galore"
      )
      is_stage = name.startswith("scale_by_")
      if is_stage or takes_rate or name in _FACTS["other_names"]:
        result[name] = fn
  result["adafactor"] = adafactor.adafactor
  result["big_vision_adafactor"] = adafactor.big_vision_adafactor
  return {name: fn for name, fn in result.items() if name not in REFUSED}


def lr_inside(spec: Mapping[str, Any]) -> bool:
  return spec.get("lr_inside", spec.get("name") in _FACTS["lr_inside"])


def base_optimizer(
  spec: Mapping[str, Any],
  learning_rate: Any,
  shapes: Any,
  key: str,
  param_views: Mapping[str, views.View],
) -> optax.GradientTransformation:
  """Builds the optimizer of `spec`, at `key`, without weight decay."""
  name = str(spec.get("name", ""))
  constructor = _constructor(name, key)
  options = {k: v for k, v in spec.items() if k not in OWN_KEYS}
  for kwarg in options:
    if kwarg in _CONFIG_KEYS:
      raise ConfigError(f"{key}.{kwarg}: use {_CONFIG_KEYS[kwarg]} instead.")
  check_kwargs(
    constructor, options, key, given={*_CONFIG_KEYS, "views"}, others=OWN_KEYS
  )
  kwargs = {k: _plain_dtype(k, v, key) for k, v in options.items()}
  parameters = inspect.signature(constructor).parameters
  if spec.get("moment_dtype") is not None:
    kwargs = moments.without_own_dtypes(kwargs, parameters, key)
  for kwarg in ("weight_decay", "adam_weight_decay"):
    # Some default to a decay. None already means no decay.
    if kwarg in parameters and parameters[kwarg].default is not None:
      kwargs[kwarg] = 0.0
  if "learning_rate" in parameters:
    kwargs["learning_rate"] = learning_rate
  level = spec.get("view", _FACTS["views"].get(name, "parameters"))
  arrays = check_choice(f"{key}.view", level, views.ARRAYS)
  specs = dict(trees.flatten_with_names(shapes))
  by_name = {name: spec.shape for name, spec in specs.items()}
  seen = views.seen(param_views, by_name, arrays)
  if "views" in parameters:
    kwargs["views"] = seen
  elif name == "muon" and (arrays != "parameters" or _MUON_RULES in kwargs):
    _set_muon_dimensions(kwargs, shapes, key, seen)
  try:
    tx = constructor(**kwargs)
  except (TypeError, ValueError) as e:
    raise ConfigError(f"{key}: {name} rejects {options}: {e}.") from e
  if not isinstance(tx, optax.GradientTransformation):
    raise ConfigError(
      f"{key}.name: expected a function that returns an "
      f"optax.GradientTransformation, but {name!r} returned {tx!r}."
    )
  # scale_by_* returns uphill directions; its state has names as in adam.
  if name.rpartition(".")[2].startswith("scale_by_"):
    tx = optax.chain(tx, optax.scale(-1.0))
  if arrays == "parameters" or "views" in parameters or name == "muon":
    return tx
  return by_array.by_array(tx, seen, shapes, key)


def _constructor(
  name: str, key: str
) -> Callable[..., optax.GradientTransformation]:
  if "." in name:
    constructor = find_attribute(name, f"{key}.name")
    if not callable(constructor):
      raise ConfigError(
        f"{key}.name: expected a function that returns an "
        f"optax.GradientTransformation, got {name!r}, a "
        f"{type(constructor).__name__}."
      )
    return constructor
  if name in REFUSED:
    raise ConfigError(
      f"{key}.name: {name!r} is not supported: {REFUSED[name]}."
    )
  optimizers = constructors()
  check_choice(f"{key}.name", name, optimizers, "unknown optimizer")
  return optimizers[name]


def _plain_dtype(kwarg: str, value: Any, key: str) -> Any:
  if "dtype" not in kwarg or not isinstance(value, str):
    return value
  try:
    return jnp.dtype(value)
  except TypeError as e:
    hint = did_you_mean(value, ("bfloat16", "float16", "float32"))
    raise ConfigError(f"{key}.{kwarg}: unknown dtype {value!r}.{hint}") from e


def _set_muon_dimensions(
  kwargs: dict[str, Any], shapes: Any, key: str, seen: Mapping[str, views.View]
) -> None:
  """Sets Muon's matrices: those of the config's rules, or all hidden ones."""
  numbers = optax.contrib.MuonDimensionNumbers
  rules = kwargs.get(_MUON_RULES)
  key = f"{key}.{_MUON_RULES}"
  expected = "a list of (regex, input dimensions, output dimensions)"
  names = trees.names(shapes)
  by_name: dict[str, Any] = {}
  if rules is None:
    for name in names:
      view = seen[name]
      if view.rows and view.hidden:
        by_name[name] = numbers(view.rows, view.columns)
    if not by_name:
      raise ConfigError(
        f"{key}: missing, and no trainable parameter is a hidden layer's "
        f"matrix. Expected {expected}."
      )
  else:
    if not isinstance(rules, list | tuple) or any(
      not isinstance(rule, list | tuple) or len(rule) != 3 for rule in rules
    ):
      raise ConfigError(f"{key}: expected {expected}, got {rules!r}.")
    matches = first_match([rule[0] for rule in rules], names, key)
    for name, i in matches.items():
      by_name[name] = numbers(*map(_as_tuple, rules[i][1:]))
  kwargs[_MUON_RULES] = functools.partial(
    trees.map_with_names, lambda name, _: by_name.get(name)
  )


def _as_tuple(dims: Any) -> tuple[int, ...]:
  return tuple(dims) if isinstance(dims, list | tuple) else (dims,)
