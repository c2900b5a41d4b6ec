"""Directories of checkpoints: found, begun, committed, removed.

  workdir/checkpoints/00000100                 a committed checkpoint
                      00000100.tmp-1f3a-0      an attempt to write one
                      00000100.old-1f3a-0      replaced by one of the same step
                      00000050.del-1f3a-0      on its way out

An attempt always writes under a name that nobody has used and gets the name of
a checkpoint by a rename, when it is complete and on the disk. Removal renames
first too. So whatever moment the machine dies at, a name made of digits alone
stands for a whole checkpoint; the others are cleaned up at the next start.

Object stores cannot rename. There an attempt has the checkpoint's name at once
and the manifest, one object that comes last and goes first, makes it one. What
lacks it is cleaned up at the next start, or before its name is used again.

All knowledge of how storage behaves is in this module. Nothing is followed out
of a workdir: a symbolic link below checkpoints/ is an error.
"""

import concurrent.futures
import dataclasses
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator

from bigtrain.checkpoints import manifest as manifest_lib
from bigtrain.checkpoints.manifest import (
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.files import objects, paths
from bigtrain.settings import ConfigError

FOLDER = "checkpoints"
_SYNCS_AT_ONCE = 16
_STEP = re.compile(r"\d{8,}")
_OURS = re.compile(r"(?P<step>\d{8,})\.(?P<kind>tmp|old|del)-[0-9a-f]+-\d+")
_CHUNK = re.compile(r"c(\.\d+)*")


@dataclasses.dataclass(frozen=True)
class Listing:
  """What lies in a workdir's folder of checkpoints.

  Attributes:
    checkpoints: step -> directory, ascending; each has a manifest file or
      arrays, so each is a checkpoint or the remains of one.
    leftovers: directories of unfinished writes and removals.
    strays: whatever else is there.
  """

  checkpoints: dict[int, str]
  leftovers: list[str]
  strays: list[str]


def folder(workdir: str) -> str:
  """The folder of a workdir's checkpoints."""
  return os.path.join(workdir, FOLDER)


def step_name(step: int) -> str:
  """The name of the directory of a step's checkpoint."""
  return f"{step:08d}"


def check_writable(workdir: str) -> None:
  """Creates the folders and tries what a save does, to fail before compiling.

  Raises:
    ConfigError: the workdir cannot be written to.
  """
  paths.normal(workdir)  # Refuses what is no place at all.
  token = f"{secrets.token_hex(4)}-0"
  try:
    if paths.is_remote(workdir):
      probe = os.path.join(workdir, f"probe-{token}")
      objects.write(probe, b"", hasty=True)
      objects.write(probe, None, hasty=True)
      return
    # Named like an attempt, so that it is cleaned up if this process dies here.
    probe = attempt(workdir, 0, token)
    os.makedirs(folder(workdir), exist_ok=True)
    os.mkdir(probe)
    os.rename(probe, probe + "1")
    os.rmdir(probe + "1")
  except OSError as e:
    raise ConfigError(
      f"--workdir={workdir}: cannot write there: {e.strerror} ({e.filename})."
    ) from e


def listing(workdir: str) -> Listing:
  """Lists a workdir's checkpoints.

  Only a folder that is proven not to be there counts as no checkpoints.

  Raises:
    CheckpointError: something could not be looked at, or is a symbolic link.
  """
  found = Listing({}, [], [])
  root = folder(workdir)
  if paths.is_remote(workdir):
    return _list_objects(root, found)
  try:
    if os.path.islink(root):
      raise CheckpointError(f"{root}: a symbolic link; it is not followed.")
    with os.scandir(root) as entries:
      names = sorted(entry.name for entry in entries)
  except FileNotFoundError:
    return found
  except OSError as e:
    raise unreadable(e) from e
  for name in names:
    try:
      _classify(os.path.join(root, name), found)
    except FileNotFoundError:
      continue  # Removed by the job that runs there, while we look.
    except OSError as e:
      raise unreadable(e) from e
  return found


def _classify(path: str, found: Listing) -> None:
  name = os.path.basename(path)
  is_step = _STEP.fullmatch(name) and step_name(int(name)) == name
  mode = os.lstat(path).st_mode
  if not is_step and not _OURS.fullmatch(name):
    found.strays.append(path)
  elif stat.S_ISLNK(mode):
    raise CheckpointError(f"{path}: a symbolic link; it is not followed.")
  elif not stat.S_ISDIR(mode):
    found.strays.append(path)
  elif not is_step:
    found.leftovers.append(path)
  elif _has_arrays(path):
    found.checkpoints[int(name)] = path
  else:
    found.strays.append(path)


def _list_objects(root: str, found: Listing) -> Listing:
  """As `listing`: the manifest is what makes a checkpoint."""
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
    if not (_STEP.fullmatch(head) and step_name(int(head)) == head):
      found.strays.append(path)
    elif manifest_lib.FILE in rests:
      found.checkpoints[int(head)] = path
    elif all(
      f == manifest_lib.METADATA_FILE or _CHUNK.fullmatch(f) for f in files
    ):
      found.leftovers.append(path)
    else:
      found.strays.append(path)
  return found


def _has_arrays(path: str) -> bool:
  """Whether a directory is or was a checkpoint, rather than somebody's own."""
  for _, _, files in os.walk(path, onerror=_raise):
    if manifest_lib.FILE in files or manifest_lib.METADATA_FILE in files:
      return True
  return False


def _raise(error: OSError) -> None:
  raise error


def unreadable(error: OSError) -> CheckpointError:
  """The error for what may be there but cannot be looked at."""
  return CheckpointError(
    f"{error.filename}: cannot be read: {error.strerror}. Whether there are "
    "checkpoints to resume from is unknown, so nothing is started."
  )


def read_manifest(directory: str) -> Manifest:
  """The manifest of one checkpoint.

  Raises:
    DamagedError: there is none, or it is damaged, or of another step than the
      directory's name says.
    CheckpointError: it cannot be read, or the directory is the remains of an
      unfinished write.
  """
  name = os.path.basename(os.path.normpath(directory))
  path = os.path.join(directory, manifest_lib.FILE)
  if _OURS.fullmatch(name):
    raise CheckpointError(
      f"{directory}: the remains of an unfinished save or removal; it is not "
      "a checkpoint."
    )
  try:
    for each in () if paths.is_remote(path) else (directory, path):
      if os.path.islink(each):
        raise CheckpointError(f"{each}: a symbolic link; it is not followed.")
    text = paths.read_bytes(path)
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
    raise DamagedError(
      f"{directory}: no checkpoint: it has no {manifest_lib.FILE}."
    ) from e
  except OSError as e:
    raise unreadable(e) from e
  manifest = manifest_lib.from_json(text, path)
  if _STEP.fullmatch(name) and int(name) != manifest.step:
    raise DamagedError(
      f"{path}: damaged: of step {manifest.step}, in the directory of step "
      f"{int(name)}."
    )
  return manifest


def find(path: str, step: int | None = None) -> str:
  """The directory of one checkpoint.

  Args:
    path: a checkpoint, a folder of checkpoints, or a workdir.
    step: which one, in a folder or a workdir; the newest unless given.

  Raises:
    CheckpointError: there is none, or `path` cannot be read.
  """
  there = find_all(path)
  if len(there) == 1 and step is None:
    return next(iter(there.values()))
  if step is None:
    return there[max(there)]
  if step not in there:
    raise CheckpointError(
      f"{path}: no checkpoint of step {step}; there are "
      f"{', '.join(map(str, there))}."
    )
  return there[step]


def find_all(path: str) -> dict[int, str]:
  """step -> directory of all checkpoints at a path, ascending.

  Args:
    path: a checkpoint, a folder of checkpoints, or a workdir.

  Raises:
    CheckpointError: there is none, or `path` cannot be read.
  """
  path = paths.normal(path)
  try:
    if paths.is_remote(path):
      inside = _names_at(path)
    else:
      with os.scandir(path) as entries:
        inside = {entry.name for entry in entries}
  except OSError as e:
    raise CheckpointError(f"{path}: {e.strerror}.") from e
  if os.path.basename(path) == FOLDER:
    path, inside = os.path.dirname(path) or ".", {FOLDER}
  if FOLDER not in inside or manifest_lib.FILE in inside:
    return {read_manifest(path).step: path}
  there = listing(path).checkpoints
  if not there:
    raise CheckpointError(f"{folder(path)}: holds no checkpoint.")
  return there


def _names_at(path: str) -> set[str]:
  """What `find_all` looks for in a place of an object store."""
  if os.path.basename(path) == FOLDER:
    return set()
  if objects.read(os.path.join(path, manifest_lib.FILE)).content is not None:
    return {manifest_lib.FILE}
  is_step = _STEP.fullmatch(os.path.basename(path))
  return set() if is_step else {FOLDER}


def attempt(workdir: str, step: int, token: str) -> str:
  """The name of a directory for one attempt; `token` was never used before."""
  name = step_name(step)
  if not paths.is_remote(workdir):
    name += f".tmp-{token}"
  return os.path.join(folder(workdir), name)


def begin(tmp: str) -> None:
  """Creates the directory of an attempt, unless another process was quicker.

  In an object store its name may be in use: whoever writes there has to wait
  for this.
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
  """Gives a complete attempt the name of a checkpoint, and puts it on disk.

  A checkpoint of the same step that is there already (damaged, or of a run
  that was rolled back) is replaced.

  Args:
    tmp: the attempt.
    text: the manifest, which `stage` was given too.
    workdir: of the run.
    step: of the checkpoint.
    token: of the attempt.
  """
  if paths.is_remote(tmp):
    objects.write(os.path.join(tmp, manifest_lib.FILE), text.encode())
    return
  # Those of arrays alone were put on disk with their files (integrity.py); the
  # rest at once, so that they share commits of the file system's journal.
  above = [d for d, below, _ in os.walk(tmp, onerror=_raise) if below]
  with concurrent.futures.ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
    list(pool.map(sync_directory, {tmp, *above}))
  final = os.path.join(folder(workdir), step_name(step))
  aside = f"{final}.old-{token}"
  replaces = os.path.lexists(final)
  if replaces:
    os.rename(final, aside)
  os.rename(tmp, final)
  sync_directory(folder(workdir))
  sync_directory(workdir)
  if replaces:
    discard(aside)


def _uncommit(directory: str) -> None:
  """Takes away, in an object store, what makes a checkpoint one."""
  objects.write(os.path.join(directory, manifest_lib.FILE), None)


def abandon(tmp: str) -> None:
  """Removes what a failed attempt wrote, if that is room which others need."""
  if not paths.is_remote(tmp) and os.path.lexists(tmp):
    discard(tmp)


def _remove(path: str) -> None:
  if paths.is_remote(path):
    objects.remove_below(path)
  else:
    shutil.rmtree(path)  # Does not follow symbolic links.


def discard(path: str) -> None:
  """Removes a directory that nobody needs; failing at it harms nobody."""
  try:
    _remove(path)
  except OSError as e:
    logging.warning("%s: cannot be removed: %s", path, e)


def sync_directory(path: str) -> None:
  """Puts the names in a directory on disk."""
  fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def retire(workdir: str, step: int, token: str) -> str:
  """Takes a committed checkpoint's name away; returns what to discard."""
  path = os.path.join(folder(workdir), step_name(step))
  if paths.is_remote(path):
    _uncommit(path)
    return path
  doomed = f"{path}.del-{token}"
  os.rename(path, doomed)
  return doomed


def clean(workdir: str) -> list[str]:
  """Removes what earlier attempts left; for the only job in the workdir.

  A checkpoint that was about to be replaced gets its name back if the one to
  replace it never came. Only directories that bear this module's own names
  are touched.

  Returns:
    One line for each thing done or ignored.

  Raises:
    CheckpointError: something could not be read or removed.
  """
  notes = []
  found = listing(workdir)
  for path in found.leftovers:
    name = os.path.basename(path)
    match = _OURS.fullmatch(name)
    final = os.path.join(folder(workdir), match["step"] if match else name)
    try:
      if match and match["kind"] == "old" and not os.path.lexists(final):
        os.rename(path, final)
        notes.append(f"{path}: back under its name {match['step']}")
      else:
        _remove(path)
        notes.append(f"{path}: removed, left by an interrupted run")
    except FileNotFoundError:
      continue  # It was of a job that tries to start here, in vain.
    except OSError as e:
      raise CheckpointError(
        f"{path}: cannot be cleaned up: {e.strerror}."
      ) from e
  for path in found.strays:
    notes.append(f"{path}: ignored, it is no checkpoint")
  for note in notes:
    logging.warning("%s", note)
  return notes


def files_below(directory: str) -> Iterator[tuple[str, int | None]]:
  """(relative path, size) of all files; the size of a link is None."""
  stack = [""]
  while stack:
    above = stack.pop()
    with os.scandir(os.path.join(directory, above)) as entries:
      for entry in entries:
        name = f"{above}/{entry.name}" if above else entry.name
        if entry.is_symlink():
          yield name, None
        elif entry.is_dir():
          stack.append(name)
        else:
          yield name, entry.stat(follow_symlinks=False).st_size
