"""Disks: which one is full, sizes as text, and folders put on disk."""

import errno
import os
import shutil

from bigtrain.files import paths

_CODES = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException | None) -> bool:
  while error is not None:
    # tensorstore's errors have only a text.
    if getattr(error, "errno", None) in _CODES or any(
      os.strerror(code) in str(error) for code in _CODES
    ):
      return True
    error = error.__cause__
  return False


def size(num_bytes: float) -> str:
  """Returns a size as text, such as "9.1 GB" (10^9 bytes)."""
  for unit, number in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if num_bytes >= number:
      return f"{num_bytes / number:.3g} {unit}"
  return f"{num_bytes:.0f} bytes"


def sync_folder(path: str) -> None:
  folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def reason(error: BaseException, path: str) -> str:
  text = str(error) or type(error).__name__
  if isinstance(error, OSError) and error.filename:
    text = f"{error.filename}: {error.strerror}"
  return text + room(error, path)


def room(error: BaseException, path: str) -> str:
  """Free bytes of a full disk, in parentheses; "" for other errors."""
  known = "bytes free" in str(error)
  if known or not is_full(error) or paths.is_remote(path):
    return ""
  while not os.path.isdir(path) and os.path.dirname(path) != path:
    path = os.path.dirname(path)
  try:
    usage = shutil.disk_usage(path)
  except OSError:
    return ""
  return f" ({path} has {usage.free:,} of {usage.total:,} bytes free)"
