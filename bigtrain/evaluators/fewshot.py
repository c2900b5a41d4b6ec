"""Few-shot transfer: a linear probe on frozen features, by least squares.

For each number of shots and each seed, so many examples of every class are
drawn, features are scaled to mean 0 and variance 1, and ridge regression maps
them to 1 for the right class and -1 for the others. The eigenvectors of a Gram
matrix give the solutions for all strengths of the penalty at once. The probe
of the transfer experiments in "Big Transfer", arXiv 1912.11370, and of those
in "Scaling Vision Transformers", arXiv 2106.04560.

Legend: B batch, N examples, T tested examples, D features, C classes, R rank,
P penalties.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.evaluation import evaluations
from bigtrain.settings import ConfigError, DataError, did_you_mean

# The most examples on which a penalty is chosen.
_MAX_TUNING = 4096

_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Evaluator:
  """Accuracy "{k}shot" of probes on k examples of each class.

  It is the mean over seeds, of which "{k}shot_std" is the standard deviation
  if there are several. With several penalties, that which does best on
  training examples beside the shots is taken, and "{k}shot_l2" is the median
  of these.

  Args:
    predict_fn: (variables, batch) -> features [B, ...].
    context: where it runs.
    data: source of the examples that shots are drawn from, as in
      config.input.data.
    test_data: source of those that accuracy is measured on.
    pp: preprocessing string of both; leaves `label_key` and the model's
      inputs.
    shots: examples of each class; fewer where a class has no more.
    l2: penalties on the squared weights, summed over the shots; the bias has
      none. Published results mostly have 1024.
    seeds: how many times the shots are drawn.
    label_key: int [B], the classes; examples with a negative one are left out.
    batch_size: that of training unless given.
    num_examples: only so many of `data` from the start.
    num_test_examples: only so many of `test_data` from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], jax.Array],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    test_data: Mapping[str, Any],
    pp: str = "",
    shots: Sequence[int] = (1, 5, 10),
    l2: Sequence[float] = (1024.0,),
    seeds: int = 3,
    label_key: str = "label",
    batch_size: int | None = None,
    num_examples: int | None = None,
    num_test_examples: int | None = None,
    cache: bool = True,
  ):
    self._path = path = f"config.evals.{context.name}"
    for name, values in (("shots", shots), ("l2", l2), ("seeds", [seeds])):
      if not values or not all(value > 0 for value in values):
        raise ConfigError(
          f"{path}.{name}: expected positive numbers, got {values!r}."
        )
    self._shots, self._l2, self._seeds = shots, l2, seeds

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      if label_key not in batch:
        raise ConfigError(
          f"{path}.label_key: the batch has no {label_key!r}."
          f"{did_you_mean(label_key, batch)}"
        )
      features = predict_fn(variables, batch).astype(jnp.float32)
      return {
        "x": features.reshape(features.shape[0], -1),
        "y": jnp.where(batch["_mask"] > 0, batch[label_key], -1),
      }

    make = functools.partial(
      evaluations.Batches,
      outputs,
      context,
      pp=pp,
      batch_size=batch_size,
      cache=cache,
    )
    self._train = make(data=data, num_examples=num_examples)
    self._test = make(data=test_data, num_examples=num_test_examples)
    replicated = sharding.replicated(context.mesh)
    self._fit = jax.jit(
      _fit,
      static_argnums=2,
      in_shardings=(replicated,) * 2,
      out_shardings=replicated,
    )
    rows = sharding.batch(context.mesh)
    self._count = jax.jit(
      functools.partial(_count_right, rows=rows),
      in_shardings=(replicated,) * 4,
      out_shardings=replicated,
    )
    self._devices = context.mesh.size

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Returns {"5shot": accuracy, "5shot_std", ...}."""
    x_ND, y_N = _features(self._train.map(variables))
    test = _features(self._test.map(variables))
    if not len(y_N) or not len(test[1]):
      raise DataError(f"{self._path}: no example has a label.")
    num_classes = int(max(y_N.max(), test[1].max())) + 1
    results = {}
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
              "choose among several; give one."
            )
          right_P = self._right(probe, x_ND[others], y_N[others], self._l2)
          penalty = self._l2[int(np.argmax(right_P))]
        (right,) = self._right(probe, *test, [penalty])
        accuracies.append(right / len(test[1]))
        penalties.append(penalty)
      results[f"{k}shot"] = float(np.mean(accuracies))
      if self._seeds > 1:
        results[f"{k}shot_std"] = float(np.std(accuracies))
      if len(self._l2) > 1:
        results[f"{k}shot_l2"] = float(np.median(penalties))
    return results

  def _right(
    self, probe: Any, x_TD: np.ndarray, y_T: np.ndarray, l2: Sequence[float]
  ) -> np.ndarray:
    """How many are classified correctly, for each penalty."""
    missing = -len(y_T) % self._devices
    x_TD = np.pad(x_TD, [(0, missing), (0, 0)])
    y_T = np.pad(y_T, [(0, missing)], constant_values=-1)
    return jax.device_get(
      self._count(probe, x_TD, y_T, np.asarray(l2, np.float32))
    )


def _features(
  found: Sequence[Mapping[str, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
  """(features [N, D], labels [N]) of the examples that have a label."""
  x_ND = np.concatenate([part["x"] for part in found])
  y_N = np.concatenate([part["y"] for part in found]).astype(np.int32)
  return x_ND[y_N >= 0], y_N[y_N >= 0]


def _draw(
  y_N: np.ndarray, shots: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """(examples to learn from, at most _MAX_TUNING of the others)."""
  order = np.random.default_rng(seed).permutation(len(y_N))
  # Which of its class an example is, in that order.
  place = np.empty(len(y_N), np.int64)
  for c in np.unique(y_N):
    members = order[y_N[order] == c]
    place[members] = np.arange(len(members))
  others = order[place[order] >= shots]
  return np.flatnonzero(place < shots), np.sort(others[:_MAX_TUNING])


def _fit(
  x_ND: jax.Array, y_N: jax.Array, num_classes: int
) -> dict[str, jax.Array]:
  """The solutions for all penalties, as factors."""
  mean_D, std_D = jnp.mean(x_ND, axis=0), jnp.std(x_ND, axis=0) + 1e-5
  x_ND = (x_ND - mean_D) / std_D
  target_NC = 2.0 * jax.nn.one_hot(y_N, num_classes) - 1.0
  # Centred inputs and targets make the bias, which no penalty holds back.
  bias_C = jnp.mean(target_NC, axis=0)
  target_NC = target_NC - bias_C
  # (X'X + l)^-1 X' = X' (XX' + l)^-1: the smaller matrix will do.
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
    "values_R": jnp.maximum(values_R, 0.0),  # Rounding may leave them below.
    "left_DR": left_DR,
    "right_RC": right_RC,
  }


def _count_right(
  probe: Mapping[str, jax.Array],
  x_TD: jax.Array,
  y_T: jax.Array,
  l2_P: jax.Array,
  *,
  rows: Any,
) -> jax.Array:
  """int [P]: how many examples a probe classifies correctly."""
  x_TD = jax.lax.with_sharding_constraint(x_TD, rows)
  x_TD = (x_TD - probe["mean_D"]) / probe["std_D"]
  x_TR = _dot(x_TD, probe["left_DR"])

  def right(l2: jax.Array) -> jax.Array:
    scores_TC = _dot(x_TR / (probe["values_R"] + l2), probe["right_RC"])
    return jnp.sum(jnp.argmax(scores_TC + probe["bias_C"], axis=1) == y_T)

  return jax.lax.map(right, l2_P)
