"""Where the checkpoints of a workdir are, and what is left of failed saves.

  workdir/checkpoints/00000100                 a committed checkpoint
                      00000100.tmp-1f3a-0      an attempt to write one
                      00000100.old-1f3a-0      replaced by one of the same step
                      00000050.del-1f3a-0      being removed

A local directory whose name is only digits is a complete checkpoint: attempts
and removals have other names (commit.py). In an object store, which cannot
rename, a checkpoint is complete if it has a manifest.

No symbolic link out of a workdir is followed: a link below checkpoints/ is an
error.
"""

import dataclasses
import os
import re
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
STEP = re.compile(r"\d{8,}")
# Names that saves and removals use for their temporary directories.
TEMPORARY = re.compile(r"(?P<step>\d{8,})\.(?P<kind>tmp|old|del)-[0-9a-f]+-\d+")
_CHUNK = re.compile(r"c(\.\d+)*")


@dataclasses.dataclass(frozen=True)
class Listing:
  """Content of a workdir's folder of checkpoints.

  Attributes:
    checkpoints: step -> directory, ascending. Each has a manifest or arrays,
      so it is a checkpoint or the remains of one.
    leftovers: directories of unfinished writes and removals.
    strays: all other files and directories.
  """

  checkpoints: dict[int, str]
  leftovers: list[str]
  strays: list[str]


def folder(workdir: str) -> str:
  """Returns the folder of a workdir's checkpoints."""
  return os.path.join(workdir, FOLDER)


def step_name(step: int) -> str:
  """Returns the directory name of a step's checkpoint."""
  return f"{step:08d}"


def is_step_name(name: str) -> bool:
  """Whether a checkpoint may have this directory name."""
  return bool(STEP.fullmatch(name)) and step_name(int(name)) == name


def steps(workdir: str) -> list[int]:
  """Returns the steps of a workdir's checkpoints, ascending.

  Raises:
    CheckpointError: something could not be read.
  """
  return list(listing(workdir).checkpoints)


def newest(workdir: str) -> int | None:
  """Returns the newest step; None only if the workdir has no checkpoint.

  Raises:
    CheckpointError: something could not be read.
  """
  return max(steps(workdir), default=None)


def listing(workdir: str) -> Listing:
  """Lists a workdir's checkpoints.

  The list is empty only if the folder certainly does not exist or is empty.

  Raises:
    CheckpointError: something could not be read, or is a symbolic link.
  """
  result = Listing({}, [], [])
  root = folder(workdir)
  if paths.is_remote(workdir):
    return _list_objects(root, result)
  try:
    if os.path.islink(root):
      raise CheckpointError(f"{root}: is a symbolic link; it is not followed.")
    with os.scandir(root) as entries:
      names = sorted(entry.name for entry in entries)
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
  """Adds one entry of the folder to the listing."""
  name = os.path.basename(path)
  mode = os.lstat(path).st_mode
  if not is_step_name(name) and not TEMPORARY.fullmatch(name):
    result.strays.append(path)
  elif stat.S_ISLNK(mode):
    raise CheckpointError(f"{path}: is a symbolic link; it is not followed.")
  elif not stat.S_ISDIR(mode):
    result.strays.append(path)
  elif not is_step_name(name):
    result.leftovers.append(path)
  elif _has_arrays(path):
    result.checkpoints[int(name)] = path
  else:
    result.strays.append(path)


def _list_objects(root: str, result: Listing) -> Listing:
  """`listing` for object stores, where the manifest makes a checkpoint."""
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
    if not is_step_name(head):
      result.strays.append(path)
    elif manifest_lib.FILE in rests:
      result.checkpoints[int(head)] = path
    elif all(
      f == manifest_lib.METADATA_FILE or _CHUNK.fullmatch(f) for f in files
    ):
      result.leftovers.append(path)
    else:
      result.strays.append(path)
  return result


def _has_arrays(path: str) -> bool:
  """Whether a directory is or was a checkpoint, not a user's own directory."""
  for _, _, files in os.walk(path, onerror=raise_error):
    if manifest_lib.FILE in files or manifest_lib.METADATA_FILE in files:
      return True
  return False


