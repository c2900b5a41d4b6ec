"""Metrics of boxes: mean IoU, and COCO's average precision.

Boxes with the same label in the same picture are matched one to one: in order
of their scores, each predicted box gets the unmatched reference box with the
largest IoU.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bigtrain.text.box_texts import Box, iou

# COCO's thresholds of the IoU, and its points of the recall.
THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)
# COCO counts an IoU as equal to a threshold if they differ only by rounding.
_EPSILON = 1e-10

Boxes = Sequence[Box]


class _Found(NamedTuple):
  """The predicted boxes of a label, over all pictures."""

  score: np.ndarray  # [boxes].
  is_right: np.ndarray  # bool [boxes], whether a reference has matched.


def mean_iou(samples: Sequence[Boxes], references: Sequence[Boxes]) -> float:
  """Mean IoU of the reference boxes with their matches; 0 if unmatched.

  NaN if there is no reference box.
  """
  values: list[float] = []
  for predicted, wanted in zip(samples, references):
    matches = {
      match: overlap
      for match, overlap in _matches(predicted, wanted, 0.0)
      if match is not None
    }
    values += [matches.get(i, 0.0) for i in range(len(wanted))]
  return float(np.mean(values)) if values else float("nan")


def average_precision(
  samples: Sequence[Boxes],
  references: Sequence[Boxes],
  threshold: float,
  scores: Sequence[Sequence[float]] | None = None,
) -> float:
  """Mean of the labels' average precisions at a threshold of the IoU.

  Computed as in pycocotools: precision, made monotonic, is averaged over 101
  values of recall. Labels without a reference do not count. Boxes with equal
  scores count together; without `scores`, all scores are equal.

  Args:
    samples: predicted boxes of each picture.
    references: reference boxes of each picture.
    threshold: smallest IoU of a match.
    scores: confidences of the predicted boxes.
  """
  wanted = collections.Counter(box.label for x in references for box in x)
  found = _by_label(samples, references, threshold, scores)
  values = [
    _area_below(found[label], number) if label in found else 0.0
    for label, number in wanted.items()
  ]
  return float(np.mean(values)) if values else float("nan")


def _by_label(
  samples: Sequence[Boxes],
  references: Sequence[Boxes],
  threshold: float,
  scores: Sequence[Sequence[float]] | None,
) -> dict[str, _Found]:
  found = collections.defaultdict[str, list[tuple[float, bool]]](list)
  for i, (predicted, wanted) in enumerate(zip(samples, references)):
    score = np.zeros(len(predicted)) if scores is None else np.array(scores[i])
    order = np.argsort(-score, kind="stable")
    in_order = [predicted[j] for j in order]
    matches = _matches(in_order, wanted, min(threshold, 1 - _EPSILON))
    for j, box, (match, _) in zip(order, in_order, matches):
      found[box.label].append((float(score[j]), match is not None))
  result = {}
  for label, pairs in found.items():
    score, is_right = map(np.array, zip(*pairs))
    result[label] = _Found(score, is_right)
  return result


def _matches(
  predicted: Boxes, wanted: Boxes, threshold: float
) -> list[tuple[int | None, float]]:
  """(number of the matched reference or None, IoU) of each predicted box."""
  left = set(range(len(wanted)))
  result: list[tuple[int | None, float]] = []
  for box in predicted:
    overlaps = [
      (iou(box, wanted[i]), i) for i in left if wanted[i].label == box.label
    ]
    overlap, match = max(overlaps, default=(0.0, -1))
    if match >= 0 and overlap >= threshold and overlap > 0:
      left.remove(match)
      result.append((match, overlap))
    else:
      result.append((None, 0.0))
  return result


def _area_below(found: _Found, number: int) -> float:
  """The average precision of a label with `number` reference boxes."""
  order = np.argsort(-found.score, kind="stable")
  score, right = found.score[order], np.cumsum(found.is_right[order])
  # The curve has a point for each score, after all boxes that have it.
  (ends,) = np.nonzero(np.append(score[1:] != score[:-1], True))
  recall = right[ends] / number
  precision = right[ends] / (ends + 1)
  falling = np.maximum.accumulate(precision[::-1])[::-1]
  at = np.searchsorted(recall, _RECALLS, side="left")
  return float(np.append(falling, 0.0)[np.minimum(at, len(falling))].mean())
