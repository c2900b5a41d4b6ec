"""Resizing as Pillow does it, to the last bit.

Pillow uses integer arithmetic: weights are multiples of 2^-22, and each of the
two passes rounds to bytes. So pixels are the same on every processor.

Axes: H height, W width, C channels; O output rows, I input rows.
"""

import functools
import math

import numpy as np

_BITS = 22


def _bilinear(x: np.ndarray) -> np.ndarray:
  return np.maximum(0.0, 1.0 - np.abs(x))


def _bicubic(x: np.ndarray) -> np.ndarray:
  a, x = -0.5, np.abs(x)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = (((x - 5) * x + 8) * x - 4) * a
  return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
  return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


# {method: (function, how far it reaches)}.
_FILTERS = {
  "bilinear": (_bilinear, 1.0),
  "bicubic": (_bicubic, 2.0),
  "lanczos": (_lanczos, 3.0),
}


def resize(
  image_HWC: np.ndarray, size: tuple[int, int], method: str
) -> np.ndarray:
  """Returns the image resized, as uint8."""
  new = [int(n) for n in size]
  image = np.asarray(image_HWC)
  rows_lost, columns_lost = (old - n for old, n in zip(image.shape, new))
  # Since version 13 it begins with the height if that leaves less to do.
  height_first = rows_lost > 0 and rows_lost > 2 * columns_lost
  for axis in (0, 1) if height_first else (1, 0):
    if image.shape[axis] != new[axis]:
      moved = image.swapaxes(0, axis)
      image = _first_axis(moved, new[axis], method).swapaxes(0, axis)
  return np.ascontiguousarray(image)


def _first_axis(image: np.ndarray, size: int, method: str) -> np.ndarray:
  weights_OI = _weights(image.shape[0], size, method)
  rows = image.reshape(len(image), -1).astype(np.float64)
  # Exact: the sums are whole numbers below 2^53.
  sums = (weights_OI @ rows).astype(np.int64) + (1 << (_BITS - 1))
  values = np.clip(sums >> _BITS, 0, 255).astype(np.uint8)
  return values.reshape(size, *image.shape[1:])


def _weights(old: int, new: int, method: str) -> np.ndarray:
  """Weights as whole numbers, float64 [new, old]."""
  exact = weights(old, new, method) * (1 << _BITS)
  return np.trunc(exact + np.copysign(0.5, exact))


@functools.lru_cache(maxsize=64)
def weights(old: int, new: int, method: str) -> np.ndarray:
  """Weights of the old pixels of a side in each new one, float64 [new, old]."""
  function, reach = _FILTERS[method]
  scale = old / new
  widening = max(scale, 1.0)
  support = reach * widening
  result = np.zeros((new, old))
  for i in range(new):
    center = (i + 0.5) * scale
    first = max(math.trunc(center - support + 0.5), 0)
    last = min(math.trunc(center + support + 0.5), old)
    at = np.arange(first, last)
    row = function((at - center + 0.5) / widening)
    result[i, first:last] = row / np.sum(row)
  return result
