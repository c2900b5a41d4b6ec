"""Makes mask_codes.npz: masks and their codes by big_vision's VQ-VAE.

  PYTHONPATH=big_vision:tests python tests/golden/make_mask_codes.py

PYTHONPATH needs a checkout of github.com/google-research/big_vision; commit
0127fb6 was used. The weights are random, those of support/mask_weights.py.
"""

import pathlib
import sys
import tempfile
import types

import numpy as np
import PIL.Image
import tensorflow as tf
from support import mask_weights

# What its evaluator imports besides; nothing of it is called.
for name in ("evaluators.common", "pp.tokenizer", "utils"):
  sys.modules[f"big_vision.{name}"] = types.ModuleType(f"big_vision.{name}")

from big_vision.evaluators.proj.paligemma.transfers import (  # noqa: E402
  segmentation as decoding,
)
from big_vision.pp.proj.paligemma import segmentation as encoding  # noqa: E402


def main():
  weights = mask_weights.arrays()
  result = {}
  inputs = []
  for mask, box in mask_weights.masks():
    h, w = mask.shape
    y1, x1, y2, x2 = np.round(np.multiply(box, (h, w, h, w))).astype(int)
    pixels = (mask * 255).astype(np.uint8)[None, y1:y2, x1:x2, None]
    size = [64, 64]
    inputs.append(tf.image.resize(pixels, size, "bilinear", antialias=True))
  x = tf.concat(inputs, axis=0) / 255.0
  codes = encoding.encode_to_codebook_indices(weights, x).numpy()
  with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/weights.npz"
    np.savez(path, **weights)
    made = np.asarray(decoding.get_reconstruct_masks(path)(codes))[..., 0]
  result |= dict(resized=x.numpy()[..., 0], codes=codes, decoded=made)
  # As its evaluator pastes a mask into a picture.
  for i, (mask, box) in enumerate(mask_weights.masks()):
    h, w = mask.shape
    y1, x1, y2, x2 = map(int, (box[0] * h, box[1] * w, box[2] * h, box[3] * w))
    image = PIL.Image.fromarray(made[i])
    inside = np.asarray(image.resize([x2 - x1, y2 - y1], PIL.Image.BILINEAR))
    inside = inside > 0.0
    shared = (mask[y1:y2, x1:x2] & inside).sum()
    result[f"iou {i}"] = shared / (mask.sum() + inside.sum() - shared)
  path = pathlib.Path(__file__).with_name("mask_codes.npz")
  np.savez_compressed(path, **result)


if __name__ == "__main__":
  main()
