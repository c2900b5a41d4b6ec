"""Finds the samples of tar files, grouped as in the library webdataset.

Consecutive members whose names are equal up to the first dot form a sample; the
rest of the name is the extension. Folders, links, hidden files, and names
without a dot are left out.

A file is scanned once for an index of its samples. The index has a checksum of
each member's header and last bytes, so that a later read detects if the file
has changed.
"""

import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import DataError
from bigtrain.data.formats import files

HEADER = tarfile.BLOCKSIZE
_NAME = re.compile(r"(?:\./)?((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_DAMAGED = 1 << 32  # In place of a checksum, to which nothing is equal.


class Index(NamedTuple):
  """The samples of a tar file."""

  keys: np.ndarray  # Names of the samples, bytes [N].
  extensions: list[str]
  # Sample, extension, and (start, size, checksum) of each member: int64 [M, 5].
  members: np.ndarray
  hidden: list[str]  # Names that were left out: see files.split_hidden.

  def rows(self, extensions: Sequence[str]) -> np.ndarray:
    """Returns (start, size, checksum) of a member of each sample, int64 [N, 3].

    The member is that of the first extension that the sample has; if it has
    none, the values are -1.
    """
    rows = np.full((len(self.keys), 3), -1, np.int64)
    for extension in reversed(extensions):
      if extension in self.extensions:
        number = self.extensions.index(extension)
        chosen = self.members[self.members[:, 1] == number]
        rows[chosen[:, 0]] = chosen[:, 2:]
    return rows


def scan_members(path: str) -> np.ndarray:
  """Returns the index of a file as int64; `load` reads it."""
  keys: list[bytes] = []
  seen: set[int] = set()
  extensions: dict[str, int] = {}
  members: list[tuple[int, ...]] = []
  all_hidden: set[str] = set()
  with files.open_to_read(path) as f:
    for name, start, size in _members(path, f):
      visible, hidden = files.split_hidden([name])
      all_hidden |= hidden
      match = _NAME.fullmatch(name)
      if not match or not visible:
        continue
      key = match[1].encode("utf-8", "surrogateescape")
      number = extensions.setdefault(match[2].lower(), len(extensions))
      if not keys or key != keys[-1]:
        keys.append(key)
        seen = set()
      if number in seen:
        raise DataError(f"{path}, byte {start}: {name!r} is there twice.")
      seen.add(number)
      checksum = _DAMAGED
      if size >= 0:
        f.seek(start - HEADER)
        header = f.read(HEADER)
        f.seek(start + max(0, size - HEADER))
        checksum = zlib.crc32(f.read(min(size, HEADER)), zlib.crc32(header))
      members.append((len(keys) - 1, number, start, max(size, 0), checksum))
  packed = io.BytesIO()
  table = np.asarray(members, np.int64).reshape(-1, 5)
  for array in (
    np.asarray(keys, "S"),
    np.asarray([*extensions], "U"),
    table,
    np.asarray([os.fsencode(each) for each in sorted(all_hidden)], "S"),
  ):
    np.save(packed, array, allow_pickle=False)
  packed.write(bytes(-packed.tell() % 8))
  return np.frombuffer(packed.getvalue(), np.int64)


def load(packed: np.ndarray) -> Index:
  content = io.BytesIO(packed.tobytes())
  keys, extensions, members, hidden = (
    files.load_array(content) for _ in range(4)
  )
  names = [os.fsdecode(name) for name in hidden.tolist()]
  return Index(keys, extensions.tolist(), members, names)


def _members(path: str, f: Any) -> Iterator[tuple[str, int, int]]:
  """Yields (name, start, size) of files; size -1 if the header is damaged."""
  at = 0
  try:
    start = f.read(HEADER)
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd")):
      raise DataError(
        f"{path}: compressed, which gives no access to single samples; "
        "decompress it once."
      )
    if any(start):  # Raises if the file does not begin with a header.
      tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    f.seek(0)
    # The library skips damaged headers, block by block.
    tar: Any = tarfile.TarFile(fileobj=f, ignore_zeros=True)
    while True:
      info = tar.next()
      tar.members = []  # It would keep all of them in memory.
      end = tar.offset
      if (info.offset if info else end) > at:
        # Blocks before this member were skipped: a damaged header, or zeros.
        f.seek(at)
        if any(block := f.read(HEADER)):
          name = block[:100].rstrip(b"\0").decode("utf-8", "surrogateescape")
          yield name, at + HEADER, -1
      if info is None:
        break
      if info.issparse():
        raise tarfile.TarError(f"{info.name} is sparse")
      if info.isreg():
        yield info.name, info.offset_data, info.size
      at = end
    f.seek(end - HEADER)
    if len(block := f.read(2 * HEADER)) != HEADER or any(block):
      raise tarfile.TarError("it ends too early")
  except tarfile.TarError as e:
    raise DataError(f"{path}, byte {at}: not a whole tar file: {e}.") from e


def parts(rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
  """Returns (start, size) of the bytes to read for rows of `Index.rows`.

  These are the header and the data of each member. They are read separately,
  because cutting the data out of a larger read would copy it.
  """
  result = []
  for start, size, _ in rows:
    result.append((start - HEADER, HEADER))
    result.append((start, size))
  return result


def members(
  contents: Sequence[bytes], rows: Sequence[Sequence[int]]
) -> list[bytes]:
  """Returns the data for rows of `Index.rows`, from the contents of `parts`."""
  headers, result = contents[::2], list(contents[1::2])
  for header, data, (_, _, checksum) in zip(headers, result, rows):
    if zlib.crc32(data[-HEADER:], zlib.crc32(header)) != checksum:
      raise DataError("damaged, or not the member that the index describes.")
  return result
