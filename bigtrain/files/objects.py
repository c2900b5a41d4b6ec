"""Client for object stores: gs://bucket/run and s3://bucket/run.

The clients are tensorstore's. Callers rely on these properties:

- An object exists as a whole or not at all, even if its writer dies.
- A read or a listing after a write sees that write.
- A write can depend on the version that it replaces, so that one of several
  concurrent writers wins, at least in Google Cloud Storage and Amazon S3.
- Objects cannot be appended to or renamed, and there are no folders.

All failures are OSErrors that name the URL. If a store does not answer, the
first request fails after a minute, and later requests within seconds.
"""

import errno
import io
import os
import re
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from bigtrain.config.errors import ConfigError

# {scheme of a URL: tensorstore's driver}.
SCHEMES = {"gs": "gcs", "s3": "s3"}

# Delays between retries: 0.5, 1, 2, 4 and then 8 seconds, in total 40; or 0.5
# and 1 second.
_PATIENT = {"max_retries": 8, "initial_delay": "0.5s", "max_delay": "8s"}
_HASTY = {"max_retries": 2, "initial_delay": "0.5s", "max_delay": "1s"}
# After a timeout, requests to the same bucket are hasty for this long.
_HASTE_SECS = 120.0
# Time after which a request is given up. None is so large or slow.
_LIMIT_SECS = 600.0
# Beginnings of tensorstore's errors after all retries have failed.
_SILENCE = ("UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED")

# {(scheme, bucket, whether it is hasty): open store}.
_stores: dict[tuple[str, str, bool], Any] = {}
_silent_since: dict[str, float] = {}  # By bucket.


class Place(NamedTuple):
  """A parsed URL."""

  scheme: str
  bucket: str
  key: str  # Without slashes at its ends; "" for the bucket itself.


class Version(NamedTuple):
  """The contents of an object at some moment."""

  content: bytes | None  # None if it does not exist.
  generation: bytes  # Identifies the version.


def parse(path: str) -> Place:
  """Parses a URL, or raises a ConfigError."""
  scheme, _, rest = path.partition("://")
  if scheme not in SCHEMES:
    known = " or ".join(f"{name}://bucket/..." for name in SCHEMES)
    raise ConfigError(
      f"{path}: unknown kind of storage {scheme!r}; expected a folder, {known}."
    )
  bucket, _, key = rest.partition("/")
  parts = key.rstrip("/").split("/") if key.rstrip("/") else []
  if not bucket or not {"", ".", ".."}.isdisjoint(parts) or "\0" in rest:
    raise ConfigError(
      f"{path}: expected {scheme}://bucket/folder/folder, without empty "
      "parts, '.' and '..'."
    )
  return Place(scheme, bucket, "/".join(parts))


def kvstore(path: str, *, is_folder: bool = False) -> dict[str, Any]:
  """The tensorstore spec of a URL, with the endpoints of the environment."""
  place = parse(path)
  key = place.key
  if is_folder and key:
    key += "/"
  spec: dict[str, Any] = {
    "driver": SCHEMES[place.scheme],
    "bucket": place.bucket,
    "path": key,
  }
  if place.scheme == "s3":
    get = os.environ.get
    endpoint = get("AWS_ENDPOINT_URL_S3") or get("AWS_ENDPOINT_URL")
    region = get("AWS_REGION") or get("AWS_DEFAULT_REGION")
    spec["use_conditional_write"] = True
    if get("AWS_ACCESS_KEY_ID"):
      # Otherwise the client also tries credential files and metadata servers.
      spec["aws_credentials"] = {"type": "environment"}
    if endpoint:
      # Signatures contain a region even if the server ignores it.
      spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return spec
  host = os.environ.get("STORAGE_EMULATOR_HOST")
  if host:
    # tensorstore has its own variable for an emulator.
    url = host if "://" in host else f"http://{host}"
    os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", url)
    # Keeps real credentials from being sent to the emulator.
    os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "emulator")
  return spec


def context(*, hasty: bool = False) -> dict[str, Any]:
  """Entries of a tensorstore context: how often requests are repeated."""
  # Limits for connections that cannot be made or that transfer no bytes.
  os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", "10")
  os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
  os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
  retries = _HASTY if hasty else _PATIENT
  return {f"{name}_request_retries": retries for name in SCHEMES.values()}


def _open(place: Place, hasty: bool) -> Any:
  import tensorstore as ts

  silent_secs = time.monotonic() - _silent_since.get(place.bucket, -_HASTE_SECS)
  hasty = hasty or silent_secs < _HASTE_SECS
  name = (place.scheme, place.bucket, hasty)
  if name not in _stores:
    root = f"{place.scheme}://{place.bucket}"
    limits = ts.Context(context(hasty=hasty))
    try:
      opening = ts.KvStore.open(kvstore(root), context=limits)
    except ValueError as e:  # Not a valid bucket name.
      raise ConfigError(f"{root}: {text(e)}.") from e
    _stores[name] = _result(opening, root)
  return _stores[name]


