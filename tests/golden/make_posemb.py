"""Makes posemb.npz: position embeddings resampled by torch.

  python tests/golden/make_posemb.py

DINOv2 calls interpolate without antialiasing, timm with it.
"""

import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent
OLD, NEW = (5, 4), ((7, 9), (3, 8), (2, 3))


def posemb() -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.normal(size=(1, OLD[0] * OLD[1], 3)).astype(np.float32)


def write(golden: pathlib.Path = GOLDEN) -> None:
  import torch

  grid = torch.from_numpy(posemb().reshape(1, *OLD, 3)).permute(0, 3, 1, 2)
  arrays = {}
  for new in NEW:
    for name, antialias in (("bicubic", False), ("antialiased_bicubic", True)):
      resized = torch.nn.functional.interpolate(
        grid, new, mode="bicubic", align_corners=False, antialias=antialias
      )
      flat = resized.permute(0, 2, 3, 1).reshape(1, -1, 3)
      arrays[f"{name}/{new[0]}x{new[1]}"] = flat.numpy()
  np.savez_compressed(golden / "posemb.npz", **arrays)


if __name__ == "__main__":
  write()
