"""Applies a model: within a loss, to evaluate a loss, and for features."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain.arrays import trees
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import check_choice


def apply(
  model: Any,
  variables: Variables,
  rng: jax.Array | None,
  train: bool,
  *args: Any,
  collect: tuple[str, ...] = (),
  **kwargs: Any,
) -> tuple[Any, Variables]:
  """Returns (output, mutable collections); only training changes the latter.

  Training also collects the largest attention logits of models whose field
  `attention_logits` is set.
  """
  if getattr(model, "attention_logits", False):
    collect = (*collect, "step_largest")
  mutable = [name for name in variables if name != "params"]
  out, new = model.apply(
    variables,
    *args,
    train=train,
    rngs={"dropout": rng} if train else None,
    mutable=[*mutable, *collect] if train else [],
    **kwargs,
  )
  if train:
    return out, dict(new)
  return out, {name: variables[name] for name in mutable}


def metrics_fn(loss_fn: Callable[..., Any], **given: Any) -> Any:
  """The metrics of a loss as a function of (variables, batch, its options)."""

  def loss(variables: Variables, batch: Any, **options: Any) -> Metrics:
    return loss_fn(variables, batch, None, train=False, **given, **options)[0]

  # Its signature shows the options, so that a wrong one is refused by name.
  result: Any = loss
  parameters = inspect.signature(loss_fn).parameters.values()
  hidden = {"rng", "train", *given}
  result.__signature__ = inspect.Signature(
    [parameter for parameter in parameters if parameter.name not in hidden]
  )
  return result


def whole_loss_fn(
  embed_fn: Callable[..., Any], embeddings_loss_fn: Callable[..., Any]
) -> Any:
  """The loss_fn of both halves, see objective.gradients.TwoPassLoss.

  The second half of a task with state returns (metrics, task_sums).
  """
  embed_parameters = inspect.signature(embed_fn).parameters
  loss_parameters = inspect.signature(embeddings_loss_fn).parameters

  def loss_fn(
    variables: Variables,
    batch: Batch,
    rng: jax.Array | None,
    *,
    model: Any,
    train: bool,
    **options: Any,
  ) -> tuple[Metrics, Variables]:
    first = {k: x for k, x in options.items() if k in embed_parameters}
    second = {
      k: x
      for k, x in {**options, "model": model}.items()
      if k in loss_parameters
    }
    z, mutable = embed_fn(
      variables, batch, rng, model=model, train=train, **first
    )
    params = trees.merge(variables["params"], variables.get("base", {}))
    result = embeddings_loss_fn(params, z, batch, **second)
    if not isinstance(result, tuple):
      return result, mutable
    loss_metrics, sums = result
    return loss_metrics, {**mutable, "task_sums": sums}

  result: Any = loss_fn
  loss_options = [
    parameter
    for parameter in loss_parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
    and parameter.name not in embed_parameters
  ]
  result.__signature__ = inspect.Signature(
    [*embed_parameters.values(), *loss_options]
  )
  result.__doc__ = embeddings_loss_fn.__doc__
  return result


def layers_fn(
  model: Any, inputs: Callable[[Batch], Batch], default: str = "pre_logits"
) -> PredictFn:
  """A predict function for the features of a layer, or a dict of several.

  A layer is named as in the dict that the model returns, or as in the names of
  parameters: "Transformer/encoderblock_3".
  """

  def layers(
    variables: Variables,
    batch: Batch,
    *,
    layer: str | Sequence[str] = default,
    pool: bool = False,  # Averages over all but the first and the last axis.
  ) -> Any:
    out, states = model.apply(
      variables,
      **inputs(batch),
      train=False,
      capture_intermediates=True,
      mutable=["intermediates"],
    )
    features: dict[str, jax.Array] = {}
    for name, x in trees.flatten_with_names(states["intermediates"]):
      features.setdefault(name.partition("/__call__/")[0], x)
    features |= out if isinstance(out, dict) else out[-1]

    def feature(name: str) -> jax.Array:
      x = features[check_choice("pred_kw.layer", name, features)]
      return jnp.mean(x, range(1, x.ndim - 1)) if pool else x

    if isinstance(layer, str):
      return feature(layer)
    return {name: feature(name) for name in layer}

  return layers


def pixels(variables: Variables, batch: Batch) -> jax.Array:
  """The image itself, [B, values]: a baseline that features should beat."""
  del variables
  image = batch["image"]
  return image.reshape(len(image), -1).astype(jnp.float32)
