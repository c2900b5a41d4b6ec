"""JSON lines; each line is an object and an example.

  dict(type="jsonl", path="captions.jsonl", image_key="file")

Strings become bytes (UTF-8), integers int64, other numbers float32, booleans
bool, and lists arrays. Lists of strings, such as captions, may have any length.
"""

import base64
import binascii
import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.data.formats import documents, files, splits
from bigtrain.settings import ConfigError, DataError, check_choice, did_you_mean

# Number of lines that determine types and shapes; all others must match.
_NUM_SAMPLED = 64


class Source:
  """The lines of one or more files.

  Args:
    path: a file, a pattern such as "data/*.jsonl", whose matches are sorted, or
      a list of these.
    image_key: name of the image field, for the feature `image` (encoded bytes).
    image_is: content of that field: "path", relative to the folder of the jsonl
      file, or "base64".
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
    self._path = path
    self._paths = files.find(path, "jsonl: path")
    self._offsets = files.offsets(self._paths, scan_lines)
    self._reader = files.Reader()
    self._shards = files.Shards([len(o) - 1 for o in self._offsets])
    if not len(self._shards):
      raise DataError(f"jsonl: {path}: contains no lines.")
    self._start, stop = splits.bounds(slice, len(self._shards), "jsonl: slice")
    self._length = stop - self._start
    self._image_key, self._image_is = image_key, image_is
    self._fields = self._find_fields(fields)
    self.spec = dict(self._fields)
    if image_key is not None:
      self.spec["image"] = (bytes, ())

  def _find_fields(
    self, fields: Sequence[str] | None
  ) -> dict[str, tuple[Any, tuple[int | None, ...]]]:
    sample = [self._load(i) for i in range(min(_NUM_SAMPLED, self._length))]
    first = sample[0]
    for name in [*(fields or ()), *filter(None, [self._image_key])]:
      if name not in first:
        hint = did_you_mean(name, first)
        raise ConfigError(f"{self.where(0)}: no field {name!r}.{hint}")
    names = first if fields is None else fields
    names = [n for n in names if n != self._image_key]
    if self._image_key is not None and "image" in names:
      raise ConfigError(
        f"jsonl: image_key={self._image_key!r} defines the feature 'image', "
        "but the lines have a field 'image' too; leave it out of fields=."
      )
    return {
      name: self._type(
        name, [self._at(i, _array, line, name) for i, line in enumerate(sample)]
      )
      for name in names
    }

  def _type(
    self, name: str, sample: list[np.ndarray]
  ) -> tuple[Any, tuple[int | None, ...]]:
    # An empty list fits any type.
    kinds = {array.dtype for array in sample if array.size}
    strings = np.dtype(object) in kinds
    ranks = {array.ndim for array in sample}
    if len(ranks) > 1 or (strings and len(kinds) > 1) or not kinds:
      raise ConfigError(
        f"jsonl: field {name!r} of {self._path} has different types in "
        "different lines, or is always empty; leave it out of fields=."
      )
    # Mixed integers and floats become floats.
    kind = bytes if strings else np.result_type(*kinds)
    kind = np.dtype(np.float32) if kind == np.float64 else kind
    sizes = zip(*(array.shape for array in sample))
    shape = tuple(s[0] if len(set(s)) == 1 else None for s in sizes)
    # Most images have five captions, but not all.
    return kind, (None,) if strings and len(shape) == 1 else shape

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    lines = [(int(i), self._load(int(i))) for i in indices]
    batch = {}
    for name, (kind, shape) in self._fields.items():
      rows = [self._at(i, self._value, line, name) for i, line in lines]
      if kind is not bytes and None not in shape:
        batch[name] = np.stack(rows).astype(kind)
        continue
      sizes: Any = () if None in shape else shape
      stacked = np.empty((len(rows), *sizes), object)
      for i, row in enumerate(rows):
        stacked[i] = row if row.shape else row.item()
      batch[name] = stacked
    if self._image_key is not None:
      images = [self._at(i, self._image, line, i) for i, line in lines]
      batch["image"] = files.objects(images)
    return batch

  def where(self, index: int) -> str:
    path, start, _ = self._position(index)
    return f"{path}, line {files.line_number(path, start)}"

  def fingerprint(self) -> str:
    names = [os.path.basename(path) for path in self._paths]
    sizes = [int(o[-1]) for o in self._offsets]
    options = self._start, self._length, sorted(self.spec)
    return files.digest("jsonl", *names, *sizes, *options)

  def _at(self, index: int, fn: Callable[..., Any], *args: Any) -> Any:
    try:
      return fn(*args)
    except DataError as e:
      raise DataError(f"{self.where(index)}: {e}") from e

  def _position(self, index: int) -> tuple[str, int, int]:
    file, line = self._shards.locate(np.asarray([index + self._start]))
    start, stop = self._offsets[file[0]][line[0] : line[0] + 2]
    return self._paths[file[0]], int(start), int(stop)

  def _load(self, index: int) -> dict[str, Any]:
    path, start, stop = self._position(index)
    raw = self._reader.read(path, start, stop - start)
    return self._at(index, documents.json_object, raw)

  def _value(self, line: dict[str, Any], name: str) -> np.ndarray:
    kind, shape = self._fields[name]
    array = _array(line, name)
    strings = array.dtype == object
    if array.size == 0 and array.ndim:
      array = array.astype(object if kind is bytes else kind)
    elif (kind is bytes) != strings or not (
      strings or np.can_cast(array.dtype, kind, "same_kind")
    ):
      expected = "a string" if kind is bytes else np.dtype(kind).name
      problem = f"expected {expected} as in earlier lines"
      raise DataError(f"field {name!r}: {problem}, got {_short(line[name])}.")
    if len(array.shape) != len(shape) or any(
      expected not in (None, size) for expected, size in zip(shape, array.shape)
    ):
      problem = f"expected shape {shape} as in earlier lines"
      raise DataError(f"field {name!r}: {problem}, got {array.shape}.")
    return array if kind is bytes else array.astype(kind)

  def _image(self, line: dict[str, Any], index: int) -> bytes:
    key, value = self._image_key, line.get(self._image_key or "")
    if not isinstance(value, str):
      expected = f"a string ({self._image_is})"
      raise DataError(
        f"field {key!r}: expected {expected}, got {_short(value)}."
      )
    if self._image_is == "base64":
      try:
        return base64.b64decode(value, validate=True)
      except binascii.Error as e:
        raise DataError(f"field {key!r} is not base64: {e}.") from e
    folder = os.path.dirname(self._position(index)[0])
    try:
      with open(os.path.join(folder, value), "rb", buffering=0) as f:
        return f.read()
    except (OSError, ValueError) as e:
      raise DataError(f"image {value!r}: {e}.") from e


def _array(line: dict[str, Any], name: str) -> np.ndarray:
  if name not in line:
    raise DataError(f"no field {name!r}.{did_you_mean(name, line)}")
  value = line[name]
  try:
    array = np.asarray(value)
  except ValueError:
    array = np.empty(0, object)  # Lists of different lengths.
  if array.dtype.kind == "U":
    # numpy cuts null characters off the ends of strings.
    texts = np.empty(array.shape, object)
    for at in np.ndindex(array.shape):
      text = functools.reduce(lambda part, i: part[i], at, value)
      texts[at] = str(text).encode("utf-8", "surrogatepass")
    return texts
  if array.dtype.kind not in "bif":
    raise DataError(
      f"field {name!r}: expected a string, a number or a list of them, got "
      f"{_short(value)} (fields= selects fields)."
    )
  return array


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


def _short(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 40 else text[:40] + "..."