def _result(future: Any, path: str) -> Any:
  """Waits for a request; its failure is an OSError."""
  try:
    return future.result(timeout=_LIMIT_SECS)
  except TimeoutError as e:
    _silent_since[parse(path).bucket] = time.monotonic()
    raise OSError(errno.ETIMEDOUT, "the store does not answer", path) from e
  except ValueError as e:  # tensorstore raises it for all failures.
    raise as_os_error(e, path) from e


def text(error: BaseException) -> str:
  """The text of a tensorstore error, without lines of its source code."""
  return str(error).split(" [", maxsplit=1)[0].rstrip(".")


def as_os_error(error: BaseException, path: str) -> OSError:
  """Converts an error of tensorstore to an OSError that names the URL.

  It is never a FileNotFoundError, because a missing bucket proves nothing about
  its objects.
  """
  reason = text(error)
  if reason.startswith(_SILENCE):
    _silent_since[parse(path).bucket] = time.monotonic()
    return OSError(errno.EHOSTUNREACH, f"no answer ({reason})", path)
  if reason.startswith(("PERMISSION_DENIED", "UNAUTHENTICATED")):
    return PermissionError(
      errno.EACCES, f"access denied; are credentials set? ({reason})", path
    )
  if reason.startswith("OUT_OF_RANGE"):
    return OSError(errno.ERANGE, "shorter than expected", path)
  if reason.startswith(("NOT_FOUND", "FAILED_PRECONDITION")):
    return OSError(errno.EIO, f"does the bucket exist? ({reason})", path)
  return OSError(errno.EIO, reason, path)


def read(path: str) -> Version:
  return read_all([path])[0]


def read_all(paths: Iterable[str]) -> list[Version]:
  return read_ranges((path, 0, None) for path in paths)


def read_ranges(
  ranges: Iterable[tuple[str, int, int | None]],
) -> list[Version]:
  """Reads (path, offset, size) ranges, all of them at once.

  A size of None reads to the end.
  """
  reading = []
  for path, start, size in ranges:
    place = parse(path)
    part = None if size is None else slice(start, start + size)
    reading.append((path, _open(place, False).read(place.key, byte_range=part)))
  versions = []
  for path, future in reading:
    result = _result(future, path)
    content = result.value if result.state == "value" else None
    versions.append(Version(content, result.stamp.generation))
  return versions


class Ranges(io.RawIOBase):
  """An object as a raw file, for io.BufferedReader; it is read by ranges."""

  def __init__(self, path: str):
    self._path = path
    self._at = 0

  def readable(self) -> bool:
    return True

  seekable = readable

  def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
    self._at = offset + (self._at if whence == os.SEEK_CUR else 0)
    return self._at

  def readinto(self, buffer: Any) -> int:
    try:
      ((content, _),) = read_ranges([(self._path, self._at, len(buffer))])
    except OSError as e:
      if e.errno != errno.ERANGE:
        raise
      # The range ends beyond the object: read what is left, perhaps nothing.
      total = re.search(r"total size (\d+)", str(e.__cause__))
      rest = max(0, int(total[1]) - self._at if total else 0)
      ((content, _),) = read_ranges(
        [(self._path, self._at if rest else 0, rest)]
      )
    content = content or b""
    buffer[: len(content)] = content
    self._at += len(content)
    return len(content)


def write(
  path: str,
  content: bytes | None,
  *,
  instead_of: Version | None = None,
  hasty: bool = False,
) -> bool:
  """Writes an object, or removes it if `content` is None.

  Args:
    path: URL of the object.
    content: its new content.
    instead_of: the version to replace; another one stays as it is.
    hasty: whether to give up soon if the store does not answer.

  Returns: False if the object has another version than `instead_of`.
  """
  place = parse(path)
  condition = {} if instead_of is None else {"if_equal": instead_of.generation}
  writing = _open(place, hasty).write(place.key, content, **condition)
  return bool(_result(writing, path).generation)


def below(folder: str) -> list[str]:
  """Names of all objects below a folder, relative to it."""
  prefix, names = _range(folder)
  store = _open(parse(folder), False)
  keys = _result(store.list(names, strip_prefix_length=len(prefix)), folder)
  return sorted(key.decode("utf-8", "replace") for key in keys)


def remove_below(folder: str) -> None:
  """Removes all objects below a folder."""
  _, names = _range(folder)
  _result(_open(parse(folder), False).delete_range(names), folder)


def _range(folder: str) -> tuple[bytes, Any]:
  """The prefix of the keys below a folder, and the range of these keys."""
  import tensorstore as ts

  key = parse(folder).key.encode()
  if not key:
    return b"", ts.KvStore.KeyRange()
  # "0" is the character after "/".
  return key + b"/", ts.KvStore.KeyRange(key + b"/", key + b"0")
