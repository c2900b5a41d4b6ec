"""The base optimizer that config.optimizer names.

It is an optimizer of optax, optax.contrib, adafactor.py or muon.py, or a user's
optimizer given by its dotted path. The base optimizer computes the direction of
an update; chain.py applies learning rate, weight decay and schedule. The tables
at the top list the peculiarities of single optimizers; `base_optimizer` builds
an optimizer.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from bigtrain.arrays import trees
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
  did_you_mean,
)
from bigtrain.config.modules import find_attribute
from bigtrain.optim import adafactor, by_array, moments, muon, views
from bigtrain.optim.patterns import first_match

Constructor = Callable[..., optax.GradientTransformation]

# Keys of config.optimizer that are not arguments of the optimizer.
OWN_KEYS = ("name", "view", "lr_inside", "moment_arithmetic", *moments.KEYS)

# Muon's argument with the matrices that it acts on.
_MUON_RULES = "muon_weight_dimension_numbers"

# Optimizers whose learning rate is not a factor of the update. They get lr *
# schedule as an argument, and apply it on their own count of updates.
_LR_INSIDE = (
  "cocob",
  "dadapt_adamw",
  "fromage",
  "madgrad",
  "momo",
  "momo_adam",
  "prodigy",
)

# Optimizers of optax that a config cannot name, and why.
REFUSED = {
  "differentially_private_aggregate": "it needs a gradient for each example",
  "dpsgd": "it needs a gradient for each example",
  "lbfgs": "it evaluates the loss several times an update",
  "lookahead": "it trains two sets of parameters",
  "optimistic_adam": "use optimistic_adam_v2",
  "rprop": "it is for gradients of the whole data set",
  "sam": "a task's gradients_fn has the gradient at other parameters",
  "scale_by_backtracking_linesearch": (
    "it evaluates the loss several times an update"
  ),
  "scale_by_cocob": "use cocob",
  "scale_by_distance_over_gradients": "use dog",
  "scale_by_learning_rate": "the learning rate is config.lr",
  "scale_by_madgrad": "use madgrad",
  "scale_by_muon": "use muon",
  "scale_by_rprop": "it is for gradients of the whole data set",
  "scale_by_schedule": "the schedule is config.schedule",
  "scale_by_zoom_linesearch": "it evaluates the loss several times an update",
  "sophia": "it needs the Hessian's diagonal, by second derivatives",
  "split_real_and_imaginary": "it is for complex parameters",
}

# Arguments of optimizers that config keys replace.
_CONFIG_KEYS = {
  "adam_learning_rate": "config.lr_mults",
  "adam_weight_decay": "config.wd",
  "learning_rate": "config.lr",
  "lr": "config.lr",
  "mask": "config.wd_mults",
  "wd": "config.wd",
  "weight_decay": "config.wd",
  "weight_decay_mask": "config.wd_mults",
  "weight_decay_rate": "config.wd",
}

# The default of config.optimizer.view, see `views.seen`. The other optimizers
# act on each element separately, so that they see whole parameters.
_VIEWS = {
  "adafactor": "matrices",
  "galore": "matrices",
  "muon": "matrices",
  "scale_by_factored_rms": "matrices",
  "scale_by_galore": "matrices",
  "big_vision_adafactor": "layers",
  "fromage": "layers",
  "lamb": "layers",
  "lars": "layers",
  "novograd": "layers",
  "scale_by_novograd": "layers",
  "scale_by_param_block_norm": "layers",
  "scale_by_param_block_rms": "layers",
  "scale_by_sm3": "layers",
  "scale_by_trust_ratio": "layers",
  "sm3": "layers",
}


# Limits of arguments that several optimizers have.
_DECAY = dict(least=0, below=1)
_LIMITS: dict[str, dict[str, Any]] = dict(
  **dict.fromkeys(("b1", "b2", "b3", "beta", "momentum"), _DECAY),
  **dict.fromkeys(("adam_b1", "adam_b2"), _DECAY),
  eps=dict(least=0),
  ns_steps=dict(least=1, whole=True),
  consistent_rms=dict(above=0),
)


def constructors() -> dict[str, Constructor]:
  """{name: constructor} of all optimizers that a config can name."""
  result: dict[str, Constructor] = {}
  for module in (optax.contrib, optax):
    for name, fn in vars(module).items():
      if _is_optimizer(name, fn):
        result[name] = fn
  result["adafactor"] = adafactor.adafactor
  result["big_vision_adafactor"] = adafactor.big_vision_adafactor
  result["muon"] = muon.muon
  return {name: fn for name, fn in result.items() if name not in REFUSED}


def _is_optimizer(name: str, fn: Any) -> bool:
  """Whether a public attribute of optax makes an optimizer."""
  is_function = isinstance(fn, types.FunctionType | functools.partial)
  if name.startswith("_") or not is_function:
    return False
  if name.startswith("scale_by_"):
    return True
  if name == "polyak_sgd":  # It has no argument learning_rate.
    return True
  parameters = inspect.signature(fn).parameters
  # wrappers.py has those around another optimizer. galore's is an option.
  is_wrapper = "base_optimizer" in parameters and name != "galore"
  return "learning_rate" in parameters and not is_wrapper


def lr_inside(spec: Mapping[str, Any]) -> bool:
  """Whether the optimizer of `spec` applies the learning rate itself."""
  return spec.get("lr_inside", spec.get("name") in _LR_INSIDE)


def base_optimizer(
  spec: Mapping[str, Any],
  learning_rate: Any,
  shapes: Any,
  key: str,
  param_views: Mapping[str, views.View],
) -> optax.GradientTransformation:
  """Builds the optimizer of a config, without weight decay.

  Args:
    spec: config.optimizer.
    learning_rate: 1, or the schedule if the optimizer applies it itself.
    shapes: specs of the trainable parameters.
    key: name of `spec` in messages.
    param_views: {name of a parameter: its view}.
  """
  name = str(spec.get("name", ""))
  constructor = _constructor(name, key)
  parameters = inspect.signature(constructor).parameters
  options = {k: v for k, v in spec.items() if k not in OWN_KEYS}
  for argument in options:
    if argument in _CONFIG_KEYS:
      instead = _CONFIG_KEYS[argument]
      raise ConfigError(f"{key}.{argument}: use {instead} instead.")
  check_kwargs(
    constructor, options, key, given={*_CONFIG_KEYS, "views"}, others=OWN_KEYS
  )
  if "." not in name:
    for argument, limits in _LIMITS.items():
      if options.get(argument) is not None:
        check_number(f"{key}.{argument}", options[argument], **limits)
  kwargs = _arguments(spec, options, parameters, key)
  if "learning_rate" in parameters:
    kwargs["learning_rate"] = learning_rate

  # What the optimizer sees: whole parameters, layers or matrices.
  level = spec.get("view", _VIEWS.get(name, "parameters"))
  check_choice(f"{key}.view", level, views.ARRAYS)
  shape_of = {n: x.shape for n, x in trees.flatten_with_names(shapes)}
  seen = views.seen(param_views, shape_of, level)
  if "views" in parameters:
    kwargs["views"] = seen
  elif name == "muon" and (level != "parameters" or _MUON_RULES in kwargs):
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
  # scale_by_* returns uphill directions. In a chain with a negative scale, the
  # names in its state are the same as in adam's.
  if name.rpartition(".")[2].startswith("scale_by_"):
    tx = optax.chain(tx, optax.scale(-1.0))
  if level == "parameters" or "views" in parameters or name == "muon":
    return tx
  return by_array.by_array(tx, seen, shapes, key)


def _arguments(
  spec: Mapping[str, Any],
  options: Mapping[str, Any],
  parameters: Mapping[str, inspect.Parameter],
  key: str,
) -> dict[str, Any]:
  """Arguments of the constructor, apart from learning rate and views."""
  kwargs = {k: _plain_dtype(k, v, key) for k, v in options.items()}
  if spec.get("moment_dtype") is not None:
    kwargs = moments.without_own_dtypes(kwargs, parameters, key)
  for argument in ("weight_decay", "adam_weight_decay"):
    # Some optimizers decay by default. A default of None means no decay, and
    # some of these do not accept 0.
    if argument in parameters and parameters[argument].default is not None:
      kwargs[argument] = 0.0
  return kwargs


def _constructor(name: str, key: str) -> Constructor:
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
  known = constructors()
  check_choice(f"{key}.name", name, known, "unknown optimizer")
  return known[name]


def _plain_dtype(argument: str, value: Any, key: str) -> Any:
  """Converts a name such as "bfloat16" to a dtype."""
  if "dtype" not in argument or not isinstance(value, str):
    return value
  try:
    return jnp.dtype(value)
  except TypeError as e:
    hint = did_you_mean(value, ("bfloat16", "float16", "float32"))
    message = f"{key}.{argument}: unknown dtype {value!r}.{hint}"
    raise ConfigError(message) from e


def _set_muon_dimensions(
  kwargs: dict[str, Any], shapes: Any, key: str, seen: Mapping[str, views.View]
) -> None:
  """Sets the matrices that Muon updates; Adam updates the other parameters.

  They are those of the config's rules, or by default the matrices of all hidden
  layers.
  """
  key = f"{key}.{_MUON_RULES}"
  expected = "a list of (regex, input dimensions, output dimensions)"
  shape_of = {name: x.shape for name, x in trees.flatten_with_names(shapes)}
  names = [*shape_of]
  rules = kwargs.get(_MUON_RULES)
  matrices: dict[str, optax.contrib.MuonDimensionNumbers] = {}
  if rules is None:
    for name in names:
      view = seen[name]
      if view.rows and view.hidden:
        matrices[name] = optax.contrib.MuonDimensionNumbers(
          view.rows, view.columns
        )
    if not matrices:
      raise ConfigError(
        f"{key}: missing, and no trainable parameter is a hidden layer's "
        f"matrix. Expected {expected}, or another optimizer, such as 'adam'."
      )
  else:
    if not isinstance(rules, list | tuple) or any(
      not isinstance(rule, list | tuple) or len(rule) != 3 for rule in rules
    ):
      raise ConfigError(f"{key}: expected {expected}, got {rules!r}.")
    matches = first_match([rule[0] for rule in rules], names, key)
    for name, i in matches.items():
      inputs, outputs = (_as_tuple(dims) for dims in rules[i][1:])
      _check_dimensions(f"{key}[{i}]", name, shape_of[name], inputs + outputs)
      matrices[name] = optax.contrib.MuonDimensionNumbers(inputs, outputs)

  kwargs[_MUON_RULES] = matrices


def _check_dimensions(
  key: str, name: str, shape: tuple[int, ...], dims: tuple[int, ...]
) -> None:
  """Raises ConfigError unless they are different dimensions of an array."""
  N = len(shape)
  exist = all(isinstance(dim, int) and -N <= dim < N for dim in dims)
  if not exist or len({dim % N for dim in dims}) < len(dims):
    raise ConfigError(
      f"{key}: expected different dimensions of {name}, which has the shape "
      f"{shape}, got {dims}."
    )


def _as_tuple(dims: Any) -> tuple[int, ...]:
  return tuple(dims) if isinstance(dims, list | tuple) else (dims,)
