"""Masks as 16 codes of a VQ-VAE, for PaliGemma's <seg000> to <seg127>.

The VQ-VAE (Ning et al. 2023, arXiv 2301.02229) sees a mask in 64 x 64 pixels,
from -1 to 1, and has a code for each square of 16 x 16. Its published weights,
vae-oid.npz, have PyTorch's names and axes:

- encoder.0, 2, 4 and 6, convolutions of stride 2; encoder.8 and 9, blocks;
  encoder.10, a convolution to the width of the codes; _vq_vae._embedding.
- decoder.0, a convolution; decoder.2 and 3, blocks; decoder.4, 6, 8 and 10,
  transposed convolutions of stride 2; decoder.12, a convolution to one channel.

A block adds convolutions net.0, net.2 and net.4 to its input. ReLU follows
every convolution except the last of a block, of the encoder and of the decoder.

Axes: N masks, H height, W width, C and D channels, K width of a code; O output
and I input pixels of a side.
"""

import functools
import io
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np

from bigtrain.config.errors import ConfigError
from bigtrain.files import paths
from bigtrain.pp import pillow
from bigtrain.text import box_texts, mask_texts

SIDE = 64  # Of a mask, in pixels.
_CODES_A_SIDE = 4
_CODEBOOK = "_vq_vae._embedding"
_STRIDED = ("encoder.0", "encoder.2", "encoder.4", "encoder.6")
_TRANSPOSED = ("decoder.4", "decoder.6", "decoder.8", "decoder.10")


