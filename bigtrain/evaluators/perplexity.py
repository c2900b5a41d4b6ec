"""Perplexity of a language model.

It is exact for any batch size and any number of devices and hosts.
"""

import math
from collections.abc import Iterable, Mapping

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import check_choice
from bigtrain.evaluation import evaluations


class Evaluator:
  """ "perplexity" = exp(sum of losses / tokens), and "bits_per_byte" of text.

  Args:
    predict_fn: (variables, batch) -> {name: (sum, weight)}, with "loss", the
      loss in nats and the number of tokens, and perhaps "bytes", the bytes of
      their text.
  """

  def __init__(self, predict_fn: PredictFn, batches: evaluations.Batches):
    path = batches.context.path

    def outputs(variables: Variables, batch: Batch) -> Metrics:
      result = predict_fn(variables, batch)
      problem = "expected a predict function that returns"
      names = result if isinstance(result, Mapping) else ()
      check_choice(f"{path}.pred", "loss", names, problem)
      return result

    self._outputs = batches.map(outputs)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    return summary(self._outputs(variables))


def summary(batches: Iterable[Mapping[str, metrics.Pair]]) -> dict[str, float]:
  """The results for the outputs of all batches."""
  batches = list(batches)
  results = metrics.host_values(batches)
  try:
    results["perplexity"] = math.exp(results["loss"])
  except OverflowError:  # The model has diverged.
    results["perplexity"] = math.inf
  if results.pop("bytes", None) is not None:
    nats = math.fsum(float(b["loss"][0]) for b in batches)
    num_bytes = math.fsum(float(b["bytes"][0]) for b in batches)
    results["bits_per_byte"] = (
      nats / math.log(2) / num_bytes if num_bytes else math.nan
    )
  return results
