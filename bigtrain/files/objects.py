"""Places in object stores: gs://bucket/run and s3://bucket/run.

tensorstore's own clients read and write them, arrays (see manifest.spec) and
everything else of a run alike, so that one set of credentials and one address
serve all of it. What holds there, and what the callers build on:

- an object is there whole or not at all, whenever its writer dies;
- who reads or lists after a write sees it;
- a write may depend on the version that is there, so of several writers one
  wins: always on Google Cloud Storage and Amazon S3, elsewhere if the server
  honours If-Match and If-None-Match;
- nothing can be appended to or renamed, and there are no folders, only names
  with slashes in them.

Failures are OSErrors that name the place. Waiting is bounded: a store that
does not answer is an error after a minute, and soon from then on.
"""

import errno
import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from bigtrain.settings import ConfigError

# The drivers of tensorstore for each scheme.
SCHEMES = {"gs": "gcs", "s3": "s3"}

# Delays of half a second, one, two, four and then eight, 40 in all; or one.
_PATIENT = {"max_retries": 8, "initial_delay": "0.5s", "max_delay": "8s"}
_HASTY = {"max_retries": 2, "initial_delay": "0.5s", "max_delay": "1s"}
# How long a store that did not answer is not waited for again.
_HASTE_SECS = 120.0
# No one request of ours is so large or so slow.
_LIMIT_SECS = 600.0
# What tensorstore calls failures after which its retries are used up.
_SILENCE = ("UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED")

_stores: dict[tuple[str, str, bool], Any] = {}
_silent_since: dict[str, float] = {}


class Place(NamedTuple):
  """A place in an object store.

  Attributes:
    scheme: a key of SCHEMES.
    bucket: its name.
    key: without slashes at its ends; "" for the bucket itself.
  """

  scheme: str
  bucket: str
  key: str


class Version(NamedTuple):
  """What is at a place, and what tells it from what may come there later.

  Attributes:
    content: None if there is nothing.
    generation: for `write`.
  """

  content: bytes | None
  generation: bytes


def parse(path: str) -> Place:
  """Takes a path apart.

  Raises:
    ConfigError: an unknown scheme, or no name that could be a place.
  """
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
  """The tensorstore spec of a place.

  The servers of the standard environment variables are used in place of the
  public ones: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, STORAGE_EMULATOR_HOST.
  """
  place = parse(path)
  spec: dict[str, Any] = {
    "driver": SCHEMES[place.scheme],
    "bucket": place.bucket,
    "path": place.key + "/" * (is_folder and bool(place.key)),
  }
  if place.scheme == "s3":
    get = os.environ.get
    endpoint = get("AWS_ENDPOINT_URL_S3") or get("AWS_ENDPOINT_URL")
    region = get("AWS_REGION") or get("AWS_DEFAULT_REGION")
    spec["use_conditional_write"] = True
    if get("AWS_ACCESS_KEY_ID"):
      # Without a look at files and machines that need not be there.
      spec["aws_credentials"] = {"type": "environment"}
    if endpoint:
      # A region is part of every signature, whether the server has one or not.
      spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
  else:
    _use_emulator()
  return spec


def _use_emulator() -> None:
  """Tells tensorstore of Google's variable for a server in place of theirs."""
  host = os.environ.get("STORAGE_EMULATOR_HOST")
  if host:
    url = host if "://" in host else f"http://{host}"
    os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", url)
    # Nobody's real credentials are sent to it.
    os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "emulator")


def context(*, hasty: bool = False) -> dict[str, Any]:
  """Resources of a tensorstore context that bound the waiting for a store."""
  # Of connections: one that is not made, and one that no byte comes through.
  os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", "10")
  os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
  os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
  retries = _HASTY if hasty else _PATIENT
  return {f"{name}_request_retries": retries for name in SCHEMES.values()}


