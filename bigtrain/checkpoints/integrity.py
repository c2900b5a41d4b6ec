"""Writes and reads the arrays of a checkpoint, and checks every bit.

`write_metadata` and `write` write a checkpoint's files with tensorstore, and
`read` reads parts of arrays. `inspect` checks names, sizes and metadata of the
files, which is quick; `verify` also reads every chunk and compares the values
with the devices' checksums. This module does not use jax.
"""

import collections
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bigtrain.checkpoints import checksums, folders
from bigtrain.checkpoints.manifest import (
  MANIFEST_FILE,
  METADATA_FILE,
  Array,
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.files import objects, paths

# Name of an array and index of a part of it.
Part = tuple[str, tuple[slice, ...]]

_NOT_AS_ON_DEVICES = (
  "its values are not those that the devices had: they changed in host memory "
  "before they were written"
)
_CHANGED = "has changed: its digest does not match"
_LINK = "is a symbolic link; it is not followed"

# Limits of the host memory that reads and writes occupy: what has been read or
# is being read and has not been used, and what has been encoded and is not
# written.
_READS_IN_FLIGHT_BYTES = 2**30
_WRITES_IN_FLIGHT_BYTES = 512 * 2**20
_POLL_SECS = 0.25  # Between two calls of `check` while a write runs.


@functools.cache
def tensorstore_context(*, sync: bool = True) -> Any:
  """The tensorstore context of all reads and writes.

  It has no cache, because a cache would need as much memory as the checkpoint.
  It does not lock files: some network file systems cannot, and every file has
  only one writer. With `sync`, a write ends when the file and its directory are
  on disk.
  """
  import tensorstore as ts

  return ts.Context(
    {
      "cache_pool": {"total_bytes_limit": 0},
      "file_io_concurrency": {"limit": 32},
      "file_io_locking": {"mode": "none"},
      "file_io_sync": sync,
      **objects.context(),
    }
  )


def _finish(futures: Iterable[Any], check: Callable[[], Any]) -> None:
  """Waits for all writes, even if one fails or `check` raises."""
  futures = list(futures)
  try:
    for future in futures:
      while not future.done():
        with contextlib.suppress(TimeoutError):
          future.result(timeout=_POLL_SECS)
        check()
      future.result()
  except BaseException:
    for future in futures:
      future.exception()  # Waits. No write may touch the folder afterwards.
    raise


def write_metadata(
  directory: str, arrays: Mapping[str, Array], check: Callable[[], Any]
) -> None:
  """Writes the zarr.json of each array.

  tensorstore would do so itself, but only after looking for an existing one.
  """
  import tensorstore as ts

  place = paths.kvstore(directory)
  store = ts.KvStore.open(place, context=tensorstore_context()).result()
  writes = [
    store.write(f"{name}/{METADATA_FILE}", array.metadata())
    for name, array in arrays.items()
  ]
  _finish(writes, check)


def write(
  directory: str,
  arrays: Mapping[str, Array],
  parts: Iterable[tuple[Part, np.ndarray]],
  check: Callable[[], Any] = lambda: None,
  *,
  sync: bool = True,
) -> None:
  """Writes parts of arrays, each of whole chunks.

  Args:
    directory: folder of the checkpoint.
    arrays: layout of the arrays, by name.
    parts: (part, values) pairs.
    check: called several times a second; it raises to give up.
    sync: whether to wait until the files are on disk.
  """
  import tensorstore as ts

  opening = {
    name: ts.open(
      array.spec(directory, name),
      open=True,
      assume_metadata=True,
      context=tensorstore_context(sync=sync),
    )
    for name, array in arrays.items()
  }
  _finish(opening.values(), check)
  stores = {name: future.result() for name, future in opening.items()}
  pending: collections.deque[tuple[Any, int]] = collections.deque()
  in_flight = 0
  try:
    for (name, place), values in parts:
      while pending and in_flight + values.nbytes > _WRITES_IN_FLIGHT_BYTES:
        _finish([pending[0][0]], check)
        in_flight -= pending.popleft()[1]
      future = stores[name][place].write(
        values, can_reference_source_data_indefinitely=True
      )
      pending.append((future.commit, values.nbytes))
      in_flight += values.nbytes
  finally:
    _finish((future for future, _ in pending), check)


def metadata_digests(directory: str, names: Iterable[str]) -> dict[str, str]:
  """Returns {name: SHA-256 of the array's zarr.json, or "" without a file}."""
  files = {name: os.path.join(directory, name, METADATA_FILE) for name in names}
  if paths.is_remote(directory):
    contents = [version.content for version in objects.read_all(files.values())]
  else:
    contents = [paths.read_bytes(path) for path in files.values()]
  return {
    name: "" if content is None else hashlib.sha256(content).hexdigest()
    for name, content in zip(files, contents)
  }


class Problem(NamedTuple):
  """A defect of a checkpoint."""

  array: str  # "" for the manifest.
  path: str
  what: str

  def __str__(self) -> str:
    array = f"array {self.array!r}: " if self.array else ""
    return f"{array}{self.path}: {self.what}"


def inspect(
  directory: str, manifest: Manifest, names: Iterable[str] | None = None
) -> list[Problem]:
  """Checks the names, sizes and metadata of arrays, by default all of them."""
  problems = []
  names = list(manifest.arrays if names is None else names)
  try:
    if paths.is_remote(directory):
      return _inspect_objects(directory, manifest, names)
    for name in names:
      problems += _inspect_array(directory, name, manifest.arrays[name])
  except OSError as e:
    raise folders.unreadable(e) from e
  return problems


def _inspect_objects(
  directory: str, manifest: Manifest, names: list[str]
) -> list[Problem]:
  """`inspect` for object stores, with few requests.

  It does not check sizes, because a crash never leaves half an object.
  """
  problems = []
  existing = set(objects.below(directory))
  known = [name for name in names if manifest.arrays[name].metadata_sha256]
  digests = metadata_digests(directory, known)
  for name in names:
    array = manifest.arrays[name]
    chunks = [file for file, _ in array.chunks()]
    problems += [
      Problem(name, os.path.join(directory, name, file), "missing")
      for file in (METADATA_FILE, *chunks)
      if f"{name}/{file}" not in existing
    ]
    if digests.get(name) and array.metadata_sha256 != digests[name]:
      path = os.path.join(directory, name, METADATA_FILE)
      problems.append(Problem(name, path, _CHANGED))
  return problems


def _inspect_array(directory: str, name: str, array: Array) -> list[Problem]:
  array_directory = os.path.join(directory, name)
  problems = []

  def report(path: str, what: str) -> None:
    problems.append(Problem(name, os.path.join(array_directory, path), what))

  parent = directory
  for part in name.split("/"):
    parent = os.path.join(parent, part)
    if os.path.islink(parent):
      report(parent, _LINK)
      return problems
  try:
    sizes = dict(folders.files_below(array_directory))
  except FileNotFoundError:
    report(array_directory, "missing")
    return problems
  except NotADirectoryError:
    report(array_directory, "is a file, expected a directory")
    return problems
  for file, size in sizes.items():
    if size is None:
      report(file, _LINK)
  if METADATA_FILE not in sizes:
    report(METADATA_FILE, "missing")
  elif sizes[METADATA_FILE] is not None and array.metadata_sha256:
    if array.metadata_sha256 != metadata_digests(directory, [name])[name]:
      report(METADATA_FILE, _CHANGED)
  expected = array.chunk_bytes
  for file, _ in array.chunks():
    if file not in sizes:
      report(file, "missing")
    elif sizes[file] is not None and sizes[file] != expected:
      report(file, f"has {sizes[file]} bytes, expected {expected}")
  return problems


def read(
  directory: str, manifest: Manifest, parts: Iterable[Part]
) -> Iterator[np.ndarray]:
  """Reads parts of arrays concurrently, and yields them in order.

  It is fastest if parts of the same array follow each other.

  Raises:
    DamagedError: if a chunk is missing or has changed.
    CheckpointError: if a file cannot be read.
  """
  for (name, _), result in read_each(directory, manifest, parts):
    if isinstance(result, ValueError):
      raise _error_type(result)(
        f"{directory}: array {name!r}: {objects.text(result)}"
      ) from result
    yield result


def read_each(
  directory: str, manifest: Manifest, parts: Iterable[Part]
) -> Iterator[tuple[Part, np.ndarray | ValueError]]:
  """Like `read`, but yields (part, values or an error)."""
  import tensorstore as ts

  name: str = ""
  store: Any = None
  pending: collections.deque[tuple[Part, Any, np.ndarray]] = collections.deque()
  in_flight = 0

  def finish() -> tuple[Part, np.ndarray | ValueError]:
    nonlocal in_flight
    part, future, out = pending.popleft()
    in_flight -= out.nbytes
    try:
      future.result()
      return part, out
    except ValueError as e:  # tensorstore raises it for all failures.
      return part, e

  for part in parts:
    if name != part[0]:
      name = part[0]
      # The metadata is known from the manifest and not read again.
      store = ts.open(
        manifest.arrays[name].spec(directory, name),
        open=True,
        assume_metadata=True,
        context=tensorstore_context(),
      ).result()
    view = store[part[1]]
    if view.rank:
      view = view[ts.d[:].translate_to[0]]
    # numpy's memory has large pages. With tensorstore's own, reading takes
    # twice as long.
    out = np.empty(view.shape, view.dtype.numpy_dtype)
    while pending and in_flight + out.nbytes > _READS_IN_FLIGHT_BYTES:
      yield finish()
    pending.append((part, ts.array(out).write(view), out))
    in_flight += out.nbytes
  while pending:
    yield finish()


def _error_type(error: ValueError) -> type[CheckpointError]:
  damaged = str(error).startswith(
    ("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF_RANGE")
  )
  return DamagedError if damaged else CheckpointError


def verify(directory: str) -> list[Problem]:
  """Reads every chunk, and returns all problems of a checkpoint.

  Raises:
    CheckpointError: if something cannot be read, so that its state is unknown.
  """
  try:
    manifest = folders.read_manifest(directory)
  except DamagedError as e:
    path = os.path.join(directory, MANIFEST_FILE)
    return [Problem("", path, str(e).removeprefix(f"{path}: "))]
  problems = inspect(directory, manifest)
  # Chunks to read: those of which `inspect` has not found anything.
  reported = {problem.path for problem in problems}
  linked = {problem.array for problem in problems if problem.what == _LINK}
  part_of: dict[str, Part] = {}
  for name, array in manifest.arrays.items():
    if name in linked or os.path.join(directory, name) in reported:
      continue
    for file, place in array.chunks():
      path = os.path.join(directory, name, file)
      if path not in reported:
        part_of[path] = (name, place)
  sums: dict[str, list[checksums.Sums]] = collections.defaultdict(list)
  results = read_each(directory, manifest, part_of.values())
  for path, ((name, place), result) in zip(part_of, results):
    if isinstance(result, ValueError):
      if _error_type(result) is not DamagedError:
        raise CheckpointError(
          f"{directory}: {objects.text(result)}"
        ) from result
      problems.append(Problem(name, path, objects.text(result)))
    else:
      shape = manifest.arrays[name].shape
      sums[name].append(checksums.of_part(result, place, shape))
  damaged = {problem.array for problem in problems}
  for name in sums.keys() - damaged:
    if not _matches(manifest.arrays[name], sums[name]):
      path = os.path.join(directory, name)
      problems.append(Problem(name, path, _NOT_AS_ON_DEVICES))
  return problems


def check_sums(
  directory: str, manifest: Manifest, name: str, sums: Iterable[checksums.Sums]
) -> None:
  """Raises DamagedError unless the parts of an array have its checksum."""
  if not _matches(manifest.arrays[name], sums):
    raise DamagedError(f"{directory}: array {name!r}: {_NOT_AS_ON_DEVICES}.")


def _matches(array: Array, sums: Iterable[checksums.Sums]) -> bool:
  expected = array.checksum  # "" in checkpoints of earlier versions.
  return not expected or expected == checksums.as_text(checksums.add(sums))
