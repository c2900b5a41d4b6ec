"""Files of a run, in a local folder or in an object store.

Paths are strings, which os.path.join joins. A path with "://" is a URL of an
object store (objects.py); any other path is local.

An object can only be written as a whole. So a file that grows, such as a log,
is written locally and uploaded from time to time (`Mirror`).
"""

import contextlib
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from bigtrain.files import objects

# A growing file is uploaded again at most every _PUSH_SECS. If an upload takes
# long, the pause after it is _PUSH_PAUSE times as long, so that uploads take at
# most 5% of the time.
_PUSH_SECS = 10.0
_PUSH_PAUSE = 20.0


def is_remote(path: str) -> bool:
  """Whether a path is a URL of an object store."""
  return "://" in path


def absolute(path: str | os.PathLike[str]) -> str:
  """The absolute path of a path that a user typed; "~" is expanded.

  As in the operating system, "link/.." is the parent of the link's target.
  """
  path = os.fspath(path)
  if is_remote(path):
    place = objects.parse(path)
    return f"{place.scheme}://" + "/".join(filter(None, place[1:]))
  path = os.path.expanduser(path)
  if not os.path.isabs(path):
    path = os.path.join(os.getcwd(), path)
  result = os.sep
  for part in path.split(os.sep):
    if part == os.pardir:
      if os.path.islink(result):
        result = os.path.realpath(result)
      result = os.path.dirname(result)
    elif part not in ("", os.curdir):
      result = os.path.join(result, part)
  return result


def exists(path: str) -> bool:
  """Whether there is a file, link or folder."""
  if not is_remote(path):
    return os.path.lexists(path)
  if objects.parse(path).key and objects.read(path).content is not None:
    return True
  return bool(objects.below(path))


def read_bytes(path: str) -> bytes:
  """Reads a file.

  Raises:
    FileNotFoundError: only if there is certainly no file.
  """
  if not is_remote(path):
    with open(path, "rb") as file:
      return file.read()
  content = objects.read(path).content
  if content is None:
    raise FileNotFoundError(2, "No such object", path)
  return content


def remove(path: str) -> None:
  """Removes a file, if it exists."""
  if is_remote(path):
    objects.write(path, None)
  else:
    with contextlib.suppress(FileNotFoundError):
      os.remove(path)


def make_folder(path: str) -> None:
  """Makes a local folder; object stores need none."""
  if not is_remote(path):
    os.makedirs(path, exist_ok=True)


def kvstore(folder: str) -> dict[str, Any]:
  """The tensorstore spec of a folder."""
  if is_remote(folder):
    return objects.kvstore(folder, is_folder=True)
  return {"driver": "file", "path": f"{folder}/"}


@contextlib.contextmanager
def replacing(path: str, mode: str = "w") -> Iterator[Any]:
  """Opens a file to replace it. Readers see the old or the new content."""
  encoding = None if "b" in mode else "utf-8"
  if not is_remote(path):
    # Several processes may write the same file at once.
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
      with open(temporary, mode, encoding=encoding) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
      os.replace(temporary, path)
    except BaseException as e:
      with contextlib.suppress(OSError):
        os.unlink(temporary)
      if isinstance(e, OSError) and e.filename == temporary:
        e.filename = path  # The name that the user knows.
      raise
    return
  with tempfile.TemporaryFile(mode + "+", encoding=encoding) as file:
    yield file
    file.seek(0)
    content = file.read()
  objects.write(path, content if encoding is None else content.encode())


class Mirror:
  """A local file that grows, and is uploaded if `path` is in an object store.

  Attributes:
    path: where the file ends up.
    local: the file to write to.
  """

  def __init__(self, path: str, local: str = ""):
    self.path = path
    self.local = local or path
    self._folder: tempfile.TemporaryDirectory[str] | None = None
    self._pushed = (0, 0)  # Size and time of the file at the last upload.
    self._next = 0.0  # Earliest time of the next upload.
    if is_remote(path) and not local:
      self._folder = tempfile.TemporaryDirectory(prefix="bigtrain-")
      self.local = os.path.join(self._folder.name, os.path.basename(path))
      with contextlib.suppress(FileNotFoundError):
        content = read_bytes(path)
        with open(self.local, "wb") as file:
          file.write(content)
        self._pushed = self._state()

  def _state(self) -> tuple[int, int]:
    stat = os.stat(self.local)
    return stat.st_size, stat.st_mtime_ns

  def push(self, *, soon: bool = False) -> None:
    """Uploads the file if it has changed; with `soon`, possibly later."""
    if self.local == self.path or self._state() == self._pushed:
      return
    started = time.monotonic()
    if soon and started < self._next:
      return
    state = self._state()
    with open(self.local, "rb") as file:
      objects.write(self.path, file.read())
    self._pushed = state
    now = time.monotonic()
    self._next = now + max(_PUSH_SECS, _PUSH_PAUSE * (now - started))

  def close(self) -> None:
    if self._folder is not None:
      self._folder.cleanup()


def push_within(local: str, path: str, secs: float) -> bool:
  """Uploads a file; False if that takes longer than `secs`."""
  pushed = threading.Event()

  def push() -> None:
    with contextlib.suppress(OSError):
      Mirror(path, local).push()
      pushed.set()

  threading.Thread(target=push, name="push", daemon=True).start()
  return pushed.wait(secs)


def push_folder(local: str, path: str) -> None:
  """Uploads all files below a folder."""
  for folder, _, files in os.walk(local):
    for name in files:
      file = os.path.join(folder, name)
      Mirror(os.path.join(path, os.path.relpath(file, local)), file).push()
