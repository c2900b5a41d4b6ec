"""Local disks: errors about full disks, sizes as text, and syncing folders."""

import errno
import os
import re
import shutil

from bigtrain.files import paths

_FULL = (errno.ENOSPC, errno.EDQUOT)  # No space, or no more of a quota.


def is_full(error: BaseException | None) -> bool:
  """Whether an error was caused by a full disk."""
  while error is not None:
    if getattr(error, "errno", None) in _FULL:
      return True
    # tensorstore's errors have a text and no number.
    if any(os.strerror(code) in str(error) for code in _FULL):
      return True
    error = error.__cause__
  return False


def size(num_bytes: float) -> str:
  """A size as text, such as "9.1 GB" (10^9 bytes each)."""
  for unit, number in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if num_bytes >= number:
      return f"{num_bytes / number:.3g} {unit}"
  return f"{num_bytes:.0f} bytes"


def sync_folder(path: str) -> None:
  """Waits until a folder's entries are on disk."""
  folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def reason(error: BaseException, path: str) -> str:
  """An error's text, with the free space if the disk of `path` is full."""
  text = str(error) or type(error).__name__
  if isinstance(error, OSError) and error.filename:
    text = f"{error.filename}: {error.strerror}"
  for code in _FULL:
    # tensorstore writes the file twice, with its own names of the operations.
    file = re.search('"([^"]+)"', text)
    if os.strerror(code) in text and file:
      text = f"{file.group(1)}: {os.strerror(code)}"
  return text + room(error, path)


def short_reason(error: OSError, path: str) -> str:
  """Like `reason`, but the error comes first, and then the file, if any."""
  at = f" ({error.filename})" if error.filename else ""
  return f"{error.strerror}{at}{room(error, path)}"


def room(error: BaseException, path: str) -> str:
  """The free space of a full disk, in parentheses; "" for other errors."""
  has_room = "bytes free" in str(error)
  if has_room or not is_full(error) or paths.is_remote(path):
    return ""
  while not os.path.isdir(path) and os.path.dirname(path) != path:
    path = os.path.dirname(path)
  try:
    usage = shutil.disk_usage(path)
  except OSError:
    return ""
  return f" ({path} has {usage.free:,} of {usage.total:,} bytes free)"
