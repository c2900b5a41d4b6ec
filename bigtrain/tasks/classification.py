"""Classification of images or texts, with one or several labels per example.

Legend: B batch, H height, W width, L length, C classes.

A batch has "image" [B, H, W, 3] floats and "labels": int [B], or one-hot or
multi-hot [B, C], or float [B] for a regression. With "shapes" [B, 2], "image"
has ready-made patches, see models.vit. Texts are "tokens" int [B, L], with -1
for padding, for a decoder with config.model.num_classes; or "text" int [B, L]
for a text_transformer, optionally with "types" [B, L], the kinds of its tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import picture_features
from bigtrain.arrays.types import (
  Batch,
  Metrics,
  PaddedIds,
  PredictFn,
  Variables,
)
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.losses import cross_entropy, forward, mixup

_LOSSES: dict[str, Callable[..., jax.Array]] = {
  "softmax_xent": cross_entropy.softmax_xent,
  "sigmoid_xent": cross_entropy.sigmoid_xent,
}


def inputs(batch: Batch) -> Batch:
  if "tokens" in batch:
    tokens = batch["tokens"]
    return {"tokens": jnp.maximum(tokens, 0), "real": tokens >= 0}
  if "image" not in batch and "text" in batch:
    return {name: batch[name] for name in ("text", "types") if name in batch}
  return picture_features.needed(batch)


def class_counts(model: Any) -> dict[str, int]:
  size = getattr(model, "num_classes", None) or 0
  return {"labels": size} if size > 1 else {}  # A regression has 1.


def vocab_sizes(model: Any) -> dict[str, int]:
  size = getattr(model, "vocab_size", None)
  return {"tokens": PaddedIds(size), "text": size} if size else {}


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  kind: str = "softmax_xent",
  label_smoothing: float = 0.0,
  label_smoothing_over: str = "all",
  mixup_alpha: float = 0.0,
  cutmix_alpha: float = 0.0,
  cutmix_prob: float = 0.5,
) -> tuple[Metrics, Variables]:
  """Computes metrics "loss", a cross-entropy, and "accuracy" of a batch.

  Args:
    kind: "softmax_xent"; "sigmoid_xent", summed over classes; "squared_error".
    label_smoothing: share of the label that is spread over the classes.
    label_smoothing_over: "all" classes or, with softmax_xent, the "others".
    mixup_alpha: parameter of mixup's beta distribution; 0 turns mixup off.
    cutmix_alpha: the same for CutMix.
    cutmix_prob: share of the batches that use CutMix, if both are on.
  """
  check_choice("config.loss.kind", kind, (*_LOSSES, "squared_error"))
  (logits_BC, _), image, mix, mutable = mixup.apply(
    model,
    variables,
    inputs(batch),
    rng,
    (mixup_alpha, cutmix_alpha, cutmix_prob),
    train,
  )
  labels = batch["labels"]
  weight_B = metrics.example_weights(batch, logits_BC)
  if kind == "squared_error":
    if logits_BC.shape[-1] != 1 or mix:
      raise ConfigError(
        "config.loss.kind='squared_error': expected 1 class, no mixing."
      )
    error_B = (logits_BC[:, 0] - labels.reshape(-1)) ** 2
    return {"loss": metrics.pair(error_B, weight_B)}, mutable
  if labels.ndim > 1 and labels.shape[-1] != logits_BC.shape[-1]:
    raise ConfigError(
      f"config.model.num_classes: expected {labels.shape[-1]}, the number of "
      f"classes in the labels, got {logits_BC.shape[-1]}."
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
  # Cross-entropy is linear in the labels, so blending losses is the same as
  # blending labels, without turning class numbers into one-hot vectors.
  loss_B = mix.losses(image, labels, xent) if mix else xent(labels)
  hits_B = metrics.top_k_hits(logits_BC, labels, 1)
  return {
    "loss": metrics.pair(loss_B, weight_B),
    "accuracy": metrics.pair(hits_B, weight_B),
  }, mutable


def predict_fns(model: Any) -> dict[str, PredictFn]:
  def logits(variables: Variables, batch: Batch) -> jax.Array:
    return model.apply(variables, **inputs(batch), train=False)[0]

  return {
    "logits": logits,
    "pre_logits": forward.layers_fn(model, inputs),
    "loss": forward.metrics_fn(loss_fn, model=model),
  }
