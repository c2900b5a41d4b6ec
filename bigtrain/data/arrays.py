"""Arrays in memory or in an .npz file; the first axis numbers the examples.

dict(type="arrays", path="data.npz", slice="[:90%]")
dict(type="arrays", name="digits", split="train")
dict(type="arrays", arrays={"image": ..., "label": ...})
"""

import importlib.util
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, DataError, check_choice
from bigtrain.data.formats import files, splits

# Exceptions of numpy and zipfile for files that they cannot read; RuntimeError
# is for encrypted files.
_UNREADABLE = (ValueError, OSError, RuntimeError)
_DIGITS_TRAIN_FRACTION = 0.8


class Source:
  """The examples of arrays of equal length.

  Args:
    path: .npz file of features; uncompressed arrays are memory-mapped.
    name: "digits", the 1797 handwritten digits of scikit-learn: `image` uint8
      [8, 8, 1] with values 0 to 16, and `label`.
    arrays: features by name, for notebooks.
    keys: names of the arrays to use; all by default.
    split: split of the digits: "train", "test" (a fifth, chosen by
      `split_seed`) or "all", optionally with a slice.
    slice: slice of the examples, such as "[:90%]" or "[1000:]".
    split_seed: seed of the digits' splits.
  """

  def __init__(
    self,
    path: str | None = None,
    *,
    name: str | None = None,
    arrays: Mapping[str, Any] | None = None,
    keys: Sequence[str] | None = None,
    split: str | None = None,
    slice: str = "",
    split_seed: int = 0,
  ):
    self.class_names: dict[str, list[str]] = {}
    if sum(given is not None for given in (path, name, arrays)) != 1:
      raise ConfigError("arrays: expected one of path, name and arrays.")
    if name is not None:
      check_choice("arrays: name", name, ["digits"])
      features, part = _digits(split or "train", split_seed)
      self.class_names = {"label": [str(digit) for digit in range(10)]}
      slice, self._name = part + slice, f"digits {split or 'train'}"
    elif split is not None:
      raise ConfigError(
        f"arrays: split={split!r} requires name='digits'; otherwise use slice."
      )
    elif path is not None:
      self._name = files.local_path(path, "arrays: path")
      features = _load(self._name, keys)
    else:
      features = {k: np.asarray(v) for k, v in (arrays or {}).items()}
      self._name = "arrays"
    if keys is not None:
      _check_keys(keys, features, self._name)
      features = {key: features[key] for key in keys}
    length = _length(features, self._name)
    self._start, stop = splits.bounds(slice, length, "arrays: slice")
    self._arrays = {
      key: array[self._start : stop] for key, array in features.items()
    }
    self._length = stop - self._start
    self.spec = {
      key: (bytes if array.dtype.kind in "SU" else array.dtype, array.shape[1:])
      for key, array in features.items()
    }

  @property
  def ids(self) -> dict[str, np.ndarray]:
    return {
      key: array
      for key, array in self._arrays.items()
      if array.ndim == 1 and array.dtype.kind in "iu"
    }

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    batch = {}
    for key, array in self._arrays.items():
      rows = array[indices]
      if rows.dtype.kind == "U":
        rows = np.char.encode(rows, "utf-8")
      batch[key] = rows.astype(object) if rows.dtype.kind == "S" else rows
    return batch

  def where(self, index: int) -> str:
    return f"{self._name}, row {self._start + int(index)}"

  def fingerprint(self) -> str:
    sample = hashing.permute(np.arange(self._length)[:64], self._length, seed=0)
    parts: list[Any] = []
    for key, array in sorted(self._arrays.items()):
      crc = zlib.crc32(np.ascontiguousarray(array[np.sort(sample)]).tobytes())
      parts += [key, array.shape, array.dtype.str, crc]
    return files.digest("arrays", *parts)


def _check_keys(
  keys: Sequence[str], available: Iterable[str], name: str
) -> None:
  for key in keys:
    check_choice(f"arrays: {name}", key, available, "no array")


