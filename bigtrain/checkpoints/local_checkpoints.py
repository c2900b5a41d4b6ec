"""Frequent checkpoints on the hosts' own disks or in their memory.

  FOLDER/RUN/0/checkpoints/00000150/   a checkpoint of process 0
  FOLDER/RUN/0/stored                  newest step in the workdir

Each process writes all shards of its devices to its own host, without waiting
for the disk. That is faster than a save to the workdir, so it can be done more
often. "shards" in a manifest's `writer` lists the shards and the checksums that
the devices computed.

When a run starts, all processes agree on the newest step for which the hosts
together have every shard. They send each other the files that some lack, and
restore the step like any other checkpoint. If there is no such step, or the
workdir has a newer one, the run starts from the workdir.

A local checkpoint may belong to a past that the run has abandoned, for instance
by a rollback. So each start draws a random token, which its checkpoints carry.
local_ckpts.json in the workdir has, for each token, the last step that still
belongs to the run's past; the newest start has null:

  {"5e1f9c2e": 150, "9ab3d7c1": null}

If the workdir lacks the step in the file "stored", somebody removed it to go
back to an earlier one, and the local checkpoints are not used either.
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
# Number of checkpoints on a host. A step is complete only when the slowest host
# has written it; until then the step before it is needed.
_KEEP = 2
# Number of starts that the record remembers, without any progress between them.
_MAX_TOKENS = 100

# A shard: name of its array; start and stop of the shard in each dimension.
Key = tuple[str, tuple[tuple[int, int], ...]]
# The shards of a checkpoint on this host, with the devices' checksums.
Shards = Mapping[Key, checksums.Sums]


class Saved(NamedTuple):
  """A checkpoint on this host, and the shards that it should have."""

  directory: str
  manifest: Manifest
  shards: Shards


def from_config(
  config: settings.Config, every_steps: int | None, workdir: str
) -> "LocalCheckpoints | None":
  """Reads config.local_ckpt_*; None if they are not set."""
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
  folder = paths.absolute(folder)
  existing = folder  # The nearest parent that exists.
  while not os.path.lexists(existing):
    existing = os.path.dirname(existing)
  if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
    raise ConfigError(
      f"config.local_ckpt_dir={folder!r}: cannot write to {existing}."
    )
  identity = changes.identity(config.to_dict())
  return LocalCheckpoints(folder, every_steps, workdir, identity)


def forget(workdir: str) -> None:
  """Removes local_ckpts.json, so that no local checkpoint is used any more."""
  paths.remove(os.path.join(workdir, RECORD))


class LocalCheckpoints:
  """The local checkpoints of a run.

  All processes call `restore` and `begin` in the same order. A process that
  cannot write one logs a warning, and writes no more of them.
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
    # Folders on this host of processes that now run elsewhere.
    self._left: list[str] = []
    self._token = ""  # Of this start; the same on all processes.
    # The record: {token: last step of the run's past, or None}.
    self._tokens: dict[str, int | None] = {}
    # {(step, token): checkpoint on this host}.
    self._saved: dict[tuple[int, str], Saved] = {}
    self._off = False  # Whether this process has given up.

  def due(self, step: int) -> bool:
    """Whether `step` is to be saved on the hosts."""
    return step % self._every_steps == 0

  # The start.

  def restore(
    self, stored: int | None, like: Any
  ) -> tuple[Any, Manifest] | None:
    """Restores the newest step that is complete on the hosts together.

    Args:
      stored: the newest step in the workdir, if there is one.
      like: specs of the state.

    Returns: the state and the manifest, or None if there is no complete step
      that is newer than `stored`; the same on all processes.
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
    candidates = {
      (step, token) for offer in offers for step, token in offer["saved"]
    }
    for step, token in sorted(candidates, reverse=True):
      if step < least:
        break
      has_it = [[step, token] in offer["saved"] for offer in offers]
      first = has_it.index(True)
      manifest = self._shared_manifest(step, token, first, like)
      if manifest is not None and self._complete(manifest, token, like):
        directory = self._saved[step, token].directory
        state = None
        error = ""
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
    """Whether a checkpoint is of this run's past."""
    last = self._tokens.get(token, -1)
    return last is None or step <= last

  def _shared_manifest(
    self, step: int, token: str, first: int, like: Any
  ) -> Manifest | None:
    """The manifest of a step, from process `first`; None if it does not fit."""
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
    """Gives every process the shards of a step that it needs.

    Returns: whether all processes now have them, the same on all.
    """
    saved = self._saved.get((manifest.step, token))
    intact = _intact(saved) if saved else {}
    missing = [key for key in _needed(like) if key not in intact]
    wanted = {_key(*key) for keys in process.gather(missing) for key in keys}
    if not wanted:
      return True

    # Each process serves the wanted shards that it has.
    offer = [[key, sums] for key, sums in intact.items() if key in wanted]
    server = transfers.Server(saved.directory) if saved and offer else None
    try:
      offers = process.gather([server and server.address, offer])
      addresses = [address for address, _ in offers]
      holders: dict[Key, list[int]] = {}  # Processes that offer a shard.
      offered: dict[Key, checksums.Sums] = {}
      for index, (_, shards) in enumerate(offers):
        for (name, place), sums in shards:
          holders.setdefault(_key(name, place), []).append(index)
          offered[_key(name, place)] = tuple(sums)
      if wanted - holders.keys():
        return False
      sources: dict[int, list[Key]] = {}  # {process: shards to get from it}.
      for key in missing:
        # Spreads the load: different processes ask different holders.
        index = holders[key][jax.process_index() % len(holders[key])]
        sources.setdefault(index, []).append(key)
      error = ""
      if missing:
        shards = {**intact, **{key: offered[key] for key in missing}}
        error = self._receive(manifest, token, addresses, sources, shards)
        logging.info("Received %d shards from other processes.", len(missing))
      return not _any_error(error)
    finally:
      if server is not None:
        server.close()

  def _receive(
    self,
    manifest: Manifest,
    token: str,
    addresses: Sequence[Any],
    sources: Mapping[int, Sequence[Key]],
    shards: Shards,
  ) -> str:
    """Receives missing shards from other processes; returns an error or "".

    Args:
      manifest, token: the checkpoint.
      addresses: the processes' servers.
      sources: {process: shards to get from it}.
      shards: all shards that this process has afterwards.
    """
    saved = self._saved.get((manifest.step, token))
    try:
      if saved is None:
        directory = self._path(manifest.step)
        _remove(directory)  # It cannot be used: it is not in `_saved`.
        os.makedirs(directory)
      else:
        directory = saved.directory
      for index, keys in sources.items():
        files = {f for key in keys for f in _files(key, manifest.arrays)}
        transfers.fetch(addresses[index], sorted(files), directory)
      _write_manifest(directory, manifest, shards)
      saved = Saved(directory, manifest, shards)
      self._saved[manifest.step, token] = saved
      if _intact(saved).keys() != shards.keys():
        return "shards of another process are damaged."
    except OSError as e:
      return f"shards of another process cannot be received: {e}"
    return ""

  def begin(self, step: int, stored: int | None) -> None:
    """Begins a new token, because the run continues from `step`.

    All processes call it. `stored` is the newest step in the workdir.
    """
    if not self._token:
      self._join()
    # Entries of earlier starts after `step` no longer belong to this run.
    tokens: dict[str, int | None] = {}
    for token, last in self._tokens.items():
      last = step if last is None else min(last, step)
      if stored is None or last >= stored:  # Older ones are never used again.
        tokens[token] = last
    tokens[self._token] = None
    self._tokens = dict([*tokens.items()][-_MAX_TOKENS:])
    error = ""
    if jax.process_index() == 0:
      try:
        with paths.replacing(os.path.join(self._workdir, RECORD)) as file:
          json.dump(self._tokens, file)
      except OSError as e:
        error = disk.reason(e, self._workdir)
    restore.raise_on_all(error)
    past = {
      saved.directory
      for (saved_step, token), saved in self._saved.items()
      if self._is_past(saved_step, token)
    }
    try:
      os.makedirs(self._own, exist_ok=True)
      _keep_only(self._own, past)
      self.note_stored(-1 if stored is None else stored)
    except OSError as e:
      self._turn_off(e)

  # While the run is training.

  def write(
    self,
    manifest: Manifest,
    pieces: Sequence[snapshot.Piece],
    sums: Sequence[checksums.Sums],
  ) -> None:
    """Writes a checkpoint of this process's shards, in a save's thread."""
    if self._off or not self._token:
      return
    token = self._token
    writer = {**manifest.writer, "run": self._run, "token": token}
    manifest = dataclasses.replace(manifest, writer=writer)
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
    """Notes on this host that the workdir has a step."""
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
    """Removes all local checkpoints of this process, at the end of a run."""
    for folder in (*self._left, self._own):
      if folder:
        _remove(folder)
    with contextlib.suppress(OSError):  # Other processes may still use it.
      os.rmdir(self._root)
    if self._token and jax.process_index() == 0:
      forget(self._workdir)


