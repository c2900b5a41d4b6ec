"""Writes a predict function's outputs for a whole data set to a file."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bigtrain import trees
from bigtrain.evaluation import evaluations
from bigtrain.files import paths
from bigtrain.settings import ConfigError, did_you_mean


class Evaluator:
  """Saves predictions to <workdir>/predictions/<name>-<step>.npz.

  The arrays are called "predictions" ("predictions/<name>" where the function
  returns several) and by the names in `keys`; row i belongs to example i of
  the data set, and padding is left out.

  Args:
    predict_fn: (variables, batch) -> tree of [B, ...] arrays.
    context: where it runs.
    data: source, as in config.input.data.
    pp: preprocessing string.
    keys: names in the batch that are saved beside the predictions.
    batch_size: that of training unless given.
    num_examples: only so many from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], Any],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    pp: str = "",
    keys: Sequence[str] = (),
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = False,
  ):
    self._context = context

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      for key in keys:
        if key not in batch:
          raise ConfigError(
            f"config.evals.{context.name}.keys: the batch has no {key!r}."
            f"{did_you_mean(key, batch)}"
          )
      return {
        "predictions": predict_fn(variables, batch),
        "_mask": batch["_mask"],
        **{key: batch[key] for key in keys},
      }

    self._batches = evaluations.Batches(
      outputs,
      context,
      data=data,
      pp=pp,
      batch_size=batch_size,
      num_examples=num_examples,
      cache=cache,
    )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Writes the file; returns the number of examples in it."""
    results = self._batches.map(variables)
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
