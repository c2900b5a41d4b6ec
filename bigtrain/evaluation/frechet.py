"""Mean and covariance of many vectors, and the distance of two of these.

Legend: B batch, N examples, D features.
"""

import math
from typing import Any, Self

import numpy as np


class Moments:
  """Mean and covariance of vectors that come in batches, in float64.

  The result depends on the sizes of the batches only by rounding. Each batch is
  centred on its own mean before it is merged (Chan, Golub and LeVeque 1983), so
  no digits are lost if the mean is large.
  """

  def __init__(self) -> None:
    self.number = 0  # N.
    self.num_nonfinite = 0  # Number of further vectors with NaN or infinities.
    self.mean_D: Any = 0.0
    self._squares_DD: Any = 0.0  # Sum of the products of deviations.

  @classmethod
  def of(cls, x_ND: np.ndarray) -> Self:
    result = cls()
    result.add(x_ND)
    return result

  def add(self, x_BD: np.ndarray) -> None:
    is_finite_B = np.isfinite(x_BD).all(axis=1)
    self.num_nonfinite += int(np.sum(~is_finite_B))
    x_BD = x_BD[is_finite_B].astype(np.float64)
    if not len(x_BD):
      return
    total = self.number + len(x_BD)
    mean_D = x_BD.mean(axis=0)
    difference_D = mean_D - self.mean_D
    deviation_BD = x_BD - mean_D
    self._squares_DD = (
      self._squares_DD
      + deviation_BD.T @ deviation_BD
      + np.outer(difference_D, difference_D) * self.number * len(x_BD) / total
    )
    self.mean_D = self.mean_D + difference_D * len(x_BD) / total
    self.number = total

  @property
  def covariance_DD(self) -> np.ndarray:
    """The unbiased covariance, with N - 1 degrees of freedom."""
    return self._squares_DD / (self.number - 1)


def distance(first: Moments, second: Moments) -> float:
  """|mean difference|^2 + trace(A + B - 2 sqrt(A B)) of the covariances A, B.

  The covariances may be singular. NaN if a vector is not finite.
  """
  if first.num_nonfinite or second.num_nonfinite:
    return math.nan
  first_DD, second_DD = first.covariance_DD, second.covariance_DD
  # sqrt(A) B sqrt(A) is symmetric and has the eigenvalues of A B.
  values_D, vectors = np.linalg.eigh(first_DD)
  root_DD = (vectors * np.sqrt(np.maximum(values_D, 0.0))) @ vectors.T
  squares_D = np.linalg.eigvalsh(root_DD @ second_DD @ root_DD)
  trace_of_root = np.sqrt(np.maximum(squares_D, 0.0)).sum()
  difference = np.sum((first.mean_D - second.mean_D) ** 2)
  return float(difference + np.trace(first_DD + second_DD) - 2 * trace_of_root)


def nonfinite(*moments: Moments) -> dict[str, float]:
  """The number of vectors that are not finite, {} if there are none."""
  number = float(sum(x.num_nonfinite for x in moments))
  return {"nonfinite": number} if number else {}
