"""Pictures as phones make them: turned by EXIF, and in other formats."""

import functools
import io
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import parse, picture_files, registry

tf = pytest.importorskip("tensorflow")

XMP = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF
  xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description
  xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/></rdf:RDF>
  </x:xmpmeta>"""


def photo(h=37, w=54):
  rng = np.random.default_rng(0)
  coarse = rng.integers(0, 256, (h // 8 + 2, w // 8 + 2, 3), np.uint8)
  return Image.fromarray(coarse).resize((w, h), Image.Resampling.BICUBIC)


def exif_of(orientation, order=b"MM\0*"):
  tags = Image.Exif()
  tags.endian = "<" if order[:1] == b"I" else ">"
  tags[0x010F] = "a camera"
  tags[0x0112] = orientation
  return tags


def encode(kind, orientation, image=None, **options):
  out = io.BytesIO()
  image = image or photo()
  image.save(out, kind, exif=exif_of(orientation), **options)
  return out.getvalue()


def turned(encoded):
  """What Pillow makes of a file, as [H, W, 3]."""
  image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
  return np.asarray(image.convert("RGB"))


@functools.cache
def graph(spec, dtype, rank):
  op = registry.compose(parse.parse(spec))

  def fn(image, u):
    return op.fn({"image": image}, u)["image"]

  signature = [
    tf.TensorSpec([None, None, 3][:rank], dtype),
    tf.TensorSpec([op.draws], tf.float32),
  ]
  return tf.function(fn, autograph=False, input_signature=signature)


def run(spec, image, u=()):
  image = tf.constant(image)
  u = tf.constant(u, tf.float32)
  return graph(spec, image.dtype, len(image.shape))(image, u).numpy()


@pytest.mark.parametrize("orientation", range(9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_pictures_are_turned_as_pillow_does(kind, orientation):
  if kind == "AVIF" and not features.check("avif"):
    pytest.skip("Pillow without libavif")
  lossless = dict(lossless=True) if kind == "WEBP" else {}
  encoded = encode(kind, orientation, **lossless)
  expected = turned(encoded)
  np.testing.assert_array_equal(run("decode(exif=True)", encoded), expected)
  as_stored = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
  np.testing.assert_array_equal(run("decode", encoded), as_stored)
  if kind in ("JPEG", "PNG"):
    wanted = orientation if orientation else 1
    assert picture_files.orientation(encoded) == wanted


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
  "crop", ["central_crop((9, 40))", "inception_crop(16)", "random_crop(20)"]
)
def test_crops_are_those_of_turned_pictures(crop, orientation):
  """`decode` and a crop are one op, which decodes a part of a JPEG."""
  encoded = encode("JPEG", orientation, photo(61, 83), subsampling=2)
  spec = f"decode(exif=True)|{crop}"
  assert len(parse.parse(spec)) == 1
  draws = parse.parse(crop)[0].draws
  for u in np.random.default_rng(0).random((3, draws), np.float32):
    whole = run(crop, turned(encoded), u)
    np.testing.assert_array_equal(run(spec, encoded, u), whole)


@pytest.mark.parametrize("order", [b"II*\0", b"MM\0*"])
def test_orientations_in_both_byte_orders(order):
  out = io.BytesIO()
  photo().save(out, "JPEG", exif=exif_of(6, order))
  data = out.getvalue()
  assert order in data
  assert picture_files.orientation(data) == 6


def test_orientations_in_xmp():
  out = io.BytesIO()
  photo().save(out, "JPEG", xmp=XMP % 8)
  encoded = out.getvalue()
  assert picture_files.orientation(encoded) == 8
  np.testing.assert_array_equal(
    run("decode(exif=True)", encoded), turned(encoded)
  )


def test_damaged_exif_turns_nothing():
  encoded = encode("JPEG", 6)
  at = encoded.index(b"Exif\0\0")
  for damage in (
    b"\xff" * 16,
    b"MM\0*\xff\xff\xff\xff",
    b"II*\0\x08\0\0\0\xff",
  ):
    start = at + 6
    broken = encoded[:start] + damage + encoded[start + len(damage) :]
    assert picture_files.orientation(broken) == 1
  for end in range(0, at + 40, 7):
    assert picture_files.orientation(encoded[:end]) in (1, 6)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK", "P", "1", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_tiffs_of_every_mode(mode, channels):
  image = photo()
  if mode == "I;16":
    pixels = np.asarray(image.convert("L")).astype(np.uint16) * 257
    image = Image.fromarray(pixels)
  else:
    image = image.convert(mode)
  out = io.BytesIO()
  image.save(out, "TIFF")
  result = run(f"decode(channels={channels})", out.getvalue())
  if mode == "I;16":  # tensorflow also scales PNGs of 16 bits.
    grey = np.asarray(photo().convert("L"))
    expected = np.repeat(grey[..., None], channels, axis=2)
  else:
    read = Image.open(io.BytesIO(out.getvalue()))
    expected = np.asarray(read.convert("L" if channels == 1 else "RGB"))
    expected = expected.reshape(*expected.shape[:2], channels)
  np.testing.assert_array_equal(result, expected)


def message(encoded):
  with pytest.raises(tf.errors.InvalidArgumentError) as error:
    run("decode", encoded)
  return str(error.value)


def test_what_cannot_be_decoded_is_told_in_a_line(monkeypatch):
  tiff = encode("TIFF", 1)
  assert "damaged TIFF picture" in message(tiff[:400])
  out = io.BytesIO()
  Image.fromarray(np.zeros((4, 4), np.float32)).save(out, "TIFF")
  assert "pixels of mode F: expected 8 or 16 bits" in message(out.getvalue())
  heic = b"\0\0\0\x18ftypheic\0\0\0\0" + bytes(40)
  monkeypatch.setitem(sys.modules, "pillow_heif", None)
  with pytest.raises(ConfigError, match=r"HEIC pictures.*install pillow-heif"):
    picture_files.decode(heic, 3, False)
  monkeypatch.setitem(sys.modules, "PIL.Image", None)
  with pytest.raises(ConfigError, match=r"TIFF pictures.*pip install pillow"):
    picture_files.decode(tiff, 3, False)


def test_other_media_are_no_pictures():
  with pytest.raises(DataError, match="not a readable other picture"):
    picture_files.decode(b"\0\0\0\x18ftypisom" + bytes(40), 3, False)
