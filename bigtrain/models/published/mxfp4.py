"""Experts' matrices in MXFP4, as gpt-oss is published.

A byte has two floats of 4 bits, the first in the low bits. 32 floats along the
inputs share a power of two, whose exponent is stored with a bias of 127.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bigtrain.config.errors import ConfigError

METHOD = "mxfp4"  # quantization_config.quant_method.
_BLOCK = 32  # Numbers that share a scale.
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
    self.shape = (E, _BLOCK * groups, outputs)

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


def specs(
  name: str, shape: Sequence[int]
) -> dict[str, tuple[Sequence[int], str]]:
  """{name: (shape, dtype)} of the arrays that encode experts' matrices.

  `shape`: (E, inputs, outputs).
  """
  E, inputs, outputs = shape
  if inputs % _BLOCK:
    raise ConfigError(
      f"--quantize={METHOD}: {name} has {inputs} inputs; expected a multiple "
      f"of {_BLOCK}, which share a scale."
    )
  groups = inputs // _BLOCK
  return {
    name + _BLOCKS: ((E, outputs, groups, _BLOCK // 2), "uint8"),
    name + _SCALES: ((E, outputs, groups), "uint8"),
  }


def encoded(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(blocks, scales) of matrices (E, inputs, outputs).

  The scale is the power of two of a block's largest number, over that of the
  largest float of 4 bits, 6: section 6.3 of the OCP Microscaling Formats (MX)
  Specification 1.0. Numbers are rounded to the nearest, ties to even.
  """
  E, inputs, outputs = matrices.shape
  values = np.swapaxes(matrices, -1, -2).astype(np.float32)
  values = values.reshape(E, outputs, inputs // _BLOCK, _BLOCK)
  # frexp's fraction is in [0.5, 1), so this is the floor of log2, minus 2.
  exponents = np.frexp(np.abs(values).max(axis=-1))[1] - 3
  exponents = np.clip(exponents, -127, 127)
  scaled = np.ldexp(values, -exponents[..., None])
  floats = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn)
  nibbles = floats.view(np.uint8) & 15
  blocks = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
  return blocks, (exponents + 127).astype(np.uint8)


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
