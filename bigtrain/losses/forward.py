"""Applies a model: in a loss, to evaluate that loss, and for features."""

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

  hidden = {"rng", "train", *given}
  parameters = inspect.signature(loss_fn).parameters.items()
  result: Any = loss
  own = [x for name, x in parameters if name not in hidden]
  result.__signature__ = inspect.Signature(own)
  return result


def whole_loss_fn(
  embed_fn: Callable[..., Any], embeddings_loss_fn: Callable[..., Metrics]
) -> Any:
  """The loss_fn of both halves, see objective.gradients.TwoPassLoss."""

  def loss_fn(
    variables: Variables, *args: Any, model: Any, train: bool, **options: Any
  ) -> tuple[Metrics, Variables]:
    z, mutable = embed_fn(variables, *args, model=model, train=train)
    params = trees.merge(variables["params"], variables.get("base", {}))
    return embeddings_loss_fn(params, z, args[0], **options), mutable

  result: Any = loss_fn
  halves = [inspect.signature(fn) for fn in (embed_fn, embeddings_loss_fn)]
  first, others = (half.parameters.values() for half in halves)
  options = [x for x in others if x.kind is x.KEYWORD_ONLY]
  result.__signature__ = inspect.Signature([*first, *options])
  result.__doc__ = embeddings_loss_fn.__doc__
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