def _open(place: Place, hasty: bool) -> Any:
  """The bucket of a place, as a tensorstore KvStore."""
  import tensorstore as ts

  silent = time.monotonic() - _silent_since.get(place.bucket, -_HASTE_SECS)
  hasty = hasty or silent < _HASTE_SECS
  name = (place.scheme, place.bucket, hasty)
  if name not in _stores:
    root = f"{place.scheme}://{place.bucket}"
    try:
      opening = ts.KvStore.open(
        kvstore(root), context=ts.Context(context(hasty=hasty))
      )
    except ValueError as e:  # A name that no bucket can have.
      raise ConfigError(f"{root}: {_text(e)}.") from e
    _stores[name] = _result(opening, root)
  return _stores[name]


def _result(future: Any, path: str) -> Any:
  try:
    return future.result(timeout=_LIMIT_SECS)
  except TimeoutError as e:
    _silent_since[parse(path).bucket] = time.monotonic()
    raise OSError(errno.ETIMEDOUT, "the store does not answer", path) from e
  except ValueError as e:  # What tensorstore raises for any failure.
    raise as_os_error(e, path) from e


def _text(error: BaseException) -> str:
  # The rest is about tensorstore's source.
  return str(error).split(" [", maxsplit=1)[0].rstrip(".")


def as_os_error(error: BaseException, path: str) -> OSError:
  """What tensorstore says of a failure, as an OSError that names the place.

  It is never a FileNotFoundError: that a bucket cannot be found proves nothing
  about what is in it.
  """
  text = _text(error)
  if text.startswith(_SILENCE):
    _silent_since[parse(path).bucket] = time.monotonic()
    return OSError(errno.EHOSTUNREACH, f"no answer ({text})", path)
  if text.startswith(("PERMISSION_DENIED", "UNAUTHENTICATED")):
    return PermissionError(
      errno.EACCES, f"refused; are there credentials? ({text})", path
    )
  if text.startswith(("NOT_FOUND", "FAILED_PRECONDITION")):
    return OSError(errno.EIO, f"is there such a bucket? ({text})", path)
  return OSError(errno.EIO, text, path)


def read(path: str) -> Version:
  """What is at a place; its content is None if that is nothing."""
  return read_all([path])[0]


def read_all(paths: Iterable[str]) -> list[Version]:
  """What is at each of many places, read at the same time."""
  reading = []
  for path in paths:
    place = parse(path)
    reading.append((path, _open(place, False).read(place.key)))
  found = []
  for path, future in reading:
    result = _result(future, path)
    content = result.value if result.state == "value" else None
    found.append(Version(content, result.stamp.generation))
  return found


def write(
  path: str,
  content: bytes | None,
  *,
  instead_of: Version | None = None,
  hasty: bool = False,
) -> bool:
  """Gives an object its content.

  Args:
    path: of the object.
    content: all of it; None removes the object.
    instead_of: what has to be there still; anything unless given.
    hasty: whether to fail soon if the store does not answer.

  Returns:
    Whether it was written: False if something else is there.
  """
  place = parse(path)
  condition = {} if instead_of is None else {"if_equal": instead_of.generation}
  stamp = _result(
    _open(place, hasty).write(place.key, content, **condition), path
  )
  return bool(stamp.generation)


def below(folder: str) -> list[str]:
  """Names of all objects below a folder, relative to it, sorted."""
  prefix, names = _range(folder)
  store = _open(parse(folder), False)
  keys = _result(store.list(names, strip_prefix_length=len(prefix)), folder)
  return sorted(key.decode("utf-8", "replace") for key in keys)


def remove_below(folder: str) -> None:
  """Removes all objects below a folder."""
  _, names = _range(folder)
  _result(_open(parse(folder), False).delete_range(names), folder)


def _range(folder: str) -> tuple[bytes, Any]:
  """What the keys below a folder begin with, and their range."""
  import tensorstore as ts

  key = parse(folder).key.encode()
  if not key:
    return b"", ts.KvStore.KeyRange()
  # "0" comes next after "/".
  return key + b"/", ts.KvStore.KeyRange(key + b"/", key + b"0")
