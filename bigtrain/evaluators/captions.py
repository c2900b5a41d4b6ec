"""Writes captions of images and compares them with references.

Legend: B batch, L length, N examples, R references of an image.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.config.errors import check_number
from bigtrain.evaluation import evaluations, sheets, text_metrics
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.reports import media
from bigtrain.text import tokenizers


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  evaluations.tokenizer(options["tokenizer"], context)
  metrics = options.get("metrics", ("exact",))
  text_metrics.check(f"{path}.metrics", metrics)
  num_images = options.get("num_images", 40)
  check_number(f"{path}.num_images", num_images, least=0, whole=True)
  if num_images:
    text_metrics.check_package(f"{path}.num_images", "matplotlib", "report")


class Evaluator:
  """Writes captions to the table <workdir>/captions/<name>-<step>.jsonl.

  The picture <name>-<step>.png shows images with their captions, in red if they
  equal no reference.

  Args:
    predict_fn: (variables, batch, eos_id=...) -> tokens int [B, L].
    tokenizer: tokenizer of the captions, see text/tokenizers.py.
    labels_key: name of the references' tokens, int [B, L] or [B, R, L].
    metrics: as for the evaluator `generate`.
    image_key: name of the images for the picture, in any range of values.
    num_images: number of images in the picture; 0 for no picture.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    tokenizer: tokenizers.Spec,
    labels_key: str = "labels",
    metrics: Sequence[str] = ("exact",),
    image_key: str = "image",
    num_images: int = 40,
  ):
    self._name = batches.context.name
    self._metrics = metrics
    self._tokenizer = evaluations.tokenizer(tokenizer, batches.context)
    eos_id = self._tokenizer.eos_id

    def outputs(variables: Variables, batch: Batch) -> dict[str, Any]:
      result = {"captions": predict_fn(variables, batch, eos_id=eos_id)}
      # Metrics need references; without metrics they are shown if there are
      # any.
      if metrics or labels_key in batch:
        result["references"] = batch[labels_key]
      return result

    self._outputs = batches.collect(outputs)
    # Only the images of the picture are copied from the devices.
    num_shown = min(num_images, batches.input.num_examples)
    self._images = None
    if num_shown:
      shown = batches.replace(num_examples=num_shown, cache=False)
      self._images = shown.collect(lambda variables, batch: batch[image_key])

  def run(self, variables: Variables, step: int) -> dict[str, Any]:
    results = self._outputs(variables)
    captions = [self._tokenizer.decode(ids) for ids in results["captions"]]
    references: list[list[str]] = [[] for _ in captions]
    if "references" in results:
      references = [self._decode_all(ids) for ids in results["references"]]
    rows = [
      {"number": i, "caption": caption, "references": texts}
      for i, (caption, texts) in enumerate(zip(captions, references))
    ]
    stem = f"captions/{self._name}-{step:08d}"
    values: dict[str, Any] = {
      **text_metrics.compute(self._metrics, captions, references),
      "captions": media.Table(rows, f"{stem}.jsonl"),
    }
    if self._images:
      images = self._images(variables)
      is_wrong = [
        bool(texts) and caption not in texts
        for caption, texts in zip(captions, references)
      ]
      sheet = sheets.of_texts(images, captions, is_wrong)
      values["picture"] = media.Image(sheet, path=f"{stem}.png")
    return values

  def _decode_all(self, ids: np.ndarray) -> list[str]:
    """The references of one image; an empty one is padding."""
    texts = [self._tokenizer.decode(row) for row in np.atleast_2d(ids)]
    return [text for text in texts if text]
