"""Config of a ViT on JPEGs, and JPEGs with the size and detail of photographs.

--config=benchmarks/jpegs.py:folder=/tmp/x,variant=Ti/32,size=224,batch_size=16
"""

import json
import os
from typing import Any

import numpy as np

from configs import common

_CLASSES = 4
TRAIN_PP = (
  "decode|inception_crop({size})|flip_lr|value_range(-1,1)"
  "|onehot(1000,key='label',key_result='labels')|keep('image','labels')"
)


def get_config(arg: str | None = None) -> Any:
  """A training config.

  Args:
    arg: folder of the images, variant, size in pixels, batch_size.
  """
  options = common.parse_arg(
    arg, folder="", variant="Ti/32", size=224, batch_size=16
  )
  config = common.parse_arg(None)
  config.seed = 0
  config.total_steps = config.ckpt_steps = 1_000_000
  config.log_steps = 10
  config.task = "classification"
  config.loss = dict(kind="softmax_xent")
  config.input = dict(
    data=dict(type="image_folder", path=options.folder),
    pp=TRAIN_PP.format(size=options.size),
    batch_size=options.batch_size,
  )
  config.model_name = "vit"
  config.model = dict(variant=options.variant, num_classes=1000)
  config.optimizer = dict(name="adam")
  config.lr = 1e-4
  config.wd = 1e-4
  config.grad_clip_norm = 1.0
  config.schedule = dict(decay_type="cosine", warmup_steps=1000)
  return config


def write(
  folder: str,
  number: int,
  height: int = 375,
  width: int = 500,
  num_bytes: int = 64_000,
) -> list[str]:
  """Writes images in one folder per class, and index.jsonl.

  The images are noise with the spectrum of photographs, encoded at the quality
  that gives the first one about `num_bytes`.

  Args:
    folder: existing folder.
    number: number of images.
    height: height in pixels.
    width: width in pixels.
    num_bytes: approximate size of an image.

  Returns:
    Paths of the images.
  """
  import tensorflow as tf

  rng = np.random.default_rng(0)
  first = _photograph(rng, height, width)

  def encode(image: np.ndarray, quality: int) -> bytes:
    return tf.io.encode_jpeg(image, quality=quality).numpy()

  quality = min(
    range(5, 100, 5), key=lambda q: abs(len(encode(first, q)) - num_bytes)
  )
  paths = []
  for label in range(_CLASSES):
    os.makedirs(os.path.join(folder, f"class-{label}"))
  with open(os.path.join(folder, "index.jsonl"), "w") as index:
    for i in range(number):
      label = i % _CLASSES
      path = os.path.join(folder, f"class-{label}", f"{i}.jpg")
      with open(path, "wb") as file:
        file.write(encode(_photograph(rng, height, width), quality))
      index.write(json.dumps({"image": path, "label": label}) + "\n")
      paths.append(path)
  return paths


def _photograph(
  rng: np.random.Generator, height: int, width: int
) -> np.ndarray:
  """Returns noise of amplitude 1 / frequency, uint8 [height, width, 3]."""
  noise = np.fft.rfft2(rng.normal(size=(3, height, width)))
  y, x = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
  noise /= np.maximum(np.hypot(y, x), 1 / max(height, width))
  image = np.fft.irfft2(noise, s=(height, width))
  # Colours vary less between neighbouring pixels than brightness.
  image = image[:1] + 0.3 * image[1:2] * np.array([[[1]], [[0]], [[-1]]])
  image = 127 + 50 * (image - image.mean()) / image.std()
  return np.clip(image, 0, 255).astype(np.uint8).transpose(1, 2, 0)
