"""Checkpoints of one process on a disk of its host: their files.

  FOLDER/00000150-1f3a9c2e/data          the process's shards, one by one
                           header.json   their names, places and checksums
  FOLDER/00000200-1f3a9c2e.tmp/          a checkpoint that is being written

A rename makes a checkpoint. Nothing waits for the disk: a file that a crash of
the machine cut or emptied has other checksums, and is not used. The shards'
checksums are made on the devices (checksums.py).
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.checkpoints import checksums
from bigtrain.checkpoints import manifest as manifest_lib
from bigtrain.checkpoints.manifest import DamagedError, Manifest

_HEADER, _DATA = "header.json", "data"
_NAME = re.compile(r"(?P<step>\d{8,})-[0-9a-f]+")

# A shard: name of the array; start and stop of the shard in each dimension.
Key = tuple[str, tuple[tuple[int, int], ...]]


class Part(NamedTuple):
  """A shard in a file.

  Attributes:
    offset: position of its first byte.
    num_bytes: size.
    sums: checksum.
  """

  offset: int
  num_bytes: int
  sums: checksums.Sums


@dataclasses.dataclass(frozen=True)
class Saved:
  """A checkpoint on this host.

  Attributes:
    directory: its directory.
    step: number of finished training steps.
    token: the start of the run that wrote it.
    parts: the shards that it holds.
    manifest_text: manifest of all arrays, with the host state.
  """

  directory: str
  step: int
  token: str
  parts: dict[Key, Part]
  manifest_text: str

  @property
  def data(self) -> str:
    """Path of the file with the shards."""
    return os.path.join(self.directory, _DATA)


def bounds(index: Sequence[slice], shape: Sequence[int]) -> Any:
  """Returns the start and stop of an index in each dimension."""
  return tuple(s.indices(n)[:2] for s, n in zip(index, shape))


def write(
  folder: str,
  token: str,
  run: str,
  pieces: Sequence[Any],
  sums: Sequence[checksums.Sums],
  manifest: Manifest,
) -> None:
  """Writes a checkpoint; replaces one of the same step and token.

  Args:
    pieces: the shards (snapshot.Piece).

  Raises:
    OSError: it cannot be written.
  """
  final = os.path.join(folder, f"{manifest.step:08d}-{token}")
  attempt = f"{final}.tmp"
  os.makedirs(attempt)
  offset, parts = 0, []
  with open(os.path.join(attempt, _DATA), "wb") as file:
    for piece, one in zip(pieces, sums, strict=True):
      # For pinned memory, np.asarray is a view.
      data = np.ascontiguousarray(np.asarray(piece.data))
      file.write(data.reshape(-1).view(np.uint8).data)
      place = [[s.start, s.stop] for s in piece.place]
      parts.append([piece.name, place, offset, data.nbytes, list(one)])
      offset += data.nbytes
  content = {
    "run": run,
    "step": manifest.step,
    "token": token,
    "parts": parts,
    "manifest": manifest_lib.to_json(manifest),
  }
  with open(os.path.join(attempt, _HEADER), "w") as file:
    json.dump({"sha256": _digest(content), "content": content}, file)
  if os.path.lexists(final):
    shutil.rmtree(final)
  os.rename(attempt, final)


def _digest(content: Mapping[str, Any]) -> str:
  text = json.dumps(content, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def find(folder: str, run: str) -> list[Saved]:
  """Returns the complete checkpoints of a run in a folder, newest first.

  Files that are damaged or of another run are left out with a warning.
  """
  result = []
  for name in _names(folder):
    directory = os.path.join(folder, name)
    try:
      saved = _read_header(directory, run)
    except (OSError, ValueError, KeyError, TypeError, DamagedError) as e:
      reason = str(e) or type(e).__name__
      logging.warning("%s: not used: %s", directory, reason)
    else:
      result.append(saved)
  return sorted(result, key=lambda saved: -saved.step)


def _names(folder: str) -> list[str]:
  """Names of the directories of complete checkpoints, by step."""
  try:
    names = os.listdir(folder)
  except OSError:  # Usually the folder does not exist.
    return []
  return sorted((n for n in names if _NAME.fullmatch(n)), key=_step)


def _step(name: str) -> int:
  return int(name.partition("-")[0])


def _read_header(directory: str, run: str) -> Saved:
  with open(os.path.join(directory, _HEADER)) as file:
    outer = json.load(file)
  content = outer["content"]
  if outer["sha256"] != _digest(content):
    raise DamagedError("damaged: its digest does not match.")
  if content["run"] != run:
    raise DamagedError("it is of another run, or of another config.")
  parts = {
    key_of(name, place): Part(offset, num_bytes, (sums[0], sums[1]))
    for name, place, offset, num_bytes, sums in content["parts"]
  }
  return Saved(
    directory, content["step"], content["token"], parts, content["manifest"]
  )


def key_of(name: str, place: Iterable[Iterable[int]]) -> Key:
  """Returns a key from JSON."""
  return name, tuple((lo, hi) for lo, hi in place)


def read(
  saved: Saved, manifest: Manifest, keys: Iterable[Key]
) -> Iterator[tuple[Key, np.ndarray]]:
  """Yields the shards that the checkpoint holds and that are intact."""
  try:
    with open(saved.data, "rb", buffering=0) as file:
      for key in keys:
        if key not in saved.parts:
          continue
        part = saved.parts[key]
        value = empty(key, manifest)
        file.seek(part.offset)
        buffer = value.reshape(-1).view(np.uint8).data
        while len(buffer) and (count := file.readinto(buffer)):
          buffer = buffer[count:]
        if is_intact(key, value, part.sums, manifest):
          yield key, value
        else:
          logging.warning("%s: array %r is damaged.", saved.directory, key[0])
  except OSError as e:
    logging.warning("%s: cannot be read: %s", saved.data, e)


def empty(key: Key, manifest: Manifest) -> np.ndarray:
  """Returns memory for a shard."""
  name, place = key
  dtype = manifest_lib.dtype_of(manifest.arrays[name].dtype)
  return np.empty([hi - lo for lo, hi in place], dtype)


def is_intact(
  key: Key, value: np.ndarray, sums: checksums.Sums, manifest: Manifest
) -> bool:
  """Whether a shard's values have the checksum of the devices."""
  name, place = key
  index = tuple(slice(lo, hi) for lo, hi in place)
  shape = manifest.arrays[name].shape
  return checksums.of_part(value, index, shape) == tuple(sums)


def keep_newest(folder: str, number: int) -> None:
  """Removes all checkpoints but the newest ones, and unfinished ones."""
  keep = _names(folder)[-number:]
  keep_only(folder, [os.path.join(folder, name) for name in keep])


def keep_only(folder: str, directories: Iterable[str]) -> None:
  """Removes all other checkpoints of a folder, also unfinished ones."""
  kept = {os.path.basename(directory) for directory in directories}
  for name in os.listdir(folder):
    if _NAME.match(name) and name not in kept:
      remove(os.path.join(folder, name))


def remove(path: str) -> None:
  """Removes a directory; logs a failure."""
  try:
    shutil.rmtree(path)
  except FileNotFoundError:
    pass  # Nothing to remove.
  except OSError as e:
    logging.warning("%s: cannot be removed: %s", path, e)
