"""Means of the (sum, weight) pairs that a predict function returns."""

from collections.abc import Callable, Mapping
from typing import Any

from bigtrain import metrics
from bigtrain.evaluation import evaluations


def check(
  options: Mapping[str, Any], context: evaluations.Context, path: str
) -> None:
  """Raises ConfigError if the classes differ from those of training."""
  del path  # It is the one of the context.
  for feature in context.class_names:
    evaluations.check_class_names(options, context, feature)


class Evaluator:
  """Mean of each metric over a data set; padding does not count.

  Args:
    predict_fn: (variables, batch) -> {name: (sum, weight)}.
    batches: the evaluation set.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], metrics.Pairs],
    batches: evaluations.Batches,
  ):
    self._pairs = batches.map(predict_fn)

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns {metric: mean}."""
    return metrics.host_means(self._pairs(variables))
