"""Compares generated masks with the reference masks, by their overlap.

  dict(type="mask_overlap", pred="generate", pred_kw=dict(max_new=64, eos_id=1),
       tokenizer="models/paligemma2-3b-mix-224",
       mask_coder="models/vae-oid.npz",
       data=dict(type="supervised", references=True, masks=True,
                 dataset=dict(name="coco_segmentation", ...), ...))

Legend: B batch, T length of an answer, R run lengths of a mask.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bigtrain.arrays.types import Batch, PredictFn, Variables
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import evaluations
from bigtrain.evaluation.evaluations import Batches, Context
from bigtrain.pp import mask_codes
from bigtrain.text import coco_masks, tokenizers


def check(options: Mapping[str, Any], context: Context, path: str) -> None:
  evaluations.tokenizer(options.get("tokenizer", "bytes"), context)
  if not isinstance(options.get("mask_coder"), str):
    raise ConfigError(
      f"{path}.mask_coder: expected the file of the VQ-VAE, vae-oid.npz."
    )
  mask_codes.load(options["mask_coder"], f"{path}.mask_coder")


class Evaluator:
  """Mean IoU of masks, "miou", and the share of "invalid" answers.

  The masks of an answer are merged into one, in pixels of the whole picture. As
  in PaliGemma's evaluation, an answer without 16 codes after a box has IoU 0.

  Args:
    predict_fn: (variables, batch) -> generated tokens, int [B, T].
    mask_coder: file of the VQ-VAE that decodes masks.
    tokenizer: tokenizer of the answers, see text/tokenizers.py.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    mask_coder: str,
    tokenizer: tokenizers.Spec = "bytes",
  ):
    self._tokenizer = evaluations.tokenizer(tokenizer, batches.context)
    self._coder = mask_codes.load(mask_coder, "mask_coder")

    def outputs(variables: Variables, batch: Batch) -> dict[str, Any]:
      return {
        "sample": predict_fn(variables, batch),
        "runs": batch["mask_runs"],
        "size": batch["mask_size"],
      }

    self._outputs = batches.collect(outputs)

  def run(self, variables: Variables, step: int) -> dict[str, Any]:
    columns = self._outputs(variables)
    overlaps, num_invalid = [], 0
    for ids, runs, size in zip(
      *(columns[x] for x in ("sample", "runs", "size"))
    ):
      height, width = size.tolist()
      right = coco_masks.of_runs(runs, (height, width))
      ends = np.flatnonzero(ids == self._tokenizer.eos_id)
      text = self._tokenizer.spell(ids[: ends[0]] if ends.size else ids)
      found, num_without = mask_codes.decoded(self._coder, text, right.shape)
      is_invalid = num_without > 0 or not found.any()
      num_invalid += is_invalid
      overlaps.append(0.0 if is_invalid else mask_codes.iou(found, right))
    return {
      "miou": float(np.mean(overlaps)),
      "invalid": num_invalid / len(overlaps),
      "num_examples": float(len(overlaps)),
    }
