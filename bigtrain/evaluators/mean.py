"""Aggregates the metrics of a predict function over a data set."""

from collections.abc import Mapping
from typing import Any

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.evaluation import evaluations
from bigtrain.evaluation.evaluations import Batches, Context


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  for feature in context.class_names:
    evaluations.check_class_names(options, context, feature)


class Evaluator:
  """Value of each metric over the whole data set, without padding.

  Args:
    predict_fn: (variables, batch) -> {name: metric}, see bigtrain/metrics.py.
  """

  def __init__(self, predict_fn: PredictFn, batches: Batches):
    source = f"{batches.context.path}.pred"

    def outputs(variables: Variables, batch: Batch) -> Metrics:
      return metrics.checked(predict_fn(variables, batch), source)

    self._outputs = batches.map(outputs)

  def run(self, variables: Variables, step: int) -> dict[str, Any]:
    return metrics.host_values(self._outputs(variables))
