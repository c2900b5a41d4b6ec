"""Images in folders that are named after their class.

  dict(type="image_folder", path="imagenet/train")

Features: `image` (the file's bytes), `label` (the number of the class) and
`label_name` (the folder's name).
"""

import os

import numpy as np
from absl import logging

from bigtrain import hashing
from bigtrain.data.formats import files, slices
from bigtrain.settings import ConfigError, DataError, did_you_mean

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")


class Source:
  """Images below `path`, by class and then by name.

  Args:
    path: folder with a folder for each class, at any depth below that.
    classes: a file with the name of a class in each line: their order gives
      the labels, and other folders are an error. Otherwise the sorted names
      of the folders are the classes.
    slice: such as "[:99%]": that part of the images in a shuffled order that
      is always the same, since a part of the sorted ones would be a part of
      the classes.

  Raises:
    ConfigError: no such folder or file, or a folder that is no class.
    DataError: there are no images.
  """

  spec = {
    "image": (bytes, ()),
    "label": (np.int64, ()),
    "label_name": (bytes, ()),
  }

  def __init__(self, path: str, *, classes: str | None = None, slice: str = ""):
    self._path = os.path.expanduser(os.fspath(path))
    if not os.path.isdir(self._path):
      raise files.missing(self._path, "image_folder: path", "folder")
    folders = sorted(e.name for e in os.scandir(self._path) if e.is_dir())
    self.classes = _read_classes(classes) if classes else folders
    for name in folders:
      if name not in self.classes:
        raise ConfigError(
          f"image_folder: folder {name!r} of {self._path} is not in "
          f"{classes}.{did_you_mean(name, self.classes)}"
        )
    found = files.in_threads(self._images, self.classes)
    empty = [name for name, images in zip(self.classes, found) if not images]
    if len(empty) == len(self.classes):
      raise DataError(
        f"image_folder: no class folders with images ({', '.join(_SUFFIXES)}) "
        f"in {self._path}."
      )
    if empty:
      logging.warning(
        "image_folder: %d of %d classes in %s have no images: %s",
        len(empty),
        len(self.classes),
        self._path,
        ", ".join(empty[:10]),
      )
    # An array of bytes takes a fraction of the memory of a list of strings.
    self._names = np.asarray([os.fsencode(n) for names in found for n in names])
    counts = [len(names) for names in found]
    self._labels = np.repeat(np.arange(len(counts)), counts)
    start, stop = slices.bounds(slice, sum(counts), "image_folder: slice")
    self._rows = np.arange(start, stop)
    if slice:
      self._rows = np.sort(hashing.permute(self._rows, sum(counts), seed=0))
    self._slice = slice

  def _images(self, class_name: str) -> list[str]:
    """Paths of a class's images, relative to the folder of classes."""
    found = []
    top = os.path.join(self._path, class_name)
    for folder, _, names in os.walk(top, followlinks=True):
      relative = os.path.relpath(folder, self._path)
      found += [
        os.path.join(relative, name)
        for name in names
        if name.lower().endswith(_SUFFIXES)
      ]
    return sorted(found)

  def __len__(self) -> int:
    return len(self._rows)

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """`image` and `label_name` [B] of bytes, `label` int64 [B]."""
    rows = self._rows[indices]
    images = np.empty(len(rows), object)
    names = np.empty(len(rows), object)
    for i, row in enumerate(rows):
      path = self._file(row)
      try:
        with open(path, "rb", buffering=0) as f:
          images[i] = f.read()
      except OSError as e:
        raise DataError(f"{path}: {e.strerror}.") from e
      names[i] = os.fsencode(self.classes[self._labels[row]])
    return {"image": images, "label": self._labels[rows], "label_name": names}

  def where(self, index: int) -> str:
    """The image's file."""
    return self._file(self._rows[index])

  def fingerprint(self) -> str:
    """Changes with the names of classes and images."""
    return files.digest(
      "image_folder",
      self._slice,
      *self.classes,
      len(self),
      files.digest(self._names.tobytes()),
    )

  def _file(self, row: int) -> str:
    return os.path.join(self._path, os.fsdecode(self._names[row]))


def _read_classes(path: str) -> list[str]:
  (path,) = files.find(path, "image_folder: classes")
  with open(path, encoding="utf-8") as f:
    names = [line.strip() for line in f]
  names = [name for name in names if name]
  if len(set(names)) != len(names):
    twice = sorted({name for name in names if names.count(name) > 1})
    raise ConfigError(f"image_folder: {path} has {twice[0]!r} twice.")
  return names
