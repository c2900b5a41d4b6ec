"""Distance between two sets of images: FID (arXiv 1706.08500).

Legend: N, M examples, D features.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bigtrain import metrics
from bigtrain.arrays.types import PredictFn, Variables
from bigtrain.evaluation import features
from bigtrain.evaluation.evaluations import Batches


class Evaluator:
  """Frechet distance "fid" between normal distributions of two sets' features.

  It is the FID of the literature if the features are those of its Inception
  network. It is NaN if features are not finite.

  Args:
    predict_fn: (variables, batch) -> features [B, ...], or a dict of them; then
      the results are "<layer>/fid".
    reference_data: source of the other set, preprocessed in the same way.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    reference_data: Mapping[str, Any],
  ):
    reference = batches.replace(data=reference_data, num_examples=None)
    self._own = features.of_all(predict_fn, batches)
    self._reference = features.of_all(predict_fn, reference)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    own, others = self._own(variables), self._reference(variables)
    results = {
      f"{name}/fid" if name else "fid": frechet_distance(x_ND, others[name])
      for name, x_ND in own.items()
    }
    return results | metrics.nonfinite(*own.values(), *others.values())


def frechet_distance(x_ND: np.ndarray, x_MD: np.ndarray) -> float:
  """|mean difference|^2 + trace(A + B - 2 sqrt(A B)) of the covariances A, B.

  It is computed in float64. The covariances may be singular.
  """
  x_ND, x_MD = x_ND.astype(np.float64), x_MD.astype(np.float64)
  if not (np.isfinite(x_ND).all() and np.isfinite(x_MD).all()):
    return math.nan
  first_DD = np.atleast_2d(np.cov(x_ND, rowvar=False))
  second_DD = np.atleast_2d(np.cov(x_MD, rowvar=False))
  # sqrt(A) B sqrt(A) is symmetric and has the eigenvalues of A B.
  values_D, vectors = np.linalg.eigh(first_DD)
  root_DD = (vectors * np.sqrt(np.maximum(values_D, 0.0))) @ vectors.T
  squares_D = np.linalg.eigvalsh(root_DD @ second_DD @ root_DD)
  trace_of_root = np.sqrt(np.maximum(squares_D, 0.0)).sum()
  difference = np.sum((x_ND.mean(0) - x_MD.mean(0)) ** 2)
  return float(difference + np.trace(first_DD + second_DD) - 2 * trace_of_root)
