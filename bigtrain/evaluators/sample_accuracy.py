"""Counts the samples of a generator that a classifier recognises."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bigtrain import metrics
from bigtrain.arrays.types import PredictFn, Variables
from bigtrain.evaluation import evaluations, generated
from bigtrain.evaluation.evaluations import Context
from bigtrain.inference import seeing

LIMITS = {
  "num_samples": dict(least=1, whole=True),
  "num_classes": dict(least=2, whole=True),
}
_LOGITS = {"pred": "logits"}


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  seeing.check({**_LOGITS, **options["model"]}, f"{path}.model")


class Evaluator:
  """Share "acc" of the samples that a classifier assigns to the right class.

  Sample i has the class i modulo `num_classes`. "acc_worst_class" is the share
  in the class with the lowest one.

  Args:
    predict_fn: (variables, {"_index"}) -> images [B, ...] from -1 to 1.
    model: options of inference/seeing.py: the path of the classifier, and what
      it expects.
    num_classes: number of classes, which both models number alike.
    num_samples: number of samples.
    batch_size: global; by default as in training.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    context: Context,
    *,
    model: Mapping[str, Any],
    num_classes: int,
    num_samples: int = 1000,
    batch_size: int | None = None,
  ):
    self._context = context
    self._num_classes = num_classes
    self._model = seeing.Model(
      context.mesh, f"{context.path}.model", **{**_LOGITS, **model}
    )
    self._generated = generated.Generated(
      predict_fn, context, num_samples, batch_size
    )

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    def calls() -> Iterator[Any]:
      for image, _ in self._generated.batches(variables):
        yield self._model(image)

    number = self._generated.num_batches
    results = [*evaluations.in_flight(calls(), number, self._context)]
    logits_NC = np.concatenate(results)[: self._generated.number]
    labels_N = np.arange(len(logits_NC)) % self._num_classes
    is_right_N = (logits_NC.argmax(1) == labels_N) & metrics.has_order(
      logits_NC
    )
    by_class = [
      is_right_N[labels_N == i].mean()
      for i in range(min(self._num_classes, len(labels_N)))
    ]
    return {
      "acc": float(is_right_N.mean()),
      "acc_worst_class": float(min(by_class)),
    }