def _find(folder: str, run: str) -> Iterable[tuple[str, Saved]]:
  """Yields (token, checkpoint) of the valid checkpoints in a folder."""
  try:
    directories = folders.listing(folder).checkpoints
  except CheckpointError as e:
    logging.warning("%s", e)
    return
  for directory in directories.values():
    try:
      manifest = folders.read_manifest(directory)
      writer = manifest.writer
      if writer["run"] != run:
        raise DamagedError("it is of another run, or of another config.")
      shards = {
        _key(name, place): tuple(sums) for name, place, sums in writer["shards"]
      }
    except (CheckpointError, KeyError, TypeError, ValueError) as e:
      logging.warning("%s: not used: %s", directory, e)
    else:
      yield writer["token"], Saved(directory, manifest, shards)


def _write_manifest(directory: str, manifest: Manifest, shards: Shards) -> None:
  listed = [[*key, sums] for key, sums in shards.items()]
  writer = {**manifest.writer, "shards": listed}
  manifest = dataclasses.replace(manifest, writer=writer)
  with paths.replacing(os.path.join(directory, MANIFEST_FILE)) as file:
    file.write(manifest.to_json())


def _intact(saved: Saved) -> dict[Key, checksums.Sums]:
  """Reads a checkpoint; returns the shards whose checksums are right."""
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
    sums = None
    if not isinstance(values, ValueError):
      sums = checksums.of_part(values, index, arrays[name].shape)
    if sums == expected:
      intact[key] = expected
    else:
      logging.warning("%s: array %r is damaged.", saved.directory, name)
  return intact


