"""Similarity of representations: linear CKA (arXiv 1905.00414).

Legend: N examples.
"""

import io
import itertools
import math

import numpy as np

from bigtrain import metrics
from bigtrain.arrays.types import PredictFn, Variables
from bigtrain.config.errors import DataError
from bigtrain.evaluation import features
from bigtrain.evaluation.evaluations import Batches
from bigtrain.files import paths


class Evaluator:
  """Linear CKA, from 0 to 1, of each pair of features: "cka", or "a:b" by name.

  Layers, or predict functions, are compared with one another, or all of them
  with all of a reference. Features that are not finite make it NaN.

  Args:
    predict_fn: (variables, batch) -> features [B, ...], or a dict of them.
    reference: file that the evaluator `save` wrote of the same examples.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    reference: str | None = None,
  ):
    self._features = features.of_all(predict_fn, batches)
    self._reference, self._path = {}, batches.context.path
    if reference:
      with np.load(io.BytesIO(paths.read_bytes(reference))) as file:
        self._reference = {
          name.removeprefix("predictions").removeprefix("/"): file[name]
          for name in file
          if name.startswith("predictions")
        }

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    own = self._features(variables)
    others = self._reference or own
    pairs = itertools.product(own, self._reference)
    results = {}
    for a, b in pairs if self._reference else itertools.combinations(own, 2):
      if len(own[a]) != len(others[b]):
        raise DataError(
          f"{self._path}.reference: {len(others[b])} examples; expected "
          f"{len(own[a])}."
        )
      results[f"{a}:{b}" if a or b else "cka"] = linear_cka(own[a], others[b])
    return results | metrics.nonfinite(*own.values())


def linear_cka(x: np.ndarray, y: np.ndarray) -> float:
  """CKA of features [N, ...] and [N, ...], in float64."""
  x, y = (a.reshape(len(a), -1).astype(np.float64) for a in (x, y))
  x, y = x - x.mean(0), y - y.mean(0)

  def similarity(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape[1] * b.shape[1] > len(a) ** 2:  # The smaller products.
      return float(np.sum((a @ a.T) * (b @ b.T)))
    return float(np.sum((a.T @ b) ** 2))

  scale = math.sqrt(similarity(x, x) * similarity(y, y))
  return similarity(x, y) / scale if scale else math.nan
