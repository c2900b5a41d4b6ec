"""Applies a model: within a loss, to evaluate a loss, and for features."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain.arrays import trees
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import check_choice

_LARGEST = "step_largest"  # See models/layers/attention_logits.py.


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

  Args:
    rng: key of dropout; not used unless `train`.
    collect: names of further collections that the model writes in training.
  """
  names = [name for name in variables if name != "params"]
  if not train:
    out, _ = model.apply(
      variables, *args, train=False, rngs=None, mutable=[], **kwargs
    )
    return out, {name: variables[name] for name in names}
  collect = (*collect, *_largest_logits(model))
  out, new = model.apply(
    variables,
    *args,
    train=True,
    rngs={"dropout": rng},
    mutable=[*names, *collect],
    **kwargs,
  )
  return out, _of_one_part(model, new)


def apply_unchanged(
  model: Any, variables: Variables, *args: Any, **kwargs: Any
) -> tuple[Any, Variables]:
  """Applies a model, whose mutable collections stay as they are.

  Returns:
    (output, the collection of the largest attention logits, for models whose
    field `attention_logits` is set).
  """
  collect = _largest_logits(model)
  if not collect:
    return model.apply(variables, *args, **kwargs), {}
  out, largest = model.apply(variables, *args, mutable=collect, **kwargs)
  return out, _of_one_part(model, largest)


def _largest_logits(model: Any) -> list[str]:
  """The collection of the largest attention logits, if the model has it."""
  return [_LARGEST] * getattr(model, "attention_logits", False)


def _of_one_part(model: Any, collections: Variables) -> Variables:
  """Keeps the logits of one part of a model, such as its decoder."""
  part = getattr(model, "attention_logits_of", None)
  result = dict(collections)
  if part is not None and _LARGEST in result:
    result[_LARGEST] = {part: result[_LARGEST][part]}
  return result


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
  """A loss_fn that calls both halves, see objective.gradients.TwoPassLoss.

  Each half gets those of the loss's options that it has as parameters. The
  second half returns its metrics; in a task with state, (metrics, task_sums).
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
    embed_options, loss_options = {}, {}
    for name, value in options.items():
      if name in embed_parameters:
        embed_options[name] = value
      if name in loss_parameters:
        loss_options[name] = value
    if "model" in loss_parameters:
      loss_options["model"] = model
    embeddings, mutable = embed_fn(
      variables, batch, rng, model=model, train=train, **embed_options
    )
    # With adapters, the parameters are in two collections.
    params = trees.merge(variables["params"], variables.get("base", {}))
    returned = embeddings_loss_fn(params, embeddings, batch, **loss_options)
    if not isinstance(returned, tuple):
      return returned, mutable
    loss_metrics, task_sums = returned
    return loss_metrics, {**mutable, "task_sums": task_sums}

  # Its signature has the options of both halves, so that a wrong option in the
  # config is refused by name.
  result: Any = loss_fn
  parameters = [*embed_parameters.values()]
  for parameter in loss_parameters.values():
    is_option = parameter.kind is parameter.KEYWORD_ONLY
    if is_option and parameter.name not in embed_parameters:
      parameters.append(parameter)
  result.__signature__ = inspect.Signature(parameters)
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
    # flax names a module's results "<module>/__call__/<number>..."; the first
    # array stands for the module.
    features: dict[str, jax.Array] = {}
    for name, x in trees.flatten_with_names(states["intermediates"]):
      features.setdefault(name.partition("/__call__/")[0], x)
    # A model returns a dict, or a tuple that ends with one.
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
