"""Repairs of arrays in parameter files: dtypes, names, position embeddings.

Axes: P patches, D model width.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bigtrain.config.errors import check_choice

# {release: regular expressions in its names, and what is ours in their place}.
# Each is applied to the result of those above it.
_RENAMES: Mapping[str, Mapping[str, str]] = {
  # BiT, of big_vision and of the paper.
  "bit": {
    r"^resnet/": "",
    r"^root_block/(standardized_conv2d(_\d+)?|conv_root)/": "conv_root/",
    r"^(norm-pre-head|group_norm)/": "gn_final/",
    r"^head/conv2d/": "head/",
    r"^block(\d)/unit0*(\d+)/": r"stage\1_block\2/",
    r"/a/proj/standardized_conv2d(_\d+)?/": "/conv_proj/",
    r"/([abc])/standardized_conv2d(_\d+)?/": r"/conv\1/",
    r"/([abc])/group_norm/": r"/gn\1/",
    r"/(conv|gn)a/": r"/\g<1>1/",
    r"/(conv|gn)b/": r"/\g<1>2/",
    r"/(conv|gn)c/": r"/\g<1>3/",
    r"/gamma$": "/scale",
    r"/beta$": "/bias",
  },
  # MLP-Mixer, of the paper's repository.
  "mixer": {
    r"^MixerBlock_": "Transformer/encoderblock_",
    r"/channel_mixing/": "/MlpBlock_0/",
    r"^pre_head_layer_norm/": "Transformer/encoder_norm/",
    r"^stem/": "embedding/",
  },
}
# Values of config.model_init.convert.posemb_align.
POSEMB_ALIGN = ("centers", "corners", "bicubic", "antialiased_bicubic")


class Remark(NamedTuple):
  """Reason why an array is not loaded as it is, in place of the array."""

  # Of arrays in the file: "merged" with another one, "ignored" because nothing
  # needs it, "dropped" on purpose, "unused". Of the model's parameters:
  # "missing" in the file, or "reshaped" or "retyped" there.
  status: str
  text: str  # Names of the arrays, and the reason.


def describe(array: Any) -> str:
  """An array's dtype and shape, such as "float32[3,4]"."""
  sizes = ",".join(map(str, array.shape))
  return f"{np.dtype(array.dtype).name}[{sizes}]"


def normalise(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Restores bfloat16 and removes prefixes of train states from the names.

  numpy's file format saves bfloat16 as two untyped bytes ("V2").
  """
  values = {
    name: x.view(ml_dtypes.bfloat16) if x.dtype == "V2" else x
    for name, x in flat.items()
  }
  for prefix in ("opt/target/", "params/"):
    if any(name.startswith(prefix) for name in values):
      return {name.removeprefix(prefix): v for name, v in values.items()}
  return values


def renamed(release: str, name: str) -> str:
  """Our name of an array that a release of another program calls `name`."""
  for pattern, ours in _RENAMES[release].items():
    name = re.sub(pattern, ours, name)
  return name


def below(prefix: str, flat: Mapping[str, Any]) -> dict[str, Any]:
  """The entries whose names start with a prefix, without it."""
  names = [name for name in flat if name.startswith(prefix)]
  return {name.removeprefix(prefix): flat[name] for name in names}


def resample_posemb(
  posemb_1PD: np.ndarray,
  old: tuple[int, int],
  new: tuple[int, int],
  align: str = "centers",
) -> np.ndarray:
  """Resamples position embeddings to another grid of patches.

  Args:
    align: one of POSEMB_ALIGN. "centers" is bilinear: an embedding keeps its
      place in the image, and smaller grids are antialiased. "corners" is
      bilinear too, but the corners keep their places, as in big_vision
      (scipy.ndimage.zoom of order 1). "bicubic" is as in DINOv2 (torch's
      interpolate), and "antialiased_bicubic" as in timm.
  """
  key = "config.model_init.convert.posemb_align"
  check_choice(key, align, POSEMB_ALIGN)
  if tuple(old) == tuple(new):
    return posemb_1PD
  D = posemb_1PD.shape[-1]
  if align in ("corners", "bicubic"):
    weights = _between_corners if align == "corners" else _cubic
    grid64 = posemb_1PD.astype(np.float64).reshape(*old, D)
    rows, columns = (weights(n, m) for n, m in zip(old, new))
    grid64 = np.einsum("ri,ijd,cj->rcd", rows, grid64, columns)
    return grid64.reshape(1, -1, D).astype(posemb_1PD.dtype)
  grid = jnp.asarray(posemb_1PD, jnp.float32).reshape(*old, D)
  method = "bilinear" if align == "centers" else "bicubic"
  grid = jax.image.resize(grid, (*new, D), method, antialias=True)
  return np.asarray(grid).reshape(1, -1, D).astype(posemb_1PD.dtype)


def _between_corners(old: int, new: int) -> np.ndarray:
  """Weights [new, old] of linear interpolation between the ends of a line."""
  places = np.linspace(0, old - 1, new)
  return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))


def _cubic(old: int, new: int) -> np.ndarray:
  """Weights [new, old] of cubic convolution with torch's coefficient."""
  a = -0.75
  places = (np.arange(new) + 0.5) * old / new - 0.5
  result = np.zeros((new, old))
  for k in range(-1, 3):
    index = np.floor(places) + k
    x = np.abs(places - index)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    # Beyond the edge, the embeddings at the edge are repeated.
    index = np.clip(index, 0, old - 1).astype(int)
    np.add.at(result, (np.arange(new), index), np.where(x <= 1, near, far))
  return result


def square_grid(num_patches: int) -> tuple[int, int] | None:
  """The grid of a square number of patches; None for other numbers."""
  side = math.isqrt(num_patches)
  return (side, side) if side * side == num_patches else None
