"""Frozen kernels in 8 or 4 bits, with one scale for each block of values.

"int8" divides a block's values by their largest absolute value into 255 steps.
"nf4" has 16 values, which are quantiles of the normal distribution, and packs
two of them in a byte (QLoRA, https://arxiv.org/abs/2305.14314).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Values with one scale, as in QLoRA. Smaller blocks are more precise, and add
# 32 / BLOCK bits a value, or 8 / BLOCK with double quantization.
BLOCK = 64
KINDS = ("int8", "nf4")

# Scales with one scale, if they are quantized as well; also as in QLoRA.
_SCALES_BLOCK = 256
# The 16 values of nf4, from appendix E of the paper.
NF4 = np.array(
  [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
  + [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
  + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634]
  + [0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
  + [0.7229568362236023, 1.0],
  np.float32,
)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("codes", "scale", "offset"),
  meta_fields=("kind", "shape", "block"),
)
@dataclasses.dataclass(frozen=True)
class Quantized:
  """An array, or a stack of arrays of the same `shape` with a leading axis."""

  codes: Any  # int8 [values], or uint8 [values / 2]; whole blocks.
  scale: Any  # float32 [blocks], or these in turn quantized.
  offset: Any  # Added to all values; None for 0.
  kind: str
  shape: tuple[int, ...]
  block: int = BLOCK

  def dequantized(self) -> jax.Array:
    """The array in float32; inside a loop over a stack, the current layer's."""
    scale = self.scale
    if isinstance(scale, Quantized):
      scale = scale.dequantized()
    if self.kind == "int8":
      values = self.codes.astype(jnp.float32) / 127
    else:
      pairs = jnp.stack([self.codes >> 4, self.codes & 15], axis=-1)
      values = jnp.take(jnp.asarray(NF4), pairs.reshape(-1).astype(jnp.int32))
    values = (values.reshape(-1, self.block) * scale[:, None]).reshape(-1)
    if self.offset is not None:
      values += self.offset
    return values[: math.prod(self.shape)].reshape(self.shape)


def quantize(
  x: jax.Array, kind: str, *, double: bool = False, stacked: int = 0
) -> Quantized:
  """Quantizes an array, or each array of a stack.

  Args:
    double: whether the scales are quantized to int8 too (double quantization).
    stacked: number of leading axes that number arrays; 0 or 1.
  """
  if stacked:
    each = functools.partial(quantize, kind=kind, double=double)
    return jax.vmap(each)(x)
  result = _quantize(x, kind, BLOCK)
  if double:
    mean = jnp.mean(result.scale)
    scale = _quantize(result.scale - mean, "int8", _SCALES_BLOCK)
    scale = dataclasses.replace(scale, offset=mean)
    result = dataclasses.replace(result, scale=scale)
  return result


def _quantize(x: jax.Array, kind: str, block: int) -> Quantized:
  values = x.astype(jnp.float32).reshape(-1)
  rows = jnp.pad(values, (0, -values.size % block)).reshape(-1, block)
  scale = jnp.max(jnp.abs(rows), axis=1)
  units = rows / jnp.where(scale == 0, 1, scale)[:, None]
  if kind == "int8":
    codes = jnp.round(127 * units).astype(jnp.int8).reshape(-1)
  else:
    middles = jnp.asarray((NF4[1:] + NF4[:-1]) / 2)
    index = jnp.searchsorted(middles, units.reshape(-1)).astype(jnp.uint8)
    codes = (index[::2] << 4) | index[1::2]
  return Quantized(codes, scale, None, kind, tuple(x.shape), block)
