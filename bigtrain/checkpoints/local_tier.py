"""Checkpoints on the hosts' own disks or memory, in front of the workdir's.

They are written more often than the workdir's, because each process writes only
to its own host: all shards that its devices hold. So where the mesh has
replicas on several hosts, a lost host's shards are on another one.

At a start, all processes agree on the newest step whose shards can be put
together (`Tier.restore`); processes get missing shards from those that have
them. Without such a step, or if the workdir has a newer one, the workdir's is
used.

A local checkpoint may be left over from a past that is no longer the run's: the
run went on elsewhere from an earlier step, or the workdir was replaced. So each
start of a run has a token, and the workdir's local_ckpts.json lists the tokens,
each with the last step up to which its checkpoints are of the run's past:

  {"5e1f9c2e": 150, "9ab3d7c1": null}

A file "stored" beside the local checkpoints has the newest step of the workdir.
If the workdir no longer has it, somebody removed it to go back, and the local
checkpoints are not used either.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging

from bigtrain import settings
from bigtrain.checkpoints import changes, local_assembly, local_files
from bigtrain.checkpoints.local_files import Saved
from bigtrain.checkpoints.manifest import CheckpointError, Manifest
from bigtrain.cluster import process
from bigtrain.files import disk, paths
from bigtrain.settings import ConfigError

RECORD = "local_ckpts.json"
_STORED = "stored"
# A step is on all hosts only when the slowest has written it: until then the
# step before is needed.
_KEEP = 2
# Starts without progress that are remembered.
_MOST_TOKENS = 100


def from_config(
  config: settings.Config, every_steps: int | None, workdir: str
) -> "Tier | None":
  """Reads local_ckpt_dir; returns None for a run without local checkpoints.

  Args:
    every_steps: config.local_ckpt_* in steps; None or 0 for none.

  Raises:
    ConfigError: the folder is missing, or is not a local, writable one.
  """
  folder = config.get("local_ckpt_dir")
  if not every_steps:
    if folder is not None and every_steps is None:
      raise ConfigError(
        f"config.local_ckpt_dir={folder!r}: needs config.local_ckpt_steps, the "
        "interval between local checkpoints."
      )
    return None
  if not isinstance(folder, str) or not folder:
    raise ConfigError(
      f"config.local_ckpt_dir={folder!r}: expected a folder on each host, such "
      'as "/dev/shm/run", because config.local_ckpt_* is set.'
    )
  if paths.is_remote(folder):
    raise ConfigError(
      f"config.local_ckpt_dir={folder!r}: expected a folder on each host, not "
      "an object store."
    )
  folder = existing = paths.absolute(folder)
  while not os.path.lexists(existing):
    existing = os.path.dirname(existing)
  if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
    raise ConfigError(
      f"config.local_ckpt_dir={folder!r}: cannot write to {existing}."
    )
  return Tier(folder, every_steps, workdir, changes.identity(config.to_dict()))


def forget(workdir: str) -> None:
  """Makes all local checkpoints of a workdir invalid; for process 0."""
  paths.remove(os.path.join(workdir, RECORD))


class Tier:
  """The local checkpoints of a run; see the module.

  All processes call `restore` and `begin` in the same order. A failure to write
  is logged once, and then this process writes none any more.
  """

  def __init__(
    self, folder: str, every_steps: int, workdir: str, config_identity: str
  ):
    """Touches no files yet."""
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
    """Whether `step` gets a local checkpoint."""
    return step % self._every_steps == 0

  # The start.

  def restore(
    self, stored: int | None, like: Any
  ) -> tuple[Any, Manifest] | None:
    """Restores the newest step that the processes together have.

    Args:
      stored: newest step of the workdir; older local ones are not used.
      like: tree of jax.ShapeDtypeStruct with shardings, the whole state.

    Returns:
      (tree of jax.Arrays, the manifest) on all processes; or None on all.
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
      holders = [[step, token] in offer["saved"] for offer in offers]
      saved = self._saved.get((step, token))
      first = holders.index(True)
      result = local_assembly.Assembly(first, saved, like).run()
      if result:
        return result
      logging.warning("The local checkpoint of step %d is not complete.", step)
    return None

  def _join(self) -> None:
    """Finds the checkpoints of this process; all processes call it."""
    index = jax.process_index()
    self._token = process.broadcast(secrets.token_hex(4))
    self._own = os.path.join(self._root, str(index))
    hosts = process.gather(_host())
    here = [i for i, host in enumerate(hosts) if host == hosts[index]]
    if index == here[0]:
      known = {str(i) for i in here}
      with contextlib.suppress(OSError):  # Usually there is no such folder.
        self._left = [
          os.path.join(self._root, name)
          for name in sorted(os.listdir(self._root))
          if name.isdigit() and name not in known
        ]
    record = _read_record(self._workdir) if index == 0 else None
    self._tokens = process.gather(record)[0]
    for folder in (*self._left, self._own):
      for saved in local_files.find(folder, self._run):
        if self._is_past(saved):
          self._saved[saved.step, saved.token] = saved

  def _is_past(self, saved: Saved) -> bool:
    """Whether a checkpoint is of the run's past."""
    if saved.token not in self._tokens:
      return False
    last = self._tokens[saved.token]
    return last is None or saved.step <= last

  def begin(self, step: int, stored: int | None) -> None:
    """Begins a new token; the run goes on from `step`.

    Args:
      stored: newest step of the workdir; None without a checkpoint.

    Raises:
      CheckpointError: the workdir's record cannot be written.
    """
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
    for message in process.gather(error):
      if message:
        raise CheckpointError(message)
    past = [s.directory for s in self._saved.values() if self._is_past(s)]
    try:
      os.makedirs(self._own, exist_ok=True)
      local_files.keep_only(self._own, past)
      self.note_stored(-1 if stored is None else stored)
    except OSError as e:
      self._turn_off(e)

  # While the run goes on.

  def write(
    self,
    manifest: Manifest,
    pieces: Sequence[Any],
    sums: Sequence[tuple[int, int]],
  ) -> None:
    """Writes a checkpoint of this process's shards, in any thread.

    Args:
      pieces: the shards (snapshot.Piece).
    """
    if self._off or not self._token:
      return
    try:
      local_files.write(
        self._own, self._token, self._run, pieces, sums, manifest
      )
      local_files.keep_newest(self._own, _KEEP)
    except OSError as e:
      self._turn_off(e)
      return
    while self._left:
      local_files.remove(self._left.pop())

  def note_stored(self, step: int) -> None:
    """Notes the newest step of the workdir."""
    if self._off or not self._own:
      return
    path = os.path.join(self._own, _STORED)
    try:
      with open(f"{path}.tmp", "w") as file:
        file.write(str(step))
      os.replace(f"{path}.tmp", path)
    except OSError as e:
      self._turn_off(e)

  def _turn_off(self, error: OSError) -> None:
    self._off = True
    logging.warning(
      "This process keeps no more local checkpoints, and its earlier ones are "
      "removed: %s. The workdir's are not affected.",
      disk.reason(error, self._root),
    )
    local_files.remove(self._own)

  def remove(self) -> None:
    """Removes the local checkpoints: the run has ended and needs none."""
    for folder in (*self._left, self._own):
      if folder:
        local_files.remove(folder)
    with contextlib.suppress(OSError):  # Others of this host still use it.
      os.rmdir(self._root)
    if self._token and jax.process_index() == 0:
      forget(self._workdir)


def _host() -> str:
  """Identity of this host, or of this container."""
  boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
  return socket.gethostname() + (boot.read_text() if boot.exists() else "")


def _read_stored(folder: str) -> int:
  """The step in the file "stored" of a folder; -1 without one."""
  try:
    with open(os.path.join(folder, _STORED)) as file:
      return int(file.read())
  except (OSError, ValueError):
    return -1


def _read_record(workdir: str) -> dict[str, int | None]:
  """The tokens of the starts so far; {} if the file is missing or damaged."""
  path = os.path.join(workdir, RECORD)
  try:
    record = json.loads(paths.read_bytes(path))
    if all(isinstance(last, int | None) for last in record.values()):
      return record
    reason = "unexpected content"
  except FileNotFoundError:
    return {}
  except (OSError, ValueError, AttributeError) as e:
    reason = str(e)
  logging.warning("%s: local checkpoints are not used: %s", path, reason)
  return {}
