"""A run on folders of small pictures, for tests of trained models."""

import os
import pathlib

import numpy as np

from support import compile_cache

CLASSES = ("cat", "dog", "owl")
_PP = "decode|resize(6)|value_range(-1,1)|copy('label','labels')"


def write_pictures(folder: os.PathLike[str]) -> None:
  """Writes train/ and val/ with a folder for each class.

  The colour of a picture tells its class; its size varies.
  """
  import tensorflow as tf

  rng = np.random.default_rng(0)
  for split, number in (("train", 8), ("val", 3)):
    for channel, name in enumerate(CLASSES):
      path = pathlib.Path(folder) / split / name
      path.mkdir(parents=True)
      for i in range(number):
        image = rng.integers(0, 80, size=(9 + i, 12 - i, 3), dtype=np.uint8)
        image[..., channel] += 150
        encoded = tf.io.encode_png(image).numpy()
        (path / f"{i}.png").write_bytes(encoded)


def config(folder: os.PathLike[str]) -> dict:
  """Returns a config of 30 steps; its evaluation saves the logits."""
  folder = pathlib.Path(folder)
  data = dict(type="image_folder", path=str(folder / "train"))
  val = dict(type="image_folder", path=str(folder / "val"))
  return dict(
    total_steps=30,
    log_steps=30,
    compile_cache=str(compile_cache.FOLDER),
    tensorboard=False,
    task="classification",
    input=dict(
      data=data,
      pp=f"{_PP}|flip_lr|keep('image','labels')",
      batch_size=8,
    ),
    model_name="tiny.net",
    model=dict(num_classes=3),
    optimizer=dict(name="adam"),
    lr=0.01,
    evals=dict(
      val=dict(
        type="save",
        pred="logits",
        data=val,
        pp=f"{_PP}|keep('image','labels')",
      )
    ),
  )
