"""Distance of two sets of images: FID (arXiv 1706.08500).

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
  """Frechet distance "fid" of the features of two sets, as normal variables.

  It is the FID of the literature if the features are those of its Inception.
  Features that are not finite make it NaN.

  Args:
    predict_fn: (variables, batch) -> features [B, ...], or a dict of them with
      results "<layer>/fid".
    reference_data: source of the other set, preprocessed in the same way.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    reference_data: Mapping[str, Any],
  ):
    others = batches.replace(data=reference_data, num_examples=None)
    sets = batches, others
    self._sets = [features.of_all(predict_fn, each) for each in sets]

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    own, others = (each(variables) for each in self._sets)
    results = {
      f"{name}/fid" if name else "fid": frechet_distance(x_ND, others[name])
      for name, x_ND in own.items()
    }
    return results | metrics.nonfinite(*own.values(), *others.values())


def frechet_distance(x_ND: np.ndarray, x_MD: np.ndarray) -> float:
  """In float64; the covariances may be singular."""
  sets = [x.astype(np.float64) for x in (x_ND, x_MD)]
  if not all(np.isfinite(x).all() for x in sets):
    return math.nan
  first_DD, second_DD = (np.atleast_2d(np.cov(x, rowvar=False)) for x in sets)
  values_D, vectors = np.linalg.eigh(first_DD)
  root_DD = (vectors * np.sqrt(np.maximum(values_D, 0.0))) @ vectors.T
  # Eigenvalues of the product of both, through a symmetric matrix.
  squares_D = np.linalg.eigvalsh(root_DD @ second_DD @ root_DD)
  overlap = np.sqrt(np.maximum(squares_D, 0.0)).sum()
  apart = np.sum((sets[0].mean(0) - sets[1].mean(0)) ** 2)
  return float(apart + np.trace(first_DD + second_DD) - 2 * overlap)
