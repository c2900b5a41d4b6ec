"""The folders of a workdir's checkpoints, and their commit and removal.

  workdir/checkpoints/00000100                 a committed checkpoint
                      00000100.tmp-1f3a-0      an attempt to write one
                      00000100.old-1f3a-0      replaced by one of the same step
                      00000050.del-1f3a-0      being removed

A complete attempt is synced to disk and then renamed to the checkpoint's name.
Removal, too, begins with a rename. So, whenever the machine dies, a local
folder whose name is only digits is a complete checkpoint. The next start
removes the others.

Object stores cannot rename. There an attempt has the checkpoint's name from the
start, and only the manifest, which is written last and removed first, makes it
a checkpoint.

No symbolic link is followed: one below checkpoints/ is an error.

The order of this file: finding and reading checkpoints, one save in its order
(`attempt`, `begin`, `stage`, `commit`), removal.
"""

import concurrent.futures
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import NamedTuple

from bigtrain.checkpoints.manifest import (
  MANIFEST_FILE,
  METADATA_FILE,
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.config.errors import ConfigError
from bigtrain.files import disk, objects, paths

FOLDER = "checkpoints"
STEP = re.compile(r"\d{8,}")
# Names that saves and removals use for their temporary directories.
TEMPORARY = re.compile(r"(?P<step>\d{8,})\.(?P<kind>tmp|old|del)-[0-9a-f]+-\d+")
_ARRAY_FILE = re.compile(rf"c(\.\d+)*|{re.escape(METADATA_FILE)}")
_SYNCS_AT_ONCE = 16  # Threads that sync folders.


class Listing(NamedTuple):
  """Contents of a workdir's folder of checkpoints."""

  # {step: directory}, ascending, of those with a manifest or arrays.
  checkpoints: dict[int, str]
  leftovers: list[str]  # Unfinished saves and removals.
  strays: list[str]  # Everything else.


def folder(workdir: str) -> str:
  return os.path.join(workdir, FOLDER)


def step_name(step: int) -> str:
  return f"{step:08d}"


def is_step_name(name: str) -> bool:
  return bool(STEP.fullmatch(name)) and step_name(int(name)) == name


def steps(workdir: str) -> list[int]:
  return list(listing(workdir).checkpoints)


def newest(workdir: str) -> int | None:
  return max(steps(workdir), default=None)


def listing(workdir: str) -> Listing:
  """Lists a workdir's checkpoints. It is empty only if there are none.

  Raises:
    CheckpointError: if something cannot be read, or is a symbolic link.
  """
  result = Listing({}, [], [])
  root = folder(workdir)
  if paths.is_remote(workdir):
    return _list_objects(root, result)
  try:
    _refuse_link(root)
    names = sorted(os.listdir(root))
  except FileNotFoundError:
    return result
  except OSError as e:
    raise unreadable(e) from e
  for name in names:
    try:
      _classify(os.path.join(root, name), result)
    except FileNotFoundError:
      continue  # The job that runs there has just removed it.
    except OSError as e:
      raise unreadable(e) from e
  return result


def _classify(path: str, result: Listing) -> None:
  """Adds a file or folder of checkpoints/ to the listing."""
  name = os.path.basename(path)
  is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
  is_step = is_step_name(name)
  is_temporary = TEMPORARY.fullmatch(name) is not None
  if is_step or is_temporary:
    _refuse_link(path)
  if is_folder and is_temporary:
    result.leftovers.append(path)
  elif is_folder and is_step and _has_arrays(path):
    result.checkpoints[int(name)] = path
  else:
    result.strays.append(path)


def _refuse_link(path: str) -> None:
  if os.path.islink(path):
    raise CheckpointError(f"{path}: is a symbolic link; it is not followed.")


def _list_objects(root: str, result: Listing) -> Listing:
  """`listing` of an object store, which has names but no folders."""
  try:
    names = objects.below(root)
  except OSError as e:
    raise unreadable(e) from e
  inside: dict[str, list[str]] = {}
  for name in names:
    head, _, rest = name.partition("/")
    inside.setdefault(head, []).append(rest)
  for head, rests in inside.items():
    path = os.path.join(root, head)
    files = [rest.rpartition("/")[2] for rest in rests]
    is_step = is_step_name(head)
    if is_step and MANIFEST_FILE in rests:
      result.checkpoints[int(head)] = path
    elif is_step and all(map(_ARRAY_FILE.fullmatch, files)):
      result.leftovers.append(path)
    else:
      result.strays.append(path)
  return result


def _has_arrays(path: str) -> bool:
  """Whether a directory is or was a checkpoint, and not a user's."""
  return any(
    MANIFEST_FILE in files or METADATA_FILE in files
    for _, _, files in os.walk(path, onerror=_raise)
  )


def _raise(error: OSError) -> None:
  raise error


def unreadable(error: OSError) -> CheckpointError:
  """The error of a run that cannot find out which checkpoints exist."""
  return CheckpointError(
    f"{error.filename}: cannot be read: {error.strerror}. Whether there are "
    "checkpoints to resume from is unknown, so nothing is started."
  )


def read_manifest(directory: str) -> Manifest:
  """Reads the manifest of a checkpoint.

  Raises:
    DamagedError: if it is missing, damaged or of another step.
    CheckpointError: if it cannot be read, or belongs to an unfinished save.
  """
  name = os.path.basename(os.path.normpath(directory))
  path = os.path.join(directory, MANIFEST_FILE)
  if TEMPORARY.fullmatch(name):
    raise CheckpointError(
      f"{directory}: the remains of an unfinished save or removal; it is not "
      "a checkpoint."
    )
  try:
    if not paths.is_remote(path):
      _refuse_link(directory)
      _refuse_link(path)
    text = paths.read_bytes(path)
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
    raise DamagedError(
      f"{directory}: not a checkpoint: it has no {MANIFEST_FILE}."
    ) from e
  except OSError as e:
    raise unreadable(e) from e
  manifest = Manifest.from_json(text, path)
  if STEP.fullmatch(name) and int(name) != manifest.step:
    raise DamagedError(
      f"{path}: damaged: it is of step {manifest.step}, in the directory of "
      f"step {int(name)}."
    )
  return manifest


def find(path: str, step: int | None = None) -> str:
  """The checkpoint of a step at a path, by default the newest."""
  directories = find_all(path)
  if step is None:
    return directories[max(directories)]
  if step not in directories:
    raise CheckpointError(
      f"{path}: no checkpoint of step {step}; there are "
      f"{', '.join(map(str, directories))}."
    )
  return directories[step]


def find_named(path: str, step: int | None, key: str) -> str:
  """`find` for a path that a user typed; its ConfigErrors name `key`."""
  path = paths.absolute(path)
  try:
    if not paths.exists(path):
      raise CheckpointError(f"no such file or directory: {path}.")
    return find(path, step)
  except DamagedError:
    raise
  except (CheckpointError, ConfigError) as e:
    raise ConfigError(f"{key}: {e}") from e


def find_all(path: str) -> dict[int, str]:
  """{step: directory} of the checkpoints at a path, ascending; never empty.

  Raises:
    ConfigError: if it is neither a workdir nor, by its name, a checkpoint.
    CheckpointError: if there is no checkpoint, or it cannot be read.
  """
  path = paths.absolute(path)
  try:
    inside = _names_at(path) if paths.is_remote(path) else os.listdir(path)
  except NotADirectoryError as e:
    raise ConfigError(
      f"{path}: a file; expected a workdir or a checkpoint, which are folders."
    ) from e
  except OSError as e:
    raise CheckpointError(f"{path}: {e.strerror}.") from e
  if os.path.basename(path) == FOLDER:
    path, inside = os.path.dirname(path), [FOLDER]
  if FOLDER not in inside or MANIFEST_FILE in inside:
    name = os.path.basename(path)
    if MANIFEST_FILE not in inside and not STEP.match(name):
      raise ConfigError(
        f"{path}: neither a workdir nor a checkpoint: it has no {FOLDER}/ and "
        f"no {MANIFEST_FILE}."
      )
    return {read_manifest(path).step: path}
  directories = listing(path).checkpoints
  if not directories:
    raise CheckpointError(f"{folder(path)}: contains no checkpoint.")
  return directories


def _names_at(path: str) -> list[str]:
  """The relevant names at a path in an object store."""
  name = os.path.basename(path)
  if name == FOLDER:
    return []
  if objects.read(os.path.join(path, MANIFEST_FILE)).content is not None:
    return [MANIFEST_FILE]
  return [] if STEP.fullmatch(name) else [FOLDER]


def files_below(directory: str) -> Iterator[tuple[str, int | None]]:
  """Yields (relative path, size) of all files; the size of a link is None."""
  stack = [""]
  while stack:
    parent = stack.pop()
    with os.scandir(os.path.join(directory, parent)) as entries:
      for entry in entries:
        name = f"{parent}/{entry.name}" if parent else entry.name
        if entry.is_symlink():
          yield name, None
        elif entry.is_dir():
          stack.append(name)
        else:
          yield name, entry.stat(follow_symlinks=False).st_size


def check_writable(workdir: str) -> None:
  """Creates the folders and rehearses a save, so that errors come early."""
  paths.absolute(workdir)  # Raises for URLs that are not valid.
  token = f"{secrets.token_hex(4)}-0"
  try:
    if paths.is_remote(workdir):
      probe = os.path.join(workdir, f"probe-{token}")
      objects.write(probe, b"", hasty=True)
      objects.write(probe, None, hasty=True)
      return
    # It has the name of an attempt, so that the next start removes it if this
    # process dies here.
    probe = attempt(workdir, 0, token)
    os.makedirs(folder(workdir), exist_ok=True)
    os.mkdir(probe)
    os.rename(probe, probe + "1")
    os.rmdir(probe + "1")
  except OSError as e:
    raise ConfigError(
      f"--workdir={workdir}: cannot write there: "
      f"{disk.short_reason(e, workdir)}."
    ) from e


# One save, in this order.


def attempt(workdir: str, step: int, token: str) -> str:
  """The directory to which a save writes."""
  name = step_name(step)
  if not paths.is_remote(workdir):
    name += f".tmp-{token}"
  return os.path.join(folder(workdir), name)


def begin(tmp: str) -> None:
  """Creates the directory of an attempt, unless another process has done so.

  In an object store it removes objects of the same names, so all processes must
  wait for it before they write.
  """
  if paths.is_remote(tmp):
    objects.write(os.path.join(tmp, MANIFEST_FILE), None)
    objects.remove_below(tmp)
  else:
    os.makedirs(tmp, exist_ok=True)


def stage(tmp: str, text: str) -> None:
  """Writes the manifest of an attempt, which is not yet a checkpoint."""
  if paths.is_remote(tmp):
    return
  with open(os.path.join(tmp, MANIFEST_FILE), "x") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def commit(tmp: str, text: str, workdir: str, step: int, token: str) -> None:
  """Syncs a complete attempt, and makes it the checkpoint of its step."""
  if paths.is_remote(tmp):
    objects.write(os.path.join(tmp, MANIFEST_FILE), text.encode())
    return
  # Directories that contain only files were synced together with these
  # (integrity.py). The others are synced at the same time, so that they share
  # commits of the file system's journal.
  walk = os.walk(tmp, onerror=_raise)
  parents = [path for path, subfolders, _ in walk if subfolders]
  with concurrent.futures.ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
    list(pool.map(disk.sync_folder, {tmp, *parents}))
  final = os.path.join(folder(workdir), step_name(step))
  replaced = f"{final}.old-{token}"
  replaces = os.path.lexists(final)
  if replaces:
    os.rename(final, replaced)
  os.rename(tmp, final)
  disk.sync_folder(folder(workdir))
  disk.sync_folder(workdir)
  if replaces:
    discard(replaced)


# Removal.


def retire(workdir: str, step: int, token: str) -> str:
  """Makes a folder no longer a checkpoint; returns the folder to discard."""
  path = os.path.join(folder(workdir), step_name(step))
  if paths.is_remote(path):
    objects.write(os.path.join(path, MANIFEST_FILE), None)
    return path
  retired = f"{path}.del-{token}"
  os.rename(path, retired)
  return retired


def discard(path: str) -> None:
  """Removes a folder; a failure is a warning."""
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
  if paths.exists(folder(workdir)):
    _remove(folder(workdir))


def clean(workdir: str) -> list[str]:
  """Removes the remains of interrupted saves and removals.

  Only one job may call it. A checkpoint that was about to be replaced gets its
  name back if the replacement is missing.

  Returns: a line about each folder that was removed, renamed or ignored.
  """
  notes = []
  listed = listing(workdir)
  for path in listed.leftovers:
    name = os.path.basename(path)
    match = TEMPORARY.fullmatch(name)
    final = os.path.join(folder(workdir), match["step"] if match else name)
    try:
      if match and match["kind"] == "old" and not os.path.lexists(final):
        os.rename(path, final)
        notes.append(f"{path}: renamed back to {match['step']}")
      else:
        _remove(path)
        notes.append(f"{path}: removed, left by an interrupted run")
    except FileNotFoundError:
      continue  # Another job, which failed to start here, has removed it.
    except OSError as e:
      raise CheckpointError(f"{path}: cannot be removed: {e.strerror}.") from e
  notes += [f"{path}: ignored, not a checkpoint" for path in listed.strays]
  for note in notes:
    logging.warning("%s", note)
  return notes
