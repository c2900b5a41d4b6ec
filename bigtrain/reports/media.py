"""Images, texts, tables and histograms in log entries.

The results of an evaluator and the metrics of a task may contain these values
as well as numbers. Each is written to a separate file, by default
media/<metric>/<step>.<suffix> in the workdir, and the log entry in
metrics.jsonl has the file's path. Loggers get it as a `MediaArray` or a
`MediaText`, and reports read the file with `read`.
"""

import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from bigtrain.files import paths

FOLDER = "media"


@dataclasses.dataclass(frozen=True, eq=False)
class Image:
  """An image, and the path of its .png file in the workdir."""

  # [height, width] or [height, width, 1, 3 or 4]; uint8, or floats from 0 to 1.
  pixels: np.ndarray
  caption: str = ""
  path: str = ""

  def uint8(self) -> np.ndarray:
    """The pixels, uint8 [height, width, channels]."""
    pixels = np.asarray(self.pixels)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[-1] not in _PNG_COLORS:
      raise ValueError(
        "an image must be [height, width] or [height, width, 1, 3 or 4]; got "
        f"shape {pixels.shape}"
      )
    if pixels.dtype == np.uint8:
      return pixels
    scaled = np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255
    return np.round(scaled).astype(np.uint8)

  def png(self) -> bytes:
    pixels = self.uint8()
    height, width, channels = pixels.shape
    lines = pixels.reshape(height, width * channels)
    # Each line starts with the number of its filter; 0 is none.
    data = np.pad(lines, ((0, 0), (1, 0))).tobytes()
    size = struct.pack(
      ">IIBBBBB", width, height, 8, _PNG_COLORS[channels], 0, 0, 0
    )
    caption = b"Description\0\0\0\0\0" + self.caption.encode()
    return (
      b"\x89PNG\r\n\x1a\n"
      + _png_chunk(b"IHDR", size)
      + (_png_chunk(b"iTXt", caption) if self.caption else b"")
      + _png_chunk(b"IDAT", zlib.compress(data))
      + _png_chunk(b"IEND", b"")
    )


# Channels and PNG's numbers of colour types (ISO/IEC 15948, 11.2.2).
_PNG_COLORS = {1: 0, 3: 2, 4: 6}


def _png_chunk(kind: bytes, data: bytes) -> bytes:
  size, checksum = len(data), zlib.crc32(kind + data)
  return struct.pack(">I", size) + kind + data + struct.pack(">I", checksum)


def png_caption(content: bytes) -> str:
  """The caption in a PNG file of `Image.png`, or ""."""
  at = 8
  while at + 8 <= len(content):
    size, kind = struct.unpack(">I4s", content[at : at + 8])
    if kind == b"iTXt":
      return content[at + 8 : at + 8 + size].rpartition(b"\0")[2].decode()
    at += 12 + size
  return ""


@dataclasses.dataclass(frozen=True)
class Text:
  """Plain text or Markdown, and the path of its .txt file in the workdir."""

  text: str
  path: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of JSON values. The keys of the first row name the columns."""

  rows: Sequence[Mapping[str, Any]]
  path: str = ""

  def markdown(self, num_rows: int = 20) -> str:
    lines = [self.columns]
    for row in self.rows[:num_rows]:
      lines.append([row.get(column, "") for column in self.columns])
    texts = [f"| {' | '.join(map(_cell, line))} |" for line in lines]
    texts.insert(1, "|---" * len(self.columns) + "|")
    return "\n".join(texts)

  @property
  def columns(self) -> list[str]:
    return list(self.rows[0]) if self.rows else []


def _cell(value: Any) -> str:
  if isinstance(value, list | tuple):
    value = "; ".join(map(str, value))
  return str(value).replace("|", "\\|").replace("\n", " ")


def path_of(name: str, step: int, value: Any) -> str:
  """The path of a value's file in the workdir."""
  suffixes = {Image: "png", Text: "txt", Table: "jsonl"}
  suffix = suffixes.get(type(value), "json")
  given = getattr(value, "path", "")
  return given or f"{FOLDER}/{name}/{step:08d}.{suffix}"


