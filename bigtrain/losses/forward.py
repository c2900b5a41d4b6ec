"""Applies a model in a loss, and a loss without training."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from bigtrain.types import Metrics, Variables


def apply(
  model: Any,
  variables: Variables,
  rng: jax.Array | None,
  train: bool,
  *args: Any,
  collect: tuple[str, ...] = (),
  **kwargs: Any,
) -> tuple[Any, Variables]:
  """Returns (output, mutable collections), which only training changes."""
  mutable = [name for name in variables if name != "params"]
  out, new = model.apply(
    variables,
    *args,
    train=train,
    rngs={"dropout": rng} if train else None,
    mutable=[*mutable, *collect] if train else [],
    **kwargs,
  )
  return out, dict(new) if train else {k: variables[k] for k in mutable}


def metrics_fn(loss_fn: Callable[..., Any], **given: Any) -> Any:
  """The metrics of a loss as a function of (variables, batch, its options)."""

  def loss(variables: Variables, batch: Any, **options: Any) -> Metrics:
    return loss_fn(variables, batch, None, train=False, **given, **options)[0]

  result: Any = loss
  signature = inspect.signature(loss_fn)
  hidden = {"rng", "train", *given}
  names = [name for name in signature.parameters if name not in hidden]
  parameters = [signature.parameters[name] for name in names]
  result.__signature__ = signature.replace(parameters=parameters)
  return result
