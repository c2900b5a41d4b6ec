"""Arrays in memory or in an .npz file, one row an example.

dict(type="arrays", path="data.npz", slice="[:90%]")
dict(type="arrays", name="digits", split="train")
dict(type="arrays", arrays={"image": ..., "label": ...})
"""

import importlib.util
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain import hashing
from bigtrain.data.formats import files, slices
from bigtrain.settings import ConfigError, DataError, did_you_mean

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_UNREADABLE = (ValueError, OSError, RuntimeError)  # Encrypted: RuntimeError.
_DIGITS_TRAIN_FRACTION = 0.8


class Source:
  """Rows of arrays of the same length.

  Args:
    path: an .npz file; its arrays are the features. One that is not
      compressed is mapped, not read, after its checksums were verified.
    name: "digits": the 1797 handwritten digits that come with scikit-learn,
      `image` uint8 [8, 8, 1] of 0 to 16 and `label`.
    arrays: the features themselves, for notebooks.
    keys: only these arrays.
    split: of the digits: "train", "test" (a fifth, fixed by `split_seed`) or
      "all", maybe with a slice.
    slice: such as "[:90%]" or "[1000:]".
    split_seed: of the digits.

  Raises:
    ConfigError: no such file, array or split; arrays of unequal lengths.
    DataError: a damaged file, arrays of objects, no example.
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
    given = (path is not None) + (name is not None) + (arrays is not None)
    if given != 1:
      raise ConfigError("arrays: give one of path, name and arrays.")
    if name is not None:
      if name != "digits":
        raise ConfigError(f"arrays: no data set {name!r}. There are: digits.")
      found, part = _digits(split or "train", split_seed)
      slice, self._name = part + slice, f"digits {split or 'train'}"
    elif split is not None:
      raise ConfigError(
        f"arrays: split={split!r} goes with name='digits'; use slice='[:90%]'."
      )
    elif path is not None:
      found, self._name = _load(path, keys), os.fspath(path)
    else:
      found = {k: np.asarray(v) for k, v in arrays.items()}
      self._name = "arrays"
    if keys is not None:
      _check_keys(keys, found, self._name)
      found = {key: found[key] for key in keys}
    length = _length(found, self._name)
    self._start, stop = slices.bounds(slice, length, "arrays: slice")
    self._arrays = {
      key: array[self._start : stop] for key, array in found.items()
    }
    self._length = stop - self._start
    self.spec = {
      key: (bytes if array.dtype.kind in "SU" else array.dtype, array.shape[1:])
      for key, array in found.items()
    }

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Copies of the rows; strings as dtype object of bytes."""
    batch = {}
    for key, array in self._arrays.items():
      rows = array[indices]
      if rows.dtype.kind == "U":
        rows = np.char.encode(rows, "utf-8")
      batch[key] = rows.astype(object) if rows.dtype.kind == "S" else rows
    return batch

  def where(self, index: int) -> str:
    """File (or name) and row."""
    return f"{self._name}, row {self._start + int(index)}"

  def fingerprint(self) -> str:
    """Changes with names, shapes and types, and a sample of the values."""
    sample = hashing.permute(np.arange(self._length)[:64], self._length, seed=0)
    parts: list[Any] = []
    for key, array in sorted(self._arrays.items()):
      crc = zlib.crc32(np.ascontiguousarray(array[np.sort(sample)]).tobytes())
      parts += [key, array.shape, array.dtype.str, crc]
    return files.digest("arrays", *parts)


def _check_keys(keys: Sequence[str], there: Iterable[str], name: str) -> None:
  for key in keys:
    if key not in there:
      hint = did_you_mean(key, there)
      raise ConfigError(f"arrays: {name} has no array {key!r}.{hint}")


