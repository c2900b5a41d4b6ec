"""Masks of COCO's annotations: polygons and run-length codes.

Runs go down the columns and begin with zeros. They are given as a list of
lengths, or as pycocotools' text: each character has 5 bits of a number, lowest
bits first, and from the fourth number on, each is the difference to the one two
places before.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bigtrain.config.errors import DataError


def decode(value: Any, size: tuple[int, int], where: Any) -> np.ndarray:
  """Returns a mask, bool [height, width].

  Args:
    value: polygons, [[x, y, x, y, ...], ...], or dict(size=..., counts=...).
    size: height and width of the picture.
    where: place of the annotation, for messages.
  """
  if isinstance(value, Mapping) and "counts" in value:
    height, width = value.get("size", size)
    counts = value["counts"]
    if isinstance(counts, str | bytes):
      counts = _counts(counts)
    if sum(counts) != height * width or (height, width) != tuple(size):
      raise DataError(
        f"{where}: a mask of {sum(counts)} pixels: expected {size[0]} x "
        f"{size[1]}."
      )
    ones = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return ones.reshape(width, height).T
  if isinstance(value, list) and value and all(map(_is_polygon, value)):
    mask = np.zeros(size, bool)
    for polygon in value:
      mask |= _inside(np.reshape(np.asarray(polygon, float), (-1, 2)), size)
    return mask
  raise DataError(
    f"{where}: segmentation: expected polygons or counts, got {value!r:.80}."
  )


def runs(mask: np.ndarray) -> np.ndarray:
  """The run lengths of a mask, int32. Trailing zeros do not matter."""
  flat = np.concatenate([[False], mask.T.reshape(-1)])
  starts = np.flatnonzero(np.diff(flat))
  return np.diff([0, *starts, mask.size]).astype(np.int32)


def of_runs(runs: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """The mask, bool [height, width], of run lengths."""
  return decode({"counts": runs.tolist()}, size, "a mask")


def _is_polygon(value: Any) -> bool:
  return isinstance(value, list) and len(value) >= 6 and len(value) % 2 == 0


def _counts(text: str | bytes) -> list[int]:
  codes = text.encode() if isinstance(text, str) else text
  result: list[int] = []
  at = 0
  while at < len(codes):
    number = shift = 0
    while True:
      code = codes[at] - 48
      number |= (code & 31) << shift
      shift, at = shift + 5, at + 1
      if not code & 32:
        break
    if code & 16:
      number -= 1 << shift  # It is negative.
    result.append(number + (result[-2] if len(result) > 2 else 0))
  return result


def _inside(points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """The pixels whose centres are inside a polygon of points (x, y)."""
  height, width = size
  x1, y1 = points.T
  x2, y2 = np.roll(x1, -1), np.roll(y1, -1)
  centers = np.arange(height)[:, None] + 0.5
  crosses = (y1 <= centers) != (y2 <= centers)  # [height, edges].
  with np.errstate(divide="ignore", invalid="ignore"):
    x = x1 + (centers - y1) * (x2 - x1) / (y2 - y1)
  # A pixel is inside if an odd number of edges is to the left of its centre.
  x = np.clip(np.where(crosses, x, 0.0), 0, width)
  first = np.ceil(x - 0.5).astype(int)
  changes = np.zeros((height, width + 1), int)
  rows, edges = np.nonzero(crosses)
  np.add.at(changes, (rows, first[rows, edges]), 1)
  return np.cumsum(changes, axis=1)[:, :width] % 2 == 1
