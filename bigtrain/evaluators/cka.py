"""Similarity of representations, measured by linear CKA (arXiv 1905.00414).

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
  """Linear CKA of each pair of features, from 0 to 1.

  Without a reference, the features of different layers or predict functions are
  compared with one another. With a reference, each of them is compared with
  each of the reference's. A result is named "a:b" after the two features, or
  "cka" if they have no names. It is NaN if features are not finite.

  Args:
    predict_fn: (variables, batch) -> features [B, ...], or a dict of them.
    reference: file that the evaluator `save` wrote for the same examples.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    reference: str | None = None,
  ):
    self._features = features.of_all(predict_fn, batches)
    self._path = batches.context.path
    self._reference: dict[str, np.ndarray] = {}
    if reference:
      with np.load(io.BytesIO(paths.read_bytes(reference))) as file:
        self._reference = {
          name.removeprefix("predictions").removeprefix("/"): file[name]
          for name in file
          if name.startswith("predictions")
        }

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    own = self._features(variables)
    if self._reference:
      others = self._reference
      pairs = list(itertools.product(own, others))
    else:
      others = own
      pairs = list(itertools.combinations(own, 2))
    results = {}
    for a, b in pairs:
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
    # Both are equal; the one with the smaller matrices costs less.
    if a.shape[1] * b.shape[1] > len(a) ** 2:
      return float(np.sum((a @ a.T) * (b @ b.T)))
    return float(np.sum((a.T @ b) ** 2))

  scale = math.sqrt(similarity(x, x) * similarity(y, y))
  return similarity(x, y) / scale if scale else math.nan