def _length(arrays: Mapping[str, np.ndarray], name: str) -> int:
  for key, array in arrays.items():
    if array.dtype.hasobject:
      raise DataError(
        f"{name}: array {key!r} holds Python objects; expected numbers, "
        "booleans or strings."
      )
    if not array.ndim:
      raise ConfigError(
        f"{name}: array {key!r} is a single value; expected one row for each "
        "example (keys= selects arrays)."
      )
  lengths = {key: len(array) for key, array in arrays.items()}
  if len(set(lengths.values())) > 1:
    told = ", ".join(f"{key} {length}" for key, length in lengths.items())
    raise ConfigError(f"{name}: arrays of unequal lengths: {told}.")
  if not lengths or not next(iter(lengths.values())):
    raise DataError(f"{name}: there is no example in it.")
  return next(iter(lengths.values()))


def _load(path: str, keys: Sequence[str] | None) -> dict[str, np.ndarray]:
  path = os.path.expanduser(os.fspath(path))
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
  """One array of an .npz file; mapped if it is not compressed."""
  with archive.open(info) as f:
    version = np.lib.format.read_magic(f)
    read_header = {
      (1, 0): np.lib.format.read_array_header_1_0,
      (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
      raise ValueError(f"{info.filename} is of an unknown .npy version")
    shape, fortran_order, dtype = read_header(f)
    data_at = f.tell()
    if dtype.hasobject:
      # Never unpickled: a pickle runs code of whoever wrote the file.
      raise DataError(
        f"{path}: array {info.filename.removesuffix('.npy')!r} holds Python "
        "objects, which are never loaded; expected numbers, booleans or "
        "strings."
      )
    mapped = info.compress_type == zipfile.ZIP_STORED
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if info.file_size != data_at + size:
      raise ValueError(f"{info.filename} has not the size that it says")
    # Reading to the end is what makes zipfile verify the checksum.
    chunks = []
    while chunk := f.read(1 << 22):
      if not mapped:
        chunks.append(chunk)
  layout: Any = "F" if fortran_order else "C"
  if not mapped:
    flat = np.frombuffer(b"".join(chunks), dtype)
    return flat.reshape(shape, order=layout)
  if not size:
    return np.empty(shape, dtype, order=layout)
  with open(path, "rb") as f:
    f.seek(info.header_offset)
    header = f.read(_LOCAL_HEADER.size)
  magic, name_size, extra_size = _LOCAL_HEADER.unpack(header)
  if magic != b"PK\3\4":
    raise ValueError(f"{info.filename} is not where the archive says")
  start = info.header_offset + _LOCAL_HEADER.size + name_size + extra_size
  mapping = np.memmap(path, dtype, "r", start + data_at, shape, layout)
  return np.asarray(mapping)  # Rows of it are then plain arrays.


def _digits(split: str, seed: int) -> tuple[dict[str, np.ndarray], str]:
  """The arrays of a split of the digits, and the slice that is left to do."""
  name, part = slices.split_name(split, "arrays: split")
  spec = importlib.util.find_spec("sklearn")
  if spec is None or not spec.submodule_search_locations:
    raise ConfigError(
      "arrays: the digits come with scikit-learn: pip install scikit-learn."
    )
  # Importing sklearn for one file of numbers would take a second.
  path = os.path.join(
    spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"
  )
  if not os.path.isfile(path):
    raise ConfigError(f"arrays: this scikit-learn has no digits: {path}.")
  table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
  shuffled = hashing.permute(np.arange(len(table)), len(table), seed)
  num_train = round(_DIGITS_TRAIN_FRACTION * len(table))
  splits = {
    "train": shuffled[:num_train],
    "test": shuffled[num_train:],
    "all": np.arange(len(table)),
  }
  if name not in splits:
    raise ConfigError(
      f"arrays: split={split!r}: there is no {name!r}."
      f"{did_you_mean(name, splits)}"
    )
  table = table[splits[name]]
  images = table[:, :64].reshape(-1, 8, 8, 1)
  return {"image": images, "label": table[:, 64].astype(np.int64)}, part
