"""Few-shot transfer: linear probes of frozen features, fitted by least squares.

A probe is a ridge regression from features with mean 0 and variance 1 to
targets that are 1 for the right class and -1 for the others, as in "Big
Transfer", arXiv 1912.11370.

Legend: B batch, N examples, T tested examples, D features, C classes, R rank,
P penalties.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics, sharding
from bigtrain.arrays.types import PredictFn
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import evaluations, features
from bigtrain.evaluation.features import Examples, Splits

# Number of examples on which a penalty is chosen: enough to tell penalties
# apart, and all of them would cost as much as the evaluation itself.
_MAX_TUNING = 4096

# The default precision of accelerators is too low to solve linear equations.
_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


LIMITS = {
  "shots": evaluations.COUNT,
  "seeds": evaluations.COUNT,
  "l2": dict(above=0),
}


class Evaluator:
  """Accuracy "{k}shot" of probes that are fitted to k examples of each class.

  It is the mean over the seeds; "{k}shot_std" is the standard deviation. If
  there are several penalties, a probe uses the one that does best on training
  examples other than its shots; "{k}shot_l2" is the median of the chosen ones.
  A prediction from features that are not finite counts as wrong.

  Args:
    predict_fn: (variables, batch) -> features [B, ...], or a dict of them; then
      the results are "<layer>/5shot".
    shots: values of k; a class with fewer examples contributes all of them.
    l2: penalties on the squared weights, summed over the shots.
    seeds: number of times that the shots are drawn.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Splits,
    *,
    shots: Sequence[int] = (1, 5, 10),
    l2: Sequence[float] = (1024.0,),
    seeds: int = 3,
  ):
    mesh = batches.context.mesh
    self._path = batches.context.path
    self._shots, self._l2, self._seeds = shots, l2, seeds
    self.run = batches.scores(predict_fn, self._accuracies)
    replicated = sharding.replicated(mesh)
    self._fit = jax.jit(
      _fit, static_argnums=2, in_shardings=replicated, out_shardings=replicated
    )
    self._hits = features.in_chunks(_hits, mesh)

  def _accuracies(self, train: Examples, test: Examples) -> dict[str, float]:
    x_ND, y_N = train
    results = {}
    num_classes = int(max(y_N.max(), test[1].max())) + 1
    for k in self._shots:
      accuracies, penalties = [], []
      for seed in range(self._seeds):
        chosen, others = _draw(y_N, k, seed)
        probe = self._fit(x_ND[chosen], y_N[chosen], num_classes)
        penalty = self._l2[0]
        if len(self._l2) > 1:
          if not len(others):
            raise ConfigError(
              f"{self._path}.l2: {k} shots leave no training examples to "
              "choose a penalty on; give one penalty."
            )
          tuning = x_ND[others], y_N[others]
          right_P = self._hits(tuning, probe, np.array(self._l2)).sum(0)
          penalty = self._l2[int(np.argmax(right_P))]
        hits_T1 = self._hits(test, probe, np.array([penalty]))
        accuracies.append(hits_T1.mean())
        penalties.append(penalty)
      results[f"{k}shot"] = float(np.mean(accuracies))
      if self._seeds > 1:
        results[f"{k}shot_std"] = float(np.std(accuracies))
      if len(self._l2) > 1:
        results[f"{k}shot_l2"] = float(np.median(penalties))
    return results


def _draw(
  y_N: np.ndarray, shots: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns indices of (the shots, at most _MAX_TUNING other examples)."""
  order = np.random.default_rng(seed).permutation(len(y_N))
  # Position of each example among those of its class, in that order.
  rank = np.empty(len(y_N), np.int64)
  for c in np.unique(y_N):
    members = order[y_N[order] == c]
    rank[members] = np.arange(len(members))
  others = order[rank[order] >= shots]
  return np.flatnonzero(rank < shots), np.sort(others[:_MAX_TUNING])


def _fit(
  x_ND: jax.Array, y_N: jax.Array, num_classes: int
) -> dict[str, jax.Array]:
  mean_D, std_D = jnp.mean(x_ND, axis=0), jnp.std(x_ND, axis=0) + 1e-5
  x_ND = (x_ND - mean_D) / std_D
  target_NC = 2.0 * jax.nn.one_hot(y_N, num_classes) - 1.0
  # With centred inputs and targets, the bias is the targets' mean, and it has
  # no penalty.
  bias_C = jnp.mean(target_NC, axis=0)
  target_NC = target_NC - bias_C
  # The weights are (X'X + l2)^-1 X'Y = X' (XX' + l2)^-1 Y. This factorizes the
  # smaller of X'X and XX', once for all penalties.
  if x_ND.shape[0] >= x_ND.shape[1]:
    values_R, vectors = jnp.linalg.eigh(_dot(x_ND.T, x_ND))
    left_DR = vectors
    right_RC = _dot(vectors.T, _dot(x_ND.T, target_NC))
  else:
    values_R, vectors = jnp.linalg.eigh(_dot(x_ND, x_ND.T))
    left_DR = _dot(x_ND.T, vectors)
    right_RC = _dot(vectors.T, target_NC)
  return {
    "mean_D": mean_D,
    "std_D": std_D,
    "bias_C": bias_C,
    "values_R": jnp.maximum(values_R, 0.0),  # Rounding can make them negative.
    "left_DR": left_DR,
    "right_RC": right_RC,
  }


def _hits(
  test: tuple[jax.Array, jax.Array],
  probe: Mapping[str, jax.Array],
  l2_P: jax.Array,
) -> jax.Array:
  """Whether each example is classified right with each penalty, bool [T, P]."""
  x_TD, y_T = test
  x_TR = _dot((x_TD - probe["mean_D"]) / probe["std_D"], probe["left_DR"])

  def hits(l2: jax.Array) -> jax.Array:
    scores_TC = _dot(x_TR / (probe["values_R"] + l2), probe["right_RC"])
    return metrics.top_k_hits(scores_TC + probe["bias_C"], y_T, 1)

  return jax.lax.map(hits, l2_P).T
