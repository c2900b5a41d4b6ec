"""Lines of JSON, one object an example.

  dict(type="jsonl", path="captions.jsonl", image_key="file")

A string becomes bytes (UTF-8), whole numbers int64, other numbers float32,
true and false bool, a list an array, a list of strings one of any length (an
image's captions). Files are indexed once, then any line is read by its
position.
"""

import base64
import binascii
import json
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.data.formats import files, slices
from bigtrain.settings import ConfigError, DataError, did_you_mean

# What types and shapes are found from. Later lines are held against them.
_NUM_SAMPLED = 64


class Source:
  """The lines of one or more files, in the order of their names.

  Args:
    path: a file, or a pattern such as "data/*.jsonl".
    image_key: the field that has an image; the feature `image` is its bytes.
    image_is: what that field holds: a "path", relative to the folder of the
      jsonl file, or the bytes in "base64".
    fields: only these fields; all those of the first line if not given.
    slice: such as "[:99%]".

  Raises:
    ConfigError: no such file or field, or a field that is no feature.
    DataError: a line that is not valid; names file and line. No lines.
  """

  def __init__(
    self,
    path: str,
    *,
    image_key: str | None = None,
    image_is: Literal["path", "base64"] = "path",
    fields: Sequence[str] | None = None,
    slice: str = "",
  ):
    if image_is not in ("path", "base64"):
      hint = did_you_mean(image_is, ("path", "base64"))
      raise ConfigError(f"jsonl: image_is={image_is!r} is unknown.{hint}")
    self._path = path
    self._paths = files.find(path, "jsonl: path")
    self._offsets = files.offsets(self._paths, scan_lines)
    self._reader = files.Reader()
    self._shards = files.Shards([len(o) - 1 for o in self._offsets])
    if not len(self._shards):
      raise DataError(f"jsonl: {path}: there is no line in it.")
    self._start, stop = slices.bounds(slice, len(self._shards), "jsonl: slice")
    self._length = stop - self._start
    self._image_key = image_key
    self._image_is = image_is
    self._fields = self._find_fields(fields)
    self.spec = {
      name: (kind, shape) for name, (kind, shape) in self._fields.items()
    }
    if image_key is not None:
      self.spec["image"] = (bytes, ())

  def _find_fields(
    self, fields: Sequence[str] | None
  ) -> dict[str, tuple[Any, tuple[int | None, ...]]]:
    """Type and shape of each field that is a feature as it stands."""
    sample = [self._load(i) for i in range(min(_NUM_SAMPLED, self._length))]
    first = sample[0]
    for name in [*(fields or ()), *filter(None, [self._image_key])]:
      if name not in first:
        raise ConfigError(
          f"jsonl: {self.where(0)} has no field {name!r}."
          f"{did_you_mean(name, first)}"
        )
    names = list(first if fields is None else fields)
    names = [n for n in names if n != self._image_key]
    if self._image_key is not None and "image" in names:
      raise ConfigError(
        f"jsonl: image_key={self._image_key!r} makes the feature 'image', but "
        "there is a field 'image' as well; leave it out of fields=."
      )
    return {
      name: self._type(
        name, [self._array(line, name, i) for i, line in enumerate(sample)]
      )
      for name in names
    }

  def _type(
    self, name: str, sample: list[np.ndarray]
  ) -> tuple[Any, tuple[int | None, ...]]:
    """The type and shape that fit all of a sample of a field's values."""
    # An empty list fits any type.
    kinds = {array.dtype for array in sample if array.size}
    strings = np.dtype(object) in kinds
    ranks = {array.ndim for array in sample}
    if len(ranks) > 1 or (strings and len(kinds) > 1) or not kinds:
      raise ConfigError(
        f"jsonl: the type of field {name!r} of {self._path} differs between "
        "lines, or all are empty; select others by fields=."
      )
    # An int in one line and 0.5 in another is a float in both.
    kind = bytes if strings else np.result_type(*kinds)
    if kind == np.float64:
      kind = np.dtype(np.float32)
    sizes = zip(*(array.shape for array in sample))
    shape = tuple(s[0] if len(set(s)) == 1 else None for s in sizes)
    # Most images have five captions, but not all: a list of texts has no size.
    return kind, (None,) if strings and len(shape) == 1 else shape

  def __len__(self) -> int:
    return self._length

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The fields [B, ...]; those of unknown size as dtype object."""
    lines = [self._load(int(i)) for i in indices]
    batch = {}
    for name, (kind, shape) in self._fields.items():
      rows = [
        self._value(line, name, int(i)) for i, line in zip(indices, lines)
      ]
      if kind is not bytes and None not in shape:
        batch[name] = np.stack(rows).astype(kind)
        continue
      stacked = np.empty((len(rows), *(() if None in shape else shape)), object)
      for i, row in enumerate(rows):
        stacked[i] = row if row.shape else row.item()
      batch[name] = stacked
    if self._image_key is not None:
      images = np.empty(len(lines), object)
      for i, line in enumerate(lines):
        images[i] = self._image(line, int(indices[i]))
      batch["image"] = images
    return batch

  def where(self, index: int) -> str:
    """File and number of the line, counted from 1."""
    path, start, _ = self._position(index)
    with open(path, "rb") as f:
      before, line = start, 1
      while before > 0 and (chunk := f.read(min(1 << 20, before))):
        line += chunk.count(b"\n")
        before -= len(chunk)
    return f"{path}, line {line}"

  def fingerprint(self) -> str:
    """Changes with the files' names and sizes, and with the choices."""
    names = [os.path.basename(path) for path in self._paths]
    sizes = [int(o[-1]) for o in self._offsets]
    return files.digest(
      "jsonl", *names, *sizes, self._start, self._length, sorted(self.spec)
    )

  def _position(self, index: int) -> tuple[str, int, int]:
    file, line = self._shards.locate(np.asarray([index + self._start]))
    start, stop = self._offsets[file[0]][line[0] : line[0] + 2]
    return self._paths[file[0]], int(start), int(stop)

  def _load(self, index: int) -> dict[str, Any]:
    path, start, stop = self._position(index)
    raw = self._reader.read(path, start, stop - start)
    try:
      line = json.loads(raw)
    except (ValueError, RecursionError) as e:
      raise DataError(f"{self.where(index)}: not valid JSON: {e}.") from e
    if not isinstance(line, dict):
      raise DataError(
        f"{self.where(index)}: expected an object, got {type(line).__name__}."
      )
    return line

  def _array(self, line: dict[str, Any], name: str, index: int) -> np.ndarray:
    """A field as an array of numbers, or of bytes with dtype object."""
    if name not in line:
      hint = did_you_mean(name, line)
      raise DataError(f"{self.where(index)}: no field {name!r}.{hint}")
    value = line[name]
    try:
      array = np.asarray(value)
    except ValueError:
      array = np.empty(0, object)  # Lists of different lengths.
    if array.dtype.kind == "U":
      texts = np.empty(array.shape, object)
      for at in np.ndindex(array.shape):
        texts[at] = _text(value, at).encode("utf-8", "surrogatepass")
      return texts
    # An empty list has no type; any other fits.
    if array.dtype.kind not in "bif":
      raise DataError(
        f"{self.where(index)}: field {name!r} is {_short(value)}, expected "
        "a string, a number or a list of them (fields= selects fields)."
      )
    return array

  def _value(self, line: dict[str, Any], name: str, index: int) -> np.ndarray:
    kind, shape = self._fields[name]
    array = self._array(line, name, index)
    found = bytes if array.dtype == object else array.dtype
    if array.size == 0 and array.ndim:
      array = array.astype(object if kind is bytes else kind)
    elif (kind is bytes) != (found is bytes) or not (
      kind is bytes or np.can_cast(found, kind, "same_kind")
    ):
      raise DataError(
        f"{self.where(index)}: field {name!r} is {_short(line[name])}, but "
        f"in earlier lines it is {_name(kind)}."
      )
    if len(array.shape) != len(shape) or any(
      want not in (None, has) for want, has in zip(shape, array.shape)
    ):
      raise DataError(
        f"{self.where(index)}: field {name!r} has shape {array.shape}, but in "
        f"earlier lines {shape}."
      )
    return array if kind is bytes else array.astype(kind)

  def _image(self, line: dict[str, Any], index: int) -> bytes:
    value = line.get(self._image_key)
    if not isinstance(value, str):
      raise DataError(
        f"{self.where(index)}: field {self._image_key!r} is {_short(value)}, "
        f"expected a string ({self._image_is})."
      )
    if self._image_is == "base64":
      try:
        return base64.b64decode(value, validate=True)
      except binascii.Error as e:
        raise DataError(
          f"{self.where(index)}: field {self._image_key!r} is not base64: {e}."
        ) from e
    folder = os.path.dirname(self._position(index)[0])
    try:
      with open(os.path.join(folder, value), "rb", buffering=0) as f:
        return f.read()
    except (OSError, ValueError) as e:
      raise DataError(f"{self.where(index)}: image {value!r}: {e}.") from e


def scan_lines(path: str) -> np.ndarray:
  """Offsets of all lines that are not empty, and last the file's size."""
  starts = [np.zeros(1, np.int64)]
  at = 0
  with open(path, "rb") as f:
    while chunk := f.read(1 << 24):
      newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10)
      starts.append(newlines + at + 1)
      at += len(chunk)
    offsets = np.concatenate([*starts, np.asarray([at])])
    offsets = offsets[: np.searchsorted(offsets, at) + 1]
    # Empty lines are of one byte, or of two where lines end in \\r\\n.
    keep = np.diff(offsets) > 2
    for i in np.flatnonzero(~keep):
      f.seek(offsets[i])
      keep[i] = bool(f.read(offsets[i + 1] - offsets[i]).strip())
  return np.append(offsets[:-1][keep], at).astype(np.int64)


def _text(value: Any, at: tuple[int, ...]) -> str:
  for i in at:
    value = value[i]
  return str(value)


def _short(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 40 else text[:40] + "..."


def _name(kind: Any) -> str:
  return "a string" if kind is bytes else np.dtype(kind).name
