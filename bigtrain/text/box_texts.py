"""Boxes in texts, in PaliGemma's format (Beyer et al. 2024, arXiv 2407.07726).

  <loc0341><loc0085><loc0938><loc0426> cat ; <loc...> dog

A box has its top, left, bottom and right edges, each as round(1023 x) of its
place x in the picture, from 0 to 1.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_LARGEST = 1023
_BOX = re.compile(r"<loc(\d{4})>" * 4)


class Box(NamedTuple):
  """A box in shares of the picture's height and width."""

  top: float
  left: float
  bottom: float
  right: float
  label: str = ""


def spell(edges: Sequence[float]) -> str:
  """The text of (top, left, bottom, right), each from 0 to 1."""
  places = [min(max(round(x * _LARGEST), 0), _LARGEST) for x in edges]
  return "".join(f"<loc{place:04d}>" for place in places)


def read(text: str) -> list[Box]:
  """Returns the boxes of a text; what is no box is left out.

  The label of a box is the text up to the next ";" or box.
  """
  result = []
  matches = [*_BOX.finditer(text)]
  ends = [match.start() for match in matches[1:]] + [len(text)]
  for match, end in zip(matches, ends):
    top, left, bottom, right = (int(x) / _LARGEST for x in match.groups())
    label = text[match.end() : end].split(";")[0].split("<")[0].strip()
    result.append(Box(top, left, bottom, right, label))
  return result


def without(text: str) -> str:
  """The text without its boxes; their labels stay."""
  return _BOX.sub("", text)


def iou(a: Box, b: Box) -> float:
  """Intersection over union of two boxes; 0 if both are empty."""
  height = max(0.0, min(a.bottom, b.bottom) - max(a.top, b.top))
  width = max(0.0, min(a.right, b.right) - max(a.left, b.left))
  shared = height * width
  union = _area(a) + _area(b) - shared
  return shared / union if union > 0 else 0.0


def _area(box: Box) -> float:
  return max(0.0, box.bottom - box.top) * max(0.0, box.right - box.left)
