"""Random access to many files: finding them, open handles, cached offsets.

`find` returns the files of a path or pattern. `Reader` reads any byte range of
any file. `offsets` scans a file once to find its records, and keeps their
offsets in the user's cache folder, under a hash of the file's path and stamp.
The stamp is the size and modification time of a file, or the generation of an
object.
"""

import collections
import contextlib
import fnmatch
import glob
import hashlib
import io
import os
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from typing import IO, Any

import numpy as np
from absl import logging

from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.files import objects as stores
from bigtrain.files import paths

# Files that are open at the same time; systems usually allow 1024.
_MAX_OPEN = 256
_MAX_THREADS = 16
_PARSES_HEADER = threading.Lock()  # See `load_array`.
_CHUNK_BYTES = 1 << 23  # Of an object that is read in order.
# Files of Windows, in lower case: thumbnails and the looks of a folder.
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


class Cache:
  """An LRU cache of values such as open files. Thread-safe.

  If several threads need the same value, one loads it and the others wait.

  Args:
    load: load(key) returns (value, its size).
    capacity: limit of the sum of sizes. The latest value stays even if it is
      larger.
    on_reload: called when a value that was evicted is loaded again.
  """

  def __init__(
    self,
    load: Callable[[Any], tuple[Any, int]],
    capacity: int,
    on_reload: Callable[[], None] = lambda: None,
  ):
    self._load, self._capacity, self._on_reload = load, capacity, on_reload
    self._lock = threading.Lock()
    self._loading: dict[Any, futures.Future[Any]] = {}
    self._loaded = collections.OrderedDict[Any, tuple[Any, int]]()
    self._evicted: set[Any] = set()

  def get(self, key: Any) -> Any:
    with self._lock:
      if key in self._loaded:
        self._loaded.move_to_end(key)
        return self._loaded[key][0]
      future = self._loading.get(key)
      ours = future is None
      if future is None:
        future = self._loading[key] = futures.Future()
    if not ours:
      return future.result()
    try:
      value, size = self._load(key)
    except BaseException as e:
      with self._lock:
        del self._loading[key]
      future.set_exception(e)
      raise
    future.set_result(value)
    with self._lock:
      del self._loading[key]
      self._loaded[key] = value, size
      total = sum(size for _, size in self._loaded.values())
      while total > self._capacity and len(self._loaded) > 1:
        old_key, (_, old_size) = self._loaded.popitem(last=False)
        self._evicted.add(old_key)
        total -= old_size
      reloaded = key in self._evicted
    if reloaded:
      self._on_reload()
    return value


def handles(open_file: Callable[[str], Any]) -> Cache:
  """Returns a cache of open files, by path."""
  return Cache(lambda path: (open_file(path), 1), _MAX_OPEN)


class _Descriptor:
  """A file descriptor that closes with its last reference."""

  def __init__(self, path: str):
    self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

  # `close` is bound here because `os` may be gone at interpreter shutdown.
  def __del__(self, close: Callable[[int], None] = os.close) -> None:
    if hasattr(self, "fd"):
      close(self.fd)


class Reader:
  """Reads any byte range of any number of files. Thread-safe."""

  def __init__(self) -> None:
    self._handles = handles(_Descriptor)
    self._last: tuple[str, Any] = "", None  # Path and handle.

  def read(self, path: str, offset: int, size: int) -> bytes:
    try:
      last = self._last
      if last[0] != path:
        last = self._last = path, self._handles.get(path)
      fd = last[1].fd
      data = os.pread(fd, size, offset)
      # Signals and network file systems can cause short reads.
      while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
          break
        data += more
    except OSError as e:
      raise DataError(f"{path}, byte {offset}: {e.strerror}.") from e
    return data

  def read_all(
    self, ranges: Sequence[tuple[str, Sequence[tuple[int, int]]]]
  ) -> list[tuple[list[bytes], bytes]]:
    """Reads several byte ranges of each of several files.

    Args:
      ranges: (path, [(offset, size)]). The ranges of one entry are close to
        each other: from an object store, they are read in one request.

    Returns:
      For each entry, ([contents], version). The version of an object is its
      generation; that of a local file is b"".
    """
    spans = [
      (path, min(parts)[0], sum(max(parts)) - min(parts)[0])
      for path, parts in ranges
      if paths.is_remote(path)
    ]
    try:
      versions = iter(stores.read_ranges(spans))  # One request for each object.
    except OSError as e:
      raise DataError(f"{e.filename}: {e.strerror}.") from e
    result = []
    for path, parts in ranges:
      if paths.is_remote(path):
        (content, version), begin = next(versions), min(parts)[0]
        whole = content or b""
        apart = [whole[x - begin : x - begin + n] for x, n in parts]
      else:
        apart, version = [self.read(path, *part) for part in parts], b""
      result.append((apart, version))
    return result


