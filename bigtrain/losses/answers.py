"""Log-probabilities of several answers to each prompt.

A batch may have "image" and "shapes", the prompts' pictures as in language
modeling, and "prefix" int [B, K], the number of leading tokens that see each
other.

Axes: B prompts; K answers to a prompt; L tokens; X = B x K.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.arrays import picture_features, trees
from bigtrain.arrays.types import Batch, Variables
from bigtrain.config.errors import ConfigError
from bigtrain.losses import forward, token_losses


class LogProbs(NamedTuple):
  """Result of `log_probs`."""

  log_prob_BKL: jax.Array
  # (loss, its gradient with respect to log_prob_BKL) -> loss with a gradient.
  with_gradient: Callable[[jax.Array, jax.Array], jax.Array]
  collected: Variables  # See forward.apply_unchanged.


def inputs(batch: Batch) -> dict[str, jax.Array]:
  """Arguments of a language model that reads "tokens" [B, K, L]."""
  real_XL = token_losses.real_positions(flat(batch["loss_mask"]))
  result = {"tokens": flat(batch["tokens"]), "real": real_XL}
  return result | prompts(batch)


def prompts(batch: Batch) -> dict[str, jax.Array]:
  """The model's other arguments for prompts, besides their tokens."""
  # All answers to a prompt have the same pictures.
  result = picture_features.of(batch)
  if "prefix" in batch:
    result["prefix"] = batch["prefix"].reshape(-1)
  return result


def flat(x_BKL: jax.Array) -> jax.Array:
  """[B, K, L] as [X, L]."""
  return x_BKL.reshape(-1, x_BKL.shape[-1])


def log_probs(
  model: Any,
  variables: Variables,
  batch: Batch,
  chunk: int | None,
  temperature: float = 1.0,
) -> LogProbs:
  """Returns log-probabilities without a gradient, and a function that adds one.

  The log-probabilities are those of "targets", [B, K, L], and 0 where
  "loss_mask" is 0. If they had a gradient, all logits would have to exist at
  once, because losses/linear_xent.py needs the weights of the tokens' losses in
  the forward pass. So the caller differentiates its loss with respect to the
  log-probabilities, and calls `with_gradient`, which uses this gradient as
  these weights.
  """
  mask_BKL = batch["loss_mask"] != 0
  (_, out), collected = forward.apply_unchanged(
    model, variables, **inputs(batch), head=False, train=False
  )

  def losses(variables: Variables, hidden_XLD: Any, weight_BKL: Any) -> Any:
    head = token_losses.head_losses(variables, model, temperature, chunk=chunk)
    targets_XL = token_losses.known_targets(model, flat(batch["targets"]))
    return head(hidden_XLD, targets_XL, flat(weight_BKL))

  def with_gradient(loss: jax.Array, grad_BKL: jax.Array) -> jax.Array:
    weight_BKL = jnp.where(mask_BKL, -grad_BKL, 0.0)
    weighted = losses(variables, out["pre_logits"], weight_BKL).total
    # The value of the loss, with the gradient of the weighted losses.
    return loss + weighted - jax.lax.stop_gradient(weighted)

  stopped = jax.lax.stop_gradient((variables, out["pre_logits"]))
  loss_XL = losses(*stopped, mask_BKL).loss_BL
  loss_BKL = loss_XL.reshape(mask_BKL.shape)
  log_prob_BKL = jnp.where(mask_BKL, -loss_BKL, 0.0)
  return LogProbs(log_prob_BKL, with_gradient, collected)


def reference(
  variables: Variables,
  model: Any,
  teacher: Any,
  option: str,
  given: bool = False,
) -> tuple[Any, Variables]:
  """(model, variables) of the reference that an option needs.

  `given` says whether the batch has the reference's log-probabilities.
  """
  if teacher is not None:
    return teacher, variables["teacher"]
  names = trees.names(variables["params"])
  if "base" in variables and all("/lora_" in name for name in names):
    own = {name: x for name, x in variables.items() if name != "teacher"}
    return model, {**own, "params": {}}
  if given:
    return model, variables  # Not used.
  raise ConfigError(
    f"config.loss.{option} compares with a reference: expected config.adapters "
    "without `train`, config.teacher, or pairs with the feature 'reference'."
  )