def _needed(like: Any) -> Iterable[Key]:
  """The shards that this process's devices hold, without duplicates."""
  keys: dict[Key, None] = {}
  for name, spec in trees.flatten_with_names(like):
    shape = tuple(spec.shape)
    indices = spec.sharding.addressable_devices_indices_map(shape)
    for index in indices.values():
      keys[name, checksums.bounds(index, shape)] = None
  return keys


def _files(key: Key, arrays: Mapping[str, Array]) -> Iterable[str]:
  """The files that contain a part of a shard."""
  name, place = key
  for file, index in arrays[name].chunks():
    if all(s.start < hi and lo < s.stop for s, (lo, hi) in zip(index, place)):
      yield f"{name}/{file}"


def _key(name: str, place: Iterable[Iterable[int]]) -> Key:
  """A key from JSON, which has lists in place of tuples."""
  return name, tuple((lo, hi) for lo, hi in place)


def _any_error(own: str) -> bool:
  """Whether any process has an error, which all processes then log."""
  errors = process.gather(own)
  for index, error in enumerate(errors):
    if error:
      logging.warning("Process %d: %s", index, error)
  return any(errors)


def _keep_only(folder: str, directories: Iterable[str]) -> None:
  """Removes everything but these checkpoints."""
  listed = folders.listing(folder)
  others = (*listed.checkpoints.values(), *listed.leftovers, *listed.strays)
  for path in {*others} - {*directories}:
    _remove(path)


def _remove(path: str) -> None:
  if os.path.lexists(path):
    folders.discard(path)


def _host() -> str:
  """Identifies this host until it reboots."""
  boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
  return socket.gethostname() + (boot.read_text() if boot.exists() else "")


def _read_stored(folder: str) -> int:
  """The newest step that the workdir had, -1 if unknown."""
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
