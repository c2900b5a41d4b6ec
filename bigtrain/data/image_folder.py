"""Images in folders that are named after their classes.

  dict(type="image_folder", path="imagenet/train")

Features: `image` (encoded bytes), `label` (class index) and `label_name` (name
of the folder).
"""

import os
from typing import Any

import numpy as np
from absl import logging

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.data.formats import files, splits
from bigtrain.pp.picture_files import SUFFIXES


class Source:
  """Images below `path`, sorted by class and then by name.

  Args:
    path: folder with one folder for each class. Images may be at any depth.
      Hidden files and folders are left out (see `files.split_hidden`).
    classes: file with one class name per line, in the order of the labels; any
      other folder is an error. By default the classes are the sorted names of
      the folders.
    slice: slice of the images, such as "[:99%]". It applies to a fixed random
      order, because a slice of the sorted images would leave out classes.
  """

  spec = {
    "image": (bytes, ()),
    "label": (np.int64, ()),
    "label_name": (bytes, ()),
  }

  def __init__(self, path: str, *, classes: str | None = None, slice: str = ""):
    self._path = files.local_path(path, "image_folder: path")
    self.classes, hidden = _class_list(self._path, classes)
    self.class_names = {"label": self.classes}
    by_class = []
    for images, hidden_images in files.in_threads(self._images, self.classes):
      by_class.append(sorted(images))
      hidden |= hidden_images
    files.log_hidden(hidden, f"image_folder: {self._path}")
    empty = [name for name, images in zip(self.classes, by_class) if not images]
    if len(empty) == len(self.classes):
      raise DataError(
        f"image_folder: no class folders with images in {self._path} "
        f"({', '.join(SUFFIXES)})."
      )
    if empty:
      logging.warning(
        f"image_folder: {len(empty)} of {len(self.classes)} classes in "
        f"{self._path} have no images, such as {', '.join(empty[:10])}"
      )
    # An array of bytes uses much less memory than a list of strings.
    self._names = np.asarray(
      [os.fsencode(image) for images in by_class for image in images]
    )
    counts = [len(images) for images in by_class]
    self._labels = np.repeat(np.arange(len(counts)), counts)
    start, stop = splits.bounds(slice, sum(counts), "image_folder: slice")
    self._rows = np.arange(start, stop)
    if slice:
      self._rows = np.sort(hashing.permute(self._rows, sum(counts), seed=0))
    self._slice = slice

  @staticmethod
  def read_class_names(
    path: str, *, classes: str | None = None, **_: Any
  ) -> dict[str, list[str]]:
    path = files.local_path(path, "image_folder: path")
    return {"label": _class_list(path, classes)[0]}

  def _images(self, class_name: str) -> tuple[list[str], set[str]]:
    """Returns the images of a class below `path`, and the hidden files."""
    images = []
    top = os.path.join(self._path, class_name)
    for folder, _, names in os.walk(top, followlinks=True):
      relative = os.path.relpath(folder, self._path)
      pictures = [n for n in names if n.lower().endswith(SUFFIXES)]
      images += [os.path.join(relative, name) for name in pictures]
    # The class itself may be hidden if the file of classes names it.
    return files.split_hidden(images, pattern=class_name)

  @property
  def ids(self) -> dict[str, np.ndarray]:
    return {"label": self._labels[self._rows]}

  def __len__(self) -> int:
    return len(self._rows)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    rows = self._rows[indices]
    labels = self._labels[rows]
    images = np.empty(len(rows), object)
    for i, row in enumerate(rows):
      path = self._file(row)
      try:
        with open(path, "rb", buffering=0) as f:
          images[i] = f.read()
      except OSError as e:
        raise DataError(f"{path}: {e.strerror}.") from e
    names = [os.fsencode(self.classes[label]) for label in labels]
    return {
      "image": images,
      "label": labels,
      "label_name": files.objects(names),
    }

  def where(self, index: int) -> str:
    return self._file(self._rows[index])

  def fingerprint(self) -> str:
    images = files.digest(self._names.tobytes())
    options = self._slice, *self.classes, len(self)
    return files.digest("image_folder", *options, images)

  def _file(self, row: int) -> str:
    return os.path.join(self._path, os.fsdecode(self._names[row]))


def _class_list(path: str, classes: str | None) -> tuple[list[str], set[str]]:
  """Returns the names of the classes, and of the hidden folders."""
  if not os.path.isdir(path):
    raise files.missing(path, "image_folder: path", "folder")
  entries = sorted(e.name for e in os.scandir(path) if e.is_dir())
  folders, hidden = files.split_hidden(entries)
  if classes is None:
    return folders, hidden
  names = _read_classes(classes)
  for name in folders:
    if name not in names:
      what = f"folder {name!r} of {path} is not a class of {classes}"
      raise ConfigError(f"image_folder: {what}.{did_you_mean(name, names)}")
  return names, hidden.difference(names)


def _read_classes(path: str) -> list[str]:
  path = files.local_path(path, "image_folder: classes")
  if not os.path.isfile(path):
    raise files.missing(path, "image_folder: classes", "file")
  with open(path, encoding="utf-8") as f:
    names = [line.strip() for line in f if line.strip()]
  if repeated := sorted(name for name in set(names) if names.count(name) > 1):
    raise ConfigError(f"image_folder: {path} lists {repeated[0]!r} twice.")
  return names