def raise_error(error: OSError) -> None:
  """Raises; os.walk skips unreadable directories unless it gets this."""
  raise error


def unreadable(error: OSError) -> CheckpointError:
  """Returns the error for something that may exist but cannot be read."""
  return CheckpointError(
    f"{error.filename}: cannot be read: {error.strerror}. Whether there are "
    "checkpoints to resume from is unknown, so nothing is started."
  )


def read_manifest(directory: str) -> Manifest:
  """Reads the manifest of one checkpoint.

  Raises:
    DamagedError: it is missing or damaged, or its step is not the one in the
      directory's name.
    CheckpointError: it cannot be read, or the directory is the remains of an
      unfinished write.
  """
  name = os.path.basename(os.path.normpath(directory))
  path = os.path.join(directory, manifest_lib.FILE)
  if TEMPORARY.fullmatch(name):
    raise CheckpointError(
      f"{directory}: the remains of an unfinished save or removal; it is not "
      "a checkpoint."
    )
  try:
    for each in () if paths.is_remote(path) else (directory, path):
      if os.path.islink(each):
        raise CheckpointError(
          f"{each}: is a symbolic link; it is not followed."
        )
    text = paths.read_bytes(path)
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
    raise DamagedError(
      f"{directory}: not a checkpoint: it has no {manifest_lib.FILE}."
    ) from e
  except OSError as e:
    raise unreadable(e) from e
  manifest = manifest_lib.from_json(text, path)
  if STEP.fullmatch(name) and int(name) != manifest.step:
    raise DamagedError(
      f"{path}: damaged: it is of step {manifest.step}, in the directory of "
      f"step {int(name)}."
    )
  return manifest


def find(path: str, step: int | None = None) -> str:
  """Returns the directory of one checkpoint.

  Args:
    step: step in a folder or workdir; the newest by default.

  Raises:
    CheckpointError: it does not exist, or `path` cannot be read.
  """
  directories = find_all(path)
  if len(directories) == 1 and step is None:
    return next(iter(directories.values()))
  if step is None:
    return directories[max(directories)]
  if step not in directories:
    raise CheckpointError(
      f"{path}: no checkpoint of step {step}; there are "
      f"{', '.join(map(str, directories))}."
    )
  return directories[step]


def find_named(path: str, step: int | None, key: str) -> str:
  """Like `find`, for a path in a config or on a command line.

  Raises:
    ConfigError: there is no such checkpoint.
    DamagedError: it is damaged.
  """
  path = paths.absolute(path)
  try:
    if not paths.exists(path):
      raise CheckpointError(f"no such file or directory: {path}.")
    return find(path, step)
  except DamagedError:
    raise
  except CheckpointError as e:
    raise ConfigError(f"{key}: {e}") from e


def find_all(path: str) -> dict[int, str]:
  """Returns {step: directory} of all checkpoints at a path, ascending.

  Raises:
    CheckpointError: `path` has no checkpoint, or cannot be read.
  """
  path = paths.absolute(path)
  try:
    if paths.is_remote(path):
      inside = _names_at(path)
    else:
      with os.scandir(path) as entries:
        inside = {entry.name for entry in entries}
  except OSError as e:
    raise CheckpointError(f"{path}: {e.strerror}.") from e
  if os.path.basename(path) == FOLDER:
    path, inside = os.path.dirname(path), {FOLDER}
  if FOLDER not in inside or manifest_lib.FILE in inside:
    return {read_manifest(path).step: path}
  directories = listing(path).checkpoints
  if not directories:
    raise CheckpointError(f"{folder(path)}: contains no checkpoint.")
  return directories


def _names_at(path: str) -> set[str]:
  """The names that `find_all` looks for, in a folder of an object store."""
  if os.path.basename(path) == FOLDER:
    return set()
  if objects.read(os.path.join(path, manifest_lib.FILE)).content is not None:
    return {manifest_lib.FILE}
  return set() if STEP.fullmatch(os.path.basename(path)) else {FOLDER}


def files_below(directory: str) -> Iterator[tuple[str, int | None]]:
  """Yields (relative path, bytes) of all files; None instead for a link."""
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
