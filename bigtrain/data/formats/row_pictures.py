"""The pictures of rows: where to find them in a row, and their bytes.

A row has `images`, a list, or `image`, one; or they are parts of its messages,
{"type": "image", "path": ...}. A picture is a path, relative to the row's file,
or the URL of an object store, gs://bucket/a.jpg; the bytes of a file, also as
Hugging Face's {"bytes": ..., "path": ...}, or in a "data:" URL; or an array of
uint8, [height, width] or with a third dimension of 1 or 3 channels.

Videos and sounds are refused: the model would not see them.
"""

import base64
import io
import itertools
import os
import posixpath
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.files import objects, paths, picture_sizes
from bigtrain.text import pictures

# Field that `with_folder` adds to rows.
FOLDER = "_folder"


_NOTHING: Mapping[str, bytes | None] = {}


class Folder(NamedTuple):
  """The folder that the paths of a file's pictures are relative to."""

  path: str
  # {URL: content, None if there is no object}, of pictures read in advance.
  fetched: Mapping[str, bytes | None] = _NOTHING


# Rows whose pictures are read from an object store at the same time.
_NUM_FETCHED = 64
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
# Media other than pictures: fields of rows, types and fields of parts.
OTHER_MEDIA = ("video", "videos", "audio", "audios")
_OTHER_PARTS = (
  *OTHER_MEDIA,
  "video_url",
  "audio_url",
  "input_audio",
  "input_video",
)
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
  """The pictures in messages, in order."""
  return [part for _, part in _all_parts(row) if pictures.is_image(part)]