def split(entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns (the entry with paths in place of media, {metric: media})."""
  media = {
    name: value
    for name, value in entry.items()
    if isinstance(value, Image | Text | Table) or hasattr(value, "edges")
  }
  files = {k: path_of(k, entry["step"], value) for k, value in media.items()}
  return {**entry, **files}, media


def content(value: Any) -> bytes:
  """The content of a value's file."""
  if isinstance(value, Image):
    return value.png()
  if isinstance(value, Text):
    return value.text.encode()
  if isinstance(value, Table):
    lines = (json.dumps(row, ensure_ascii=False) for row in value.rows)
    return "".join(f"{line}\n" for line in lines).encode()
  counts = np.asarray(value.counts).tolist()
  return json.dumps({"edges": value.edges.tolist(), "counts": counts}).encode()


def save(workdir: str, step: int, media: Mapping[str, Any]) -> None:
  for name, value in media.items():
    save_file(workdir, path_of(name, step, value), value)


def save_file(folder: str, path: str, value: Any) -> None:
  """Writes a value to a file whose path is relative to the folder."""
  path = os.path.join(folder, path)
  paths.make_folder(os.path.dirname(path))
  with paths.replacing(path, "wb") as file:
    file.write(content(value))


class MediaArray(np.ndarray):
  """An array for a logger, together with what the array cannot say.

  `media` is the `Image` with its caption or the `metrics.Histogram` with its
  counts; `path` is the path of its file in the workdir.
  """

  media: Any
  path: str

  @classmethod
  def of(cls, media: Any, array: np.ndarray, path: str) -> Self:
    result = array.view(cls)
    result.media, result.path = media, path
    return result


class MediaText(str):
  """A text for a logger, with the `Text` or `Table` that it shows."""

  media: Text | Table
  path: str

  @classmethod
  def of(cls, media: Text | Table, text: str, path: str) -> Self:
    result = cls(text)
    result.media, result.path = media, path
    return result


def image_array(image: Image, path: str) -> MediaArray:
  """The pixels, uint8 [1, height, width, channels]."""
  return MediaArray.of(image, image.uint8()[None], path)


# Largest number of values that represent the counts of one histogram. More
# values would be more precise for small bins, but each logger's thread sorts
# them all.
_MAX_SAMPLES = 10_000


def histogram_array(histogram: Any, path: str) -> tuple[MediaArray, int]:
  """Returns (values with the histogram's counts, number of buckets).

  Metric writers count the values themselves. So each bin becomes `count` copies
  of its centre, and a histogram with the same number of buckets has the same
  counts.
  """
  counts = np.asarray(histogram.counts, np.float64)
  edges = histogram.edges
  middles = (edges[1:] + edges[:-1]) / 2
  scale = min(1.0, _MAX_SAMPLES / max(counts.sum(), 1.0))
  # No bin with a count, however small, disappears.
  copies = np.where(counts > 0, np.maximum(np.rint(counts * scale), 1), 0)
  (filled,) = np.nonzero(copies)
  num_buckets = filled[-1] - filled[0] + 1 if filled.size else 1
  values = np.repeat(middles, copies.astype(np.int64))
  return MediaArray.of(histogram, values, path), int(num_buckets)


class ImageFile(NamedTuple):
  """A PNG file."""

  content: bytes
  caption: str
  width: int


def read(workdir: str, path: str) -> Any:
  """Reads the file that a log entry names; None if it is not in the workdir.

  Histograms are {"edges": ..., "counts": ...}.
  """
  suffix = os.path.splitext(path)[1]
  is_inside = not os.path.isabs(path) and ".." not in path.split("/")
  if suffix not in (".png", ".txt", ".jsonl", ".json") or not is_inside:
    return None
  try:
    data = paths.read_bytes(os.path.join(workdir, path))
  except (OSError, ValueError):
    return None
  if suffix == ".png":
    return ImageFile(data, png_caption(data), int.from_bytes(data[16:20]))
  if suffix == ".jsonl":
    return Table([json.loads(line) for line in data.splitlines()], path)
  return json.loads(data) if suffix == ".json" else Text(data.decode(), path)
