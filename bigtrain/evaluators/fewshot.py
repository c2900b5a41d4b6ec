"""Few-shot transfer: a linear probe on frozen features, by least squares.

Ridge regression from features of mean 0 and variance 1 to 1 for the right class
and -1 for the others, as in "Big Transfer", arXiv 1912.11370.

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

_MAX_TUNING = 4096  # Examples on which a penalty is chosen.

_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


LIMITS = dict.fromkeys(("shots", "seeds"), evaluations.COUNT)
LIMITS |= {"l2": dict(above=0)}


class Evaluator:
  """Accuracy "{k}shot" of probes on k examples of each class.

  The mean over seeds, with the standard deviation "{k}shot_std". Of several
  penalties a probe uses the best one on training examples that are not among
  the shots; "{k}shot_l2" is their median. A probe that sees features that are
  not finite is never right.

  Args:
    predict_fn: (variables, batch) -> features [B, ...], or a dict of them with
      results "<layer>/5shot".
    shots: numbers of examples per class; a smaller class gives all it has.
    l2: penalties on the squared weights, summed over the shots.
    seeds: number of times the shots are drawn.
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
    self._path, mesh = batches.context.path, batches.context.mesh
    self._shots, self._l2, self._seeds = shots, l2, seeds
    self.run = batches.scores(predict_fn, self._accuracies)
    replicated = sharding.replicated(mesh)
    self._fit = jax.jit(
      _fit, static_argnums=2, in_shardings=replicated, out_shardings=replicated
    )
    self._hits = features.by_rows(_hits, mesh)

  def _accuracies(self, train: Examples, test: Examples) -> dict[str, float]:
    (x_ND, y_N), results = train, {}
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
  """Indices of (the shots, at most _MAX_TUNING other examples)."""
  order = np.random.default_rng(seed).permutation(len(y_N))
  rank = np.empty(len(y_N), np.int64)  # In its class, in that order.
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
  # Centred inputs and targets give the bias, which has no penalty.
  bias_C = jnp.mean(target_NC, axis=0)
  target_NC = target_NC - bias_C
  # (X'X + l)^-1 X' = X' (XX' + l)^-1: factorize the smaller matrix.
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
