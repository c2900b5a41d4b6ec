"""Perplexity of a language model, exact for any batches, devices and hosts."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bigtrain import metrics
from bigtrain.evaluation import evaluations
from bigtrain.settings import ConfigError, did_you_mean


class Evaluator:
  """Perplexity, and bits for each byte of text, over a data set.

  Args:
    predict_fn: (variables, batch) -> {name: (sum, weight)} with "loss", in
      nats, whose weight is the number of predicted tokens, and maybe "bytes",
      whose sum is the bytes of text that these stand for. Padding is left out
      by whoever makes the pairs.
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
    def pairs(variables: Any, batch: Mapping[str, Any]) -> metrics.Pairs:
      found = predict_fn(variables, batch)
      if "loss" not in found:
        raise ConfigError(
          f"config.evals.{context.name}.pred: expected a predict function that "
          f"returns 'loss'.{did_you_mean('loss', found)}"
        )
      return found

    self._batches = evaluations.Batches(
      pairs,
      context,
      data=data,
      pp=pp,
      batch_size=batch_size,
      num_examples=num_examples,
      cache=cache,
    )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns "loss", "perplexity", "bits_per_byte" where bytes are known.

    The means of what else the predict function returns are there, too.
    """
    return summary(self._batches.map(variables))


def summary(batches: Iterable[Mapping[str, metrics.Pair]]) -> dict[str, float]:
  """What fetched pairs of a set's batches say of the whole set.

  Perplexity is exp(sum of losses / tokens); bits per byte are the sum of
  losses, in bits, by the sum of bytes: what tokens a text was cut into does
  not matter then.
  """
  batches = list(batches)
  results = metrics.host_means(batches)
  results["perplexity"] = _exp(results["loss"])
  if results.pop("bytes", None) is not None:
    nats = math.fsum(float(b["loss"][0]) for b in batches)
    size = math.fsum(float(b["bytes"][0]) for b in batches)
    results["bits_per_byte"] = nats / math.log(2) / size if size else math.nan
  return results


def _exp(x: float) -> float:
  try:
    return math.exp(x)
  except OverflowError:  # A model that has diverged.
    return math.inf
