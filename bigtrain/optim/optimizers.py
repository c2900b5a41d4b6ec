"""Base optimizers: optax's by name, without learning rate and weight decay.

chain.py applies learning rate, weight decay and schedule, the same way for all
optimizers. This module builds the rest of the optimizer that a config names,
and adds an Adafactor that optax does not have.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bigtrain import settings, trees
from bigtrain.optim.patterns import first_match
from bigtrain.settings import ConfigError, did_you_mean

# Optimizers whose learning rate is not a factor of the update. They get
# lr * schedule as an argument and apply it on their own count of updates.
LR_INSIDE = ("cocob", "dadapt_adamw", "fromage", "madgrad", "prodigy")

_LOSS = "it needs the loss at every update"
_REFUSED = {
  "dpsgd": "it needs a gradient for each example",
  "lbfgs": "it evaluates the loss several times an update",
  "momo": _LOSS,
  "momo_adam": _LOSS,
  "optimistic_adam": "use optimistic_adam_v2",
  "polyak_sgd": _LOSS,
  "rprop": "it is for gradients of the whole data set",
  "scale_by_backtracking_linesearch": _LOSS,
  "scale_by_cocob": "use cocob",
  "scale_by_distance_over_gradients": "use dog",
  "scale_by_learning_rate": "the learning rate is config.lr",
  "scale_by_madgrad": "use madgrad",
  "scale_by_muon": "use muon",
  "scale_by_polyak": _LOSS,
  "scale_by_rprop": "it is for gradients of the whole data set",
  "scale_by_schedule": "the schedule is config.schedule",
  "scale_by_zoom_linesearch": _LOSS,
  "schedule_free": "evaluation would need other parameters",
  "schedule_free_adamw": "evaluation would need other parameters",
  "schedule_free_sgd": "evaluation would need other parameters",
  "sophia": "it needs the Hessian's diagonal",
}

# Keyword arguments of optimizers, and the config keys that replace them.
_CONFIG_KEYS = {
  "adam_learning_rate": "config.lr_mults",
  "adam_weight_decay": "config.wd",
  "learning_rate": "config.lr",
  "mask": "config.wd_mults",
  "weight_decay": "config.wd",
  "weight_decay_mask": "config.wd_mults",
  "weight_decay_rate": "config.wd",
}


def constructors() -> dict[str, Callable[..., optax.GradientTransformation]]:
  """Returns the functions that build optimizers, by their name in a config."""
  result: dict[str, Callable[..., optax.GradientTransformation]] = {
    "big_vision_adafactor": big_vision_adafactor
  }
  for module in (optax.contrib, optax):
    for name, fn in vars(module).items():
      if name[0] == "_" or not isinstance(
        fn, types.FunctionType | functools.partial
      ):
        continue
      parameters = inspect.signature(fn).parameters
      if name.startswith("scale_by_") or "learning_rate" in parameters:
        result[name] = fn
  return {name: fn for name, fn in result.items() if name not in _REFUSED}


def base_optimizer(
  spec: dict[str, Any], learning_rate: Any, shapes: Any, key: str
) -> optax.GradientTransformation:
  """Builds the named optimizer without weight decay.

  Args:
    spec: name and keyword arguments.
    learning_rate: 1, or for LR_INSIDE a function of the number of updates.
    shapes: tree of the trainable parameters' ShapeDtypeStructs.
    key: location of `spec` in the config, for messages.

  Returns:
    A transformation whose updates are added to the parameters.

  Raises:
    ConfigError: unknown or unsupported name, unknown or ill-typed argument.
  """
  spec = dict(spec)
  name = str(spec.pop("name", ""))
  optimizers = constructors()
  if name in _REFUSED:
    raise ConfigError(
      f"{key}.name: {name!r} is not supported: {_REFUSED[name]}."
    )
  if name not in optimizers:
    hint = did_you_mean(name, optimizers)
    raise ConfigError(f"{key}.name: unknown optimizer {name!r}.{hint}")
  constructor = optimizers[name]
  for kwarg in spec:
    if kwarg in _CONFIG_KEYS:
      raise ConfigError(f"{key}.{kwarg}: use {_CONFIG_KEYS[kwarg]} instead.")
  settings.check_kwargs(constructor, spec, key, given=_CONFIG_KEYS)
  kwargs = {k: _plain_dtype(k, v, key) for k, v in spec.items()}
  parameters = inspect.signature(constructor).parameters
  for kwarg in ("weight_decay", "adam_weight_decay"):
    # Some default to a decay. None already means no decay.
    if kwarg in parameters and parameters[kwarg].default is not None:
      kwargs[kwarg] = 0.0
  if "learning_rate" in parameters:
    kwargs["learning_rate"] = learning_rate
  if name == "muon":
    _set_muon_dimensions(kwargs, shapes, key)
  try:
    tx = constructor(**kwargs)
  except (TypeError, ValueError) as e:
    raise ConfigError(f"{key}: {name} rejects {spec}: {e}.") from e
  if "learning_rate" in parameters:
    return tx
  # scale_by_* returns directions uphill. Its state gets the same name in this
  # chain as in a full optimizer.
  return optax.chain(tx, optax.scale(-1.0))


def _plain_dtype(kwarg: str, value: Any, key: str) -> Any:
  if "dtype" not in kwarg or not isinstance(value, str):
    return value
  try:
    return jnp.dtype(value)
  except TypeError as e:
    hint = did_you_mean(value, ("bfloat16", "float16", "float32"))
    raise ConfigError(f"{key}.{kwarg}: unknown dtype {value!r}.{hint}") from e


def _set_muon_dimensions(kwargs: dict[str, Any], shapes: Any, key: str) -> None:
  """Replaces Muon's rules from the config by the function that Muon expects.

  By default Muon updates 2D parameters and leaves all others, among them
  stacked layers and attention heads, to Adam. A config can give a list of
  (regex, input dimensions, output dimensions) instead. The remaining dimensions
  of a parameter stack matrices.

  Raises:
    ConfigError: no list and no 2D parameter, or an ill-formed list.
  """
  argument = "muon_weight_dimension_numbers"
  rules = kwargs.get(argument)
  if rules is None:
    if all(len(leaf.shape) != 2 for leaf in jax.tree.leaves(shapes)):
      raise ConfigError(
        f"{key}.{argument}: missing, and no trainable parameter is 2D. "
        "Expected a list of (regex, input dimensions, output dimensions)."
      )
    return
  if not isinstance(rules, list | tuple) or any(
    not isinstance(rule, list | tuple) or len(rule) != 3 for rule in rules
  ):
    raise ConfigError(
      f"{key}.{argument}: expected a list of (regex, input dimensions, output "
      f"dimensions), got {rules!r}."
    )
  rule_by_name = first_match(
    [rule[0] for rule in rules], trees.names(shapes), f"{key}.{argument}"
  )
  dimensions = [
    optax.contrib.MuonDimensionNumbers(*map(_as_tuple, rule[1:]))
    for rule in rules
  ]

  def leaf_dimensions(name: str, _: Any) -> Any:
    return dimensions[rule_by_name[name]] if name in rule_by_name else None

  kwargs[argument] = functools.partial(trees.map_with_names, leaf_dimensions)


def _as_tuple(dims: Any) -> tuple[int, ...]:
  return tuple(dims) if isinstance(dims, list | tuple) else (dims,)


def big_vision_adafactor(
  learning_rate: optax.ScalarOrSchedule,
  min_dim_size_to_factor: int = 32,
  decay_rate: float = 0.8,
  decay_offset: int = 0,
  beta2_cap: float = 0.999,
  clipping_threshold: float | None = None,
  momentum: float | None = 0.9,
  dtype_momentum: Any = jnp.bfloat16,
  eps: float = 1e-30,
) -> optax.GradientTransformation:
  """Builds the Adafactor variant used for large vision transformers.

  Zhai et al. 2021, "Scaling Vision Transformers" (arxiv.org/abs/2106.04560),
  section 3.4, change Adafactor (Shazeer and Stern 2018,
  arxiv.org/abs/1804.04235) in three ways: momentum is on and kept in bfloat16,
  the decay of the second moment is capped, and updates are not scaled by the
  parameter's size. The state takes 2 bytes a parameter plus a row and a column
  for each matrix; Adam's takes 8 bytes a parameter.

  Args:
    learning_rate: factor of the update, applied last.
    min_dim_size_to_factor: parameters whose second largest dimension is
      smaller keep a full second moment.
    decay_rate: the second moment of update t (from 1) decays by
      min(beta2_cap, 1 - t ** -decay_rate).
    decay_offset: start of the count t, for fine-tuning with a restored state.
    beta2_cap: see decay_rate.
    clipping_threshold: largest RMS of a parameter's update, before momentum.
    momentum: decay of the average of updates, not debiased; None for no
      momentum.
    dtype_momentum: dtype of the stored average.
    eps: added to squared gradients.

  Returns:
    A transformation. Its state has the second moment at 0 and the momentum at
    2, whichever parts are on.
  """

  def second_moment_decay(count: jax.Array, exponent: float) -> jax.Array:
    updates = jnp.maximum(count, 0).astype(jnp.float32) + 1.0
    return jnp.minimum(beta2_cap, 1.0 - updates**-exponent)

  return optax.chain(
    optax.scale_by_factored_rms(
      decay_rate=decay_rate,
      step_offset=decay_offset,
      min_dim_size_to_factor=min_dim_size_to_factor,
      epsilon=eps,
      decay_rate_fn=second_moment_decay,
    ),
    optax.clip_by_block_rms(clipping_threshold)
    if clipping_threshold
    else optax.identity(),
    optax.ema(momentum, debias=False, accumulator_dtype=dtype_momentum)
    if momentum
    else optax.identity(),
    optax.scale_by_learning_rate(learning_rate),
  )
