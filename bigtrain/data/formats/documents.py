"""Reads documents from plain text, JSON and Parquet files, also compressed.

For tokenizing, a corpus is cut into parts that processes read independently:
whole files, byte ranges of large files of lines, and row groups of Parquet
files. `rows` reads a whole file: JSON lines, a JSON array, a Parquet file, or a
text.
"""

import glob
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import logging

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  did_you_mean,
  import_package,
)
from bigtrain.data.formats import arrow_columns, files
from bigtrain.files import objects, paths

FORMATS = ("text", "lines", "jsonl", "json", "parquet")

_CHUNK_BYTES = 1 << 20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_FORMAT_OF = {
  **dict.fromkeys((".txt", ".md", ".rst", ".py"), "text"),
  **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
  ".json": "json",
  ".parquet": "parquet",
}
# Files with rows that a folder may consist of.
_ROW_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")
# Some editors of Windows begin a file with it.
_BOM = b"\xef\xbb\xbf"


class Part(NamedTuple):
  """A part of a file that is read at once."""

  path: str
  format: str  # One of FORMATS; in "text" the whole file is a document.
  compression: str  # "", "gzip" or "zstd".
  # The lines that begin in these bytes, or the Parquet row groups with these
  # numbers.
  start: int
  stop: int
  num_bytes: int  # Approximate.


def parts(path: str, format: str, most_bytes: int) -> list[Part]:
  """Cuts a file into parts of at most `most_bytes`, if its format allows it.

  Args:
    format: one of FORMATS, or "auto" to go by the suffix.
  """
  compression = _COMPRESSIONS.get(os.path.splitext(path)[1], "")
  if format == "auto":
    inner = suffix_of(path)
    if inner not in _FORMAT_OF:
      hint = f"give the format: {', '.join(FORMATS)}."
      raise ConfigError(f"{path}: unknown suffix {inner!r}; {hint}")
    format = _FORMAT_OF[inner]
  check_choice("format", format, FORMATS)
  # All of an object is one part, which ends where the object does.
  size = sys.maxsize if paths.is_remote(path) else os.path.getsize(path)
  if format == "parquet":
    return _row_groups(path, most_bytes)
  if format in ("text", "json") or compression or paths.is_remote(path):
    return [Part(path, format, compression, 0, size, size)]
  cuts = [*range(0, size, most_bytes), size]
  return [
    Part(path, format, "", start, stop, stop - start)
    for start, stop in zip(cuts[:-1], cuts[1:])
  ]


def read(part: Part, key: str) -> Iterator[str | DataError]:
  """Yields the documents of a part; an error takes the place of an invalid one.

  Texts may be empty; blank lines are skipped. Raises DataError if the rest of
  the file cannot be read.
  """
  if part.format == "parquet":
    yield from _read_rows(part, key)
  elif part.format == "text":
    yield _decoded(b"".join(_chunks(part)), part.path)
  elif part.format == "json":
    for where, row in _json_rows(part):
      yield row if isinstance(row, DataError) else _text_of(row, key, where)
  else:
    for position, line in _lines(part):
      where = _Where(part, position)
      if line.strip() and part.format == "lines":
        yield _decoded(line.rstrip(b"\r\n"), where)
      elif line.strip():
        yield _field(line, key, where)


def suffix_of(path: str) -> str:
  """Returns the end of a file's name that says its format, such as ".jsonl"."""
  stem, suffix = os.path.splitext(path.lower())
  return os.path.splitext(stem)[1] if suffix in _COMPRESSIONS else suffix


def find(path: Any, key: str) -> list[str]:
  """Returns the files of a path, a pattern, a folder, or a list of these.

  They may be in object stores.
  """
  result: list[str] = []
  for entry in files.as_list(path, key):
    folder = files.local_path(entry, key)
    names = _names_below(folder)
    if names is not None:
      result += _files_of(folder, names, key)
    else:
      result += files.find(entry, key, remote=True)
  return result


def _names_below(folder: str) -> list[str] | None:
  """Names of all files below a folder, or None if it is not a folder."""
  if paths.is_remote(folder):
    if suffix_of(folder) in _FORMAT_OF or glob.has_magic(folder):
      return None
    try:
      return objects.below(folder)
    except OSError as e:
      raise DataError(f"{folder}: {e.strerror}.") from e
  if not os.path.isdir(folder):
    return None
  pattern = os.path.join(glob.escape(folder), "**")
  names = glob.glob(pattern, recursive=True, include_hidden=True)
  return sorted(os.path.relpath(n, folder) for n in names if os.path.isfile(n))


