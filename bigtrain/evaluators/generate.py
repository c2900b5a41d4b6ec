"""Writes generated texts, and compares them with references.

Legend: B batch, L and T lengths, R references of an example.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.evaluation import evaluations, sheets, text_metrics
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.reports import media
from bigtrain.text import tokenizers

_NUM_IMAGES = 40


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  evaluations.tokenizer(options.get("tokenizer", "bytes"), context)
  metrics = options.get("metrics", ())
  text_metrics.check(f"{path}.metrics", metrics)
  if metrics and options.get("reference_key") is None:
    raise ConfigError(f"{path}.reference_key: missing; metrics compare to it.")
  num_images = options.get("num_images", _NUM_IMAGES)
  check_number(f"{path}.num_images", num_images, least=1, whole=True)
  if options.get("image_key") is not None:
    text_metrics.check_package(f"{path}.image_key", "matplotlib", "report")


class Evaluator:
  """Writes texts to the table <workdir>/generations/<name>-<step>.jsonl.

  Args:
    predict_fn: (variables, batch) -> generated tokens, int [B, T].
    tokenizer: tokenizer of all texts, see text/tokenizers.py.
    prompt_key: name of the prompts' tokens, int [B, L].
    reference_key: name of the reference answers' tokens, int [B, L] or [B, R,
      L]; metrics need it.
    metrics: names of text metrics, or dotted paths of your own functions, see
      evaluation/text_metrics.py.
    image_key: name of the prompts' pictures, for the picture
      <name>-<step>.png of the first `num_images` with prompts and answers.
    num_images: number of examples in the picture.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    tokenizer: tokenizers.Spec = "bytes",
    prompt_key: str | None = None,
    reference_key: str | None = None,
    metrics: Sequence[str] = (),
    image_key: str | None = None,
    num_images: int = _NUM_IMAGES,
  ):
    self._name = batches.context.name
    self._metrics = metrics
    self._tokenizer = evaluations.tokenizer(tokenizer, batches.context)

    def outputs(variables: Variables, batch: Batch) -> dict[str, Any]:
      result = {"sample": predict_fn(variables, batch)}
      if prompt_key is not None:
        result["prompt"] = batch[prompt_key]
      if reference_key is not None:
        result["references"] = batch[reference_key]
      return result

    self._outputs = batches.collect(outputs)
    self._images = None
    if image_key is not None:
      # Only the images of the picture are copied from the devices.
      num_shown = min(num_images, batches.input.num_examples)
      shown = batches.replace(num_examples=num_shown, cache=False)
      self._images = shown.collect(lambda variables, batch: batch[image_key])

  def run(self, variables: Variables, step: int) -> dict[str, Any]:
    columns = self._outputs(variables)
    rows: list[dict[str, Any]] = []
    for i in range(len(columns["sample"])):
      row: dict[str, Any] = {"number": i}
      if "prompt" in columns:
        row["prompt"] = self._tokenizer.decode(columns["prompt"][i])
      row["sample"] = self._decode(columns["sample"][i])
      if "references" in columns:
        ids_RL = np.atleast_2d(columns["references"][i])
        texts = [self._decode(ids) for ids in ids_RL]
        # An example with fewer references than others has padding.
        row["references"] = [text for text in texts if text] or [""]
      rows.append(row)
    stem = f"generations/{self._name}-{step:08d}"
    results: dict[str, Any] = {
      "num_examples": float(len(rows)),
      "texts": media.Table(rows, f"{stem}.jsonl"),
    }
    if self._images:
      sheet = _sheet(self._images(variables), rows)
      results["picture"] = media.Image(sheet, path=f"{stem}.png")
    if self._metrics:
      samples = [row["sample"] for row in rows]
      references = [row["references"] for row in rows]
      results |= text_metrics.compute(self._metrics, samples, references)
    return results

  def _decode(self, ids: np.ndarray) -> str:
    """The text before the end token."""
    ends = np.flatnonzero(ids == self._tokenizer.eos_id)
    return self._tokenizer.decode(ids[: ends[0]] if ends.size else ids)


def _sheet(images: np.ndarray, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
  """Pictures with their prompts and answers."""
  shown = rows[: len(images)]
  texts = [f"{row.get('prompt', '')} {row['sample']}" for row in shown]
  is_wrong = [
    "references" in row and row["sample"] not in row["references"]
    for row in shown
  ]
  return sheets.of_texts(images, texts, is_wrong)
