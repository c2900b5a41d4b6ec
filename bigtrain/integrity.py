"""Whether a checkpoint is what was once written, down to the last bit.

`inspect` looks at names, sizes and metadata, which is quick; `verify` also
reads every chunk against its checksum. Each problem is one line that names the
array and the file. Nothing here needs jax.
"""

import collections
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from bigtrain import manifest as manifest_lib
from bigtrain import storage
from bigtrain.manifest import Array, CheckpointError, DamagedError, Manifest

# What may be read and not yet used up, on one host.
_BYTES_IN_FLIGHT = 2**30

_context: list[Any] = []


def tensorstore_context() -> Any:
  """The tensorstore context of reads and writes.

  No cache: it would cost as much memory as the checkpoint has bytes. No file
  locks: some network file systems lack them, and every file has one writer.
  Files and their names are put on disk before a write counts as done.
  """
  import tensorstore as ts

  if not _context:
    _context.append(
      ts.Context(
        {
          "cache_pool": {"total_bytes_limit": 0},
          "file_io_concurrency": {"limit": 32},
          "file_io_locking": {"mode": "none"},
          "file_io_sync": True,
        }
      )
    )
  return _context[0]


def metadata_digest(directory: str, name: str) -> str:
  """SHA-256 of an array's zarr.json."""
  path = os.path.join(directory, name, manifest_lib.METADATA_FILE)
  with open(path, "rb") as file:
    return hashlib.sha256(file.read()).hexdigest()


def inspect(
  directory: str, manifest: Manifest, names: Iterable[str] | None = None
) -> list[str]:
  """Problems that names, sizes and metadata show; reads no values.

  Args:
    directory: of the checkpoint.
    manifest: its manifest.
    names: of the arrays to look at; all unless given.
  """
  problems = []
  for name in manifest.arrays if names is None else names:
    problems += _inspect_array(directory, name, manifest.arrays[name])
  return problems


def _inspect_array(directory: str, name: str, array: Array) -> list[str]:
  where = os.path.join(directory, name)

  def problem(file: str, what: str) -> str:
    return f"array {name!r}: {os.path.join(where, file)}: {what}"

  parts = name.split("/")
  for i in range(1, len(parts) + 1):
    above = os.path.join(directory, *parts[:i])
    if os.path.islink(above):
      return [f"array {name!r}: {above}: a symbolic link; it is not followed"]
  try:
    sizes = dict(storage.files_below(where))
  except FileNotFoundError:
    return [f"array {name!r}: {where}: missing"]
  except NotADirectoryError:
    return [f"array {name!r}: {where}: a file, where a directory should be"]
  problems = [
    problem(file, "a symbolic link; it is not followed")
    for file, size in sizes.items()
    if size is None
  ]
  if manifest_lib.METADATA_FILE not in sizes:
    problems.append(problem(manifest_lib.METADATA_FILE, "missing"))
  elif array.metadata_sha256 and (
    metadata_digest(directory, name) != array.metadata_sha256
  ):
    problems.append(problem(manifest_lib.METADATA_FILE, "changed"))
  for file, _ in array.chunks():
    if file not in sizes:
      problems.append(problem(file, "missing"))
    elif sizes[file] is not None and sizes[file] != array.chunk_bytes:
      problems.append(
        problem(
          file, f"has {sizes[file]} bytes, expected {array.chunk_bytes}"
        )
      )
  return problems


def read(
  directory: str,
  manifest: Manifest,
  parts: Iterable[tuple[str, tuple[slice, ...]]],
) -> Iterator[np.ndarray]:
  """Reads parts of arrays, several at once, and yields them in order.

  Args:
    directory: of the checkpoint.
    manifest: its manifest.
    parts: (name, index into the array) of each.

  Raises:
    DamagedError: a chunk is missing or not what was written.
    CheckpointError: a file cannot be read.
  """
  import tensorstore as ts

  opened: dict[str, Any] = {}
  pending: collections.deque[tuple[str, Any, int]] = collections.deque()
  in_flight = 0

  def finish() -> np.ndarray:
    nonlocal in_flight
    name, future, num_bytes = pending.popleft()
    in_flight -= num_bytes
    try:
      return future.result()
    except ValueError as e:
      raise _explain(directory, name, e) from e

  for name, index in parts:
    array = manifest.arrays[name]
    if name not in opened:
      # The manifest vouches for the metadata, so it is not read again.
      opened = {
        name: ts.open(
          manifest_lib.spec(directory, name, array),
          open=True,
          assume_metadata=True,
          context=tensorstore_context(),
        ).result()
      }
    part = opened[name][index]
    num_bytes = part.size * part.dtype.numpy_dtype.itemsize
    while pending and in_flight + num_bytes > _BYTES_IN_FLIGHT:
      yield finish()
    pending.append((name, part.read(order="C"), num_bytes))
    in_flight += num_bytes
  while pending:
    yield finish()


def _explain(directory: str, name: str, error: ValueError) -> CheckpointError:
  """tensorstore's error with the array's name, sorted by what may be done."""
  text = str(error).split(" [")[0]
  kind = DamagedError
  if text.startswith(("PERMISSION_DENIED", "UNKNOWN", "INTERNAL")):
    kind = CheckpointError  # Nothing proves that the file is bad.
  return kind(f"{directory}: array {name!r}: {text}")


def read_array(directory: str, manifest: Manifest, name: str) -> np.ndarray:
  """The whole of one array, on the host."""
  index = (slice(None),) * len(manifest.arrays[name].shape)
  return next(read(directory, manifest, [(name, index)]))


def verify(directory: str) -> list[str]:
  """Every problem of a checkpoint, each chunk read; [] if it is whole.

  Raises:
    CheckpointError: it cannot be read at all.
  """
  try:
    manifest = storage.read_manifest(directory)
  except DamagedError as e:
    return [str(e)]
  problems = inspect(directory, manifest)
  for name, array in manifest.arrays.items():
    for file, index in array.chunks():
      path = os.path.join(directory, name, file)
      if any(path in problem for problem in problems):
        continue
      try:
        next(read(directory, manifest, [(name, index)]))
      except DamagedError as e:
        problems.append(f"array {name!r}: {path}: {str(e).split(': ', 2)[-1]}")
  return problems
