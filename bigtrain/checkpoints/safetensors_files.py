"""Reads and writes .safetensors files, which hold arrays as plain bytes.

A file consists of the header's length (8 bytes), the header (JSON with dtype,
shape and offsets of each array) and the arrays. Files are memory-mapped:
nothing is copied before it is used, and each process reads only its own part
of an array that is split over devices.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
  "bool": "BOOL",
  "uint8": "U8",
  "int8": "I8",
  "uint16": "U16",
  "int16": "I16",
  "uint32": "U32",
  "int32": "I32",
  "uint64": "U64",
  "int64": "I64",
  "float16": "F16",
  "bfloat16": "BF16",
  "float32": "F32",
  "float64": "F64",
  "float8_e4m3fn": "F8_E4M3",
  "float8_e5m2": "F8_E5M2",
}
_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}

# The folder of a published model has a single file, or several and an index.
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LARGEST_HEADER = 100_000_000


def is_folder(path: str) -> bool:
  """Whether `path` is the folder of a published model."""
  return any(os.path.isfile(os.path.join(path, n)) for n in (MODEL, INDEX))


def read(path: str) -> dict[str, np.ndarray]:
  """Maps all arrays of a file, or of a published model's folder.

  Returns:
    {name: read-only memory-mapped array}.

  Raises:
    ValueError: not a .safetensors file, or truncated; an array in two files.
    OSError: a file cannot be read.
  """
  if not os.path.isdir(path):
    return _read_file(path)
  index = os.path.join(path, INDEX)
  if not os.path.isfile(index):
    return _read_file(os.path.join(path, MODEL))
  if os.path.isfile(os.path.join(path, MODEL)):
    raise ValueError(f"there are both {MODEL} and {INDEX}; keep one of them")
  with open(index) as f:
    file_of = json.load(f)["weight_map"]
  arrays: dict[str, np.ndarray] = {}
  for name in sorted(set(file_of.values())):
    of_file = _read_file(os.path.join(path, name))
    twice = sorted(set(arrays) & set(of_file))
    if twice:
      raise ValueError(f"{twice[0]!r} is in several files of {INDEX}")
    arrays |= of_file
  missing = sorted(set(file_of) - set(arrays))
  if missing:
    raise ValueError(f"{missing[0]!r} of {INDEX} is in none of its files")
  return arrays


def _read_file(path: str) -> dict[str, np.ndarray]:
  size = os.path.getsize(path)
  with open(path, "rb") as f:
    start = f.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if length > min(size - 8, _LARGEST_HEADER):
      raise ValueError("not a .safetensors file, or truncated")
    header = json.loads(f.read(length))
  begin = 8 + length
  data = (
    np.memmap(path, np.uint8, "r", offset=begin)
    if size > begin
    else np.zeros(0, np.uint8)
  )
  arrays = {}
  for name, entry in header.items():
    if name == "__metadata__":
      continue
    try:
      dtype = _dtype(_NAMES[entry["dtype"]])
      count = int(np.prod(entry["shape"], dtype=np.int64))
      first, last = entry["data_offsets"]
    except (KeyError, TypeError) as e:
      raise ValueError(f"{name}: header entry is not valid: {entry}") from e
    if last - first != count * dtype.itemsize or not 0 <= first <= last:
      raise ValueError(f"{name}: its offsets do not fit its shape")
    if last > len(data):
      raise ValueError(f"{name}: the file is truncated")
    # Not a slice of the memmap, which would be slow to create.
    array = np.ndarray(entry["shape"], dtype, data, first)
    array.flags.writeable = False
    arrays[name] = array
  return arrays


def _dtype(name: str) -> np.dtype:
  return np.dtype(getattr(ml_dtypes, name, name))


def write(
  path: str,
  specs: Mapping[str, tuple[Sequence[int], str]],
  arrays: Iterable[np.ndarray],
  metadata: Mapping[str, str],
) -> None:
  """Writes one file, one array at a time.

  Args:
    path: path of the file.
    specs: {name: (shape, name of the dtype)}, in the order of `arrays`.

  Raises:
    ValueError: the format has no such dtype.
  """
  header: dict[str, Any] = {"__metadata__": dict(metadata)}
  end = 0
  for name, (shape, dtype) in specs.items():
    if dtype not in DTYPES:
      raise ValueError(f"{name}: safetensors files have no dtype {dtype}")
    size = int(np.prod(shape, dtype=np.int64)) * _dtype(dtype).itemsize
    header[name] = {
      "dtype": DTYPES[dtype],
      "shape": list(shape),
      "data_offsets": [end, end + size],
    }
    end += size
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for values in arrays:
      file.write(np.ascontiguousarray(values).tobytes())
