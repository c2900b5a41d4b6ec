"""JSON lines. Each line is a JSON object, which is one example.

  dict(type="jsonl", path="captions.jsonl", image_key="file")

Strings become bytes (UTF-8), integers int64, other numbers float32, booleans
bool, and lists arrays. Lists of strings, such as captions, may have any length.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_choice
from bigtrain.data.formats import documents, files, row_files


class Source(row_files.Rows):
  """The lines of one or more files.

  Args:
    path: a file, a pattern such as "data/*.jsonl", whose matches are sorted, or
      a list of these.
    image_key: name of the image field, for the feature `image` (encoded bytes).
    image_is: what that field contains: "path", a path relative to the folder of
      the jsonl file, or "base64".
    fields: names of the fields to use; the default is all of the first line.
    slice: slice of the lines, such as "[:99%]".
  """

  def __init__(
    self,
    path: str | Sequence[str],
    *,
    image_key: str | None = None,
    image_is: Literal["path", "base64"] = "path",
    fields: Sequence[str] | None = None,
    slice: str = "",
  ):
    check_choice("jsonl: image_is", image_is, ("path", "base64"))
    self._paths = files.find(path, "jsonl: path")
    self._offsets = files.offsets(self._paths, scan_lines)
    self._reader = files.Reader()
    counts = [len(o) - 1 for o in self._offsets]
    sizes = [int(o[-1]) for o in self._offsets]
    self._open("jsonl", path, counts, sizes, slice)
    self._image_key, self._image_is = image_key, image_is
    sample = [self._load(i) for i in self._first()]
    names = sample[0] if fields is None else fields
    if image_key is not None:
      check_choice(self.where(0), image_key, sample[0], "no field")
    names = [n for n in names if n != image_key]
    if image_key is not None and "image" in names:
      raise ConfigError(
        f"jsonl: image_key={image_key!r} defines the feature 'image', "
        "but the lines have a field 'image' too; leave it out of fields=."
      )
    self.spec = self._infer(sample, names, "fields")
    if image_key is not None:
      self.spec["image"] = (bytes, ())

  def _rows(self, indices: np.ndarray) -> list[dict[str, Any]]:
    lines = [self._load(index) for index in indices]
    if self._image_key is None:
      return lines
    return [
      {**line, "image": self._at(i, self._image_of, line, i)}
      for i, line in zip(indices, lines)
    ]

  def where(self, index: int) -> str:
    path, start, _ = self._position(index)
    return f"{path}, line {files.line_number(path, start)}"

  def _position(self, index: int) -> tuple[str, int, int]:
    ((file, line),) = self._places([index])
    start, stop = self._offsets[file][line : line + 2]
    return self._paths[file], int(start), int(stop)

  def _load(self, index: int) -> dict[str, Any]:
    path, start, stop = self._position(index)
    raw = self._reader.read(path, start, stop - start)
    return self._at(index, documents.json_object, raw)

  def _image_of(self, line: dict[str, Any], index: int) -> bytes:
    key, value = self._image_key, line.get(self._image_key or "")
    if not isinstance(value, str):
      expected = f"a string ({self._image_is})"
      raise DataError(
        f"field {key!r}: expected {expected}, got {row_files.short(value)}."
      )
    if self._image_is == "base64":
      try:
        return base64.b64decode(value, validate=True)
      except binascii.Error as e:
        raise DataError(f"field {key!r} is not base64: {e}.") from e
    return self._image(index, value)


def scan_lines(path: str) -> np.ndarray:
  """Returns the offsets of N non-empty lines and the file size, [N + 1]."""
  starts, at = [np.zeros(1, np.int64)], 0
  with open(path, "rb") as f:
    while chunk := f.read(1 << 24):
      newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10)
      starts.append(newlines + at + 1)
      at += len(chunk)
    offsets = np.concatenate([*starts, np.asarray([at])])
    offsets = offsets[: np.searchsorted(offsets, at) + 1]
    # Only lines of at most two bytes are checked for being blank.
    keep = np.diff(offsets) > 2
    for i in np.flatnonzero(~keep):
      f.seek(offsets[i])
      keep[i] = bool(f.read(offsets[i + 1] - offsets[i]).strip())
  return np.append(offsets[:-1][keep], at).astype(np.int64)
