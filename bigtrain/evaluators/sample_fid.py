"""Compares samples of a generator with images, by the features of a model."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bigtrain.arrays.types import PredictFn, Variables
from bigtrain.evaluation import evaluations, generated
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.evaluation.frechet import Moments, distance, nonfinite
from bigtrain.inference import seeing

LIMITS = {"num_samples": dict(least=2, whole=True)}


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  seeing.check(options["model"], f"{path}.model")


class Evaluator:
  """Frechet distance "fid" between samples and the images of `data`.

  Means and covariances are accumulated in float64, so memory does not grow with
  the number of images. It is the FID of the literature only with features of
  the literature's Inception network.

  Args:
    predict_fn: (variables, {"_index"}) -> images [B, ...] from -1 to 1.
    model: options of inference/seeing.py: the path of the model whose features
      are compared, and what it expects.
    num_samples: number of samples; the literature uses 50,000.
    image_key: name of the images, from -1 to 1 and as large as samples.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    model: Mapping[str, Any],
    num_samples: int = 50_000,
    image_key: str = "image",
  ):
    self._context = batches.context
    self._model = seeing.Model(
      batches.context.mesh, f"{batches.context.path}.model", **model
    )
    self._generated = generated.Generated(
      predict_fn, batches.context, num_samples, batches.batch_size
    )
    self._input = batches.input
    self._image_key = image_key
    self._reference: Moments | None = None  # The same at each step.

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    if self._reference is None:
      self._reference = self._of_images()
    samples = self._moments(
      self._generated.batches(variables), self._generated.num_batches
    )
    fid = distance(samples, self._reference)
    return {"fid": fid} | nonfinite(samples, self._reference)

  def _of_images(self) -> Moments:
    data = self._input

    def batches() -> Iterator[tuple[Any, int]]:
      left = data.num_examples  # The rest of the last batch is padding.
      for batch in data.batches():
        yield batch[self._image_key], min(left, data.batch_size)
        left -= data.batch_size

    return self._moments(batches(), data.num_batches)

  def _moments(
    self, batches: Iterator[tuple[Any, int]], number: int
  ) -> Moments:
    """Moments of the features of batches, (images, number that count)."""
    sizes: list[int] = []

    def calls() -> Iterator[Any]:
      for image, size in batches:
        sizes.append(size)
        yield self._model(image)

    result = Moments()
    features = evaluations.in_flight(calls(), number, self._context)
    for i, x_BD in enumerate(features):
      result.add(np.asarray(x_BD).reshape(len(x_BD), -1)[: sizes[i]])
    return result
