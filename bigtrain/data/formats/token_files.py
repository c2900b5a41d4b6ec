"""Token files: the formats of bigtrain and of other programs.

- A folder made by `python -m bigtrain.tools.tokenize`: manifest.json, and for
  each shard plain ids (00000.bin) and the ends of documents (00000.ends.npy).
- nanoGPT: plain ids without a header (.bin).
- llm.c: a header of 256 int32 with the number of ids, then plain ids (.bin).
- Megatron: plain ids (.bin) and an index of sequences (.idx).
- Modalities: a header, ids and a pickled index of documents (.pbin).
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

from bigtrain.config.errors import ConfigError, DataError, check_choice
from bigtrain.data.formats import files

MANIFEST = "manifest.json"
FORMAT = "bigtrain tokens"
FORMAT_VERSION = 1

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = dict(enumerate(("u1", "i1", "i2", "i4", "i8"), 1))
_MEGATRON_DTYPES[8] = "u2"
_LLMC_HEADER = struct.Struct("<256i")
_LLMC_DTYPES = {20240520: np.uint16, 20240801: np.uint32}  # By magic number.
_PBIN_HEADER = struct.Struct("<QI")
_PBIN_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_DTYPES = ("uint8", "uint16", "uint32", "int32")


@dataclasses.dataclass(frozen=True)
class Shard:
  """The token ids of a file."""

  path: str
  offset: int  # Of the first id, in bytes.
  dtype: np.dtype
  size: int  # Number of ids.
  # Loads the document ends, if known: int64, ascending, the last one `size`.
  ends: Callable[[], np.ndarray] | None = None

  def map(self) -> np.ndarray:
    if not self.size:
      return np.zeros(0, self.dtype)
    try:
      ids = np.memmap(self.path, self.dtype, "r", self.offset, (self.size,))
      return np.asarray(ids)
    except (OSError, ValueError) as e:
      what = f"{self.size} ids of {self.dtype} from byte {self.offset}"
      raise DataError(f"{self.path}: cannot map {what}: {e}.") from e


def open_shards(
  path: str | Sequence[str], dtype: str | None
) -> tuple[list[Shard], dict[str, Any] | None]:
  """Opens the files of a path, and the manifest if bigtrain made the folder."""
  if dtype is not None:
    check_choice("tokens: dtype", dtype, _DTYPES)
  if isinstance(path, str | os.PathLike):
    folder = files.local_path(path, "tokens: path")
    if os.path.isdir(folder):
      manifest = read_manifest(folder)
      return _own_shards(folder, manifest), manifest
  entries = files.as_list(path, "tokens: path")
  return [_open(file, dtype) for one in entries for file in _find(one)], None


def _find(path: str) -> list[str]:
  stem = files.local_path(path, "tokens: path")
  if not os.path.exists(stem) and os.path.isfile(stem + ".idx"):
    return [stem + ".bin"]  # Megatron's files without their suffix.
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
    raise ConfigError(f"tokens: dtype={dtype!r}: {path} has {shard.dtype}.")
  return shard


def _open_plain(path: str, dtype: str | None) -> Shard:
  size = os.path.getsize(path)
  with open(path, "rb") as f:
    head = f.read(_LLMC_HEADER.size)
  if len(head) == _LLMC_HEADER.size:
    magic, _, count, *_ = _LLMC_HEADER.unpack(head)
    if magic in _LLMC_DTYPES:
      kind = np.dtype(_LLMC_DTYPES[magic])
      # Ids may start with the magic number, but hardly with their own count.
      if size == len(head) + count * kind.itemsize:
        return Shard(path, len(head), kind, count)
  kind = np.dtype(dtype or "uint16")
  if size % kind.itemsize:
    raise DataError(
      f"{path}: {size} bytes are not a whole number of {kind} ids; the file is "
      "truncated, or dtype= is wrong."
    )
  return Shard(path, 0, kind, size // kind.itemsize)


def _open_megatron(path: str, index: str) -> Shard:
  with open(index, "rb") as f:
    raw = f.read()
  at = _MEGATRON_HEADER.size
  if len(raw) < at:
    raise DataError(f"{index}: truncated to {len(raw)} bytes.")
  head = _MEGATRON_HEADER.unpack_from(raw)
  magic, version, code, num_sequences, num_bounds = head
  if magic != _MEGATRON_MAGIC or version != 1:
    raise DataError(f"{index}: not a Megatron index of version 1.")
  if code not in _MEGATRON_DTYPES:
    raise DataError(f"{index}: data type {code} is not a type of token ids.")
  kind = np.dtype(_MEGATRON_DTYPES[code])
  expected = at + 12 * num_sequences + 8 * num_bounds
  if len(raw) < expected:
    raise DataError(
      f"{index}: truncated to {len(raw)} bytes; expected {expected}."
    )
  sizes = np.frombuffer(raw, "<i4", num_sequences, at).astype(np.int64)
  at += 4 * num_sequences
  pointers = np.frombuffer(raw, "<i8", num_sequences, at)
  bounds = np.frombuffer(raw, "<i8", num_bounds, at + 8 * num_sequences)
  ends = np.cumsum(sizes)
  if np.any(sizes < 0) or np.any(pointers != (ends - sizes) * kind.itemsize):
    raise DataError(f"{index}: the sequences are not contiguous.")
  size = int(ends[-1]) if len(ends) else 0
  if len(bounds):
    if np.any((bounds < 0) | (bounds > num_sequences)):
      raise DataError(f"{index}: a document refers to a missing sequence.")
    ends = np.append(0, ends)[bounds[bounds > 0]]
  return _indexed(path, 0, kind, size, ends)


def _open_pbin(path: str) -> Shard:
  with open(path, "rb") as f:
    head = f.read(_PBIN_HEADER.size)
    if len(head) < _PBIN_HEADER.size:
      raise DataError(f"{path}: truncated to {len(head)} bytes.")
    num_bytes, itemsize = _PBIN_HEADER.unpack(head)
    if itemsize not in _PBIN_DTYPES or num_bytes % itemsize:
      raise DataError(
        f"{path}: not packed data: {num_bytes} bytes of {itemsize}-byte ids."
      )
    f.seek(len(head) + num_bytes)
    index = _plain_pickle(f.read(), path)
  kind = np.dtype(_PBIN_DTYPES[itemsize])
  spans = np.asarray(index, np.int64).reshape(-1, 2)
  starts, sizes = spans.T
  if len(starts) and starts[0] == len(head):
    starts = starts - len(head)  # Older files count from the file's start.
  ends = starts + sizes
  contiguous = np.array_equal(starts, np.append(0, ends)[:-1])
  if not contiguous or np.any(sizes < 0) or np.any(ends % itemsize):
    raise DataError(f"{path}: the documents are not contiguous.")
  size = num_bytes // itemsize
  if len(ends) and ends[-1] > num_bytes:
    raise DataError(f"{path}: documents extend beyond the {size} ids.")
  return _indexed(path, len(head), kind, size, ends // itemsize)


class _PlainUnpickler(pickle.Unpickler):
  """Refuses all classes and functions, so no code in a file is executed."""

  def find_class(self, module: str, name: str) -> Any:
    raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _plain_pickle(raw: bytes, path: str) -> Any:
  try:
    index = _PlainUnpickler(io.BytesIO(raw)).load()
    plain = isinstance(index, list) and all(
      isinstance(span, tuple | list) and [*map(type, span)] == [int, int]
      for span in index
    )
  # Damaged pickles can raise almost any exception.
  except Exception as e:
    raise DataError(
      f"{path}: its index is truncated, damaged or not plain numbers: {e}."
    ) from e
  if not plain:
    raise DataError(f"{path}: its index is not a list of (offset, length).")
  return index


def _indexed(
  path: str, offset: int, dtype: np.dtype, size: int, ends: np.ndarray
) -> Shard:
  num_bytes, expected = os.path.getsize(path), offset + size * dtype.itemsize
  if num_bytes < expected:
    raise DataError(
      f"{path}: truncated to {num_bytes} bytes; expected {expected}."
    )
  if not len(ends) or ends[-1] != size:  # Other ids are one more document.
    ends = np.append(ends, size)
  return Shard(path, offset, dtype, size, lambda: ends)


def read_manifest(folder: str) -> dict[str, Any]:
  """Reads the manifest of a folder made by bigtrain.tools.tokenize."""
  path = os.path.join(folder, MANIFEST)
  try:
    with open(path, encoding="utf-8") as f:
      manifest = json.load(f)
  except FileNotFoundError as e:
    raise DataError(
      f"{folder}: no {MANIFEST}; expected a folder of bigtrain.tools.tokenize. "
      "To continue an unfinished one, run the same command again."
    ) from e
  except (OSError, ValueError) as e:
    raise DataError(f"{path}: cannot read it: {e}.") from e
  if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
    raise DataError(f"{path}: not a manifest of token files.")
  if (version := manifest.get("version")) != FORMAT_VERSION:
    expected = f"expected version {FORMAT_VERSION}"
    raise DataError(f"{path}: version {version!r}; {expected}.")
  return manifest


def _own_shards(folder: str, manifest: dict[str, Any]) -> list[Shard]:
  kind = np.dtype(manifest["dtype"])
  shards = []
  for entry in manifest["shards"]:
    name = entry["name"]
    if os.path.basename(name) != name:
      raise DataError(f"{folder}: shard {name!r} is outside of the folder.")
    path = os.path.join(folder, f"{name}.bin")
    if not os.path.isfile(path):
      raise DataError(f"{path}: listed in {MANIFEST}, but missing.")
    size, num_bytes = entry["num_tokens"], os.path.getsize(path)
    if num_bytes != size * kind.itemsize:
      expected = f"expected {size} {kind} ids, as in {MANIFEST}"
      raise DataError(f"{path}: {num_bytes} bytes; {expected}.")
    ends = os.path.join(folder, f"{name}.ends.npy")
    shards.append(Shard(path, 0, kind, size, _load_ends(ends, size)))
  return shards


def _load_ends(path: str, size: int) -> Callable[[], np.ndarray]:
  def load() -> np.ndarray:
    try:
      ends = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as e:
      raise DataError(f"{path}: cannot read it: {e}.") from e
    ascending = ends.ndim == 1 and not np.any(np.diff(ends, prepend=0) < 0)
    if not ascending or not len(ends) or ends[-1] != size:
      raise DataError(f"{path}: does not match the ids in the .bin file.")
    return ends.astype(np.int64)

  return load


def ends_by_id(shard: Shard, eos_id: int) -> np.ndarray:
  """Finds the ends of documents in a shard, by the id that ends a document.

  Ids after the last `eos_id` form another document.
  """

  def scan(path: str) -> np.ndarray:
    ids, step = shard.map(), 1 << 24
    blocks = [
      np.flatnonzero(ids[at : at + step] == eos_id) + at + 1
      for at in range(0, len(ids), step)
    ]
    ends = np.concatenate([*blocks, np.asarray([len(ids)])])
    ends = ends[: np.searchsorted(ends, len(ids)) + 1]
    # files.offsets requires the file's size as the last offset.
    return np.append(ends, os.path.getsize(path)).astype(np.int64)

  scan.__name__ = f"ends {eos_id} {shard.dtype} {shard.offset}"
  return files.offsets([shard.path], scan)[0][:-1]
