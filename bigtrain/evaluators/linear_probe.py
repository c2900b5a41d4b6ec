"""Logistic regression on frozen features, of images or of their patches.

Legend: N examples, D features, C classes, S slices of R rows, H x W pixels,
h x w patches.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import metrics, sharding
from bigtrain.arrays.types import PredictFn
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import evaluations, features
from bigtrain.evaluation.features import Examples, Splits

# Training examples whose logits exist at the same time. With more, the logits
# of many classes would need much memory.
_SLICE_ROWS = 8192


LIMITS = {
  "max_steps": evaluations.COUNT,
  "top_k": evaluations.COUNT,
  "l2": dict(least=0),
}


class Evaluator:
  """Accuracy "acc", "top5_acc", ... and "loss" of logistic regression.

  L-BFGS minimises the sum of the cross-entropies plus l2 / 2 times the sum of
  the squared weights, for features with mean 0 and variance 1: l2 is 1 / C of
  scikit-learn. If there are several penalties, "l2" is the one that is best on
  a held-out tenth of the training examples; the final fit uses all of them.

  For segmentation, there is a label for each pixel, [B, H, W], and a feature
  vector for each patch: [B, h, w, D], or [B, P, D] if the patches form a
  square. A patch is trained with the class of the pixel at its centre, and the
  logits are resized bilinearly to pixels. The results are "miou", the mean over
  all classes that occur, and the "acc" of pixels.

  Args:
    l2: penalties.
    max_steps: largest number of steps of one fit.
    top_k: values of k; a prediction is right if the class is among the k most
      likely ones.
    ignore: label that does not count, such as 255. Negative labels never count.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Splits,
    *,
    l2: Sequence[float] = (1.0,),
    max_steps: int = 1000,
    top_k: Sequence[int] = (1, 5),
    ignore: int | None = None,
  ):
    mesh = batches.context.mesh
    self._path = batches.context.path
    # From the largest: each fit starts from the weights of the one before.
    self._l2 = sorted(l2, reverse=True)
    self._max_steps, self._ignore = max_steps, ignore
    self.run = batches.scores(predict_fn, self._score)
    replicated = sharding.replicated(mesh)
    spec = PartitionSpec(None, sharding.batch_axes(mesh))
    self._slices = NamedSharding(mesh, spec)
    self._gradient = jax.jit(
      jax.value_and_grad(_objective),
      in_shardings=(replicated, replicated, replicated, *[self._slices] * 2),
      out_shardings=replicated,
    )
    of_examples = functools.partial(_of_examples, top_k)
    self._of_examples = features.in_chunks(of_examples, mesh)
    self._of_pixels = features.in_chunks(_of_pixels, mesh, chunk_size=16)

  def _score(self, train: Examples, test: Examples) -> dict[str, float]:
    train_x, train_y = train[0], self._without_ignored(train[1])
    test_x, test_y = test[0], self._without_ignored(test[1])
    x_ND, y_N = _rows(train_x, train_y)
    scale = x_ND.mean(0), x_ND.std(0) + 1e-5
    num_classes = int(max(train_y.max(), test_y.max())) + 1
    # The last row is the bias.
    weights = np.zeros((x_ND.shape[1] + 1, num_classes))
    l2, results = self._l2[0], {}
    if len(self._l2) > 1:
      held_N = np.random.default_rng(0).permutation(len(y_N)) % 10 == 0
      fit = self._fitter(x_ND, np.where(held_N, -1, y_N), scale)
      held = x_ND[held_N], y_N[held_N]
      hits = []
      for each_l2 in self._l2:
        weights = fit(each_l2, weights)
        hits.append(self._of_examples(held, weights, scale)["acc"].sum())
      l2 = self._l2[int(np.argmax(hits))]
      results["l2"] = l2
    weights = self._fitter(x_ND, y_N, scale)(l2, weights)
    if test_y.ndim == 1:
      values = self._of_examples((test_x, test_y), weights, scale)
      return results | {k: float(v.mean()) for k, v in values.items()}
    counts = self._of_pixels((_on_grid(test_x), test_y), weights, scale)
    hits_C, predicted_C, labelled_C = (x.sum(0, np.float64) for x in counts)
    union_C = predicted_C + labelled_C - hits_C
    occurs_C = union_C > 0
    results["miou"] = float(np.mean(hits_C[occurs_C] / union_C[occurs_C]))
    results["acc"] = float(hits_C.sum() / labelled_C.sum())
    return results

  def _without_ignored(self, y: np.ndarray) -> np.ndarray:
    return y if self._ignore is None else np.where(y == self._ignore, -1, y)

  def _fitter(self, x_ND: np.ndarray, y_N: np.ndarray, scale: Any) -> Any:
    """Returns fit(l2, start) -> weights, for examples that stay on the devices.

    L-BFGS runs on process 0, and all processes compute its gradients.
    """
    ways = sharding.batch_ways(self._slices.mesh)
    num_slices = -(-len(y_N) // _SLICE_ROWS)
    rows = ways * -(-len(y_N) // (num_slices * ways))
    padding = num_slices * rows - len(y_N)

    def placed(x: np.ndarray, fill: int) -> jax.Array:
      pads = [(0, padding)] + [(0, 0)] * (x.ndim - 1)
      x = np.pad(x, pads, constant_values=fill)
      x = x.reshape(num_slices, rows, *x.shape[1:])
      return jax.make_array_from_callback(x.shape, self._slices, x.__getitem__)

    data = placed(x_ND, 0), placed(y_N, -1)

    def fit(l2: float, start: np.ndarray) -> np.ndarray:
      def shared(flat: np.ndarray, ended: bool) -> Any:
        """Weights of process 0, and whether its fit has ended.

        If each process ran L-BFGS, rounding could make them diverge.
        """
        both = flat.reshape(start.shape).astype(np.float32), np.int32(ended)
        return jax.device_get(multihost_utils.broadcast_one_to_all(both))

      def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights, _ = shared(flat, False)
        result = self._gradient(weights, scale, np.float32(l2), *data)
        loss, gradient = jax.device_get(result)
        return float(loss), gradient.astype(np.float64).ravel()

      if jax.process_index():
        while True:
          weights, has_ended = shared(start, False)
          if has_ended:
            return weights
          self._gradient(weights, scale, np.float32(l2), *data)
      result = scipy.optimize.minimize(
        loss_and_gradient,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        options=dict(maxiter=self._max_steps, ftol=1e-8, gtol=1e-6),
      )
      if result.nit >= self._max_steps:
        logging.warning("%s: l2=%g: not converged.", self._path, l2)
      return shared(result.x, True)[0]

    return fit


def _rows(x: np.ndarray, y: np.ndarray) -> Examples:
  """Features [N, D] and labels [N] to fit: of examples, or of their patches.

  Only those with a label and with finite features are left.
  """
  if y.ndim > 1:
    x = _on_grid(x)
    # Pixels at the centres of the patches.
    rows, columns = (
      (np.arange(n) * 2 + 1) * size // (2 * n)
      for n, size in zip(x.shape[1:3], y.shape[1:])
    )
    x = x.reshape(-1, x.shape[-1])
    y = y[:, rows][:, :, columns].reshape(-1)
  is_usable = np.isfinite(x).all(1) & (y >= 0)
  if not is_usable.any():
    # The fit needs an example. With this one it will predict nothing right.
    is_usable[0] = True
  return x[is_usable], y[is_usable]


def _on_grid(x: np.ndarray) -> np.ndarray:
  """Features of patches as [N, h, w, D]."""
  side = math.isqrt(x.shape[1])
  if x.ndim == 3 and side**2 != x.shape[1]:
    raise ConfigError(f"linear_probe: {x.shape[1]} patches are not a square.")
  return x.reshape(len(x), side, side, -1) if x.ndim == 3 else x


def _logits(x: jax.Array, weights: jax.Array, scale: Any) -> jax.Array:
  mean_D, std_D = scale
  x = (x - mean_D) / std_D
  precision = jax.lax.Precision.HIGHEST
  return jnp.matmul(x, weights[:-1], precision=precision) + weights[-1]


def _losses(logits: jax.Array, y: jax.Array) -> jax.Array:
  xent = optax.softmax_cross_entropy_with_integer_labels
  return jnp.where(y >= 0, xent(logits, jnp.maximum(y, 0)), 0.0)


def _objective(
  weights: jax.Array, scale: Any, l2: jax.Array, *slices: jax.Array
) -> jax.Array:
  """The loss per labelled example, a scale that suits L-BFGS's tolerances.

  It is computed slice by slice, because the logits of all examples would need
  much memory.
  """

  @jax.checkpoint
  def slice_loss(rows: Any) -> jax.Array:
    return jnp.sum(_losses(_logits(rows[0], weights, scale), rows[1]))

  total = jnp.sum(jax.lax.map(slice_loss, slices))
  total += l2 / 2 * jnp.sum(weights[:-1] ** 2)
  return total / jnp.sum(slices[1] >= 0)


def _of_examples(
  top_k: Sequence[int], rows: Any, weights: jax.Array, scale: Any
) -> dict[str, jax.Array]:
  x_ND, y_N = rows
  logits_NC = _logits(x_ND, weights, scale)
  values = {"loss": _losses(logits_NC, y_N)}
  for k in (1, *top_k):
    if k <= logits_NC.shape[-1]:
      name = "acc" if k == 1 else f"top{k}_acc"
      values[name] = metrics.top_k_hits(logits_NC, y_N, k)
  return values


def _of_pixels(
  rows: Any, weights: jax.Array, scale: Any
) -> tuple[jax.Array, ...]:
  """Number of pixels of each class, int [N, C]: right, predicted, labelled."""
  x_NhwD, y_NHW = rows
  logits = _logits(x_NhwD, weights, scale)
  none = logits.shape[-1]  # An extra class, for pixels that do not count.
  logits = jax.image.resize(logits, (*y_NHW.shape, none), "bilinear")
  real_NHW = y_NHW >= 0
  best_NHW = jnp.argmax(logits, axis=-1)
  good_NHW = real_NHW & metrics.has_order(logits)
  hits_NHW = good_NHW & (best_NHW == y_NHW)
  count = jax.vmap(lambda y: jnp.bincount(y.reshape(-1), length=none + 1)[:-1])
  return (
    count(jnp.where(hits_NHW, y_NHW, none)),
    count(jnp.where(good_NHW, best_NHW, none)),
    count(jnp.where(real_NHW, y_NHW, none)),
  )
