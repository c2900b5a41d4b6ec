"""Reads and writes .safetensors files without holding them in memory.

The safetensors library checks headers and writes files. Arrays are mapped from
the file here, because the library would copy whole arrays.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import safetensors

from bigtrain.checkpoints.manifest import dtype_of

# The library's name of a dtype -> ours.
_DTYPES = {
  "BOOL": "bool",
  **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
  **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
  **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
  "BF16": "bfloat16",
  "F8_E4M3": "float8_e4m3fn",
  "F8_E5M2": "float8_e5m2",
}

# The folder of a published model has a single file, or several and an index.
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


def is_folder(path: str) -> bool:
  return any(os.path.isfile(os.path.join(path, n)) for n in (MODEL, INDEX))


def read(path: str) -> dict[str, np.ndarray]:
  """Maps all arrays of a file, or of a published model's folder, read-only."""
  if not os.path.isdir(path):
    return _read_file(path)
  index = os.path.join(path, INDEX)
  if not os.path.isfile(index):
    return _read_file(os.path.join(path, MODEL))
  if os.path.isfile(os.path.join(path, MODEL)):
    raise ValueError(f"there are both {MODEL} and {INDEX}; keep one of them")
  with open(index) as file:
    file_of = json.load(file)["weight_map"]
  arrays: dict[str, np.ndarray] = {}
  for name in sorted(set(file_of.values())):
    of_file = _read_file(os.path.join(path, name))
    if twice := sorted(set(arrays) & set(of_file)):
      raise ValueError(f"{twice[0]!r} is in several files of {INDEX}")
    arrays |= of_file
  if missing := sorted(set(file_of) - set(arrays)):
    raise ValueError(f"{missing[0]!r} of {INDEX} is in none of its files")
  return arrays


def _read_file(path: str) -> dict[str, np.ndarray]:
  try:
    with safetensors.safe_open(path, framework="numpy") as opened:
      names = opened.offset_keys()  # The arrays follow one another.
      slices = {name: opened.get_slice(name) for name in names}
      about = {n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()}
  except safetensors.SafetensorError as e:
    raise ValueError(f"not a .safetensors file, or truncated: {e}") from e
  with open(path, "rb") as file:
    offset = 8 + int.from_bytes(file.read(8), "little")
  data = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else None
  arrays = {}
  for name, (dtype_name, shape) in about.items():
    if dtype_name not in _DTYPES:
      raise ValueError(f"{name}: cannot read the dtype {dtype_name}")
    dtype = dtype_of(_DTYPES[dtype_name])
    # Not a slice of the memmap, which would be slow to create.
    arrays[name] = np.ndarray(shape, dtype, data, offset)
    arrays[name].flags.writeable = False
    offset += arrays[name].nbytes
  return arrays


def write(
  path: str,
  specs: Mapping[str, tuple[Sequence[int], str]],
  arrays: Iterable[np.ndarray],
  metadata: Mapping[str, str],
) -> None:
  """Writes one file; holds one array in memory at a time.

  `specs` is {name: (shape, name of the dtype)}, in the order of `arrays`, which
  wait in a temporary file, because the library writes all of them at once.
  """
  for name, (_, dtype) in specs.items():
    if dtype not in _DTYPES.values():
      raise ValueError(f"{name}: safetensors files have no dtype {dtype}")
  with tempfile.TemporaryFile(dir=os.path.dirname(path) or ".") as raw:
    for values in arrays:
      raw.write(np.ascontiguousarray(values).tobytes())
    raw.write(b"\0")  # An empty file cannot be mapped.
    raw.flush()
    data = np.memmap(raw, np.uint8, "r")
    tensors, offset = {}, 0
    for name, (shape, dtype) in specs.items():
      size = math.prod(shape) * dtype_of(dtype).itemsize
      tensors[name] = safetensors.TensorSpec(
        dtype=dtype,
        shape=list(shape),
        data_ptr=data.ctypes.data + offset,
        data_len=size,
      )
      offset += size
    safetensors.serialize_file(tensors, path, metadata=dict(metadata))
