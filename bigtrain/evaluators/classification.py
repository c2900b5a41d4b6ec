"""Top-k accuracy, loss and calibration of a classifier.

Legend: B batch, C classes.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import check_choice
from bigtrain.evaluation import evaluations
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.losses import cross_entropy

# {name: (loss of logits and labels, probabilities of logits)}.
_LOSSES = {
  "softmax_xent": (cross_entropy.softmax_xent, jax.nn.softmax),
  "sigmoid_xent": (cross_entropy.sigmoid_xent, jax.nn.sigmoid),
}


LIMITS = {
  "top_k": evaluations.COUNT,
  "calibration_bins": dict(least=0, whole=True),
}


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  loss = options.get("loss", "softmax_xent")
  check_choice(f"{path}.loss", loss, _LOSSES)
  label_key = options.get("label_key", "labels")
  evaluations.check_class_names(options, context, label_key)


class Evaluator:
  """Accuracy "acc", "top5_acc", ... and "loss" over a data set.

  Args:
    predict_fn: (variables, batch) -> logits [B, C].
    loss: "softmax_xent" or "sigmoid_xent".
    label_key: name of the labels: int [B], or one-hot or multi-hot [B, C].
      Examples with a negative label, or without a label, do not count.
    top_k: values of k; a prediction is right if a label is among the k largest
      logits.
    calibration_bins: number of bins for the calibration error "ece" (arXiv
      1706.04599); 0 for no such metric.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    loss: str = "softmax_xent",
    label_key: str = "labels",
    top_k: Sequence[int] = (1, 5),
    calibration_bins: int = 0,
  ):
    loss_of, probabilities_of = _LOSSES[loss]

    def outputs(variables: Variables, batch: Batch) -> Metrics:
      logits_BC = predict_fn(variables, batch).astype(jnp.float32)
      labels = batch[label_key]
      # Some sets have images without a label (ImageNet ReaL).
      weight_B = metrics.labelled_weights(batch, labels)
      result = {
        "loss": metrics.pair(loss_of(logits_BC, labels), weight_B),
        **metrics.top_k_accuracies(logits_BC, labels, weight_B, top_k),
      }
      if calibration_bins:
        hit_B = metrics.top_k_hits(logits_BC, labels, 1)
        confidence_B = jnp.max(probabilities_of(logits_BC), -1)
        histogram = functools.partial(
          metrics.Histogram.of, confidence_B, bins=calibration_bins
        )
        # Number of examples in each bin, and sums over them.
        result["confidence"] = histogram(weight_B)
        result["_hits"] = histogram(weight_B * hit_B)
        result["_confidences"] = histogram(weight_B * confidence_B)
      return result

    self._outputs = batches.labelled_as_in_training(label_key).map(outputs)

  def run(self, variables: Variables, step: int) -> dict[str, Any]:
    values = metrics.host_values(self._outputs(variables))
    if "confidence" in values:
      values["ece"] = calibration_error(
        values["confidence"].counts,
        hits=values.pop("_hits").counts,
        confidences=values.pop("_confidences").counts,
      )
    return values


def calibration_error(
  counts: np.ndarray, hits: np.ndarray, confidences: np.ndarray
) -> float:
  """Mean difference between accuracy and confidence, from sums by bin."""
  total = counts.sum()
  return float(np.abs(hits - confidences).sum() / total) if total else math.nan
