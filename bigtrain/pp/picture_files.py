"""Picture files beyond what tensorflow reads: orientations, more formats.

Cameras store a picture as the sensor saw it, with a number in the file's EXIF
data that says how to rotate it. `orientation` reads that number. Pillow decodes
the formats that tensorflow does not: TIFF, AVIF, and HEIC with pillow-heif.
"""

import contextlib
import io
import re
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, import_package

# Suffixes of the files that `decode` reads.
SUFFIXES = (
  ".jpg",
  ".jpeg",
  ".png",
  ".bmp",
  ".gif",
  ".webp",
  # With Pillow.
  ".tif",
  ".tiff",
  ".avif",
)
# How to turn a stored picture: (rows and columns are exchanged; then rows are
# reversed, columns are reversed), by the orientation, which counts from 1.
TURNS = (
  (False, False, False),
  (False, False, True),
  (False, True, True),
  (False, True, False),
  (True, False, False),
  (True, False, True),
  (True, True, True),
  (True, True, False),
)
_TAG = 0x0112
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Brands of ISO media files, ISO/IEC 14496-12, by the format that they mean.
_BRANDS = {
  **dict.fromkeys((b"avif", b"avis"), "AVIF"),
  **dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"),
    "HEIC",
  ),
}


def pillow_format(encoded: bytes) -> str:
  """Returns the name of a format that Pillow decodes, or "" for others."""
  if encoded[:4] in TIFF:
    return "TIFF"
  if encoded[4:8] == b"ftyp":
    return _BRANDS.get(encoded[8:12], "")
  return ""


def orientation(encoded: bytes) -> int:
  """Returns the orientation of a file, 1 to 8; 1 if it says nothing.

  A TIFF counts as 1, because decoding rotates it.
  """
  if encoded[:2] == b"\xff\xd8":
    value = _of_jpeg(encoded)
  elif pillow_format(encoded) != "TIFF" and _may_be_turned(encoded):
    value = _by_pillow(encoded)
  else:
    value = 1
  return value if 1 <= value <= 8 else 1


def would_turn(orientations: Iterable[tuple[str, int]]) -> str:
  """Returns what decode(exif=True) would change, or "".

  Args:
    orientations: (name, orientation) of files that are decoded without it.
  """
  pictures = [*orientations]
  names = [name for name, value in pictures if value != 1]
  if not names:
    return ""
  return (
    f"EXIF says that {len(names)} of {len(pictures)} pictures are turned, such "
    f"as {names[0]}; decode turns them with exif=True."
  )


def _of_jpeg(encoded: bytes) -> int:
  """Reads the segments before the pixels, by ITU-T T.81, annex B."""
  start, in_xmp = 2, 1
  while start + 4 <= len(encoded) and encoded[start] == 0xFF:
    marker = encoded[start + 1]
    if marker == 0xFF:  # Padding.
      start += 1
      continue
    if marker == 0xDA:  # The pixels.
      break
    (size,) = struct.unpack_from(">H", encoded, start + 2)
    content = encoded[start + 4 : start + 2 + size]
    if marker == 0xE1 and content.startswith(b"Exif\0\0"):
      if (value := _of_tiff_header(content[6:])) is not None:
        return value
    elif marker == 0xE1 and (match := _XMP.search(content)):
      in_xmp = int(match[1])
    start += 2 + size
  return in_xmp


def _of_tiff_header(content: bytes) -> int | None:
  """Finds the orientation in EXIF data, which are the header of a TIFF."""
  order = {b"II": "<", b"MM": ">"}.get(content[:2])
  if order is None:
    return None
  with contextlib.suppress(struct.error):  # Damaged data turn nothing.
    (offset,) = struct.unpack_from(f"{order}I", content, 4)
    (count,) = struct.unpack_from(f"{order}H", content, offset)
    for i in range(count):
      entry = offset + 2 + 12 * i
      tag, kind = struct.unpack_from(f"{order}HH", content, entry)
      if tag == _TAG and kind in (3, 4):  # 16 or 32 bits.
        format_ = f"{order}{'H' if kind == 3 else 'I'}"
        return int(struct.unpack_from(format_, content, entry + 8)[0])
  return None


def _may_be_turned(encoded: bytes) -> bool:
  if pillow_format(encoded):
    return True
  names = (b"eXIf", b"EXIF", b"Raw profile type exif", b"tiff:Orientation")
  return any(name in encoded for name in names)


def _by_pillow(encoded: bytes) -> int:
  try:
    image = _open(encoded)
    return int(image.getexif().get(_TAG, 1))
  except (DataError, ConfigError, OSError, ValueError, SyntaxError):
    return 1  # Decoding says what is wrong.


def _open(encoded: bytes) -> Any:
  name = pillow_format(encoded) or "other"
  pil = import_package("PIL.Image", f"{name} pictures: decoding", "pillow")
  if name == "HEIC":
    by = "HEIC pictures: decoding"
    import_package("pillow_heif", by, "pillow-heif").register_heif_opener()
  try:
    return pil.open(io.BytesIO(encoded))
  except pil.UnidentifiedImageError as e:
    features = import_package("PIL.features", "pictures", "pillow")
    if name == "AVIF" and not features.check("avif"):
      raise ConfigError(
        "AVIF pictures: this Pillow was built without libavif; pip install -U "
        "pillow."
      ) from e
    raise DataError(f"not a readable {name} picture.") from e


def opaque(image: Any, background: int | None = 255) -> Any:
  """A picture of Pillow as RGB, on a grey background if it is transparent."""
  has_alpha = "A" in image.getbands() or "transparency" in image.info
  if background is None or not has_alpha:
    return image.convert("RGB")
  pil = import_package("PIL.Image", "pictures", "pillow")
  image = image.convert("RGBA")
  behind = pil.new("RGBA", image.size, (*[background] * 3, 255))
  return pil.alpha_composite(behind, image).convert("RGB")


def decode(
  encoded: bytes, channels: int, exif: bool, background: int | None = None
) -> np.ndarray:
  """Decodes a picture with Pillow, to uint8 [H, W, channels].

  Args:
    exif: whether to turn it; a TIFF is always turned, as Pillow does.
    background: see `opaque`.
  """
  image = _open(encoded)
  ops = import_package("PIL.ImageOps", "pictures", "pillow")
  try:
    if exif:
      image = ops.exif_transpose(image)
    image.load()
  except (OSError, ValueError, SyntaxError) as e:
    name = pillow_format(encoded)
    raise DataError(f"damaged {name} picture: {e}.") from e
  if image.mode.startswith("I;16"):  # As tensorflow scales PNGs of 16 bits.
    grey = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, None], channels, axis=2)
  if image.mode in ("I", "F"):
    raise DataError(
      f"pixels of mode {image.mode}: expected 8 or 16 bits a channel."
    )
  grey = image.convert("L") if channels == 1 else opaque(image, background)
  pixels = np.asarray(grey)
  return pixels.reshape(*pixels.shape[:2], channels)
