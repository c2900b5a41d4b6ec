"""Reads and writes .safetensors files without holding them in memory.

The safetensors library checks headers and writes files. This module maps arrays
from the file itself, because the library would copy whole arrays.
"""

import json
import math
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import safetensors

from bigtrain.checkpoints.manifest import dtype_of

# {the library's name of a dtype: numpy's}.
_DTYPES = {
  "BOOL": "bool",
  "U8": "uint8",
  "U16": "uint16",
  "U32": "uint32",
  "U64": "uint64",
  "I8": "int8",
  "I16": "int16",
  "I32": "int32",
  "I64": "int64",
  "F16": "float16",
  "F32": "float32",
  "F64": "float64",
  "BF16": "bfloat16",
  "F8_E4M3": "float8_e4m3fn",
  "F8_E5M2": "float8_e5m2",
}

# A published model's folder has a single file, or several and an index.
MODEL = "model.safetensors"
_DIFFUSERS = "diffusion_pytorch_model.safetensors"  # A folder of diffusers.
INDEX = "model.safetensors.index.json"


def is_folder(path: str) -> bool:
  """Whether a path is the folder of a published model."""
  return any(
    os.path.isfile(os.path.join(path, name))
    for name in (MODEL, INDEX, _DIFFUSERS)
  )


def read(path: str) -> dict[str, np.ndarray]:
  """Maps all arrays of a file, or of a published model's folder, read-only."""
  if not os.path.isdir(path):
    return _read_file(path)
  index = os.path.join(path, INDEX)
  if not os.path.isfile(index):
    single = os.path.join(path, MODEL)
    if not os.path.isfile(single):
      single = os.path.join(path, _DIFFUSERS)
    return _read_file(single)
  if os.path.isfile(os.path.join(path, MODEL)):
    raise ValueError(f"there are both {MODEL} and {INDEX}; keep one of them")
  with open(index) as file:
    file_of = json.load(file)["weight_map"]
  arrays: dict[str, np.ndarray] = {}
  for name in sorted(set(file_of.values())):
    from_file = _read_file(os.path.join(path, name))
    repeated = sorted(set(arrays) & set(from_file))
    if repeated:
      raise ValueError(f"{repeated[0]!r} is in several files of {INDEX}")
    arrays |= from_file
  missing = sorted(set(file_of) - set(arrays))
  if missing:
    raise ValueError(f"{missing[0]!r} of {INDEX} is in none of its files")
  return arrays


def _read_file(path: str) -> dict[str, np.ndarray]:
  try:
    with safetensors.safe_open(path, framework="numpy") as opened:
      specs = {}
      for name in opened.offset_keys():  # In the order of their bytes.
        array = opened.get_slice(name)
        specs[name] = (array.get_dtype(), array.get_shape())
  except safetensors.SafetensorError as e:
    raise ValueError(f"not a .safetensors file, or truncated: {e}") from e
  # The file is: size of the header (8 bytes), header, and the arrays one after
  # the other.
  with open(path, "rb") as file:
    offset = 8 + int.from_bytes(file.read(8), "little")
  data = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else None
  arrays = {}
  for name, (dtype_name, shape) in specs.items():
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
  """Writes a file, with one array in memory at a time.

  The library writes all arrays at once, so they are collected in a temporary
  file, which is mapped to memory.

  Args:
    path: the file.
    specs: {name: (shape, name of the dtype)}.
    arrays: the arrays, in the same order.
    metadata: strings for the header.
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
    tensors = {}
    offset = 0
    for name, (shape, dtype) in specs.items():
      size = math.prod(shape) * dtype_of(dtype).itemsize
      tensors[name] = safetensors.TensorSpec(
        dtype=dtype,
        shape=list(shape),
        data_ptr=data.ctypes.data + offset,
        data_len=size,
      )
      offset += size
    # The library's file is readable only by its owner; give it the mode of an
    # ordinary new file. Appending does not cut an old file that is in use.
    with open(path, "ab") as file:
      mode = os.fstat(file.fileno()).st_mode
    safetensors.serialize_file(tensors, path, metadata=dict(metadata))
    os.chmod(path, stat.S_IMODE(mode))
