"""Tar shards of tests."""

import io
import tarfile


def write(path, members, format=tarfile.GNU_FORMAT):
  """Writes (name, bytes) pairs; None makes a folder."""
  with tarfile.open(path, "w", format=format) as tar:
    for name, data in members:
      info = tarfile.TarInfo(name)
      info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
      info.size = len(data or b"")
      tar.addfile(info, io.BytesIO(data or b""))
  return str(path)


def sample(i, image=None):
  """Members of a sample with a picture, its class and its captions."""
  image = b"image %d " % i * (100 + i) if image is None else image
  json = b'{"captions": [%s], "score": %d.5}' % (
    b", ".join([b'"c%d"' % i] * (i % 3)),
    i,
  )
  name = f"{i:04}"
  return [
    (f"{name}.jpg", image),
    (f"{name}.cls", b"%d" % i),
    (f"{name}.json", json),
    (f"{name}.txt", b"text %d" % i),
  ]
