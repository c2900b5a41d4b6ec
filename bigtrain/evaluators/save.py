"""Writes the outputs of a predict function for a whole data set to a file."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bigtrain.arrays import trees
from bigtrain.arrays.types import Batch, ClassCount, PredictFn, Variables
from bigtrain.evaluation import evaluations
from bigtrain.files import paths


class Evaluator:
  """Saves predictions to <workdir>/predictions/<name>-<step>.npz.

  Its arrays are "predictions", or "predictions/<name>" if the predict function
  returns a tree, and the features of `keys`.

  Args:
    predict_fn: (variables, batch) -> tree of [B, ...] arrays.
    keys: features to save with the predictions.
    cache: whether to keep preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: evaluations.Batches,
    *,
    keys: Sequence[str] = (),
    cache: bool = False,
  ):
    self._context = batches.context

    def outputs(variables: Variables, batch: Batch) -> dict[str, Any]:
      features = {key: batch[key] for key in keys}
      return {"predictions": predict_fn(variables, batch), **features}

    for name, size in self._context.vocab_sizes.items():
      if isinstance(size, ClassCount):  # A test set may lack labels.
        batches = batches.labelled(name, size)
    self._outputs = batches.replace(cache=cache).collect(outputs)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    columns = dict(trees.flatten_with_names(self._outputs(variables)))
    if jax.process_index() == 0:
      folder = os.path.join(self._context.workdir, "predictions")
      paths.make_folder(folder)
      path = os.path.join(folder, f"{self._context.name}-{step:08d}.npz")
      with paths.replacing(path, "wb") as file:
        np.savez(file, **columns)
    return {"num_examples": float(len(next(iter(columns.values()))))}
