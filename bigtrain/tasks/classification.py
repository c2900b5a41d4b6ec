"""Image classification with one or several labels for each image.

Legend: B batch, H height, W width, C classes.

A batch has "image" [B, H, W, 3] floats and "labels": int [B], or one-hot or
multi-hot [B, C].
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics, trees
from bigtrain.losses import cross_entropy
from bigtrain.losses.mixup import mixup
from bigtrain.settings import ConfigError, did_you_mean

_LOSSES: dict[str, Callable[..., jax.Array]] = {
  "softmax_xent": cross_entropy.softmax_xent,
  "sigmoid_xent": cross_entropy.sigmoid_xent,
}


def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the model's arguments."""
  return {"image": batch["image"]}


def class_counts(model: Any) -> dict[str, int]:
  """Returns the model's number of classes by feature, if it has a head."""
  size = getattr(model, "num_classes", None)
  return {"labels": size} if size else {}


def loss_fn(
  variables: Any,
  batch: Mapping[str, Any],
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  kind: str = "softmax_xent",
  label_smoothing: float = 0.0,
  label_smoothing_over: str = "all",
  mixup_alpha: float = 0.0,
) -> tuple[metrics.Metrics, Any]:
  """Computes cross-entropy and accuracy of a batch.

  Args:
    variables: "params" and, where the model has them, mutable collections.
    batch: see the module docstring; "_mask" is 0 for padding.
    rng: key for dropout and mixup; unused in evaluation.
    model: flax module that returns (logits [B, C], dict).
    train: whether dropout, mixup and updates of batch statistics are on.
    kind: "softmax_xent", or "sigmoid_xent", which is summed over classes.
    label_smoothing: share of the label that is spread over the classes.
    label_smoothing_over: "all" classes or, with softmax_xent, the "others"; see
      losses.cross_entropy.softmax_xent.
    mixup_alpha: parameter of mixup's beta distribution; 0 turns mixup off.

  Returns:
    ({"loss": pair, "accuracy": pair}, new mutable collections).

  Raises:
    ConfigError: unknown kind, or labels of another number of classes.
  """
  if kind not in _LOSSES:
    hint = did_you_mean(kind, _LOSSES)
    raise ConfigError(f"config.loss.kind: unknown {kind!r}.{hint}")
  image, labels = batch["image"], batch["labels"]
  mutable = [name for name in variables if name != "params"]
  mixup_rng, dropout_rng = jax.random.split(rng) if train else (None, None)
  share: Any = 1.0
  if train and trees.is_on(mixup_alpha):
    image, share = mixup(mixup_rng, image, mixup_alpha)
  (logits_BC, _), new_mutable = model.apply(
    variables,
    image,
    train=train,
    rngs={"dropout": dropout_rng} if train else None,
    mutable=mutable if train else [],
  )
  classes = labels.shape[-1] if labels.ndim > 1 else logits_BC.shape[-1]
  if classes != logits_BC.shape[-1]:
    raise ConfigError(
      f"config.model.num_classes: expected {classes}, the number of classes in "
      f"the labels, got {logits_BC.shape[-1]}."
    )
  smoothing: dict[str, Any] = dict(label_smoothing=label_smoothing)
  if kind == "softmax_xent":
    smoothing["label_smoothing_over"] = label_smoothing_over
  elif label_smoothing_over != "all":
    raise ConfigError(
      "config.loss.label_smoothing_over: sigmoid_xent only has 'all', got "
      f"{label_smoothing_over!r}."
    )
  xent = functools.partial(_LOSSES[kind], logits_BC, **smoothing)
  loss_B = xent(labels)
  if train and trees.is_on(mixup_alpha):
    # Cross-entropy is linear in the labels, so blending losses is the same as
    # blending labels, without turning class numbers into one-hot vectors.
    loss_B = share * loss_B + (1 - share) * xent(jnp.roll(labels, 1, axis=0))
  weight_B = metrics.example_weights(batch, logits_BC)
  pairs = {
    "loss": metrics.pair(loss_B, weight_B),
    "accuracy": metrics.pair(
      metrics.top_k_hits(logits_BC, labels, 1), weight_B
    ),
  }
  return pairs, new_mutable if train else {k: variables[k] for k in mutable}


def predict_fns(model: Any) -> dict[str, Callable[..., Any]]:
  """Returns functions for evaluators: "logits", "pre_logits" and "loss"."""

  def logits(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    return model.apply(variables, **inputs(batch), train=False)[0]

  def pre_logits(variables: Any, batch: Mapping[str, Any]) -> jax.Array:
    return model.apply(variables, **inputs(batch), train=False)[1]["pre_logits"]

  def loss(
    variables: Any,
    batch: Mapping[str, Any],
    *,
    kind: str = "softmax_xent",
    label_smoothing: float = 0.0,
    label_smoothing_over: str = "all",
  ) -> metrics.Metrics:
    pairs, _ = loss_fn(
      variables,
      batch,
      None,
      model=model,
      train=False,
      kind=kind,
      label_smoothing=label_smoothing,
      label_smoothing_over=label_smoothing_over,
    )
    return pairs

  return {"logits": logits, "pre_logits": pre_logits, "loss": loss}