def _files_of(folder: str, names: Sequence[str], key: str) -> list[str]:
  """Returns the files with rows in a folder, which must all be of one kind."""
  visible, hidden = files.split_hidden(names)
  files.log_hidden(hidden, key)
  by_suffix: dict[str, list[str]] = {}
  others = []
  for name in visible:
    suffix = suffix_of(name)
    if suffix in _ROW_SUFFIXES:
      by_suffix.setdefault(suffix, []).append(os.path.join(folder, name))
    else:
      others.append(name)
  if others:
    logging.info(
      "%s: left out other files (%d), such as %s",
      key,
      len(others),
      others[0],
    )
  if len(by_suffix) != 1:
    found = ", ".join(f"{len(x)} {suffix}" for suffix, x in by_suffix.items())
    raise DataError(
      f"{folder}: expected files of one kind, {', '.join(_ROW_SUFFIXES)}, got "
      f"{found or 'none'}; a pattern such as {folder}/*.jsonl selects some."
    )
  return next(iter(by_suffix.values()))


def rows(path: str) -> Iterator[tuple[Any, dict[str, Any] | DataError]]:
  """Yields (place, row) of a file; an error in the place of an invalid row.

  A plain text is one row with the field `text`.
  """
  if suffix_of(path) not in _FORMAT_OF:
    raise ConfigError(
      f"{path}: expected a .jsonl, .json, .parquet or .txt file."
    )
  for part in parts(path, "auto", sys.maxsize):
    if part.format == "parquet":
      with (
        arrow_columns.errors(f"{path}: cannot read it") as pa,
        pa.parquet.ParquetFile(_parquet(path)) as file,
      ):
        batches = (batch.to_pylist() for batch in file.iter_batches())
        for number, row in enumerate(itertools.chain.from_iterable(batches)):
          yield f"{path}, row {number}", row
    elif part.format == "json":
      yield from _json_rows(part)
    elif part.format == "text":
      yield path, _text_row(part)
    else:
      for position, line in _lines(part):
        if line.strip():
          where = _Where(part, position)
          yield where, _parsed(line, where)


def json_value(path: str) -> Any:
  """The content of a JSON file, which may be compressed."""
  compression = _COMPRESSIONS.get(os.path.splitext(path)[1], "")
  part = Part(path, "json", compression, 0, sys.maxsize, 0)
  try:
    return json.loads(b"".join(_chunks(part)).removeprefix(_BOM))
  except (ValueError, RecursionError) as e:
    raise DataError(f"{path}: not valid JSON: {e}.") from e


