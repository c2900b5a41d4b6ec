"""Many files read by position: open handles, and offsets found only once.

Records of a file, or lines, are found through an array of byte offsets. It is
made by one pass over the file and kept in the user's cache folder, under a
key of the file's name, size and time of modification.
"""

import collections
import concurrent.futures
import contextlib
import glob
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from bigtrain.settings import ConfigError, DataError, did_you_mean

_MAX_OPEN = 256
_MAX_THREADS = 16


class Handles:
  """Open files, of which the latest few stay open. Threads may share one.

  Args:
    open_file: makes a handle from a path; a handle closes its file when
      nobody refers to it any more, so one that is dropped here while another
      thread reads from it is closed after that.
    max_open: how many to keep.
  """

  def __init__(
    self, open_file: Callable[[str], Any], max_open: int = _MAX_OPEN
  ):
    self._open_file = open_file
    self._max_open = max_open
    self._lock = threading.Lock()
    self._open: collections.OrderedDict[str, Any] = collections.OrderedDict()

  def get(self, path: str) -> Any:
    """The handle of a file, opened if need be."""
    with self._lock:
      if path in self._open:
        self._open.move_to_end(path)
        return self._open[path]
    handle = self._open_file(path)
    with self._lock:
      self._open[path] = handle
      while len(self._open) > self._max_open:
        self._open.popitem(last=False)
    return handle


class _Descriptor:
  """A file descriptor that is closed with the last reference."""

  def __init__(self, path: str):
    self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

  # Bound early: when the interpreter ends, `os` may be gone before this is.
  def __del__(self, close: Callable[[int], None] = os.close) -> None:
    if hasattr(self, "fd"):
      close(self.fd)


class Reader:
  """Reads from any number of files at any position. Threads may share one."""

  def __init__(self) -> None:
    self._handles = Handles(_Descriptor)

  def read(self, path: str, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`, fewer only where the file ends.

    Raises:
      DataError: the file cannot be opened or read.
    """
    try:
      handle = self._handles.get(path)
      data = os.pread(handle.fd, size, offset)
      while len(data) < size:  # A signal, or a network file system.
        more = os.pread(handle.fd, size - len(data), offset + len(data))
        if not more:
          break
        data += more
    except OSError as e:
      raise DataError(f"{path}, byte {offset}: {e.strerror}.") from e
    return data


def find(path: str, key: str) -> list[str]:
  """The file at `path`, or all that a pattern such as "dir/*.x" matches.

  Raises:
    ConfigError: there is none; names the nearest file of the folder.
  """
  path = os.path.expanduser(os.fspath(path))
  if os.path.isfile(path):
    return [path]
  found = sorted(p for p in glob.glob(path) if os.path.isfile(p))
  if not found:
    raise missing(path, key, "file")
  return found


def missing(path: str, key: str, kind: str) -> ConfigError:
  """The error of a path that is not there, with the nearest that is."""
  folder, name = os.path.split(path)
  folder = folder or "."
  if not os.path.isdir(folder):
    return ConfigError(f"{key}={path!r}: there is no folder {folder!r}.")
  hint = did_you_mean(name, os.listdir(folder))
  return ConfigError(f"{key}={path!r}: no such {kind}.{hint}")


def in_threads(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
  """`[fn(item) for item in items]`, for functions that wait for files."""
  with concurrent.futures.ThreadPoolExecutor(_MAX_THREADS) as pool:
    return list(pool.map(fn, items))


def offsets(
  paths: Sequence[str], scan: Callable[[str], np.ndarray]
) -> list[np.ndarray]:
  """`scan(path)` for each file, from the cache where it has been done.

  Args:
    paths: files.
    scan: returns the int64 offsets of what the file is made of, and last the
      size of the file.

  Returns:
    For each file, what `scan` returned.
  """
  return in_threads(lambda path: _offsets(path, scan), paths)


def _offsets(path: str, scan: Callable[[str], np.ndarray]) -> np.ndarray:
  try:
    stat = os.stat(path)
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}.") from e
  # v1: raise it when the meaning of the offsets changes.
  key = f"v1 {scan.__name__} {os.path.realpath(path)} "
  key += f"{stat.st_size} {stat.st_mtime_ns}"
  name = hashlib.sha256(key.encode()).hexdigest()[:32] + ".npy"
  cached = os.path.join(cache_folder(), name)
  # A damaged or missing index costs a scan, nothing more.
  with contextlib.suppress(OSError, ValueError, EOFError):
    found = np.load(cached, allow_pickle=False)
    if found.dtype == np.int64 and found.size and found[-1] == stat.st_size:
      return found
  found = scan(path)
  try:
    os.makedirs(cache_folder(), exist_ok=True)
    # Processes of one machine may write the same index at the same time.
    with tempfile.NamedTemporaryFile(
      dir=cache_folder(), suffix=".tmp", delete=False
    ) as f:
      np.save(f, found, allow_pickle=False)
    os.replace(f.name, cached)
  except OSError as e:
    logging.warning(
      "The index of %s is not kept, it will be made again: %s", path, e
    )
  return found


def cache_folder() -> str:
  """Where indices are kept: $XDG_CACHE_HOME/bigtrain/offsets."""
  home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  return os.path.join(home, "bigtrain", "offsets")


class Shards:
  """Which file, and which record of it, holds example i of many files.

  Args:
    counts: examples of each file.
  """

  def __init__(self, counts: Sequence[int]):
    self._ends = np.cumsum(np.asarray(counts, np.int64))

  def __len__(self) -> int:
    return int(self._ends[-1]) if self._ends.size else 0

  def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(file int64 [B], record of that file int64 [B]) of examples [B]."""
    index = np.asarray(index, np.int64)
    file = np.searchsorted(self._ends, index, side="right")
    before = np.where(file > 0, self._ends[file - 1], 0)
    return file, index - before


def digest(*parts: object) -> str:
  """A short, stable name for what a source consists of."""
  text = "\0".join(map(str, parts))
  return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[
    :16
  ]