class Coder:
  """Encodes and decodes masks.

  Args:
    arrays: the weights, by name.
  """

  def __init__(self, arrays: Mapping[str, np.ndarray]):
    self._arrays = {
      name: np.asarray(x, np.float32) for name, x in arrays.items()
    }

  def encode(self, mask_HW: np.ndarray, box: box_texts.Box) -> list[int]:
    """Returns the codes of the part of a mask that is inside a box."""
    H, W = mask_HW.shape
    edges = (box.top * H, box.left * W, box.bottom * H, box.right * W)
    top, left, bottom, right = (int(np.round(x)) for x in edges)
    # A box of a thin object may have no whole pixel.
    top, left = min(max(top, 0), H - 1), min(max(left, 0), W - 1)
    bottom, right = max(bottom, top + 1), max(right, left + 1)
    inside = mask_HW[top:bottom, left:right].astype(np.float32)
    return self.codes(resized(inside, (SIDE, SIDE))[None])[0].tolist()

  def codes(self, masks_NHW: np.ndarray) -> np.ndarray:
    """Codes, int [N, 16], of masks with values 0 to 1, [N, 64, 64]."""
    x = 2 * np.asarray(masks_NHW, np.float32)[..., None] - 1
    for name in _STRIDED:
      x = _relu(self._conv(x, name, stride=2))
    for name in ("encoder.8.net", "encoder.9.net"):
      x = self._block(x, name)
    x = self._conv(x, "encoder.10")
    table_VK = self._arrays[_CODEBOOK]
    flat_MK = x.reshape(-1, table_VK.shape[1])
    distances_MV = np.sum(table_VK**2, 1) - 2 * flat_MK @ table_VK.T
    return distances_MV.argmin(1).reshape(len(x), mask_texts.NUM_CODES)

  def decode(self, codes_NT: np.ndarray) -> np.ndarray:
    """Masks [N, 64, 64] of codes, int [N, 16]; values above 0 are inside."""
    x = self._arrays[_CODEBOOK][np.asarray(codes_NT)]
    x = x.reshape(len(x), _CODES_A_SIDE, _CODES_A_SIDE, x.shape[-1])
    x = _relu(self._conv(x, "decoder.0"))
    for name in ("decoder.2.net", "decoder.3.net"):
      x = self._block(x, name)
    for name in _TRANSPOSED:
      x = _relu(self._transposed(x, name))
    return self._conv(x, "decoder.12")[..., 0]

  def _block(self, x: np.ndarray, name: str) -> np.ndarray:
    y = _relu(self._conv(x, f"{name}.0"))
    y = _relu(self._conv(y, f"{name}.2"))
    return x + self._conv(y, f"{name}.4")

  def _conv(self, x: np.ndarray, name: str, stride: int = 1) -> np.ndarray:
    kernel = self._arrays[f"{name}.weight"]  # [D, C, height, width].
    total = max(kernel.shape[-1] - stride, 0)
    pad = (total // 2, total - total // 2)
    bias = self._arrays[f"{name}.bias"]
    return _convolved(x, kernel.transpose(2, 3, 1, 0), pad, stride) + bias

  def _transposed(self, x: np.ndarray, name: str) -> np.ndarray:
    """A transposed convolution that doubles the sides."""
    kernel = self._arrays[f"{name}.weight"]  # [C, D, height, width].
    N, H, W, C = x.shape
    apart = np.zeros((N, 2 * H - 1, 2 * W - 1, C), np.float32)
    apart[:, ::2, ::2] = x
    flipped = kernel[:, :, ::-1, ::-1].transpose(2, 3, 0, 1)
    size = kernel.shape[-1] // 2
    bias = self._arrays[f"{name}.bias"]
    return _convolved(apart, flipped, (size, size), 1) + bias


def _convolved(
  x: np.ndarray, kernel_HWCD: np.ndarray, pad: tuple[int, int], stride: int
) -> np.ndarray:
  padded = np.pad(x, ((0, 0), pad, pad, (0, 0)))
  height, width, _, channels = kernel_HWCD.shape
  windows = np.lib.stride_tricks.sliding_window_view(
    padded, (height, width), axis=(1, 2)
  )[:, ::stride, ::stride]
  N, H, W = windows.shape[:3]
  columns = windows.transpose(0, 1, 2, 4, 5, 3).reshape(N * H * W, -1)
  result = columns @ kernel_HWCD.reshape(-1, channels)
  return result.reshape(N, H, W, channels)


def _relu(x: np.ndarray) -> np.ndarray:
  return np.maximum(x, 0)


def resized(mask_HW: np.ndarray, size: Sequence[int]) -> np.ndarray:
  """Resizes values bilinearly, averaging them where the size shrinks."""
  rows_OI, columns_OI = (
    pillow.weights(old, new, "bilinear").astype(np.float32)
    for old, new in zip(mask_HW.shape, size)
  )
  return rows_OI @ mask_HW @ columns_OI.T


def paste(mask_HW: np.ndarray, box: box_texts.Box, into: np.ndarray) -> None:
  """Sets the pixels of `into`, bool [height, width], that a mask has in a box.

  Args:
    mask_HW: as `Coder.decode` returns it, without N.
  """
  H, W = into.shape
  edges = (box.top * H, box.left * W, box.bottom * H, box.right * W)
  top, left, bottom, right = map(int, edges)
  if bottom > top and right > left:
    inside = resized(mask_HW, (bottom - top, right - left)) > 0
    into[top:bottom, left:right] |= inside


def decoded(
  coder: Coder, text: str, size: tuple[int, int]
) -> tuple[np.ndarray, int]:
  """The union of a text's masks, bool [H, W], and the number without codes."""
  result = np.zeros(size, bool)
  masks = mask_texts.read(text)
  valid = [mask for mask in masks if mask is not None]
  if valid:
    values = coder.decode(np.asarray([mask.codes for mask in valid]))
    for mask, value in zip(valid, values):
      paste(value, mask.box, result)
  return result, len(masks) - len(valid)


def iou(first: np.ndarray, second: np.ndarray) -> float:
  """Intersection over union of two masks; 1 if both are empty."""
  union = np.count_nonzero(first | second)
  return np.count_nonzero(first & second) / union if union else 1.0


@functools.cache
def load(path: str, key: str) -> Coder:
  """Returns the coder with the weights of an .npz file."""
  where = paths.absolute(path)
  try:
    with np.load(io.BytesIO(paths.read_bytes(where))) as file:
      arrays = {name: file[name] for name in file.files}
  except (OSError, ValueError, zipfile.BadZipFile) as e:
    raise ConfigError(f"{key}={path!r}: cannot be read: {e}.") from e
  needed = [_CODEBOOK]
  convs = [*_STRIDED, *_TRANSPOSED, "encoder.10", "decoder.0", "decoder.12"]
  for block in ("encoder.8", "encoder.9", "decoder.2", "decoder.3"):
    convs += [f"{block}.net.{i}" for i in (0, 2, 4)]
  needed += [f"{name}.{x}" for name in convs for x in ("weight", "bias")]
  missing = [name for name in needed if name not in arrays]
  if missing:
    raise ConfigError(
      f"{key}={path!r}: expected the VQ-VAE of PaliGemma's masks, "
      f"vae-oid.npz; it has no {missing[0]}."
    )
  return Coder(arrays)
