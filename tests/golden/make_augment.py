"""Makes augment.npz: colours of a picture by torchvision, and timm's policies.

  python tests/golden/make_augment.py

Needs torchvision, timm and Pillow; tests/pp/test_ops_augment.py reads it.
"""

import inspect
import pathlib
import re

import numpy as np

GOLDEN = pathlib.Path(__file__).parent
NEEDS = ("timm", "torchvision")
FACTORS = (0.7, 1.0, 1.25)
SIGMAS = (0.5, 1.0, 2.0)
TURNS = (-0.4, -0.1, 0.0, 0.1, 0.25)  # Shifts of the hue.


def picture(height: int = 24, width: int = 30) -> np.ndarray:
  """Smooth colours with some noise, uint8 [H, W, 3]."""
  rng = np.random.RandomState(0)
  y, x = np.mgrid[:height, :width] / 10
  waves = [np.sin(x + c) * np.cos(y * (c + 1)) for c in range(3)]
  values = 128 + 100 * np.stack(waves, -1) + rng.normal(size=(height, width, 3))
  return np.clip(values, 0, 255).astype(np.uint8)


def write(golden: pathlib.Path = GOLDEN) -> None:
  import torch
  from PIL import Image, ImageFilter, ImageOps
  from timm.data import auto_augment
  from torchvision.transforms.v2 import functional

  image = torch.from_numpy(picture()).permute(2, 0, 1)
  pillow = Image.fromarray(picture())
  arrays = {}
  for name in ("brightness", "contrast", "saturation"):
    for factor in FACTORS:
      adjust = getattr(functional, f"adjust_{name}")
      changed = adjust(image, factor).permute(1, 2, 0).numpy()
      arrays[f"{name}/{factor}"] = changed
  for sigma in SIGMAS:
    blurred = functional.gaussian_blur(image.float(), [13, 13], [sigma, sigma])
    arrays[f"blur/{sigma}"] = blurred.permute(1, 2, 0).numpy()
    pil = pillow.filter(ImageFilter.GaussianBlur(sigma))
    arrays[f"pillow_blur/{sigma}"] = np.asarray(pil)
    mirrored = functional.gaussian_blur(image, [9, 9], [sigma, sigma])
    arrays[f"mirrored_blur/{sigma}"] = mirrored.permute(1, 2, 0).numpy()
  for turns in TURNS:
    changed = functional.adjust_hue(image, turns).permute(1, 2, 0).numpy()
    arrays[f"hue/{turns}"] = changed
  arrays["grey"] = np.asarray(ImageOps.grayscale(pillow))
  arrays["solarize"] = np.asarray(ImageOps.solarize(pillow, 128))
  source = inspect.getsource(auto_augment.auto_augment_policy_v0)
  found = re.findall(r"\('(\w+)', ([\d.]+), (\d+)\)", source)
  arrays["policies"] = np.array([" ".join(words) for words in found])
  np.savez_compressed(golden / "augment.npz", **arrays)


if __name__ == "__main__":
  write()
