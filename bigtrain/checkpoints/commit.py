"""Makes a finished write a checkpoint at one instant, and removes old ones.

An attempt writes into a directory with a new name. When it is complete and on
disk, a rename gives it the name of a checkpoint (see folders.py for the names).
Removal begins with a rename too. So whenever the machine dies, a name of only
digits belongs to a complete checkpoint; the next start removes the others.

Object stores cannot rename. An attempt has the checkpoint's name from the
start, and the manifest makes it a checkpoint: one object that is written last
and removed first. Directories without one are removed at the next start, or
before their name is used again.
"""

import concurrent.futures
import logging
import os
import secrets
import shutil

from bigtrain.checkpoints import folders
from bigtrain.checkpoints import manifest as manifest_lib
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.files import disk, objects, paths
from bigtrain.settings import ConfigError

_SYNCS_AT_ONCE = 16


def check_writable(workdir: str) -> None:
  """Creates the folders and rehearses a save, to fail before compiling.

  Raises:
    ConfigError: the workdir is not writable.
  """
  paths.absolute(workdir)  # Raises for URLs that are not valid.
  token = f"{secrets.token_hex(4)}-0"
  try:
    if paths.is_remote(workdir):
      probe = os.path.join(workdir, f"probe-{token}")
      objects.write(probe, b"", hasty=True)
      objects.write(probe, None, hasty=True)
      return
    # Has the name of an attempt, so the next start removes it if this process
    # dies here.
    probe = attempt(workdir, 0, token)
    os.makedirs(folders.folder(workdir), exist_ok=True)
    os.mkdir(probe)
    os.rename(probe, probe + "1")
    os.rmdir(probe + "1")
  except OSError as e:
    raise ConfigError(
      f"--workdir={workdir}: cannot write there: {e.strerror} ({e.filename})"
      f"{disk.room(e, workdir)}."
    ) from e


# A save, in this order.


def attempt(workdir: str, step: int, token: str) -> str:
  """Returns the directory for one attempt; `token` must be new."""
  name = folders.step_name(step)
  if not paths.is_remote(workdir):
    name += f".tmp-{token}"
  return os.path.join(folders.folder(workdir), name)


def begin(tmp: str) -> None:
  """Creates the directory of an attempt, unless another process has.

  In an object store this first removes what is there under the same name, so
  writers must wait for it.
  """
  if paths.is_remote(tmp):
    _uncommit(tmp)
    objects.remove_below(tmp)
  else:
    os.makedirs(tmp, exist_ok=True)


def stage(tmp: str, text: str) -> None:
  """Writes the manifest of an attempt, unless that would commit it."""
  if paths.is_remote(tmp):
    return
  with open(os.path.join(tmp, manifest_lib.FILE), "x") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def commit(tmp: str, text: str, workdir: str, step: int, token: str) -> None:
  """Puts a complete attempt on disk and gives it the name of a checkpoint.

  Replaces an existing checkpoint of the same step, which is damaged or of a run
  that was rolled back.
  """
  if paths.is_remote(tmp):
    objects.write(os.path.join(tmp, manifest_lib.FILE), text.encode())
    return
  # Directories that hold only files were synced with their files
  # (integrity.py). The others are synced together, to share commits of the
  # file system's journal.
  parents = [
    path
    for path, subfolders, _ in os.walk(tmp, onerror=folders.raise_error)
    if subfolders
  ]
  with concurrent.futures.ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
    list(pool.map(_sync_directory, {tmp, *parents}))
  final = os.path.join(folders.folder(workdir), folders.step_name(step))
  replaced = f"{final}.old-{token}"
  replaces = os.path.lexists(final)
  if replaces:
    os.rename(final, replaced)
  os.rename(tmp, final)
  _sync_directory(folders.folder(workdir))
  _sync_directory(workdir)
  if replaces:
    discard(replaced)


def _sync_directory(path: str) -> None:
  """Puts the entries of a directory on disk."""
  fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def abandon(tmp: str) -> None:
  """Removes a failed attempt where it takes up disk space."""
  if not paths.is_remote(tmp) and os.path.lexists(tmp):
    discard(tmp)


# Removal.


def retire(workdir: str, step: int, token: str) -> str:
  """Makes a checkpoint not a checkpoint; returns the directory to discard."""
  path = os.path.join(folders.folder(workdir), folders.step_name(step))
  if paths.is_remote(path):
    _uncommit(path)
    return path
  retired = f"{path}.del-{token}"
  os.rename(path, retired)
  return retired


def _uncommit(directory: str) -> None:
  """Removes the manifest of a checkpoint in an object store."""
  objects.write(os.path.join(directory, manifest_lib.FILE), None)


def discard(path: str) -> None:
  """Removes a directory that is no longer needed; logs a failure."""
  try:
    _remove(path)
  except OSError as e:
    logging.warning("%s: cannot be removed: %s", path, e)


def _remove(path: str) -> None:
  if paths.is_remote(path):
    objects.remove_below(path)
  else:
    shutil.rmtree(path)  # Does not follow symbolic links.


def remove_all(workdir: str) -> None:
  """Removes all checkpoints of a workdir; only one process may call it."""
  folder = folders.folder(workdir)
  if paths.exists(folder):
    _remove(folder)


def clean(workdir: str) -> list[str]:
  """Removes the remains of earlier attempts; only one job may call it.

  A checkpoint that was about to be replaced gets its name back if the
  replacement is missing. Only directories with the names that this package
  uses are touched.

  Returns:
    One line for each directory that was removed, renamed or ignored.

  Raises:
    CheckpointError: something could not be read or removed.
  """
  notes = []
  listing = folders.listing(workdir)
  for path in listing.leftovers:
    name = os.path.basename(path)
    match = folders.TEMPORARY.fullmatch(name)
    final = os.path.join(
      folders.folder(workdir), match["step"] if match else name
    )
    try:
      if match and match["kind"] == "old" and not os.path.lexists(final):
        os.rename(path, final)
        notes.append(f"{path}: renamed back to {match['step']}")
      else:
        _remove(path)
        notes.append(f"{path}: removed, left by an interrupted run")
    except FileNotFoundError:
      continue  # Of another job that just failed to start here.
    except OSError as e:
      raise CheckpointError(f"{path}: cannot be removed: {e.strerror}.") from e
  notes += [f"{path}: ignored, not a checkpoint" for path in listing.strays]
  for note in notes:
    logging.warning("%s", note)
  return notes