def _text_row(part: Part) -> dict[str, Any] | DataError:
  raw = b"".join(_chunks(part)).removeprefix(_BOM)
  text = _decoded(raw, part.path)
  if isinstance(text, DataError):
    return text
  if not text.strip():
    return DataError(f"{part.path}: the file has no text.")
  # Line ends as Python reads them from text files.
  return {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


def _json_rows(part: Part) -> Iterator[tuple[Any, dict[str, Any] | DataError]]:
  """Yields (place, row) of an array in JSON, or of lines of JSON."""
  content = b"".join(_chunks(part)).removeprefix(_BOM)
  if content.lstrip()[:1] == b"[":
    try:
      elements = json.loads(content)
    except (ValueError, RecursionError) as e:
      raise DataError(f"{part.path}: not valid JSON: {e}.") from e
    for number, row in enumerate(elements):
      where = f"{part.path}, row {number} (from 0)"
      if isinstance(row, dict):
        yield where, row
      else:
        kind = type(row).__name__
        yield where, DataError(f"{where}: expected an object, got {kind}.")
    return
  lines = content.split(b"\n")
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    where = f"{part.path}, line {number}"
    row = _parsed(line, where)
    if number == 1 and isinstance(row, DataError):
      # Often an object over several lines, around the array.
      row = DataError(
        f"{part.path}: expected an array of objects, or an object in each line."
      )
    yield where, row


def _parsed(line: bytes, where: Any) -> dict[str, Any] | DataError:
  try:
    return json_object(line)
  except DataError as e:
    return DataError(f"{where}: {e}")


def json_object(line: bytes) -> dict[str, Any]:
  """Parses a line of JSON that must be an object; errors name no place."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as e:
    raise DataError(f"not valid JSON: {e}.") from e
  if not isinstance(row, dict):
    raise DataError(f"expected an object, got {type(row).__name__}.")
  return row


class _Where(NamedTuple):
  """A line's location, whose line number is computed only when printed."""

  part: Part
  position: int  # Line number in a compressed file, else byte offset.

  def __str__(self) -> str:
    path, number = self.part.path, self.position
    if not self.part.compression:
      number = files.line_number(path, number)
    return f"{path}, line {number}"


def _field(line: bytes, key: str, where: _Where) -> str | DataError:
  example = _parsed(line, where)
  if isinstance(example, DataError):
    return example
  return _text_of(example, key, where)


def _text_of(example: dict[str, Any], key: str, where: Any) -> str | DataError:
  if key not in example:
    hint = did_you_mean(key, example)
    return DataError(f"{where}: no field {key!r}.{hint}")
  return _checked(example[key], key, where)


def _checked(text: Any, key: str, where: Any) -> str | DataError:
  if not isinstance(text, str):
    kind = type(text).__name__
    return DataError(f"{where}: field {key!r}: expected a string, got {kind}.")
  try:
    text.encode()
  except UnicodeEncodeError:
    return DataError(f"{where}: field {key!r} contains a lone surrogate.")
  return text


def _decoded(raw: bytes, where: Any) -> str | DataError:
  try:
    return raw.decode("utf-8")
  except UnicodeDecodeError as e:
    return DataError(f"{where}: not UTF-8: {e.reason} at byte {e.start}.")


def _lines(part: Part) -> Iterator[tuple[int, bytes]]:
  """Yields (position as in `_Where`, line) for each line of a part."""
  if part.compression:
    rest, number = b"", 1
    for chunk in _chunks(part):
      *whole, rest = (rest + chunk).split(b"\n")
      for line in whole:
        yield number, line
        number += 1
    yield number, rest
    return
  try:
    with files.open_to_read(part.path) as f:
      f.seek(max(0, part.start - 1))
      if part.start and f.read(1) != b"\n":
        f.readline()  # This line belongs to the previous part.
      at = f.tell()
      while at < part.stop and (line := f.readline()):
        yield at, line
        at += len(line)
  except OSError as e:
    raise DataError(f"{part.path}: {e.strerror}.") from e


def _chunks(part: Part) -> Iterator[bytes]:
  try:
    with files.open_to_read(part.path) as raw:
      f = gzip.GzipFile(fileobj=raw) if part.compression == "gzip" else raw
      blocks = iter(lambda: f.read(_CHUNK_BYTES), b"")
      yield from (
        _unzstd(blocks, part.path) if part.compression == "zstd" else blocks
      )
  except (OSError, EOFError, zlib.error) as e:
    raise DataError(f"{part.path}: truncated or damaged: {e}.") from e


def _unzstd(blocks: Iterator[bytes], path: str) -> Iterator[bytes]:
  zstandard = import_package(
    "zstandard", f"{path}: reading it", "'bigtrain[zstd]'"
  )
  frame = None
  try:
    for block in blocks:
      while block:
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        yield frame.decompress(block)
        # A file may consist of several frames.
        block = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
  except zstandard.ZstdError as e:
    raise DataError(f"{path}: damaged: {e}.") from e
  if frame is not None:
    raise DataError(f"{path}: truncated: the last zstd frame is incomplete.")


def _parquet(path: str) -> Any:
  """A source for pyarrow: a local path, or the whole content of an object."""
  return io.BytesIO(paths.read_bytes(path)) if paths.is_remote(path) else path


def _row_groups(path: str, most_bytes: int) -> list[Part]:
  with arrow_columns.errors(f"{path}: cannot open it") as pa:
    metadata = pa.parquet.read_metadata(_parquet(path))
  groups = map(metadata.row_group, range(metadata.num_row_groups))
  sizes = [group.total_byte_size for group in groups]
  rows = [Part(path, "parquet", "", i, i + 1, n) for i, n in enumerate(sizes)]
  return [
    group[0]._replace(
      stop=group[-1].stop, num_bytes=sum(part.num_bytes for part in group)
    )
    for group in grouped(rows, most_bytes)
  ]


def _read_rows(part: Part, key: str) -> Iterator[str | DataError]:
  with (
    arrow_columns.errors(f"{part.path}: cannot read it") as pa,
    pa.parquet.ParquetFile(part.path) as file,
  ):
    names = file.schema_arrow.names
    check_choice(part.path, key, names, "no column")
    for group in range(part.start, part.stop):
      batches = file.iter_batches(row_groups=[group], columns=[key])
      texts = (text for batch in batches for text in batch[0].to_pylist())
      for row, text in enumerate(texts):
        where = f"{part.path}, row group {group}, row {row}"
        yield _checked(text, key, where)


def grouped(file_parts: Sequence[Part], most_bytes: int) -> list[list[Part]]:
  """Groups consecutive parts up to `most_bytes`; a larger part is a group."""
  groups: list[list[Part]] = []
  size = most_bytes
  for part in file_parts:
    if size + part.num_bytes > most_bytes:
      groups.append([])
      size = 0
    groups[-1].append(part)
    size += part.num_bytes
  return groups
