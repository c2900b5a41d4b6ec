"""Shows samples of a generator, and writes them to files."""

import os

import jax
import numpy as np

from bigtrain.arrays.types import PredictFn, Variables
from bigtrain.evaluation import generated
from bigtrain.evaluation.evaluations import COUNT, Context
from bigtrain.reports import media

_GREY = 0.3
LIMITS = {"num_samples": COUNT, "columns": COUNT, "zoom": COUNT}


class Evaluator:
  """The picture "samples" of a log entry, with samples in rows.

  Args:
    predict_fn: (variables, {"_index"}) -> images [B, ...] from -1 to 1.
    num_samples: number of samples. Sample i has the class i modulo the number
      of classes.
    columns: number of samples in a row of the picture.
    zoom: width and height of a sample's pixel, in pixels of the picture.
    files: whether to write each sample to a file too, in the workdir's
      samples/<name>-<step>.
    batch_size: global; by default as in training.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    context: Context,
    *,
    num_samples: int = 40,
    columns: int = 10,
    zoom: int = 1,
    files: bool = False,
    batch_size: int | None = None,
  ):
    self._context = context
    self._columns, self._zoom, self._files = columns, zoom, files
    self._generated = generated.Generated(
      predict_fn, context, num_samples, batch_size
    )

  def run(self, variables: Variables, step: int) -> dict[str, media.Image]:
    images = (self._generated.on_host(variables) + 1) / 2
    if self._files and jax.process_index() == 0:
      folder = f"samples/{self._context.name}-{step:08d}"
      for i, image in enumerate(images):
        path = os.path.join(folder, f"{i:06d}.png")
        media.save_file(self._context.workdir, path, media.Image(image))
    return {"samples": media.Image(sheet(images, self._columns, self._zoom))}


def sheet(images: np.ndarray, columns: int, zoom: int = 1) -> np.ndarray:
  """Images (N, rows, columns, C) side by side in one, in a grey grid."""
  border = ((0, 0), (0, 1), (0, 1), (0, 0))
  images = np.pad(images, border, constant_values=_GREY)
  images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
  columns = min(columns, len(images))
  rows = -(-len(images) // columns)
  images = np.pad(images, ((0, rows * columns - len(images)), *[(0, 0)] * 3))
  _, height, width, C = images.shape
  x = images.reshape(rows, columns, height, width, C).transpose(0, 2, 1, 3, 4)
  return x.reshape(rows * height, columns * width, C)
