"""Means of the (sum, weight) pairs that a predict function returns."""

from collections.abc import Callable, Mapping
from typing import Any

from bigtrain import metrics
from bigtrain.evaluation import evaluations


class Evaluator:
  """Mean of each metric over a data set, padding left out.

  Args:
    predict_fn: (variables, batch) -> {name: (sum, weight)}.
    context: where it runs.
    data: source, as in config.input.data.
    pp: preprocessing string.
    batch_size: that of training unless given.
    num_examples: only so many from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], metrics.Pairs],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    pp: str = "",
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = True,
  ):
    self._batches = evaluations.Batches(
      predict_fn,
      context,
      data=data,
      pp=pp,
      batch_size=batch_size,
      num_examples=num_examples,
      cache=cache,
    )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns {metric: mean}."""
    return metrics.host_means(self._batches.map(variables))