def _length(arrays: Mapping[str, np.ndarray], name: str) -> int:
  for key, array in arrays.items():
    if array.dtype.hasobject:
      raise DataError(
        f"{name}: array {key!r} holds Python objects; expected numbers, "
        "booleans or strings."
      )
    if not array.ndim:
      raise ConfigError(
        f"{name}: array {key!r} is a scalar; expected one row for each example "
        "(keys= selects arrays)."
      )
  lengths = {key: len(array) for key, array in arrays.items()}
  if len(set(lengths.values())) > 1:
    listed = ", ".join(f"{key} {length}" for key, length in lengths.items())
    raise ConfigError(f"{name}: arrays of unequal lengths: {listed}.")
  if not any(lengths.values()):
    raise DataError(f"{name}: contains no examples.")
  return max(lengths.values())


def _load(path: str, keys: Sequence[str] | None) -> dict[str, np.ndarray]:
  if not os.path.isfile(path):
    raise files.missing(path, "arrays: path", "file")
  try:
    with zipfile.ZipFile(path) as archive:
      members = {
        info.filename.removesuffix(".npy"): info
        for info in archive.infolist()
        if info.filename.endswith(".npy")
      }
      _check_keys(keys or (), members, path)
      return {
        key: _member(path, archive, info)
        for key, info in members.items()
        if keys is None or key in keys
      }
  except (zipfile.BadZipFile, zlib.error, EOFError, *_UNREADABLE) as e:
    raise DataError(f"{path}: not a readable .npz file: {e}.") from e


def _member(
  path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo
) -> np.ndarray:
  """Returns an array of the archive, memory-mapped if it is not compressed."""
  with archive.open(info) as f:
    assert archive.fp is not None
    start = archive.fp.tell()  # Where the .npy begins in the archive.
    major, _ = np.lib.format.read_magic(f)
    read_header = getattr(np.lib.format, f"read_array_header_{major}_0", None)
    if read_header is None:
      raise ValueError(f"{info.filename} has an unknown .npy version")
    shape, fortran_order, dtype = read_header(f)
    data_at = f.tell()
    if dtype.hasobject:
      # Unpickling would execute code from the file.
      name = info.filename.removesuffix(".npy")
      raise DataError(
        f"{path}: array {name!r} holds Python objects, which are never loaded; "
        "expected numbers, booleans or strings."
      )
    is_mapped = info.compress_type == zipfile.ZIP_STORED
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if info.file_size != data_at + size:
      raise ValueError(f"{info.filename} does not match the size in its header")
    # A mapped array is read too: zipfile verifies the checksum at the end.
    chunks = []
    while chunk := f.read(1 << 22):
      if not is_mapped:
        chunks.append(chunk)
  layout: Any = "F" if fortran_order else "C"
  if not is_mapped:
    flat = np.frombuffer(b"".join(chunks), dtype)
    return flat.reshape(shape, order=layout)
  if not size:
    return np.empty(shape, dtype, order=layout)
  mapping = np.memmap(path, dtype, "r", start + data_at, shape, layout)
  return np.asarray(mapping)  # Its examples are plain arrays, not memmaps.


def _digits(split: str, seed: int) -> tuple[dict[str, np.ndarray], str]:
  """Returns the arrays of a split of the digits, and the slice to apply."""
  spec = importlib.util.find_spec("sklearn")
  if spec is None or not spec.submodule_search_locations:
    raise ConfigError("arrays: 'digits' requires: pip install scikit-learn.")
  # Importing sklearn takes a second, and only one of its files is needed.
  (folder, *_) = spec.submodule_search_locations
  path = os.path.join(folder, "datasets", "data", "digits.csv.gz")
  if not os.path.isfile(path):
    raise ConfigError(f"arrays: scikit-learn has no file {path}.")
  table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
  shuffled = hashing.permute(np.arange(len(table)), len(table), seed)
  num_train = round(_DIGITS_TRAIN_FRACTION * len(table))
  rows = {
    "train": shuffled[:num_train],
    "test": shuffled[num_train:],
    "all": np.arange(len(table)),
  }
  chosen, part = splits.choose(split, rows, "arrays: split")
  table = table[chosen]
  images = table[:, :64].reshape(-1, 8, 8, 1)
  return {"image": images, "label": table[:, 64].astype(np.int64)}, part
