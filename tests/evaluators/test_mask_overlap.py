"""Overlap of generated masks with the right ones."""

import numpy as np
import pytest
from support import mask_weights
from tiny import evaluating

from bigtrain.config.errors import ConfigError
from bigtrain.evaluators import mask_overlap
from bigtrain.pp import mask_codes
from bigtrain.text import box_texts, coco_masks, mask_texts, tokenizers

BYTES = tokenizers.get("bytes")
SIZE = (20, 30)
TEXT = mask_texts.spell(box_texts.Box(0.1, 0.2, 0.9, 0.8, "cat"), [5] * 16)


@pytest.fixture
def weights(tmp_path):
  path = str(tmp_path / "vae.npz")
  np.savez(path, **mask_weights.arrays())
  return path


def test_masks_of_answers_are_compared_in_pixels(weights):
  found, _ = mask_codes.decoded(mask_codes.load(weights, ""), TEXT, SIZE)
  assert 20 < found.sum() < found.size - 20
  half = found.copy()
  half[10:] = False
  # The same; half of it; something else; codes without an end; no box.
  rights = [found, half, ~found, found, found]
  texts = [TEXT, TEXT, TEXT, TEXT.replace("<seg005>", "", 1), "a cat"]
  sample = np.zeros((5, 250), np.int32)
  for row, text in zip(sample, texts):
    ids = [*BYTES.encode(text), BYTES.eos_id, *BYTES.encode("<loc")]
    row[: len(ids)] = ids
  runs = [coco_masks.runs(mask) for mask in rights]
  padded = np.zeros((5, max(map(len, runs)) + 3), np.int32)
  for row, own in zip(padded, runs):
    row[: len(own)] = own
  arrays = dict(
    sample=sample, mask_runs=padded, mask_size=np.tile(np.int32(SIZE), (5, 1))
  )
  evaluator = evaluating.build(
    "mask_overlap",
    lambda variables, batch: batch["sample"],
    evaluating.context(),
    data=dict(type="arrays", arrays=arrays),
    mask_coder=weights,
  )
  share = half.sum() / found.sum()
  assert evaluator.run({}, 1) == {
    "miou": pytest.approx((1 + share) / 5),
    "invalid": pytest.approx(2 / 5),
    "num_examples": 5.0,
  }


def test_weights_are_checked_at_the_start():
  with pytest.raises(
    ConfigError, match="evals.seg.mask_coder: expected the file"
  ):
    mask_overlap.check({}, evaluating.context(), "evals.seg")
  with pytest.raises(
    ConfigError, match=r"evals.seg.mask_coder='no.npz': cannot"
  ):
    mask_overlap.check(
      dict(mask_coder="no.npz"), evaluating.context(), "evals.seg"
    )
