"""Explains a full disk: which one it is and how many bytes are free."""

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