def stamp(path: str) -> str:
  """Returns a value that changes whenever the file does."""
  try:
    if paths.is_remote(path):
      (version,) = stores.read_ranges([(path, 0, 0)])
      if version.content is None:
        raise DataError(f"{path}: no such object.")
      return version.generation.hex()
    stat = os.stat(path)
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}.") from e
  return f"{stat.st_size} {stat.st_mtime_ns}"


def open_to_read(path: str) -> Any:
  if paths.is_remote(path):
    return io.BufferedReader(stores.Ranges(path), _CHUNK_BYTES)
  return open(path, "rb")


def local_path(path: str | os.PathLike[str], key: str) -> str:
  """Returns a path of the config as an absolute path, with `~` expanded."""
  if not isinstance(path, str | os.PathLike) or not os.fspath(path):
    raise ConfigError(f"{key}: expected a path, got {path!r}.")
  return paths.absolute(os.fspath(path))


def as_list(path: Any, key: str) -> list[Any]:
  """Returns a path or a list of paths of the config as a list."""
  if isinstance(path, str | os.PathLike):
    return [path]
  if not isinstance(path, Sequence) or not path:
    raise ConfigError(f"{key}: expected at least one file, got {path!r}.")
  return list(path)


def find(path: Any, key: str, remote: bool = False) -> list[str]:
  """Returns absolute paths of a file, a pattern (sorted), or a list of them.

  In a pattern, "{000..127}" and "{a,b}" work as in a shell. As in a shell, too,
  hidden files match only if the pattern names them.
  """
  files: list[str] = []
  for entry in as_list(path, key):
    file = local_path(entry, key)
    # Relative to the working directory, whose name may contain brackets.
    pattern = os.path.expanduser(os.fspath(entry))
    if os.path.isfile(file):
      files.append(file)
      continue
    for each in _expand_braces(pattern):
      if remote and paths.is_remote(each):
        names = _objects(each)
      else:
        names = glob.glob(each, recursive=True, include_hidden=True)
        names = sorted(filter(os.path.isfile, names))
      names, hidden = split_hidden(names, pattern=each)
      log_hidden(hidden, key)
      matches = [paths.absolute(name) for name in names]
      if not matches:
        raise missing(paths.absolute(each), key, "file")
      files += matches
  return files


def _expand_braces(pattern: str) -> list[str]:
  match = _BRACES.search(pattern)
  if not match:
    return [pattern]
  first, last, words = match.groups()
  if words is None:
    numbers = range(int(first), int(last) + 1)
    parts = [f"{i:0{len(first)}}" for i in numbers]
  else:
    parts = words.split(",")
  before, after = pattern[: match.start()], pattern[match.end() :]
  return [x for part in parts for x in _expand_braces(before + part + after)]


def _objects(pattern: str) -> list[str]:
  url = paths.absolute(pattern)
  if not glob.has_magic(url):
    return [url]
  folder = os.path.dirname(re.split(r"[*?[]", url)[0])
  return [
    name
    for name in (f"{folder}/{each}" for each in stores.below(folder))
    if fnmatch.fnmatchcase(name, url) and name.count("/") == url.count("/")
  ]


def split_hidden(
  names: Iterable[str], pattern: str = ""
) -> tuple[list[str], set[str]]:
  """Returns the paths without hidden names, and what is hidden.

  Systems and editors leave files in users' folders that are not data, such as
  ".DS_Store", "._photo.png" and ".ipynb_checkpoints/photo-checkpoint.png". A
  hidden folder is reported as one entry. If the pattern itself has a hidden
  name, such as "Thumbs.db" or ".*", files of this name are not left out.
  """
  asked = [part for part in pattern.split("/") if _is_hidden(part)]
  visible: list[str] = []
  hidden: set[str] = set()
  for name in names:
    parts = name.split("/")
    for number, part in enumerate(parts, 1):
      wanted = any(fnmatch.fnmatchcase(part, each) for each in asked)
      if _is_hidden(part) and not wanted:
        hidden.add("/".join(parts[:number]))
        break
    else:
      visible.append(name)
  return visible, hidden


def _is_hidden(name: str) -> bool:
  if name in (os.curdir, os.pardir):
    return False
  return name.startswith(".") or name.lower() in _SYSTEM_FILES


