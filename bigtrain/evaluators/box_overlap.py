"""Compares predicted boxes with the reference boxes, by their overlap.

Legend: B batch, N examples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import check_number
from bigtrain.evaluation import evaluations, sheets, text_metrics
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.reports import media


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  del context
  evaluations.check_numbers(
    f"{path}.thresholds", options.get("thresholds", (0.5,)), above=0, most=1
  )
  num_images = options.get("num_images", 20)
  check_number(f"{path}.num_images", num_images, least=0, whole=True)
  if num_images:
    text_metrics.check_package(f"{path}.num_images", "matplotlib", "report")


def overlap(box_B4: jax.Array, other_B4: jax.Array) -> jax.Array:
  """Area of the intersection as a share of the union's, [B]."""
  first = jnp.maximum(box_B4[:, :2], other_B4[:, :2])
  last = jnp.minimum(box_B4[:, 2:], other_B4[:, 2:])
  common_B = jnp.prod(jnp.maximum(last - first, 0.0), axis=1)

  def area(x: jax.Array) -> jax.Array:
    return jnp.prod(jnp.maximum(x[:, 2:] - x[:, :2], 0.0), axis=1)

  union_B = area(box_B4) + area(other_B4) - common_B
  return common_B / jnp.maximum(union_B, 1e-9)


class Evaluator:
  """Mean overlap "iou", and "acc@0.5", the share of overlaps of at least 0.5.

  The picture boxes/<name>-<step>.png shows images with the reference box in
  green and the predicted box in red.

  Args:
    predict_fn: (variables, batch) -> boxes [B, 4]: top, left, bottom, right, in
      shares of the image.
    target_key: name of the reference boxes; an example with NaN does not count.
    thresholds: smallest overlaps of a box that counts as right.
    image_key: name of the images for the picture, in any range of values.
    num_images: number of images in the picture; 0 for no picture.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    target_key: str = "box",
    thresholds: Sequence[float] = (0.5,),
    image_key: str = "image",
    num_images: int = 20,
  ):
    self._name = batches.context.name

    def outputs(variables: Variables, batch: Batch) -> Metrics:
      target_B4 = batch[target_key].astype(jnp.float32)
      known_B = jnp.isfinite(target_B4).all(axis=1)
      target_B4 = jnp.where(known_B[:, None], target_B4, 0.0)
      iou_B = overlap(predict_fn(variables, batch), target_B4)
      weight_B = metrics.example_weights(batch, target_B4) * known_B
      shares = {f"acc@{x:g}": (iou_B >= x) * 1.0 for x in thresholds}
      return {
        name: metrics.pair(x_B, weight_B)
        for name, x_B in {"iou": iou_B, **shares}.items()
      }

    self._outputs = batches.map(outputs)
    self._shown = None
    num_shown = min(num_images, batches.input.num_examples)
    if num_shown:

      def shown(variables: Variables, batch: Batch) -> Batch:
        return {
          "image": batch[image_key],
          "target": batch[target_key],
          "box": predict_fn(variables, batch),
        }

      few = batches.replace(num_examples=num_shown, cache=False)
      self._shown = few.collect(shown)

  def run(self, variables: Variables, step: int) -> dict[str, Any]:
    values: dict[str, Any] = metrics.host_values(self._outputs(variables))
    if self._shown:
      sheet = _sheet(**self._shown(variables))
      path = f"boxes/{self._name}-{step:08d}.png"
      values["picture"] = media.Image(sheet, path=path)
    return values


def _sheet(
  image: np.ndarray, target: np.ndarray, box: np.ndarray
) -> np.ndarray:
  """Images with the reference boxes in green and the predicted ones in red."""
  number = len(image)
  boxes: list[sheets.Boxes] = [
    {"tab:green": [target[i]], "tab:red": [box[i]]} for i in range(number)
  ]
  return sheets.draw(image, [""] * number, ["black"] * number, boxes)
