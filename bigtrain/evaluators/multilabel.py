"""Precision, recall, F1, mAP and AUC of examples with several labels.

Legend: B batch, N examples, C classes.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import evaluations
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.reports import media

LIMITS = {"threshold": dict(least=0, most=1)}


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  label_key = options.get("label_key", "labels")
  evaluations.check_class_names(options, context, label_key)


class Evaluator:
  """Metrics over a data set, from 0 to 1, as scikit-learn defines them.

  "mAP" is the mean average precision over the classes that have an example, and
  "auc" the mean area under the ROC curve over those that also have a
  counterexample. "precision", "recall" and "f1" are means over all classes,
  where 0 / 0 is 0. "precision_micro" and so on are computed over all pairs of
  example and class.

  Args:
    predict_fn: (variables, batch) -> logits [B, C] of independent labels.
    label_key: name of the labels, multi-hot [B, C].
    threshold: a label is predicted if its probability is above it.
    per_class: whether to return the table "classes" with the metrics of each.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    label_key: str = "labels",
    threshold: float = 0.5,
    per_class: bool = False,
  ):
    # Logits are compared, since the probabilities of large logits are equal.
    with np.errstate(divide="ignore"):
      self._least_logit = np.log(threshold) - np.log1p(-threshold)
    self._per_class = per_class
    path, names = batches.context.path, batches.context.class_names
    self._names = names.get(label_key, names.get("labels"))

    def outputs(variables: Variables, batch: Batch) -> Any:
      logits_BC = predict_fn(variables, batch).astype(jnp.float32)
      labels_BC = batch[label_key]
      if labels_BC.shape != logits_BC.shape:
        raise ConfigError(
          f"{path}.label_key: {label_key!r} has the shape {labels_BC.shape}; "
          f"expected multi-hot labels of all classes, {logits_BC.shape}."
        )
      return logits_BC, labels_BC > 0

    self._outputs = batches.labelled_as_in_training(label_key).collect(outputs)

  def run(self, variables: Variables, step: int) -> dict[str, Any]:
    scores_NC, labels_NC = self._outputs(variables)
    ranked = [
      average_precision_and_auc(scores_N, labels_N)
      for scores_N, labels_N in zip(scores_NC.T, labels_NC.T)
    ]
    precisions, aucs = np.array(ranked).T
    # A score of -inf is a label that cannot be.
    bad_NC = ~(scores_NC < np.inf)
    predicted_NC = (scores_NC > self._least_logit) & ~bad_NC
    hits_C = (predicted_NC & labels_NC).sum(0)
    predicted_C, labelled_C = predicted_NC.sum(0), labels_NC.sum(0)
    rates = _rates(hits_C, predicted_C, labelled_C)
    by_class = {"ap": precisions, "auc": aucs, **rates}
    values: dict[str, Any] = {
      "mAP": _mean_of_known(precisions),
      "auc": _mean_of_known(aucs),
      **{k: float(by_class[k].mean()) for k in ("precision", "recall", "f1")},
    }
    if bad_NC.any():
      values = dict.fromkeys(values, np.nan)
      values["nonfinite"] = float(bad_NC.any(-1).sum())
    micro = _rates(hits_C.sum(), predicted_C.sum(), labelled_C.sum())
    values |= {f"{k}_micro": float(v) for k, v in micro.items()}
    if self._per_class:
      names = self._names or [str(i) for i in range(len(hits_C))]
      rows = [
        {"class": name, "examples": int(labelled_C[i])}
        | {k: _rounded(column[i]) for k, column in by_class.items()}
        for i, name in enumerate(names)
      ]
      values["classes"] = media.Table(rows)
    return values


def average_precision_and_auc(
  scores_N: np.ndarray, labels_N: np.ndarray
) -> tuple[float, float]:
  """Both for one class. Both are NaN without an example, AUC also without a
  counterexample.
  """
  order = np.argsort(-scores_N, kind="stable")
  scores_N, labels_N = scores_N[order], labels_N[order]
  # A threshold cannot part equal scores, so only the last one of each counts.
  ends = np.append(np.flatnonzero(np.diff(scores_N)), len(scores_N) - 1)
  hits = np.cumsum(labels_N)[ends].astype(np.float64)
  misses = ends + 1 - hits
  if not hits.size or not hits[-1]:
    return np.nan, np.nan
  recall = np.append(0.0, hits / hits[-1])
  precision = np.sum(np.diff(recall) * hits / (ends + 1))
  if not misses[-1]:
    return float(precision), np.nan
  false_positive_rate = np.append(0.0, misses / misses[-1])
  return float(precision), float(np.trapezoid(recall, false_positive_rate))


def _rates(hits: Any, predicted: Any, labelled: Any) -> dict[str, Any]:
  # If a count is 0, so are the hits, and the rate is 0.
  return {
    "precision": hits / np.maximum(predicted, 1),
    "recall": hits / np.maximum(labelled, 1),
    "f1": 2 * hits / np.maximum(predicted + labelled, 1),
  }


def _mean_of_known(values_C: np.ndarray) -> float:
  known = values_C[~np.isnan(values_C)]
  return float(known.mean()) if known.size else np.nan


def _rounded(value: float) -> float | None:
  return None if np.isnan(value) else round(float(value), 4)
