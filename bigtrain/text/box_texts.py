"""Boxes in texts, in PaliGemma's format (Beyer et al. 2024, arXiv 2407.07726).

  <loc0341><loc0085><loc0938><loc0426> cat ; <loc...> dog

A box is given by its top, left, bottom and right edges. An edge at position x
of the picture, from 0 to 1, is written as round(1023 x).

Qwen3-VL writes JSON, with left, top, right and bottom from 0 to 1000:

  [{"bbox_2d": [83, 333, 416, 917], "label": "cat"}, {"bbox_2d": ...}]
"""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

_LARGEST = 1023
_BOX = re.compile(r"<loc(\d{4})>" * 4)
_LARGEST_JSON = 1000
_NUMBERS = r"\[\s*" + r"\s*,\s*".join([r"(\d+)"] * 4) + r"\s*\]"
_JSON_BOX = re.compile(
  rf'"bbox_2d"\s*:\s*{_NUMBERS}(?:\s*,\s*"label"\s*:\s*("(?:[^"\\]|\\.)*"))?'
)


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


def spell_json(boxes: Sequence[Box]) -> str:
  """The text of boxes and their labels, as Qwen3-VL writes it."""
  found = []
  for top, left, bottom, right, label in boxes:
    edges = (left, top, right, bottom)
    places = [round(min(max(x, 0.0), 1.0) * _LARGEST_JSON) for x in edges]
    found.append({"bbox_2d": places, "label": label})
  return json.dumps(found, ensure_ascii=False)


def read(text: str) -> list[Box]:
  """Returns the boxes of a text, and leaves out everything else.

  The label of a box is the text up to the next ";" or box.
  """
  if "bbox_2d" in text:
    return _read_json(text)
  return [
    box._replace(label=after.split(";")[0].split("<")[0].strip())
    for box, after in read_with_rest(text)
  ]


def read_with_rest(text: str) -> list[tuple[Box, str]]:
  """Returns boxes without labels, each with the text up to the next box."""
  result = []
  matches = [*_BOX.finditer(text)]
  ends = [match.start() for match in matches[1:]] + [len(text)]
  for match, end in zip(matches, ends):
    top, left, bottom, right = (int(x) / _LARGEST for x in match.groups())
    result.append((Box(top, left, bottom, right), text[match.end() : end]))
  return result


def _read_json(text: str) -> list[Box]:
  result = []
  for match in _JSON_BOX.finditer(text):  # Also of an answer that is cut off.
    *places, label = match.groups()
    left, top, right, bottom = (int(x) / _LARGEST_JSON for x in places)
    try:
      name = json.loads(label) if label else ""
    except ValueError:  # An escape that JSON does not have.
      name = label[1:-1]
    result.append(Box(top, left, bottom, right, name))
  return result


def without(text: str) -> str:
  """The text without its boxes, but with their labels."""
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
