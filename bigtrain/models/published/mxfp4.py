"""Experts' matrices in MXFP4, as gpt-oss is published.

A byte has two floats of 4 bits, the first in the low bits. 32 floats along the
inputs share a power of two, whose exponent is stored with a bias of 127.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

# Endings of the two arrays that make up a matrix.
_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])  # By the four bits.


class Matrices:
  """Matrices (E, inputs, outputs) of which only what is read is decoded.

  Args:
    blocks: uint8 (E, outputs, inputs / 32, 16).
    scales: uint8 (E, outputs, inputs / 32).
  """

  dtype = np.dtype(ml_dtypes.bfloat16)  # Holds all values exactly.

  def __init__(self, blocks: Any, scales: Any):
    self._blocks, self._scales = blocks, scales
    E, outputs, groups, _ = blocks.shape
    self.shape = (E, 32 * groups, outputs)

  def __getitem__(self, index: Any) -> Any:
    """An array; for [..., outputs] these matrices with fewer outputs."""
    if index[0] is Ellipsis:
      return Matrices(self._blocks[:, index[1]], self._scales[:, index[1]])
    experts, inputs, outputs = index
    packed = np.asarray(self._blocks[experts, outputs])
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1)
    exponents = self._scales[experts, outputs].astype(np.int32) - 127
    values = np.ldexp(_VALUES[nibbles], exponents[..., None, None])
    matrices = values.reshape(*packed.shape[:2], -1)
    return matrices[..., inputs].swapaxes(-1, -2).astype(self.dtype)

  def reshape(self, shape: tuple[int, ...]) -> "Matrices":
    assert tuple(shape) == self.shape, shape
    return self


def joined(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Replaces each pair of blocks and scales by the matrices."""
  result = dict(flat)
  for name, blocks in flat.items():
    matrices = name.removesuffix(_BLOCKS)
    scales = result.get(matrices + _SCALES)
    if matrices != name and scales is not None:
      result[matrices] = Matrices(blocks, scales)
      del result[name], result[matrices + _SCALES]
  return result
