"""Begins to load the update's executable while the program still imports.

XLA takes seconds to load the executable of a large model, and needs no Python
for it. Which executable is right is only known once the model and the data are.
So the command begins with the one that the last start of the same config used,
and `take` returns it only if its bytes and devices are those that this start
wants.
"""

import contextlib
import hashlib
import json
import os
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from bigtrain.cluster import process
from bigtrain.runtime import host_memory, kept_files

_BYTES = 8  # Of a number that has the length of what follows.


class _Loading(NamedTuple):
  """An executable that is being loaded.

  Attributes:
    device_ids: its devices in order.
    serialized: its bytes.
    program: takes all arguments as one list.
  """

  device_ids: list[int]
  serialized: bytes
  program: jax.stages.Compiled


_loading: list[process.Background] = []


def split(body: bytes) -> tuple[bytes, bytes, bytes]:
  """Returns (head, content, executable) of the body of an entry."""
  parts, begin = [], 0
  for _ in range(2):
    end = begin + _BYTES
    begin = end + int.from_bytes(body[begin:end], "little")
    parts.append(body[end:begin])
  return parts[0], parts[1], body[begin:]


def joined(head: bytes, content: bytes, executable: bytes) -> bytes:
  """Returns the body of an entry, for `split`."""
  sized = (len(x).to_bytes(_BYTES, "little") + x for x in (head, content))
  return b"".join([*sized, executable])


def note(
  folder: str, config: str, entry: str, mesh: Any, num_args: int
) -> None:
  """Notes the executable that a start used, for the next one.

  Args:
    entry: path of the executable's entry.
  """
  ids = [d.id for d in mesh.devices.flat]
  text = json.dumps([os.path.basename(entry), ids, num_args]).encode()
  path = _path(folder, config)
  if jax.process_count() == 1 and kept_files.load(path) != text:
    kept_files.store(path, text)


def begin(cache: str, config: str) -> None:
  """Begins to load what the last start of a config used, if anything.

  This starts jax's devices, so the process must be alone.
  """
  folder = os.path.join(cache, "kept")
  if "://" in cache or not os.path.exists(_path(folder, config)):
    return
  host_memory.keep_freed()
  _loading.append(process.Background(lambda: _load(cache, config), "load"))


def _load(cache: str, config: str) -> _Loading:
  folder = kept_files.own_folder(cache)
  entry, ids, num_args = json.loads(kept_files.load(_path(folder, config)))
  body = kept_files.load(os.path.join(folder, os.path.basename(entry)))
  serialized = split(body)[2]
  by_id = {d.id: d for d in jax.devices()}
  devices = [by_id[i] for i in ids]
  program = serialize_executable.deserialize_and_load(
    serialized,
    jax.tree.structure([0] * num_args),
    jax.tree.structure(0),
    backend=devices[0].client,
    execution_devices=devices,
  )
  return _Loading(ids, serialized, program)


def take(serialized: bytes, mesh: Any) -> jax.stages.Compiled | None:
  """Returns the executable if it is this one; each only once.

  Args:
    serialized: bytes of the executable that the start wants.
  """
  if not _loading:
    return None
  background = _loading.pop()
  with contextlib.suppress(Exception):  # The caller then loads it again.
    loading = background.result()
    same_devices = loading.device_ids == [d.id for d in mesh.devices.flat]
    if same_devices and loading.serialized == serialized:
      return loading.program
  return None


def forget(folder: str, config: str) -> None:
  """Drops the executable of a stale note, and the note."""
  if _loading:
    _loading.clear()  # Its memory is free once it is loaded.
    with contextlib.suppress(OSError):
      os.unlink(_path(folder, config))


def _path(folder: str, config: str) -> str:
  name = hashlib.sha256(f"last start of {config}".encode()).hexdigest()
  return os.path.join(folder, f"{name}{kept_files.LAST}")
