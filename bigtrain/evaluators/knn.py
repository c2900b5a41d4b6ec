"""Classifies examples by the labels of their nearest training examples.

Legend: Q queries, N training examples, D features, K neighbours, C classes.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics
from bigtrain.arrays.types import PredictFn
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import evaluations, features
from bigtrain.evaluation.features import Examples, Splits

LIMITS = {
  "k": evaluations.COUNT,
  "top_k": evaluations.COUNT,
  "temperature": dict(above=0),
}


class Evaluator:
  """Accuracy "20nn_acc", "20nn_top5_acc", ... of the neighbours' votes.

  The weight of a vote is exp(cosine / temperature), as in DINO (arXiv
  2104.14294). Training examples whose features are not finite do not vote, and
  the prediction for such a test example counts as wrong.

  Args:
    k: numbers of neighbours.
    temperature: the lower it is, the more the nearest neighbours count.
    top_k: a prediction is right if the class is among this many classes with
      the most votes.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Splits,
    *,
    k: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.07,
    top_k: Sequence[int] = (1, 5),
  ):
    self._path, self._k, self._top_k = batches.context.path, k, top_k
    vote = functools.partial(self._hits, temperature)
    self._vote = features.in_chunks(vote, batches.context.mesh, chunk_size=256)
    self.run = batches.scores(predict_fn, self._accuracies)

  def _accuracies(self, train: Examples, test: Examples) -> dict[str, float]:
    if max(self._k) > len(train[0]):
      raise ConfigError(
        f"{self._path}.k: {max(self._k)} neighbours, but {len(train[0])} "
        "training examples."
      )
    num_classes = int(max(train[1].max(), test[1].max())) + 1
    hits = self._vote(test, *train, static=num_classes)
    return {name: float(np.mean(hit)) for name, hit in hits.items()}

  def _hits(
    self,
    temperature: float,
    queries: tuple[jax.Array, jax.Array],
    x_ND: jax.Array,
    y_N: jax.Array,
    num_classes: int,
  ) -> dict[str, jax.Array]:
    x_QD, y_Q = queries
    cosine_QN = jnp.matmul(
      _unit(x_QD), _unit(x_ND).T, precision=jax.lax.Precision.HIGHEST
    )
    usable_N = jnp.all(jnp.isfinite(x_ND), axis=1)
    cosine_QN = jnp.where(usable_N, cosine_QN, -jnp.inf)
    cosine_QK, nearest_QK = jax.lax.top_k(cosine_QN, max(self._k))
    # Relative to the nearest one, so that no temperature makes it infinite.
    vote_QK = jnp.exp((cosine_QK - cosine_QK[:, :1]) / temperature)
    row_Q1, class_QK = jnp.arange(len(y_Q))[:, None], y_N[nearest_QK]
    hits = {}
    for k in self._k:
      votes_QC = jnp.zeros((len(y_Q), num_classes))
      votes_QC = votes_QC.at[row_Q1, class_QK[:, :k]].add(vote_QK[:, :k])
      votes_QC = jnp.where(votes_QC > 0, votes_QC, -jnp.inf)
      for top in self._top_k:
        name = f"{k}nn_acc" if top == 1 else f"{k}nn_top{top}_acc"
        if top <= num_classes:
          hits[name] = metrics.top_k_hits(votes_QC, y_Q, top)
    return hits


def _unit(x_ND: jax.Array) -> jax.Array:
  norm_N1 = jnp.linalg.norm(x_ND, axis=1, keepdims=True)
  return x_ND / jnp.maximum(norm_N1, 1e-12)
