"""Files of kept programs: private, checked, and limited in size."""

import contextlib
import hashlib
import os
import stat
import time

import jax
from absl import logging

from bigtrain.runtime.sources import NotKept

FORMAT = b"bigtrain kept program 2\n"
SUFFIX = ".kept"
LAST = ".last"  # The entry of the last start of a config, see early.py.
_DIGEST_BYTES = 32
# Default size of the folder; jax_compilation_cache_max_size replaces it.
_LIMIT_BYTES = 4 * 2**30


def own_folder(cache: str) -> str:
  """Makes the folder of the entries, beside jax's, and returns it.

  Raises:
    NotKept: others may write to it.
  """
  folder = os.path.join(cache, "kept")
  os.makedirs(cache, exist_ok=True)
  with contextlib.suppress(FileExistsError):
    os.mkdir(folder, 0o700)
  status = os.lstat(folder)
  is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
  if not is_own or status.st_mode & 0o077:
    logging.warning(
      "%s: other users may write to it, so restarts trace their programs "
      "again. Remove it, or set config.compile_cache to a folder of your own.",
      folder,
    )
    raise NotKept("the folder is not private")
  return folder


def store(path: str, body: bytes) -> None:
  """Writes a file at once, then removes old ones above the limit.

  Args:
    path: path of the file.
  """
  folder = os.path.dirname(path)
  temporary = f"{path}.{os.getpid()}.tmp"
  checksum = hashlib.sha256(body).digest()
  descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  try:
    with open(descriptor, "wb") as file:
      file.write(FORMAT + checksum + body)
    os.replace(temporary, path)
  except OSError:
    os.unlink(temporary)
    raise
  limit = jax.config.jax_compilation_cache_max_size  # type: ignore[attr-defined]
  _evict(folder, limit if limit >= 0 else _LIMIT_BYTES)


def load(path: str) -> bytes | None:
  """Returns the body of a file; removes a damaged file after a warning."""
  try:
    with open(path, "rb") as file:
      content = file.read()
  except OSError:
    return None
  begin = len(FORMAT) + _DIGEST_BYTES
  body = content[begin:]
  if content[:begin] == FORMAT + hashlib.sha256(body).digest():
    return body
  logging.warning("%s is damaged: this start traces its program again.", path)
  with contextlib.suppress(OSError):
    os.unlink(path)
  return None


def _evict(folder: str, limit: int) -> None:
  """Removes the entries that were not used for longest, and old remains."""
  entries = []
  for entry in os.scandir(folder):
    with contextlib.suppress(OSError):
      status = entry.stat(follow_symlinks=False)
      age = time.time() - status.st_mtime
      if entry.name.endswith((SUFFIX, LAST)):
        entries.append((status.st_mtime, status.st_size, entry.path))
      elif age > 3600:
        os.unlink(entry.path)
  total = sum(size for _, size, _ in entries)
  for _, size, path in sorted(entries):
    if total <= limit:
      break
    with contextlib.suppress(OSError):
      os.unlink(path)
    total -= size
