"""Matrices in FP8 with a scale for each block, as DeepSeek V3 is published.

A float8 matrix (outputs, inputs) comes with a float32 array that has a factor
for each block of 128 x 128 numbers. The last blocks may be smaller.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bigtrain.config.errors import ConfigError

METHOD = "fp8"  # quantization_config.quant_method.
BLOCK = 128
_LARGEST = 448.0  # Of float8_e4m3fn.
_SCALES = "_scale_inv"  # Ending of the array of factors.


class Matrix:
  """A matrix of which only what is read is decoded.

  It has the few methods of an array that array_files.py uses. Transposed,
  its last dimensions are the outputs.
  """

  dtype = np.dtype(np.float32)

  def __init__(self, weight: Any, scales: Any):
    self._weight, self._scales = weight, scales
    self._outputs = 0, weight.shape[0]  # The rows that are left.
    self._is_transposed = False
    self.shape: tuple[int, ...] = weight.shape

  @property
  def ndim(self) -> int:
    return len(self.shape)

  def _changed(self, shape: tuple[int, ...], **changes: Any) -> "Matrix":
    result = Matrix(self._weight, self._scales)
    result.__dict__ |= {**self.__dict__, "shape": tuple(shape), **changes}
    return result

  def swapaxes(self, first: int, second: int) -> "Matrix":
    assert {first, second} == {-1, -2} and self.ndim == 2
    shape = self.shape[1], self.shape[0]
    return self._changed(shape, _is_transposed=not self._is_transposed)

  def reshape(self, shape: tuple[int, ...]) -> "Matrix":
    assert math.prod(shape) == math.prod(self.shape), (shape, self.shape)
    return self._changed(shape)

  def __getitem__(self, index: Any) -> Any:
    """An array; for [..., outputs] the transposed matrix with fewer outputs."""
    if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
      assert self._is_transposed and self.ndim == 2
      start, stop, step = index[1].indices(self.shape[1])
      assert step == 1, index
      first = self._outputs[0]
      shape = self.shape[0], stop - start
      return self._changed(shape, _outputs=(first + start, first + stop))
    if index is Ellipsis:
      index = ()
    index = index if isinstance(index, tuple) else (index,)
    index = (*index, *[slice(None)] * (self.ndim - len(index)))
    # The first dimensions make up the rows, the others the columns.
    start, stop = self._outputs
    num_rows = self._weight.shape[1] if self._is_transposed else stop - start
    split = 1
    while math.prod(self.shape[:split]) < num_rows:
      split += 1
    rows = _range(self.shape[:split], index[0])
    columns = _range(self.shape[split:], index[split])
    if self._is_transposed:
      part = self._decoded(columns, rows).T
    else:
      part = self._decoded(rows, columns)
    part = part.reshape(
      -1 if split > 1 else len(rows),
      *self.shape[1:split],
      len(columns) // math.prod(self.shape[split + 1 :]),
      *self.shape[split + 1 :],
    )
    whole = (slice(None),)
    return part[(*whole, *index[1:split], *whole, *index[split + 1 :])]

  def _decoded(self, outputs: range, inputs: range) -> np.ndarray:
    """float32 (outputs, inputs)."""
    rows = np.asarray(outputs, int) + self._outputs[0]
    columns = np.asarray(inputs, int)
    values = np.asarray(
      self._weight[slice(*_ends(rows)), slice(*_ends(columns))]
    )
    scales = np.asarray(self._scales)[rows // BLOCK][:, columns // BLOCK]
    return values.astype(np.float32) * scales


def _range(shape: tuple[int, ...], first: slice) -> range:
  """The numbers that a slice of the first dimension selects."""
  start, stop, step = first.indices(shape[0])
  assert step == 1, first
  size = math.prod(shape[1:])
  return range(start * size, stop * size)


def _ends(numbers: np.ndarray) -> tuple[int, int]:
  return (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)


def check(
  quantisation: Mapping[str, Any], error: Callable[[str], Exception]
) -> None:
  """Refuses a quantization_config with blocks of another kind."""
  for key, expected in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
    value = quantisation.get(key, expected)
    if value != expected:
      raise error(
        f"quantization_config: {key}={value!r}: expected {expected!r} with "
        f"quant_method={METHOD!r}."
      )
  blocks = quantisation.get("weight_block_size")
  if blocks is None or list(blocks) != [BLOCK, BLOCK]:
    raise error(
      f"quantization_config: weight_block_size={blocks!r}: expected "
      f"[{BLOCK}, {BLOCK}] with quant_method={METHOD!r}."
    )


def specs(
  name: str, shape: Sequence[int]
) -> dict[str, tuple[Sequence[int], str]]:
  """{name: (shape, dtype)} of the arrays that encode a matrix."""
  blocks = [-(-size // BLOCK) for size in shape]
  return {
    name: (shape, "float8_e4m3fn"),
    name + _SCALES: (blocks, "float32"),
  }


def encoded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(float8, scales) of a matrix.

  The largest number of a block becomes the largest of float8, 448.
  """
  rows, columns = matrix.shape
  height, width = (-(-size // BLOCK) for size in matrix.shape)
  padded = np.zeros((height * BLOCK, width * BLOCK), np.float32)
  padded[:rows, :columns] = matrix
  blocks = padded.reshape(height, BLOCK, width, BLOCK)
  largest = np.abs(blocks).max(axis=(1, 3))
  scales = np.where(largest > 0, largest / np.float32(_LARGEST), 1.0)
  scales = scales.astype(np.float32)
  scaled = blocks / scales[:, None, :, None]
  # Rounding may exceed 448 by a little, and float8 has no infinity.
  scaled = np.clip(scaled, -_LARGEST, _LARGEST).reshape(padded.shape)
  return scaled[:rows, :columns].astype(ml_dtypes.float8_e4m3fn), scales


def joined(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Replaces each pair of a matrix and its scales by a Matrix."""
  result = dict(flat)
  for name, weight in flat.items():
    scales = result.pop(name + _SCALES, None)
    if scales is not None:
      expected = tuple(-(-size // BLOCK) for size in weight.shape)
      if weight.ndim != 2 or scales.shape != expected:
        raise ConfigError(
          f"{name}{_SCALES}: expected the scales {expected} of blocks of "
          f"{BLOCK} x {BLOCK}, got {scales.shape} for {weight.shape}."
        )
      result[name] = Matrix(weight, scales)
    elif "float8" in str(weight.dtype) and name.endswith(".weight"):
      raise ConfigError(
        f"{name}: {weight.dtype} without {name}{_SCALES}, which has the scales "
        "of its blocks; other formats of float8 are not read."
      )
  return result
