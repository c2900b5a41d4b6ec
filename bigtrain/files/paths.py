"""Files of a run, wherever it is: in a folder or in an object store.

Paths are strings that os.path.join joins. One with "://" in it is a place in
an object store (objects.py), any other is a file system's. Checkpoints have
rules of their own (storage.py); whatever else a run reads and writes in its
workdir goes through here.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from bigtrain.files import objects

# An object is written whole, so what grows is written again now and then: not
# more often than this, nor for more than one part in so many of the time.
_PUSH_SECS = 10.0
_PUSH_SHARE = 20.0


def is_remote(path: str) -> bool:
  """Whether a path is a place in an object store."""
  return "://" in path


def normal(path: str) -> str:
  """A path in its plainest form: without "~", "a/../" or a slash at its end.

  Raises:
    ConfigError: an unknown kind of store, or no place in one.
  """
  if is_remote(path):
    place = objects.parse(path)
    return f"{place.scheme}://" + "/".join(filter(None, place[1:]))
  return os.path.normpath(os.path.expanduser(path))


def exists(path: str) -> bool:
  """Whether there is a file or folder; a link that leads nowhere is one."""
  if not is_remote(path):
    return os.path.lexists(path)
  if objects.parse(path).key and objects.read(path).content is not None:
    return True
  return bool(objects.below(path))


def read_bytes(path: str) -> bytes:
  """The content of a file.

  Raises:
    FileNotFoundError: it is proven not to be there.
    OSError: it cannot be read.
  """
  if not is_remote(path):
    with open(path, "rb") as file:
      return file.read()
  content = objects.read(path).content
  if content is None:
    raise FileNotFoundError(2, "No such object", path)
  return content


def make_folder(path: str) -> None:
  """Makes a folder, unless it is there; object stores need none."""
  if not is_remote(path):
    os.makedirs(path, exist_ok=True)


@contextlib.contextmanager
def replacing(path: str, mode: str = "w") -> Iterator[Any]:
  """Opens a file to write all of it: a reader sees the old one or the new one.

  Args:
    path: of the file; its folder is there.
    mode: "w", in UTF-8, or "wb".
  """
  encoding = None if "b" in mode else "utf-8"
  if not is_remote(path):
    with open(path + ".tmp", mode, encoding=encoding) as file:
      yield file
    os.replace(path + ".tmp", path)
    return
  with tempfile.TemporaryFile(mode + "+", encoding=encoding) as file:
    yield file
    file.seek(0)
    content = file.read()
  objects.write(path, content if encoding is None else content.encode())


class Mirror:
  """A file that grows, beside the object that is to have its content.

  In a file system the file is the thing itself, and nothing is to be done.

  Attributes:
    path: where it belongs.
    local: the file to write to; it has what was at `path`.
  """

  def __init__(self, path: str, local: str = ""):
    """Args: path as above; `local`, a file that is there, if it is another."""
    self.path = path
    self.local = local or path
    self._folder: tempfile.TemporaryDirectory[str] | None = None
    self._pushed = (0, 0)
    self._next = 0.0
    if is_remote(path) and not local:
      self._folder = tempfile.TemporaryDirectory(prefix="bigtrain-")
      self.local = os.path.join(self._folder.name, os.path.basename(path))
      with contextlib.suppress(FileNotFoundError):
        content = read_bytes(path)
        with open(self.local, "wb") as file:
          file.write(content)
        self._pushed = self._state()

  def _state(self) -> tuple[int, int]:
    found = os.stat(self.local)
    return found.st_size, found.st_mtime_ns

  def push(self, *, soon: bool = False) -> None:
    """Returns when the content is where it belongs.

    Args:
      soon: whether it may as well be done at a later call, if it was done
        lately.
    """
    if self.local == self.path or self._state() == self._pushed:
      return
    began = time.monotonic()
    if soon and began < self._next:
      return
    state = self._state()
    with open(self.local, "rb") as file:
      objects.write(self.path, file.read())
    self._pushed = state
    now = time.monotonic()
    self._next = now + max(_PUSH_SECS, _PUSH_SHARE * (now - began))

  def close(self) -> None:
    """Removes the local file, if it is another than that at `path`."""
    if self._folder is not None:
      self._folder.cleanup()


def push_within(local: str, path: str, secs: float) -> bool:
  """Copies a file to where it belongs; whether that was done in time."""
  done = threading.Event()

  def push() -> None:
    with contextlib.suppress(OSError):
      Mirror(path, local).push()
      done.set()

  threading.Thread(target=push, name="push", daemon=True).start()
  return done.wait(secs)


def push_folder(local: str, path: str) -> None:
  """Copies all files below a local folder to where they belong."""
  for above, _, files in os.walk(local):
    for name in files:
      file = os.path.join(above, name)
      Mirror(os.path.join(path, os.path.relpath(file, local)), file).push()
