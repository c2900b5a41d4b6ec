"""Resizing of bytes as torch and torchvision do it, to the last bit.

As in pillow.py, weights are whole numbers and both passes round to bytes. But
torch stores weights in 16 bits, and always begins with the width.

Axes: H height, W width, C channels; O output rows, I input rows.
"""

import numpy as np

from bigtrain.pp import pillow

_MAX_BITS = 22  # After the binary point of a weight.
_MAX_WEIGHT = 1 << 15


def resize(
  image_HWC: np.ndarray, size: tuple[int, int], method: str
) -> np.ndarray:
  """Returns the image resized with antialiasing, as uint8."""
  image = np.asarray(image_HWC)
  for axis in (1, 0):
    if image.shape[axis] != size[axis]:
      moved = image.swapaxes(0, axis)
      image = _first_axis(moved, int(size[axis]), method).swapaxes(0, axis)
  return np.ascontiguousarray(image)


def _first_axis(image: np.ndarray, size: int, method: str) -> np.ndarray:
  exact_OI = pillow.weights(image.shape[0], size, method)
  bits = _num_bits(float(exact_OI.max()))
  scaled_OI = exact_OI * (1 << bits)
  weights_OI = np.trunc(scaled_OI + np.copysign(0.5, scaled_OI))
  rows = image.reshape(len(image), -1).astype(np.float64)
  # Exact: the sums are whole numbers below 2^53.
  sums = (weights_OI @ rows).astype(np.int64) + (1 << (bits - 1))
  values = np.clip(sums >> bits, 0, 255).astype(np.uint8)
  return values.reshape(size, *image.shape[1:])


def _num_bits(largest: float) -> int:
  """The most bits with which the largest weight fits into 16."""
  for bits in range(_MAX_BITS):
    if int(0.5 + largest * (1 << (bits + 1))) >= _MAX_WEIGHT:
      return bits
  return _MAX_BITS