def log_hidden(hidden: Collection[str], where: str) -> None:
  if hidden:
    logging.info(
      "%s: left out hidden files and folders (%d), such as %s",
      where,
      len(hidden),
      min(hidden),
    )


def missing(path: str, key: str, kind: str) -> ConfigError:
  """Returns the error for a file or folder that does not exist."""
  folder, name = os.path.split(path)
  if paths.is_remote(path):
    return ConfigError(f"{key}={path!r}: no such {kind}.")
  if not os.path.isdir(folder):
    return ConfigError(f"{key}={path!r}: no such folder: {folder!r}.")
  hint = did_you_mean(name, os.listdir(folder))
  return ConfigError(f"{key}={path!r}: no such {kind}.{hint}")


def line_number(path: str, offset: int) -> int:
  """Returns the number, from 1, of the line at a byte offset."""
  number = 1
  with open_to_read(path) as f:
    while offset > 0 and (chunk := f.read(min(1 << 20, offset))):
      number += chunk.count(b"\n")
      offset -= len(chunk)
  return number


def load_array(file: IO[bytes]) -> np.ndarray:
  """Reads an array that numpy has saved. Unlike np.load, safe in threads.

  numpy parses the header with `ast`. In Python 3.11, two threads that parse at
  the same time can fail with "SystemError: AST constructor recursion depth
  mismatch", because jax's garbage collection callback lets the other thread
  run.
  """
  with _PARSES_HEADER:
    return np.load(file, allow_pickle=False)


def in_threads(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
  """Returns fn(item) of each item, computed in up to 16 threads."""
  with futures.ThreadPoolExecutor(_MAX_THREADS) as pool:
    return list(pool.map(fn, items))


def offsets(
  names: Sequence[str],
  scan: Callable[[str], np.ndarray],
  folder: str | None = None,
) -> list[np.ndarray]:
  """Returns scan(path) for each file, from the cache where possible.

  Args:
    scan: returns int64, such as the offsets of N records and the file's size,
      [N + 1]. The function's name is part of the cache's key.
    folder: folder of the cache, also in an object store; by default the user's
      cache folder.
  """
  folder = folder or cache_folder()
  return in_threads(lambda path: _offsets(path, scan, folder), names)


def _offsets(
  path: str, scan: Callable[[str], np.ndarray], folder: str
) -> np.ndarray:
  # Increase the version when the meaning of the offsets changes.
  real = path if paths.is_remote(path) else os.path.realpath(path)
  key = f"v2 {scan.__name__} {real} {stamp(path)}"
  name = hashlib.sha256(key.encode()).hexdigest()[:32] + ".npy"
  cached = os.path.join(folder, name)
  # A missing or damaged cache entry only costs another scan.
  with contextlib.suppress(OSError, ValueError, EOFError):
    result = load_array(io.BytesIO(paths.read_bytes(cached)))
    if result.dtype == np.int64 and _crc(result[:-1]) == result[-1]:
      return result[:-1]
  try:
    result = scan(path)
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}.") from e
  try:
    paths.make_folder(folder)
    with paths.replacing(cached, "wb") as f:
      np.save(f, np.append(result, _crc(result)), allow_pickle=False)
  except OSError as e:
    logging.warning(
      f"Cannot cache the index of {path}; the next run scans it again: {e}"
    )
  return result


def _crc(values: np.ndarray) -> int:
  return zlib.crc32(values.tobytes())


def cache_folder() -> str:
  home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  return os.path.join(home, "bigtrain", "offsets")


class Shards:
  """Maps the numbers of examples to files and records, by counts per file."""

  def __init__(self, counts: Sequence[int]):
    self._ends = np.cumsum(np.asarray(counts, np.int64))

  def __len__(self) -> int:
    return int(self._ends[-1]) if self._ends.size else 0

  def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (file int64 [B], record in it int64 [B]) of examples [B]."""
    index = np.asarray(index, np.int64)
    file = np.searchsorted(self._ends, index, side="right")
    before = np.where(file > 0, self._ends[file - 1], 0)
    return file, index - before


def digest(*parts: object) -> str:
  """Returns a hash of the parts, as text."""
  text = "\0".join(map(str, parts)).encode("utf-8", "surrogateescape")
  return hashlib.sha256(text).hexdigest()[:16]


def objects(rows: Sequence[Any]) -> np.ndarray:
  """Returns an array of objects [B], even if the values are sequences."""
  array = np.empty(len(rows), object)
  for i, row in enumerate(rows):
    array[i] = row
  return array


def one_line(error: Exception) -> str:
  """Returns the message of an error in one line, without a period."""
  return " ".join(str(error).split()).rstrip(".")[:400]