def _all_parts(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields (place, part) for the parts of the contents of messages."""
  for field in ("messages", "prompt", "completion", "chosen", "rejected"):
    messages = row.get(field)
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
      content = message.get("content") if isinstance(message, dict) else None
      if isinstance(content, list):
        for j, part in enumerate(content):
          yield f"{field}[{i}]: content[{j}]", part


def refuse_other_media(row: Mapping[str, Any], in_fields: bool) -> None:
  """Refuses videos and sounds in messages and, if asked, in fields."""
  for field in OTHER_MEDIA if in_fields else ():
    value = row.get(field)
    if value is not None and len(value if hasattr(value, "__len__") else "?"):
      raise DataError(_not_seen(field))
  for place, part in _all_parts(row):
    if isinstance(part, Mapping) and not pictures.is_image(part):
      names = [part.get("type"), *(x for x, y in part.items() if y is not None)]
      found = [name for name in names if name in _OTHER_PARTS]
      if found:
        raise DataError(f"{place}: {_not_seen(found[0])}")


def _not_seen(name: str) -> str:
  return (
    f"{name}: this source reads texts and pictures; the model would not see it."
  )


def with_folder(
  rows: Iterable[tuple[Any, Any]], folder: str
) -> Iterator[tuple[Any, Any]]:
  """Yields (place, row) with the folder of the rows' file, for their pictures.

  Pictures in an object store are read for several rows at the same time.
  """
  rows = iter(rows)
  while chunk := [*itertools.islice(rows, _NUM_FETCHED)]:
    urls: list[str] = []
    for _, row in chunk:
      if isinstance(row, Mapping):  # Otherwise an error in its place.
        urls += _urls(row, folder)
    where = Folder(folder, _fetch(urls))
    for place, row in chunk:
      if isinstance(row, Mapping):
        row = {**row, FOLDER: where}
      yield place, row


def _urls(row: Mapping[str, Any], folder: str) -> list[str]:
  """The pictures of a row that are in object stores."""
  try:
    named = [_name(picture) for picture in of_row(row)]
    places = [_place(name, folder) for name in named if name is not None]
  except ConfigError:
    return []  # Encoding the row says what is wrong.
  return [place for place in places if paths.is_remote(place)]


def _fetch(urls: Sequence[str]) -> dict[str, bytes | None]:
  urls = list(dict.fromkeys(urls))
  try:
    versions = objects.read_all(urls)
  except (OSError, ConfigError):
    return {}  # As above.
  return dict(zip(urls, (version.content for version in versions)))


def _name(picture: Any) -> str | None:
  """The path or URL of a picture; None if the row contains its bytes."""
  if isinstance(picture, Mapping):
    if picture.get("bytes") is not None:
      return None
    picture = picture.get("path")
  if isinstance(picture, os.PathLike):
    picture = os.fspath(picture)
  is_name = isinstance(picture, str) and not _DATA_URL.match(picture)
  return picture if is_name else None


def _place(name: str, folder: str) -> str:
  """The path or URL of a picture, for rows in a folder."""
  name = name.removeprefix("file://")
  if paths.is_remote(name):
    return paths.absolute(name)
  path = os.path.join(folder, os.path.expanduser(name))
  if not paths.is_remote(path):
    return path
  # Object stores have no "..".
  scheme, _, rest = path.partition("://")
  plain = posixpath.normpath(rest)
  if plain.split("/")[0] != rest.split("/")[0]:
    raise DataError(f"the picture {name}: leaves the bucket of {folder}.")
  return f"{scheme}://{plain}"


def _source(part: Mapping[str, Any]) -> list[Any]:
  """[the picture of a part], [] if the row has it elsewhere."""
  for field in ("image", "path", "bytes", "url", "image_url"):
    value = part.get(field)
    if isinstance(value, Mapping) and "url" in value:
      value = value["url"]
    if value is not None:
      return [value]
  return []


def size_of(kept: bytes) -> tuple[int, int]:
  """Height and width of a picture that was stored with its size."""
  _, height, width = _SIZE.unpack_from(kept)
  return height, width


def encoded(picture: Any, row: Mapping[str, Any], sized: bool = False) -> bytes:
  """Returns what to store of a picture: its path, or its bytes.

  Raises DataError if the file is missing, truncated, or not a picture.

  Args:
    sized: whether to store its height and width too.
  """
  content, kept = _content(picture, row)
  if not sized:
    return kept
  if isinstance(content, bytes):
    size = picture_sizes.size(content)
  else:
    size = content.shape[0], content.shape[1]
  return _SIZE.pack(_SIZED, *size) + kept


def _content(
  picture: Any, row: Mapping[str, Any]
) -> tuple[bytes | np.ndarray, bytes]:
  """Returns (the bytes or pixels of a picture, what to store of it)."""
  name = _name(picture)
  if name is not None:
    folder: Folder = row.get(FOLDER, Folder(""))
    path = _place(name, folder.path)
    content = folder.fetched.get(path)
    content = _read(path) if content is None else content
    _check(content, name)
    return content, _PATH + path.encode()
  if isinstance(picture, Mapping):
    picture = picture.get("bytes")
  if isinstance(picture, str):
    picture = _of_data_url(picture)
  if isinstance(picture, bytes | bytearray):
    _check(bytes(picture), "its bytes")
    return bytes(picture), _BYTES + bytes(picture)
  array = np.asarray(picture)
  if array.dtype != np.uint8 or array.ndim not in (2, 3):
    raise DataError(
      "images: expected paths, bytes of files, or arrays of uint8 [height, "
      f"width, channels], got {picture!r:.80}."
    )
  file = io.BytesIO()
  np.save(file, array, allow_pickle=False)
  return array, _ARRAY + file.getvalue()


def decoded(
  kept: bytes, fetched: Mapping[str, bytes | None] = _NOTHING
) -> bytes | np.ndarray:
  """Returns the bytes of a picture's file, or uint8 [height, width, 3].

  Args:
    fetched: contents that `fetch` has read.
  """
  if kept[:1] == _SIZED:
    kept = kept[_SIZE.size :]
  kind, content = kept[:1], kept[1:]
  if kind == _PATH:
    path = content.decode()
    return fetched.get(path) or _read(path)
  if kind == _BYTES:
    return content
  array = np.load(io.BytesIO(content), allow_pickle=False)
  array = array[..., None] if array.ndim == 2 else array
  return np.broadcast_to(array, (*array.shape[:2], 3))


def fetch(kept: Iterable[bytes]) -> dict[str, bytes | None]:
  """Reads pictures in object stores at the same time, by URL."""
  return _fetch([url for url in map(_kept_url, kept) if url])


def _kept_url(kept: bytes) -> str:
  """The URL of a picture in an object store, "" for others."""
  if kept[:1] == _SIZED:
    kept = kept[_SIZE.size :]
  name = kept[1:].decode() if kept[:1] == _PATH else ""
  return name if paths.is_remote(name) else ""


def _of_data_url(url: str) -> bytes:
  try:
    return base64.b64decode(_DATA_URL.sub("", url, count=1), validate=True)
  except ValueError as e:
    raise DataError(f"the picture {url:.40}: not valid base64: {e}.") from e


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
