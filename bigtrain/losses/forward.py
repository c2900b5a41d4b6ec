"""Applies a model: in a loss, to evaluate that loss, and for features."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import trees
from bigtrain.settings import check_choice
from bigtrain.types import Batch, Metrics, PredictFn, Variables


def apply(
  model: Any,
  variables: Variables,
  rng: jax.Array | None,
  train: bool,
  *args: Any,
  collect: tuple[str, ...] = (),
  **kwargs: Any,
) -> tuple[Any, Variables]:
  """Returns (output, mutable collections); only training changes the latter."""
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


def layers_fn(
  model: Any, inputs: Callable[[Batch], Batch], default: str = "pre_logits"
) -> PredictFn:
  """A predict function of features: of a layer, or a dict of several.

  A layer is a name in the dict that the model returns, or of one of its
  modules, as in names of parameters: "Transformer/encoderblock_3".
  """

  def layers(
    variables: Variables,
    batch: Batch,
    *,
    layer: str | Sequence[str] = default,
    pool: bool = False,  # Averages over all but the first and the last axis.
  ) -> Any:
    capture = dict(capture_intermediates=True, mutable=["intermediates"])
    args = {**inputs(batch), "train": False}
    out, states = model.apply(variables, **args, **capture)
    features: dict[str, jax.Array] = {}
    for name, x in trees.flatten_with_names(states["intermediates"]):
      features.setdefault(name.partition("/__call__/")[0], x)
    features |= out if isinstance(out, dict) else out[-1]

    def one(name: str) -> jax.Array:
      x = features[check_choice("pred_kw.layer", name, features)]
      return jnp.mean(x, range(1, x.ndim - 1)) if pool else x

    return one(layer) if isinstance(layer, str) else {n: one(n) for n in layer}

  return layers
