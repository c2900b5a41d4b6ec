"""Writes a predict function's outputs for a whole data set to a file."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bigtrain import parts, trees
from bigtrain.evaluation import evaluations
from bigtrain.files import paths


class Evaluator:
  """Saves predictions to <workdir>/predictions/<name>-<step>.npz.

  The arrays are "predictions" ("predictions/<name>" if the function returns
  several) and the features in `keys`. Row i belongs to example i of the data
  set; padding is removed.

  Args:
    predict_fn: (variables, batch) -> tree of [B, ...] arrays.
    batches: the evaluation set.
    context: context of the run.
    keys: features to save with the predictions.
    cache: whether to keep preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], Any],
    batches: evaluations.Batches,
    context: evaluations.Context,
    *,
    keys: Sequence[str] = (),
    cache: bool = False,
  ):
    self._context, keys = context, tuple(keys)

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      return {
        "predictions": predict_fn(variables, batch),
        "_mask": batch["_mask"],
        **{key: batch[key] for key in keys},
      }

    for name, size in context.vocab_sizes.items():
      if isinstance(size, parts.ClassCount):  # A test set may have no labels.
        batches = batches.labelled(name, size)
    self._outputs = batches.replace(cache=cache).map(outputs)

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Writes the file; returns the number of examples in it."""
    results = self._outputs(variables)
    real = np.concatenate([r.pop("_mask") for r in results]) > 0
    columns: dict[str, list[Any]] = {}
    for result in results:
      for name, value in trees.flatten_with_names(result):
        columns.setdefault(name, []).append(value)
    if jax.process_index() == 0:
      folder = os.path.join(self._context.workdir, "predictions")
      paths.make_folder(folder)
      name = f"{self._context.name}-{step:08d}.npz"
      path = os.path.join(folder, name)
      arrays: dict[str, Any] = {
        k: np.concatenate(v)[real] for k, v in columns.items()
      }
      with paths.replacing(path, "wb") as file:
        np.savez(file, **arrays)
    return {"num_examples": float(real.sum())}
