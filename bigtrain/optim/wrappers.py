"""Optimizers around another optimizer, config.optimizer.base_optimizer.

A wrapper acts on complete updates, which include learning rate and weight
decay:

  schedule_free      averages in place of a decaying schedule (Defazio et al.
                     2024, arxiv.org/abs/2405.15682)
  schedule_free_adamw  the same around Adam without momentum
  schedule_free_sgd  the same around gradient descent
  mechanize          learns a factor of the learning rate (Cutkosky et al. 2023,
                     arxiv.org/abs/2306.00144)
  reduce_on_plateau  reduces the learning rate while the loss does not improve
"""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from bigtrain.config.errors import ConfigError, check_kwargs, check_number
from bigtrain.optim import optimizers

# (optimizer, fn(step) -> learning rate) -> the wrapped optimizer.
Wrap = Callable[
  [optax.GradientTransformationExtraArgs, Callable[[Any], Any]],
  optax.GradientTransformation,
]


_WRAPPERS: dict[str, Callable[..., Any]] = {
  "schedule_free": optax.contrib.schedule_free,
  "schedule_free_adamw": optax.contrib.schedule_free,
  "schedule_free_sgd": optax.contrib.schedule_free,
  "mechanize": optax.contrib.mechanize,
  "reduce_on_plateau": optax.contrib.reduce_on_plateau,
}
NAMES = tuple(_WRAPPERS)


def split(
  spec: Mapping[str, Any], key: str
) -> tuple[dict[str, Any], Wrap | None]:
  """Splits config.optimizer into the base optimizer and its wrapper.

  Args:
    spec: config.optimizer.
    key: its name in messages.

  Returns: the config of the base optimizer, and the wrapper or None.
  """
  options = dict(spec)
  name = options.get("name")
  if name not in _WRAPPERS:
    return options, None
  # Such as the dtype of moments, which concerns the base optimizer.
  kept = {k: options.pop(k) for k in optimizers.OWN_KEYS if k in options}
  base: Any = options.pop("base_optimizer", None)
  if name == "schedule_free_adamw":
    base = dict(
      name="scale_by_rms",
      decay=options.pop("b2", 0.999),
      eps=options.pop("eps", 1e-8),
      eps_in_sqrt=False,
      bias_correction=True,
    )
  elif name == "schedule_free_sgd":
    base = dict(name="sgd")
  elif not isinstance(base, Mapping) or base.get("name") in _WRAPPERS:
    raise ConfigError(
      f"{key}.base_optimizer: expected the dict of an optimizer, such as "
      f"dict(name='adam'), got {base!r}."
    )
  fn = _WRAPPERS[name]
  check_kwargs(fn, options, key, given=("base_optimizer", "learning_rate"))
  if fn is optax.contrib.schedule_free:
    b1 = options.get("b1", 0.9)
    check_number(f"{key}.b1", b1, above=0, most=1)
  try:
    wrap = _wrapper(fn, options)
  except (TypeError, ValueError) as e:
    raise ConfigError(f"{key}: {name} rejects {options}: {e}.") from e
  return {**kept, **base}, wrap


def _wrapper(fn: Callable[..., Any], options: Mapping[str, Any]) -> Wrap:
  if fn is optax.contrib.reduce_on_plateau:
    scale = fn(**options)
    return lambda inner, _: optax.chain(inner, scale)
  if fn is optax.contrib.mechanize:
    return lambda inner, _: fn(inner, **options)
  return lambda inner, learning_rate: fn(inner, learning_rate, **options)
