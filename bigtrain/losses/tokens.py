"""Losses of a text's tokens, for the tasks that predict them.

Axes: B batch, L length.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.losses import linear_xent


class Predicted(NamedTuple):
  """What a model made of some targets.

  Attributes:
    pairs: {"loss": pair in nats, "accuracy": pair}, by token.
    loss_BL: float32, in nats, without gradient.
    correct_BL: float32, 1 where the target is likeliest.
    experts: what layers with experts report on average, see models/moe.py;
      None where there are none.
  """

  pairs: metrics.Pairs
  loss_BL: jax.Array
  correct_BL: jax.Array
  experts: dict[str, jax.Array] | None


def predict(
  variables: Any,
  inputs: Mapping[str, Any],
  targets_BL: jax.Array,
  weight_BL: jax.Array,
  rng: jax.Array | None = None,
  *,
  model: Any,
  train: bool = False,
  chunk: int | None = None,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
) -> Predicted:
  """Applies a model such as models/decoder.py or models/t5.py.

  Args:
    variables: "params".
    inputs: arguments of the model's call.
    targets_BL: tokens to predict.
    weight_BL: what each counts.
    rng: key for dropout; unused when not training.
    model: what it returns beside logits has "pre_logits", and perhaps "moe".
    train: whether dropout is at work.
    chunk: positions of each example for which logits exist at a time, see
      losses.linear_softmax_xent.
    label_smoothing: see losses.softmax_xent.
    z_loss: see there.
  """
  _, out = model.apply(
    variables,
    **inputs,
    head=False,
    train=train,
    rngs={"dropout": rng} if train else None,
  )
  found = linear_xent.linear_softmax_xent(
    out["pre_logits"],
    model.head_kernel(variables["params"]),
    targets_BL,
    weight_BL,
    chunk=chunk,
    dtype=model.dtype,
    label_smoothing=label_smoothing,
    z_loss=z_loss,
    softcap=getattr(model, "logits_softcap", None),
  )
  pairs = {
    "loss": (found.total, jnp.sum(weight_BL)),
    "accuracy": metrics.pair(found.correct_BL, weight_BL),
  }
  return Predicted(pairs, found.loss_BL, found.correct_BL, out.get("moe"))


def with_experts(
  pairs: metrics.Pairs,
  experts: Mapping[str, jax.Array] | None,
  *,
  load_balance: float,
  router_z: float,
) -> metrics.Pairs:
  """Adds the routers' losses, and what there is to say of experts.

  The share that an expert gets is counted over a microbatch on all devices, so
  "load_balance" does depend on the number of microbatches, as the product of
  two means.

  Args:
    pairs: of `predict`.
    experts: of `predict`.
    load_balance: weight of the loss that keeps experts evenly loaded.
    router_z: weight of the loss that keeps the routers' logits small.

  Returns:
    The pairs as they are, without experts; else also "nll", the loss without
    these terms, and "expert_load/<i>" and "experts/<statistic>".
  """
  if experts is None:
    return pairs
  nll, weight = pairs["loss"]
  extra = load_balance * experts["load_balance"]
  extra += router_z * experts["router_z"]
  found = pairs | {"nll": (nll, weight), "loss": (nll + extra * weight, weight)}
  for name, value in experts.items():
    if name == "load":
      for e, load in enumerate(value):
        found[f"expert_load/{e}"] = (load * weight, weight)
    else:
      found[f"experts/{name}"] = (value * weight, weight)
  return found


def with_bytes(pairs: metrics.Pairs, batch: Mapping[str, Any]) -> metrics.Pairs:
  """Adds {"bytes": (sum, 1)}, what targets stand for, if the batch says."""
  if "num_bytes" not in batch:
    return pairs
  num_bytes = batch["num_bytes"]
  real_B = metrics.example_weights(batch, num_bytes)
  total, _ = metrics.pair(num_bytes, real_B)
  return pairs | {"bytes": (total, jnp.ones(()))}
