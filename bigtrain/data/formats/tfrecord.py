"""Random access to the records of TFRecord and ArrayRecord files.

A TFRecord is the length of its data (8 bytes, little-endian), a masked CRC-32C
of these 8 bytes, the data, and a masked CRC-32C of the data. Both checksums are
verified.
"""

import os
import struct
from typing import Any

import google_crc32c
import numpy as np

from bigtrain.config.errors import DataError, import_package
from bigtrain.data.formats import files

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_OVERHEAD = _HEADER.size + _FOOTER.size
# Exceptions that array_record raises for damaged files.
_ERRORS = (IndexError, OSError, ValueError, RuntimeError)


def _masked(crc: int) -> int:
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def scan(path: str) -> np.ndarray:
  """Returns the offsets of N records and the file size, int64 [N + 1]."""
  starts, at = [], 0
  with open(path, "rb") as f:
    size = os.fstat(f.fileno()).st_size
    while at < size:
      f.seek(at)  # Keeps the buffer if it holds this position.
      header = f.read(_HEADER.size)
      if len(header) < _HEADER.size:
        raise _truncated(path, at)
      data_size, crc = _HEADER.unpack(header)
      if _masked(google_crc32c.value(header[:8])) != crc:
        raise DataError(
          f"{path}, byte {at}: damaged record (the checksum of its length "
          "does not match); the start of the next record is unknown."
        )
      starts.append(at)
      at += data_size + _OVERHEAD
    if at > size:
      raise _truncated(path, starts[-1])
  return np.asarray([*starts, size], np.int64)


def _truncated(path: str, at: int) -> DataError:
  return DataError(f"{path}, byte {at}: the file ends within this record.")


class TFRecordFiles:
  """The records of several TFRecord files; `counts` for each file."""

  def __init__(self, paths: list[str]):
    self._paths = paths
    self._reader = files.Reader()
    self._offsets = files.offsets(paths, scan)
    self.counts = [len(o) - 1 for o in self._offsets]

  def read(self, file: int, record: int) -> bytes:
    start, stop = self._offsets[file][record : record + 2].tolist()
    path = self._paths[file]
    # Two reads, because slicing the data out of one would copy it again.
    size = stop - start - _OVERHEAD
    data = self._reader.read(path, start + _HEADER.size, size)
    footer = self._reader.read(path, stop - _FOOTER.size, _FOOTER.size)
    if len(data) < size or len(footer) < _FOOTER.size:
      raise _truncated(path, start)
    if (_masked(google_crc32c.value(data)),) != _FOOTER.unpack(footer):
      where = self.where(file, record)
      raise DataError(f"{where}: damaged record (its checksum does not match).")
    return data

  def where(self, file: int, record: int) -> str:
    return f"{self._paths[file]}, byte {self._offsets[file][record]}"


class ArrayRecordFiles:
  """The records of several ArrayRecord files; `counts` for each file."""

  def __init__(self, paths: list[str]):
    name = "array_record.python.array_record_module"
    module = import_package(name, "ArrayRecord", "'bigtrain[tfds]'")

    def open_file(path: str) -> Any:
      try:
        # Read-ahead does not help random access.
        reader = module.ArrayRecordReader(
          path,
          options="readahead_buffer_size:0",
          file_reader_buffer_size=1 << 15,
        )
      except _ERRORS as e:
        raise DataError(f"{path}: cannot open it: {files.one_line(e)}.") from e
      # The reader reports no records for a file whose index is missing.
      if not reader.ok():
        raise DataError(f"{path}: truncated or damaged: cannot read its index.")
      return reader

    self._paths = paths
    self._handles = files.handles(open_file)
    self.counts = files.in_threads(
      lambda path: self._handles.get(path).num_records(), paths
    )

  def read(self, file: int, record: int) -> bytes:
    try:
      return self._handles.get(self._paths[file]).read([record])[0]
    except _ERRORS as e:
      where = self.where(file, record)
      raise DataError(f"{where}: damaged record: {files.one_line(e)}.") from e

  def where(self, file: int, record: int) -> str:
    return f"{self._paths[file]}, record {record}"
