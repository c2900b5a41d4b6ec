"""Checkpoints on the hosts' own disks or memory, in front of the workdir's.

  FOLDER/RUN/0/checkpoints/00000150/   a checkpoint of process 0
  FOLDER/RUN/0/stored                  newest step in the workdir

They are written more often than the workdir's: each process writes all shards
of its devices to its own host, without waiting for the disk. "shards" in a
manifest's `writer` lists them with the devices' checksums. At a start, all
processes agree on the newest step whose shards can be put together, receive the
files that they lack from each other, and restore it as any other checkpoint;
without such a step, or if the workdir has a newer one, the workdir's is used.

A local checkpoint may be of a past that is no longer the run's. So each start
has a token, and the workdir's local_ckpts.json has the last step up to which
the checkpoints of each token are of the run's past:

  {"5e1f9c2e": 150, "9ab3d7c1": null}

If the workdir lacks the step in the file "stored", somebody removed it to go
back, and the local checkpoints are not used either.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging

from bigtrain.arrays import trees
from bigtrain.checkpoints import (
  changes,
  checksums,
  folders,
  integrity,
  restore,
  snapshot,
)
from bigtrain.checkpoints.manifest import (
  MANIFEST_FILE,
  Array,
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.cluster import process, transfers
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.files import disk, paths

RECORD = "local_ckpts.json"
_STORED = "stored"
# A step is on all hosts only when the slowest has written it: until then the
# step before is needed.
_KEEP = 2
# Starts without progress that are remembered.
_MOST_TOKENS = 100

# A shard: name of the array; start and stop of the shard in each dimension.
Key = tuple[str, tuple[tuple[int, int], ...]]
Shards = Mapping[Key, checksums.Sums]


class Saved(NamedTuple):
  """A checkpoint on this host, with the shards that it should have."""

  directory: str
  manifest: Manifest
  shards: Shards


def from_config(
  config: settings.Config, every_steps: int | None, workdir: str
) -> "LocalCheckpoints | None":
  folder = config.get("local_ckpt_dir")
  if not every_steps:
    if folder is not None and every_steps is None:
      raise ConfigError(
        f"config.local_ckpt_dir={folder!r}: needs config.local_ckpt_steps, the "
        "interval between local checkpoints."
      )
    return None
  if not isinstance(folder, str) or not folder or paths.is_remote(folder):
    raise ConfigError(
      f"config.local_ckpt_dir={folder!r}: expected a folder on each host, such "
      'as "/dev/shm/run" and not an object store, because config.local_ckpt_* '
      "is set."
    )
  folder = existing = paths.absolute(folder)
  while not os.path.lexists(existing):
    existing = os.path.dirname(existing)
  if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
    raise ConfigError(
      f"config.local_ckpt_dir={folder!r}: cannot write to {existing}."
    )
  identity = changes.identity(config.to_dict())
  return LocalCheckpoints(folder, every_steps, workdir, identity)


def forget(workdir: str) -> None:
  paths.remove(os.path.join(workdir, RECORD))


class LocalCheckpoints:
  """The local checkpoints of a run.

  All processes call `restore` and `begin` in the same order. A failure to write
  is logged once, and then this process writes none any more.
  """

  def __init__(
    self, folder: str, every_steps: int, workdir: str, config_identity: str
  ):
    self._workdir = workdir
    self._every_steps = every_steps
    self._run = f"{workdir} {config_identity}"
    name = os.path.basename(workdir)
    digest = hashlib.sha256(workdir.encode()).hexdigest()[:8]
    self._root = os.path.join(folder, f"{name}-{digest}")
    self._own = ""  # Folder of this process, once its index is known.
    # Folders of processes that no longer run on this host.
    self._left: list[str] = []
    self._token = ""  # Of this start; the same on all processes.
    self._tokens: dict[str, int | None] = {}
    self._saved: dict[tuple[int, str], Saved] = {}
    self._off = False

  def due(self, step: int) -> bool:
    return step % self._every_steps == 0

  # The start.

  def restore(
    self, stored: int | None, like: Any
  ) -> tuple[Any, Manifest] | None:
    """Restores the newest step that the processes together have.

    Returns (tree like `like`, the manifest) on all processes, or None on all:
    also if the workdir's newest step, `stored`, is newer.
    """
    self._join()
    seen = [_read_stored(folder) for folder in (self._own, *self._left)]
    offers = process.gather(
      {"seen": max(seen), "saved": [list(key) for key in self._saved]}
    )
    least = -1 if stored is None else stored
    removed = max(offer["seen"] for offer in offers)
    if removed > least:
      logging.warning(
        "Local checkpoints are not used: the checkpoint of step %d was removed "
        "from the workdir.",
        removed,
      )
      return None
    candidates = {(s, t) for offer in offers for s, t in offer["saved"]}
    for step, token in sorted(candidates, reverse=True):
      if step < least:
        break
      first = [[step, token] in offer["saved"] for offer in offers].index(True)
      manifest = self._shared_manifest(step, token, first, like)
      if manifest is not None and self._complete(manifest, token, like):
        directory = self._saved[step, token].directory
        state, error = None, ""
        try:
          state = restore.read_tree(directory, manifest, like, inspected=True)
        except CheckpointError as e:  # Damaged since `_complete` read it.
          error = str(e)
        if not _any_error(error):
          return state, manifest
      logging.warning("The local checkpoint of step %d is not complete.", step)
    return None

  def _path(self, step: int) -> str:
    return os.path.join(folders.folder(self._own), folders.step_name(step))

  def _join(self) -> None:
    """Finds the checkpoints of this process; all processes call it."""
    index = jax.process_index()
    self._token = process.broadcast(secrets.token_hex(4))
    self._own = os.path.join(self._root, str(index))
    hosts = process.gather(_host())
    here = [i for i, host in enumerate(hosts) if host == hosts[index]]
    known = {str(i) for i in here}
    if index == here[0]:
      with contextlib.suppress(OSError):  # Usually there is no such folder.
        self._left = [
          os.path.join(self._root, name)
          for name in sorted(os.listdir(self._root))
          if name.isdigit() and name not in known
        ]
    record = _read_record(self._workdir) if index == 0 else None
    self._tokens = process.broadcast(record)
    for folder in (*self._left, self._own):
      for token, saved in _find(folder, self._run):
        if self._is_past(saved.manifest.step, token):
          self._saved[saved.manifest.step, token] = saved

  def _is_past(self, step: int, token: str) -> bool:
    last = self._tokens.get(token, -1)
    return last is None or step <= last

  def _shared_manifest(
    self, step: int, token: str, first: int, like: Any
  ) -> Manifest | None:
    text = ""
    if jax.process_index() == first:
      text = self._saved[step, token].manifest.to_json()
    text = process.gather(text)[first]
    try:
      manifest = Manifest.from_json(text, "the local checkpoint")
      specs = dict(trees.flatten_with_names(like))
      restore.check_fits("the local checkpoint", manifest, specs)
    except (DamagedError, restore.MismatchError) as e:
      logging.warning("%s", e)
      return None
    return manifest

  def _complete(self, manifest: Manifest, token: str, like: Any) -> bool:
    saved = self._saved.get((manifest.step, token))
    intact = _intact(saved) if saved else {}
    missing = [key for key in _needed(like) if key not in intact]
    wanted = {_key(*key) for keys in process.gather(missing) for key in keys}
    if not wanted:
      return True
    offer = [[key, sums] for key, sums in intact.items() if key in wanted]
    server = transfers.Server(saved.directory) if saved and offer else None
    try:
      offers = process.gather([server and server.address, offer])
      holders: dict[Key, list[int]] = {}
      offered: dict[Key, checksums.Sums] = {}
      for index, (_, shards) in enumerate(offers):
        for (name, place), sums in shards:
          holders.setdefault(_key(name, place), []).append(index)
          offered[_key(name, place)] = tuple(sums)
      if wanted - holders.keys():
        return False
      sources: dict[int, list[Key]] = {}
      for key in missing:
        # Different processes ask different ones first.
        index = holders[key][jax.process_index() % len(holders[key])]
        sources.setdefault(index, []).append(key)
      error = ""
      if missing:
        try:
          if saved is None:
            directory = self._path(manifest.step)
            _remove(directory)  # Cannot be used.
            os.makedirs(directory)
          else:
            directory = saved.directory
          for index, keys in sources.items():
            files = {f for key in keys for f in _files(key, manifest.arrays)}
            transfers.fetch(offers[index][0], sorted(files), directory)
          shards = {**intact, **{key: offered[key] for key in missing}}
          _write_manifest(directory, manifest, shards)
          saved = Saved(directory, manifest, shards)
          self._saved[manifest.step, token] = saved
          if _intact(saved).keys() != shards.keys():
            error = "shards of another process are damaged."
        except OSError as e:
          error = f"shards of another process cannot be received: {e}"
        logging.info("Received %d shards from other processes.", len(missing))
      return not _any_error(error)
    finally:
      if server is not None:
        server.close()

  def begin(self, step: int, stored: int | None) -> None:
    """Begins a new token: the run goes on from `step`."""
    if not self._token:
      self._join()
    tokens = {
      token: step if last is None else min(last, step)
      for token, last in self._tokens.items()
    }
    if stored is not None:  # Older ones are never used again.
      tokens = {t: last for t, last in tokens.items() if last >= stored}
    self._tokens = dict([*tokens.items(), (self._token, None)][-_MOST_TOKENS:])
    error = ""
    if jax.process_index() == 0:
      try:
        with paths.replacing(os.path.join(self._workdir, RECORD)) as file:
          json.dump(self._tokens, file)
      except OSError as e:
        error = disk.reason(e, self._workdir)
    restore.raise_on_all(error)
    past = {s.directory for k, s in self._saved.items() if self._is_past(*k)}
    try:
      os.makedirs(self._own, exist_ok=True)
      _keep_only(self._own, past)
      self.note_stored(-1 if stored is None else stored)
    except OSError as e:
      self._turn_off(e)

  # While the run goes on.

  def write(
    self,
    manifest: Manifest,
    pieces: Sequence[snapshot.Piece],
    sums: Sequence[checksums.Sums],
  ) -> None:
    if self._off or not self._token:
      return
    token = self._token
    about = {**manifest.writer, "run": self._run, "token": token}
    manifest = dataclasses.replace(manifest, writer=about)
    shards = {
      (piece.name, tuple((s.start, s.stop) for s in piece.place)): one
      for piece, one in zip(pieces, sums, strict=True)
    }
    final = self._path(manifest.step)
    attempt = folders.attempt(self._own, manifest.step, f"{token}-0")
    try:
      os.makedirs(attempt)
      parts = snapshot.blocks(pieces, manifest.arrays)
      integrity.write(attempt, manifest.arrays, parts, sync=False)
      _write_manifest(attempt, manifest, shards)
      _remove(final)
      os.rename(attempt, final)
      newest = [*folders.listing(self._own).checkpoints.values()][-_KEEP:]
      _keep_only(self._own, newest)
    except (OSError, ValueError, CheckpointError) as e:
      self._turn_off(e)
      return
    while self._left:
      _remove(self._left.pop())

  def note_stored(self, step: int) -> None:
    if self._off or not self._own:
      return
    try:
      with paths.replacing(os.path.join(self._own, _STORED)) as file:
        file.write(str(step))
    except OSError as e:
      self._turn_off(e)

  def _turn_off(self, error: Exception) -> None:
    self._off = True
    logging.warning(
      "This process keeps no more local checkpoints, and its earlier ones are "
      f"removed: {disk.reason(error, self._root)}. The workdir's are not "
      "affected."
    )
    _remove(self._own)

  def remove(self) -> None:
    for folder in (*self._left, self._own):
      if folder:
        _remove(folder)
    with contextlib.suppress(OSError):  # Others of this host still use it.
      os.rmdir(self._root)
    if self._token and jax.process_index() == 0:
      forget(self._workdir)


def _find(folder: str, run: str) -> Iterable[tuple[str, Saved]]:
  try:
    directories = folders.listing(folder).checkpoints
  except CheckpointError as e:
    logging.warning("%s", e)
    return
  for directory in directories.values():
    try:
      manifest = folders.read_manifest(directory)
      about = manifest.writer
      if about["run"] != run:
        raise DamagedError("it is of another run, or of another config.")
      shards = {_key(n, place): tuple(s) for n, place, s in about["shards"]}
    except (CheckpointError, KeyError, TypeError, ValueError) as e:
      logging.warning("%s: not used: %s", directory, e)
    else:
      yield about["token"], Saved(directory, manifest, shards)


def _write_manifest(directory: str, manifest: Manifest, shards: Shards) -> None:
  listed = [[*key, sums] for key, sums in shards.items()]
  about = {**manifest.writer, "shards": listed}
  manifest = dataclasses.replace(manifest, writer=about)
  with paths.replacing(os.path.join(directory, MANIFEST_FILE)) as file:
    file.write(manifest.to_json())


def _intact(saved: Saved) -> dict[Key, checksums.Sums]:
  arrays = saved.manifest.arrays
  parts = [
    (name, tuple(slice(*bounds) for bounds in place))
    for name, place in saved.shards
  ]
  intact = {}
  results = integrity.read_each(saved.directory, saved.manifest, parts)
  for (key, expected), ((name, index), values) in zip(
    saved.shards.items(), results, strict=True
  ):
    if not isinstance(values, ValueError) and expected == checksums.of_part(
      values, index, arrays[name].shape
    ):
      intact[key] = expected
    else:
      logging.warning("%s: array %r is damaged.", saved.directory, name)
  return intact


def _needed(like: Any) -> Iterable[Key]:
  keys: dict[Key, None] = {}
  for name, spec in trees.flatten_with_names(like):
    shape = tuple(spec.shape)
    indices = spec.sharding.addressable_devices_indices_map(shape)
    for index in indices.values():
      keys[name, checksums.bounds(index, shape)] = None
  return keys


def _files(key: Key, arrays: Mapping[str, Array]) -> Iterable[str]:
  name, place = key
  for file, index in arrays[name].chunks():
    if all(s.start < hi and lo < s.stop for s, (lo, hi) in zip(index, place)):
      yield f"{name}/{file}"


def _key(name: str, place: Iterable[Iterable[int]]) -> Key:
  return name, tuple((lo, hi) for lo, hi in place)


def _any_error(own: str) -> bool:
  errors = process.gather(own)
  for index, error in enumerate(errors):
    if error:
      logging.warning("Process %d: %s", index, error)
  return any(errors)


def _keep_only(folder: str, directories: Iterable[str]) -> None:
  listed = folders.listing(folder)
  others = (*listed.checkpoints.values(), *listed.leftovers, *listed.strays)
  for path in {*others} - {*directories}:
    _remove(path)


def _remove(path: str) -> None:
  if os.path.lexists(path):
    folders.discard(path)


def _host() -> str:
  boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
  return socket.gethostname() + (boot.read_text() if boot.exists() else "")


def _read_stored(folder: str) -> int:
  try:
    return int(paths.read_bytes(os.path.join(folder, _STORED)))
  except (OSError, ValueError):
    return -1


def _read_record(workdir: str) -> dict[str, int | None]:
  path = os.path.join(workdir, RECORD)
  try:
    record = json.loads(paths.read_bytes(path))
    if not all(isinstance(last, int | None) for last in record.values()):
      raise ValueError("unexpected content")
    return record
  except FileNotFoundError:
    return {}
  except (OSError, ValueError, AttributeError) as e:
    logging.warning("%s: local checkpoints are not used: %s", path, e)
    return {}
