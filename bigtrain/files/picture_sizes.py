"""The size of a picture, from the first bytes of its file."""

import contextlib
import struct

from bigtrain.config.errors import DataError


def size(encoded: bytes) -> tuple[int, int]:
  """Returns (height, width) as a JPEG, PNG, GIF or BMP file says at its start.

  Raises DataError for other files.
  """
  with contextlib.suppress(struct.error):
    if encoded[:8] == b"\x89PNG\r\n\x1a\n":
      width, height = struct.unpack_from(">II", encoded, 16)
      return height, width
    if encoded[:4] == b"GIF8":
      width, height = struct.unpack_from("<HH", encoded, 6)
      return height, width
    if encoded[:2] == b"BM":
      width, height = struct.unpack_from("<ii", encoded, 18)
      return abs(height), width
    if encoded[:2] == b"\xff\xd8":
      return _size_of_jpeg(encoded)
  raise DataError("a picture: its file does not say its size.")


# Markers of JPEG's frames, ITU-T T.81, table B.1.
_FRAMES = {0xC0 + i for i in range(16)} - {0xC4, 0xC8, 0xCC}


def _size_of_jpeg(encoded: bytes) -> tuple[int, int]:
  start = 2
  while True:
    marker, length = struct.unpack_from(">HH", encoded, start)
    if marker == 0xFFFF:  # Padding.
      start += 1
    elif marker & 0xFF in _FRAMES:
      height, width = struct.unpack_from(">HH", encoded, start + 5)
      return height, width
    else:
      start += 2 + length
