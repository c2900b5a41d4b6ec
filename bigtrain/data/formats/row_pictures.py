"""The pictures of rows: where a row has them, and their bytes.

A row has `images`, a list, or `image`, one; or they are parts of its messages,
{"type": "image", "path": ...}. A picture is a path, relative to the row's file;
the bytes of a file, also as Hugging Face's {"bytes": ..., "path": ...}; or an
array of uint8, [height, width] or with a third dimension of 1 or 3 channels.
"""

import io
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import DataError
from bigtrain.files import paths, picture_sizes
from bigtrain.text import pictures

# Field that `rows` of a file get: the folder of the file.
FOLDER = "_folder"
_PATH, _BYTES, _ARRAY = b"p", b"b", b"a"
# Comes before one of these, with height and width, where sizes matter.
_SIZED = b"s"
_SIZE = struct.Struct(">cII")
# {first bytes of a format: its last ones, if a whole file ends with them}.
_FORMATS = {
  b"\xff\xd8\xff": b"\xff\xd9",  # JPEG.
  b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82",
  b"GIF8": b";",
  b"BM": b"",
}
# JPEGs may have a few more bytes at the end.
_MAX_TAIL = 4096


def of_row(row: Mapping[str, Any]) -> list[Any]:
  """Returns the pictures of a row as they are given there."""
  given: Any = row.get("images")
  if given is None and row.get("image") is not None:
    given = [row["image"]]
  if given is not None and not isinstance(given, Sequence | np.ndarray):
    raise DataError(f"images: expected a list, got {given!r:.80}.")
  if isinstance(given, str | bytes):
    raise DataError("images: expected a list; one picture is `image`.")
  in_parts = [source for source in map(_source, _parts(row)) if source]
  if in_parts and given:
    raise DataError(
      "expected pictures in `images` or in the messages, not in both."
    )
  return [x[0] for x in in_parts] if in_parts else list(given or [])


def _parts(row: Mapping[str, Any]) -> list[Any]:
  """The pictures that messages place, in their order."""
  result: list[Any] = []
  for field in ("messages", "prompt", "completion", "chosen", "rejected"):
    messages = row.get(field)
    if isinstance(messages, list):
      for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
          result += filter(pictures.is_image, content)
  return result


def _source(part: Mapping[str, Any]) -> list[Any]:
  """[the picture of a part], [] if the row has it elsewhere."""
  for field in ("image", "path", "bytes", "url", "image_url"):
    value = part.get(field)
    if isinstance(value, Mapping) and "url" in value:
      value = value["url"]
    if value is not None:
      return [value]
  return []


def with_size(kept: bytes) -> tuple[bytes, tuple[int, int]]:
  """Adds a picture's size to what is kept of it; returns both."""
  content = decoded(kept)
  if isinstance(content, bytes):
    size = picture_sizes.size(content)
  else:
    size = content.shape[0], content.shape[1]
  return _SIZE.pack(_SIZED, *size) + kept, size


def size_of(kept: bytes) -> tuple[int, int]:
  """Height and width, which `with_size` has added."""
  _, height, width = _SIZE.unpack_from(kept)
  return height, width


def encoded(picture: Any, row: Mapping[str, Any]) -> bytes:
  """Returns what is kept of a picture: its path, or its bytes.

  Raises DataError if there is no such file, or one that is no picture or cut
  off.
  """
  if isinstance(picture, Mapping):
    value = picture.get("bytes")
    picture = picture.get("path") if value is None else value
  if isinstance(picture, os.PathLike):
    picture = os.fspath(picture)
  if isinstance(picture, str):
    picture = picture.removeprefix("file://")
    path = os.path.join(str(row.get(FOLDER, "")), os.path.expanduser(picture))
    _check(_read(path), picture)
    return _PATH + path.encode()
  if isinstance(picture, bytes | bytearray):
    _check(bytes(picture), "its bytes")
    return _BYTES + bytes(picture)
  array = np.asarray(picture)
  if array.dtype != np.uint8 or array.ndim not in (2, 3):
    raise DataError(
      "images: expected paths, bytes of files, or arrays of uint8 [height, "
      f"width, channels], got {picture!r:.80}."
    )
  file = io.BytesIO()
  np.save(file, array, allow_pickle=False)
  return _ARRAY + file.getvalue()


def decoded(kept: bytes) -> bytes | np.ndarray:
  """Returns the bytes of a picture's file, or uint8 [height, width, 3]."""
  if kept[:1] == _SIZED:
    kept = kept[_SIZE.size :]
  kind, content = kept[:1], kept[1:]
  if kind == _PATH:
    return _read(content.decode())
  if kind == _BYTES:
    return content
  array = np.load(io.BytesIO(content), allow_pickle=False)
  array = array[..., None] if array.ndim == 2 else array
  return np.broadcast_to(array, (*array.shape[:2], 3))


def _read(path: str) -> bytes:
  try:
    return paths.read_bytes(path)
  except OSError as e:
    raise DataError(f"the picture {path}: {e.strerror or e}.") from e


def _check(content: bytes, name: str) -> None:
  for start, end in _FORMATS.items():
    if content.startswith(start):
      if end not in content[-_MAX_TAIL:]:
        raise DataError(f"the picture {name}: the file is cut off.")
      return
  raise DataError(f"the picture {name}: expected a JPEG, PNG, GIF or BMP file.")
