"""The parts of torchvision that transformers' processors need, by torch.

torchvision requires another torch than the other scripts. Its resize of bytes
is torch.nn.functional.interpolate, and its normalize is two operations. This
module puts them into transformers while it imports a processor.
"""

import enum
import importlib
import sys
import types

import torch
from transformers import image_processing_backends


class InterpolationMode(enum.Enum):
  BILINEAR = "bilinear"
  BICUBIC = "bicubic"
  LANCZOS = "lanczos"


def resize(image, size, interpolation, antialias):
  if tuple(image.shape[-2:]) == tuple(size):
    return image
  batch = image if image.ndim == 4 else image[None]
  result = torch.nn.functional.interpolate(
    batch,
    size=tuple(size),
    mode=interpolation.value,
    align_corners=False,
    antialias=antialias,
  )
  return result.reshape(*image.shape[:-2], *size)


def normalize(image, mean, std, inplace):
  del inplace
  mean, std = (torch.as_tensor(x).view(-1, 1, 1) for x in (mean, std))
  return image.sub(mean).div(std)


FUNCTIONAL = types.ModuleType("torchvision.transforms.v2.functional")
FUNCTIONAL.InterpolationMode = InterpolationMode
FUNCTIONAL.resize, FUNCTIONAL.normalize = resize, normalize
# For images with three channels.
FUNCTIONAL.grayscale_to_rgb = lambda image: image


def imported(package, module):
  """A module of transformers.models that imports torchvision."""
  names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
  modules = {name: types.ModuleType(name) for name in names}
  for stand_in in modules.values():
    stand_in.__path__ = []
  modules[names[-1]].functional = FUNCTIONAL
  modules[FUNCTIONAL.__name__] = FUNCTIONAL
  sys.modules.update(modules)
  image_processing_backends.tvF = FUNCTIONAL
  image_processing_backends.pil_torch_interpolation_mapping = {
    2: InterpolationMode.BILINEAR,
    3: InterpolationMode.BICUBIC,
  }
  try:
    return importlib.import_module(f"transformers.models.{package}.{module}")
  finally:
    for name in modules:
      del sys.modules[name]
