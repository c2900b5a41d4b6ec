"""Files of token ids, as this and other programs write them.

- A folder made by `python -m bigtrain.tools.tokenize`: manifest.json, and for
  each shard plain ids (00000.bin) and where documents end (00000.ends.npy).
- Plain ids without a header, as nanoGPT writes them (.bin).
- llm.c's: the same behind a header of 256 int32, which says how many (.bin).
- Megatron's: plain ids (.bin) beside an index of sequences (.idx).
- Modalities' packed data (.pbin): a header, ids, and an index of documents.

All numbers are little-endian. Nothing in a file is executed: an index that is
a pickle is opened by a reader that knows lists, tuples and whole numbers only.
"""

import dataclasses
import io
import json
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bigtrain.data.formats import files
from bigtrain.settings import ConfigError, DataError

MANIFEST = "manifest.json"
FORMAT = "bigtrain tokens"
FORMAT_VERSION = 1

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {
  1: np.uint8,
  2: np.int8,
  3: np.int16,
  4: np.int32,
  5: np.int64,
  8: np.uint16,
}
_LLMC_HEADER = struct.Struct("<256i")
_LLMC_DTYPES = {20240520: np.uint16, 20240801: np.uint32}  # By magic number.
_PBIN_HEADER = struct.Struct("<QI")
_PBIN_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_DTYPES = ("uint8", "uint16", "uint32", "int32")


@dataclasses.dataclass(frozen=True)
class Shard:
  """A run of token ids in a file.

  Attributes:
    path: the file.
    offset: bytes before the first id.
    dtype: of the ids.
    size: how many there are.
    ends: reads where documents end, int64, ascending; the last is `size`. None
      if nothing says.
  """

  path: str
  offset: int
  dtype: np.dtype
  size: int
  ends: Callable[[], np.ndarray] | None = None

  def map(self) -> np.ndarray:
    """The ids [size], read when they are used.

    Raises:
      DataError: the file is not there or too short.
    """
    if not self.size:
      return np.zeros(0, self.dtype)
    try:
      return np.asarray(
        np.memmap(self.path, self.dtype, "r", self.offset, (self.size,))
      )
    except (OSError, ValueError) as e:
      raise DataError(
        f"{self.path}: cannot map {self.size} ids of {self.dtype} from byte "
        f"{self.offset}: {e}."
      ) from e


def open_shards(
  path: str | Sequence[str], dtype: str | None
) -> tuple[list[Shard], dict[str, Any] | None]:
  """The shards of one or more token files, and a manifest if there is one.

  Args:
    path: a folder with a manifest, a file, Megatron's name without ending, a
      pattern, or a list of files and patterns.
    dtype: of ids in files that do not say; uint16 unless given.

  Raises:
    ConfigError: no such file; a dtype that a file contradicts.
    DataError: a file that is damaged or not what its name says.
  """
  if dtype is not None and dtype not in _DTYPES:
    raise ConfigError(
      f"tokens: dtype={dtype!r}: expected one of {', '.join(_DTYPES)}."
    )
  if not isinstance(path, str | os.PathLike):
    return [_open(p, dtype) for one in path for p in _find(one)], None
  path = os.path.expanduser(os.fspath(path))
  if os.path.isdir(path):
    manifest = read_manifest(path)
    return _own_shards(path, manifest), manifest
  return [_open(p, dtype) for p in _find(path)], None


def _find(path: str) -> list[str]:
  path = os.path.expanduser(os.fspath(path))
  if not os.path.exists(path) and os.path.isfile(path + ".idx"):
    return [path + ".bin"]
  return files.find(path, "tokens: path")


def _open(path: str, dtype: str | None) -> Shard:
  index = os.path.splitext(path)[0] + ".idx"
  if path.endswith(".pbin"):
    shard = _open_pbin(path)
  elif os.path.isfile(index):
    shard = _open_megatron(path, index)
  else:
    return _open_plain(path, dtype)
  if dtype is not None and shard.dtype != np.dtype(dtype):
    raise ConfigError(
      f"tokens: dtype={dtype!r}, but {path} says that its ids are "
      f"{shard.dtype}."
    )
  return shard


