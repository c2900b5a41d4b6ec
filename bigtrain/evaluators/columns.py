"""Writes examples together with the outputs of a predict function.

A source dict(type="arrays", path="<workdir>/columns/<evaluation>.npz") reads
them, for example to train on a model's log-probabilities.
"""

import os
from typing import Any

import jax
import numpy as np

from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.evaluation.evaluations import Batches
from bigtrain.files import paths


class Evaluator:
  """Writes the batch's features and the outputs, arrays [B, ...] by name."""

  def __init__(self, predict_fn: PredictFn, batches: Batches):
    def columns(variables: Variables, batch: Batch) -> dict[str, jax.Array]:
      features = {name: x for name, x in batch.items() if name[0] != "_"}
      return {**features, **predict_fn(variables, batch)}

    self._columns, context = batches.collect(columns), batches.context
    self._path = os.path.join(context.workdir, "columns", f"{context.name}.npz")

  def run(self, variables: Variables, step: int) -> dict[str, Any]:
    arrays = self._columns(variables)
    if jax.process_index() == 0:
      os.makedirs(os.path.dirname(self._path), exist_ok=True)
      with paths.replacing(self._path, "wb") as file:
        np.savez(file, **arrays)
    return {"examples": len(next(iter(arrays.values())))}
