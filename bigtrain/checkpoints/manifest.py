"""The manifest of a checkpoint, manifest.json, and its layout in files.

A checkpoint is a directory with a valid manifest:

  00000100/params/encoder/kernel/zarr.json   metadata of one array (zarr v3)
                                 c.0.1       one of its chunks
           ...
           manifest.json                     written last

The manifest has the SHA-256 of each zarr.json and of itself, and each chunk has
a crc32c. So files that are missing, truncated, changed or from another run are
detected before they are used. The checksum of an array's values is computed on
the devices (checksums.py), so it also reveals corruption in host memory.

The files are those that jax.experimental.array_serialization writes for the
same tensorstore spec. This module does not use jax.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bigtrain.files import paths

MANIFEST_FILE = "manifest.json"
METADATA_FILE = "zarr.json"
FORMAT = "bigtrain-checkpoint"
VERSION = 1

# Largest file of an array's chunk. Large enough that opening a file costs
# little in comparison, and small enough that several threads share a big array.
CHUNK_BYTES = 64 * 2**20

_CRC_BYTES = 4
_DTYPES = (
  "bool",
  "int8",
  "int16",
  "int32",
  "int64",
  "uint8",
  "uint16",
  "uint32",
  "uint64",
  "float16",
  "bfloat16",
  "float32",
  "float64",
  "complex64",
  "complex128",
  "float8_e4m3fn",
  "float8_e4m3fnuz",
  "float8_e4m3b11fnuz",
  "float8_e5m2",
  "float8_e5m2fnuz",
  "float8_e3m4",
  "float8_e8m0fnu",
)


class CheckpointError(Exception):
  """A checkpoint that could not be written or read."""


class DamagedError(CheckpointError):
  """A checkpoint whose files have changed since they were written."""


def dtype_of(name: str) -> np.dtype:
  """The dtype with a name, such as "bfloat16"."""
  return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a checkpoint."""

  shape: tuple[int, ...]
  dtype: str
  chunk_shape: tuple[int, ...]  # Shape of the part in a file.
  # For information: {"mesh": {axis: size}, "spec": [axes or None of a dim]}.
  sharding: dict[str, Any] | None = None
  # These two are "" while the array is being written.
  metadata_sha256: str = ""
  checksum: str = ""

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * dtype_of(self.dtype).itemsize

  @property
  def grid(self) -> tuple[int, ...]:
    """Number of chunks in each dimension."""
    return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape))

  @property
  def chunk_bytes(self) -> int:
    """Size of each chunk's file; chunks at the edges are padded to it."""
    itemsize = dtype_of(self.dtype).itemsize
    return math.prod(self.chunk_shape) * itemsize + _CRC_BYTES

  def chunks(self) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Yields (file in the array's directory, index of its part)."""
    for position in itertools.product(*map(range, self.grid)):
      index = tuple(
        slice(i * c, min((i + 1) * c, n))
        for i, c, n in zip(position, self.chunk_shape, self.shape)
      )
      yield ".".join(["c", *map(str, position)]), index

  def spec(self, directory: str, name: str) -> dict[str, Any]:
    """The tensorstore spec of the array in a checkpoint's directory."""
    codecs: list[dict[str, Any]] = [{"name": "bytes"}, {"name": "crc32c"}]
    if dtype_of(self.dtype).itemsize > 1:
      codecs[0]["configuration"] = {"endian": "little"}
    return {
      "driver": "zarr3",
      "kvstore": paths.kvstore(f"{directory}/{name}"),
      # Chunks of zeros are written, and missing chunks are errors. By default
      # both would read as zeros.
      "store_data_equal_to_fill_value": True,
      "fill_missing_data_reads": False,
      "metadata": {
        "shape": self.shape,
        "data_type": self.dtype,
        "chunk_grid": {
          "name": "regular",
          "configuration": {"chunk_shape": self.chunk_shape},
        },
        # All chunks are in the array's own directory, so that there are fewer
        # directories to sync.
        "chunk_key_encoding": {
          "name": "default",
          "configuration": {"separator": "."},
        },
        "codecs": codecs,
      },
    }

  def metadata(self) -> bytes:
    """The zarr.json of the array, as tensorstore writes it."""
    return _metadata(self.shape, self.dtype, self.chunk_shape)

  @property
  def metadata_digest(self) -> str:
    return hashlib.sha256(self.metadata()).hexdigest()

  @classmethod
  def describe(
    cls,
    shape: Sequence[int],
    dtype: Any,
    shard_shape: Sequence[int] | None = None,
    sharding: dict[str, Any] | None = None,
  ) -> "Array":
    """Plans the chunks of an array.

    A chunk never crosses the border of a shard, so no two processes write the
    same file. A shard larger than CHUNK_BYTES is cut into several chunks, along
    its first dimensions.

    Args:
      shape, dtype: of the array.
      shard_shape: shape of the parts that one process writes; by default one
        process writes the whole array.
      sharding: for information.
    """
    name = np.dtype(dtype).name
    if name not in _DTYPES:
      raise CheckpointError(f"dtype {name} cannot be saved.")
    shape = tuple(map(int, shape))
    shard_shape = shape if shard_shape is None else tuple(map(int, shard_shape))
    chunk = [max(1, n) for n in shard_shape]
    for dim, (n, shard_n) in enumerate(zip(shape, shard_shape)):
      num_bytes = math.prod(chunk) * np.dtype(dtype).itemsize
      if num_bytes <= CHUNK_BYTES or 0 in shape:
        break
      most = max(1, chunk[dim] * CHUNK_BYTES // num_bytes)
      if n == shard_n:
        # Not sharded: chunks of about equal size, of which the last may extend
        # beyond the array.
        num_chunks = -(-n // most)
        chunk[dim] = -(-n // num_chunks)
      else:
        chunk[dim] = _near_divisor(shard_n, most)
    return cls(shape, name, tuple(chunk), sharding)

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class HostState:
  """The part of a run's state that is not in arrays; all of it is JSON."""

  config: dict[str, Any] | None = None
  # The running metrics, see step/running_metrics.py.
  tally: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Time accounts. None means that they start now.
  clock: dict[str, Any] | None = None
  hooks: dict[str, Any] = dataclasses.field(default_factory=dict)
  batches_ahead: int = 0  # Number of batches that rollbacks have skipped.
  # {input file: fingerprint of its content}.
  fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  # The frozen base of adapters, see adapters.Base.saved.
  base: dict[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return {name: x for name, x in vars(self).items() if x is not None}

  @classmethod
  def from_json(cls, content: Mapping[str, Any]) -> "HostState":
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: x for name, x in content.items() if name in names})


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Description of a checkpoint after `step` finished steps."""

  step: int
  arrays: Mapping[str, Array]
  host_state: HostState
  config_digest: str = ""
  # Time, host and versions, for information. Local checkpoints add to it.
  writer: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def num_bytes(self) -> int:
    return sum(a.num_bytes for a in self.arrays.values())

  @property
  def rounded(self) -> dict[str, str]:
    """config.ckpt_dtype of the run: {tree: dtype of its saved arrays}."""
    return (self.host_state.config or {}).get("ckpt_dtype") or {}

  def state_dtype(self, name: str) -> np.dtype:
    """The dtype that an array has in the train state, before any rounding."""
    saved = self.arrays[name].dtype
    is_rounded = self.rounded.get(name.split("/")[0]) == saved
    return dtype_of("float32" if is_rounded else saved)

  def to_json(self) -> str:
    content: dict[str, Any] = {
      "format": FORMAT,
      "version": VERSION,
      "step": self.step,
      "config_digest": self.config_digest,
      "writer": self.writer,
      "num_bytes": self.num_bytes,
      "arrays": {
        name: {
          **vars(array),
          "num_chunks": math.prod(array.grid),
          "chunk_bytes": array.chunk_bytes,
        }
        for name, array in self.arrays.items()
      },
      "host_state": self.host_state.to_json(),
    }
    content["sha256"] = _digest(content)
    # One line for each array, for people who read the file.
    array_lines = [
      f"  {json.dumps(name)}: {json.dumps(array)}"
      for name, array in content["arrays"].items()
    ]
    lines = []
    for key, value in content.items():
      text = json.dumps(value)
      if key == "arrays":
        text = "{\n" + ",\n".join(array_lines) + "\n }"
      lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"

  @classmethod
  def from_json(cls, text: bytes | str, where: str) -> "Manifest":
    """Parses a manifest.

    Raises:
      DamagedError: if it, or a name in it, is not valid.
      CheckpointError: if it has another version of the format.
    """
    try:
      content = json.loads(text)
      digest = content.pop("sha256")
      is_ours = content["format"] == FORMAT
      version = content["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
      raise DamagedError(f"{where}: damaged: {type(e).__name__}: {e}") from e
    if not is_ours or digest != _digest(content):
      raise DamagedError(f"{where}: damaged: its digest does not match.")
    if version != VERSION:
      raise CheckpointError(
        f"{where}: format version {version}; this program reads {VERSION}."
      )
    try:
      arrays = {
        name: Array(
          shape=tuple(a["shape"]),
          dtype=a["dtype"],
          chunk_shape=tuple(a["chunk_shape"]),
          sharding=a["sharding"],
          metadata_sha256=a["metadata_sha256"],
          checksum=a.get("checksum", ""),
        )
        for name, a in content["arrays"].items()
      }
      check_names(arrays)
      for name, array in arrays.items():
        _check_array(name, array)
      return cls(
        step=content["step"],
        arrays=arrays,
        host_state=HostState.from_json(content["host_state"]),
        config_digest=content["config_digest"],
        writer=content["writer"],
      )
    except (KeyError, TypeError, CheckpointError) as e:
      raise DamagedError(f"{where}: damaged: {type(e).__name__}: {e}") from e


def _near_divisor(n: int, most: int) -> int:
  """The largest divisor of n up to `most`, or the next larger one.

  The larger one avoids tiny chunks for sizes such as primes.
  """
  divisor = next(d for d in range(most, 0, -1) if n % d == 0)
  if 8 * divisor >= most:
    return divisor
  return next(d for d in range(most, n + 1) if n % d == 0)


@functools.lru_cache(maxsize=4096)  # Many arrays have the same shape.
def _metadata(
  shape: tuple[int, ...], dtype: str, chunk_shape: tuple[int, ...]
) -> bytes:
  import tensorstore as ts

  array = Array(shape, dtype, chunk_shape)
  in_memory = array.spec("", "") | {"kvstore": {"driver": "memory"}}
  store = ts.open(in_memory, create=True, context=ts.Context()).result()
  files: Any = store.kvstore
  return files.read(METADATA_FILE).result().value


def check_names(names: Iterable[str]) -> None:
  """Raises CheckpointError for names that are not safe as paths.

  A name that is another's parent would mix the files of two arrays.
  """
  seen: set[str] = set()
  for name in names:
    parts = name.split("/")
    if (
      not set(parts).isdisjoint({"", ".", "..", METADATA_FILE})
      or "\\" in name
      or "\0" in name
      or parts[0] == MANIFEST_FILE
    ):
      raise CheckpointError(f"array name {name!r}: not allowed as a path.")
    if name in seen:
      raise CheckpointError(f"array name {name!r}: used by two arrays.")
    seen.add(name)
  for name in seen:
    for parent in map(str, pathlib.PurePosixPath(name).parents):
      if parent in seen:
        raise CheckpointError(
          f"array name {name!r}: {parent!r} is an array already."
        )


def _check_array(name: str, array: Array) -> None:
  sizes = [*array.shape, *array.chunk_shape]
  if (
    array.dtype not in _DTYPES
    or len(array.shape) != len(array.chunk_shape)
    or not all(isinstance(n, int) for n in sizes)
    or min(array.shape, default=0) < 0
    or min(array.chunk_shape, default=1) < 1
  ):
    raise CheckpointError(
      f"array {name!r}: cannot be {array} in chunks of {array.chunk_shape}."
    )


def _digest(content: Mapping[str, Any]) -> str:
  text = json.dumps(content, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()