def _open_plain(path: str, dtype: str | None) -> Shard:
  size = os.path.getsize(path)
  with open(path, "rb") as f:
    head = f.read(_LLMC_HEADER.size)
  if len(head) == _LLMC_HEADER.size:
    magic, _, count, *_ = _LLMC_HEADER.unpack(head)
    if magic in _LLMC_DTYPES:
      kind = np.dtype(_LLMC_DTYPES[magic])
      # Ids may begin with the magic number, but hardly with their own number.
      if size == len(head) + count * kind.itemsize:
        return Shard(path, len(head), kind, count)
  kind = np.dtype(dtype or "uint16")
  if size % kind.itemsize:
    raise DataError(
      f"{path}: its {size} bytes are no whole number of ids of {kind}: cut "
      "short, or dtype= is another."
    )
  return Shard(path, 0, kind, size // kind.itemsize)


def _open_megatron(path: str, index: str) -> Shard:
  with open(index, "rb") as f:
    raw = f.read()
  head = struct.Struct("<9sQBQQ")
  if len(raw) < head.size:
    raise DataError(f"{index}: is cut short, at {len(raw)} bytes.")
  magic, version, code, num_sequences, num_bounds = head.unpack_from(raw)
  if magic != _MEGATRON_MAGIC or version != 1:
    raise DataError(f"{index}: is no Megatron index of version 1.")
  if code not in _MEGATRON_DTYPES:
    raise DataError(f"{index}: its data type {code} is none of token ids.")
  kind = np.dtype(_MEGATRON_DTYPES[code])
  need = head.size + 12 * num_sequences + 8 * num_bounds
  if len(raw) < need:
    raise DataError(
      f"{index}: is cut short: {len(raw)} bytes, but {num_sequences} sequences "
      f"take {need}."
    )
  at = head.size
  sizes = np.frombuffer(raw, "<i4", num_sequences, at).astype(np.int64)
  at += 4 * num_sequences
  pointers = np.frombuffer(raw, "<i8", num_sequences, at)
  bounds = np.frombuffer(raw, "<i8", num_bounds, at + 8 * num_sequences)
  ends = np.cumsum(sizes)
  if np.any(sizes < 0) or np.any(pointers != (ends - sizes) * kind.itemsize):
    raise DataError(f"{index}: sequences that do not follow on each other.")
  size = int(ends[-1]) if len(ends) else 0
  if len(bounds):
    if np.any((bounds < 0) | (bounds > num_sequences)):
      raise DataError(f"{index}: documents of sequences that are not there.")
    ends = np.append(0, ends)[bounds[bounds > 0]]
  shard = Shard(path, 0, kind, size, _complete(ends, size))
  _check_size(shard)
  return shard


def _open_pbin(path: str) -> Shard:
  with open(path, "rb") as f:
    head = f.read(_PBIN_HEADER.size)
    if len(head) < _PBIN_HEADER.size:
      raise DataError(f"{path}: is cut short, at {len(head)} bytes.")
    num_bytes, itemsize = _PBIN_HEADER.unpack(head)
    if itemsize not in _PBIN_DTYPES or num_bytes % itemsize:
      raise DataError(
        f"{path}: is no packed data: {num_bytes} bytes of ids of {itemsize}."
      )
    f.seek(len(head) + num_bytes)
    index = _plain_pickle(f.read(), path)
  kind = np.dtype(_PBIN_DTYPES[itemsize])
  spans = np.asarray(index, np.int64).reshape(-1, 2)
  starts, sizes = spans[:, 0], spans[:, 1]
  if len(starts) and starts[0] == len(head):
    starts = starts - len(head)  # Earlier versions count from the header.
  ends = starts + sizes
  contiguous = np.array_equal(starts, np.append(0, ends)[:-1])
  if not contiguous or np.any(sizes < 0) or np.any(ends % itemsize):
    raise DataError(f"{path}: documents that do not follow on each other.")
  size = num_bytes // itemsize
  if len(ends) and ends[-1] > num_bytes:
    raise DataError(f"{path}: documents that go beyond its {size} ids.")
  shard = Shard(path, len(head), kind, size, _complete(ends // itemsize, size))
  _check_size(shard)
  return shard


class _PlainUnpickler(pickle.Unpickler):
  """Knows no names, so nothing that a pickle asks for can be called."""

  def find_class(self, module: str, name: str) -> Any:
    raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _plain_pickle(raw: bytes, path: str) -> Any:
  try:
    index = _PlainUnpickler(io.BytesIO(raw)).load()
    plain = isinstance(index, list) and all(
      isinstance(span, tuple | list)
      and len(span) == 2
      and all(type(number) is int for number in span)
      for span in index
    )
  # Damaged pickles raise nearly anything.
  except Exception as e:
    raise DataError(
      f"{path}: its index is cut short, damaged, or not just numbers: {e}."
    ) from e
  if not plain:
    raise DataError(f"{path}: its index is no list of (offset, length).")
  return index


def _complete(ends: np.ndarray, size: int) -> Callable[[], np.ndarray]:
  """`ends`, and last the end of what belongs to no document."""
  if not len(ends) or ends[-1] != size:
    ends = np.append(ends, size)
  return lambda: ends


def _check_size(shard: Shard) -> None:
  have = os.path.getsize(shard.path)
  need = shard.offset + shard.size * shard.dtype.itemsize
  if have < need:
    raise DataError(
      f"{shard.path}: is cut short: {have} bytes, expected {need}."
    )


def read_manifest(folder: str) -> dict[str, Any]:
  """The manifest of a folder that bigtrain.tools.tokenize has finished.

  Raises:
    DataError: there is none, or it is not of this format and version.
  """
  path = os.path.join(folder, MANIFEST)
  try:
    with open(path, encoding="utf-8") as f:
      manifest = json.load(f)
  except FileNotFoundError as e:
    raise DataError(
      f"{folder}: no {MANIFEST}: no folder of bigtrain.tools.tokenize, or one "
      "that is not finished; the same command again goes on with it."
    ) from e
  except (OSError, ValueError) as e:
    raise DataError(f"{path}: cannot be read: {e}.") from e
  if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
    raise DataError(f"{path}: is no manifest of token files.")
  if manifest.get("version") != FORMAT_VERSION:
    raise DataError(
      f"{path}: is of version {manifest.get('version')!r}; this program reads "
      f"{FORMAT_VERSION}."
    )
  return manifest


def _own_shards(folder: str, manifest: dict[str, Any]) -> list[Shard]:
  kind = np.dtype(manifest["dtype"])
  shards = []
  for entry in manifest["shards"]:
    name = entry["name"]
    if os.path.basename(name) != name:
      raise DataError(f"{folder}: shard {name!r} is not in the folder.")
    path = os.path.join(folder, f"{name}.bin")
    if not os.path.isfile(path):
      raise DataError(f"{path}: is missing, but {MANIFEST} lists it.")
    size = entry["num_tokens"]
    if os.path.getsize(path) != size * kind.itemsize:
      raise DataError(
        f"{path}: has {os.path.getsize(path)} bytes, but {MANIFEST} says that "
        f"it has {size} ids of {kind}."
      )
    ends = os.path.join(folder, f"{name}.ends.npy")
    shards.append(Shard(path, 0, kind, size, _load_ends(ends, size)))
  return shards


def _load_ends(path: str, size: int) -> Callable[[], np.ndarray]:
  def load() -> np.ndarray:
    try:
      ends = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as e:
      raise DataError(f"{path}: cannot be read: {e}.") from e
    rising = ends.ndim == 1 and not np.any(np.diff(ends, prepend=0) < 0)
    if not rising or not len(ends) or ends[-1] != size:
      raise DataError(f"{path}: does not fit to the ids beside it.")
    return ends.astype(np.int64)

  return load


def ends_by_id(shard: Shard, eos_id: int) -> np.ndarray:
  """Where documents end, by one pass over the ids, once for each file.

  Args:
    shard: its documents end in `eos_id`; what follows the last is one, too.
    eos_id: which belongs to the document that it ends.

  Returns:
    int64, ascending; the last is the number of ids.
  """

  def scan(path: str) -> np.ndarray:
    ids, found = shard.map(), []
    step = 1 << 24
    for at in range(0, len(ids), step):
      found.append(np.flatnonzero(ids[at : at + step] == eos_id) + at + 1)
    ends = np.concatenate([*found, np.asarray([len(ids)])])
    ends = ends[: np.searchsorted(ends, len(ids)) + 1]
    # Files keep their indices in bytes, of which the last is their size.
    return np.append(ends, os.path.getsize(path)).astype(np.int64)

  scan.__name__ = f"ends {eos_id} {shard.dtype} {shard.offset}"
  return files.offsets([shard.path], scan)[0][:-1]
