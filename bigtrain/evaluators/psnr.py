"""Compares predicted images with their targets, by PSNR."""

import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.evaluation.evaluations import Batches


class Evaluator:
  """Mean peak signal-to-noise ratio "psnr" in dB; infinite for equal images.

  Args:
    predict_fn: (variables, batch) -> images [B, ...].
    target_key: name of the target images.
    peak: largest possible value minus the smallest: 2 for values from -1 to 1.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    target_key: str = "image",
    peak: float = 2.0,
  ):
    def outputs(variables: Variables, batch: Batch) -> Metrics:
      target = batch[target_key].astype(jnp.float32)
      error = (predict_fn(variables, batch).astype(jnp.float32) - target) ** 2
      error_B = jnp.mean(error, axis=range(1, error.ndim))
      weight_B = metrics.example_weights(batch, target)
      return {
        "psnr": metrics.pair(10 * jnp.log10(peak**2 / error_B), weight_B),
        "nonfinite": metrics.Faults.of(~jnp.isfinite(error_B), weight_B),
      }

    self._outputs = batches.map(outputs)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    return metrics.host_values(self._outputs(variables))
