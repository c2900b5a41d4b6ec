"""Files that parameters come from: .npz, .safetensors, checkpoints.

Arrays of .safetensors are mapped into memory, and read where they are used.

A file that holds more than parameters, such as a train state, is read only in
the tree that `prefix` names, and in the mutable collections of a model that has
some. Nothing pickled is ever read: it would run code.
"""

import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from bigtrain.checkpoints import folders, integrity, safetensors_files
from bigtrain.checkpoints import manifest as manifest_lib
from bigtrain.checkpoints.manifest import (
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.files import paths
from bigtrain.settings import ConfigError, did_you_mean

# Where parameters lie in files of whole train states.
_PREFIXES = ("params", "opt/target")
# Where mutable collections lie there; elsewhere they are beside "params".
_MUTABLE = "mutable/"


class File(NamedTuple):
  """Arrays that can be read.

  Attributes:
    specs: name, without the prefix -> jax.ShapeDtypeStruct.
    read: names -> arrays by name.
    checkpoint: (directory, manifest, {name: full name}) if it is one of this
      program's.
  """

  specs: dict[str, jax.ShapeDtypeStruct]
  read: Callable[[Sequence[str]], dict[str, np.ndarray]]
  checkpoint: tuple[str, Manifest, dict[str, str]] | None = None


def open_file(
  path: str,
  *,
  step: int | None,
  prefix: str | None,
  key: str,
  collections: Sequence[str] = (),
) -> File:
  """Opens a file or checkpoint.

  Args:
    path: ends with .npz or .safetensors; or a published model's folder with
      such files; or a checkpoint, or a workdir.
    step: of a workdir's checkpoint; the newest unless given.
    prefix: the tree to read, such as "ema"; unless given, "params" if there is
      such a tree, else everything.
    key: config key, for messages.
    collections: mutable collections to read as well, such as "batch_stats";
      their names begin with that, wherever in the file they are.

  Raises:
    ConfigError: it is not there, or not such a file.
    CheckpointError: a checkpoint that is damaged or cannot be read.
  """
  path = os.path.expanduser(path)
  published = safetensors_files.is_folder(path)
  if not path.endswith((".npz", ".safetensors")) and not published:
    directory = find_checkpoint(path, step, key)
    return _open_checkpoint(directory, prefix, collections, key)
  if step is not None:
    raise ConfigError(f"{key}.step: {path} holds one state only.")
  if paths.is_remote(path):
    raise ConfigError(
      f"{key}: {path}: copy it to a folder; of what is in object stores, "
      "checkpoints are read."
    )
  if not os.path.lexists(path):
    raise ConfigError(f"{key}: no such file: {path}.")
  load = _load_npz if path.endswith(".npz") else _load_safetensors
  try:
    arrays = load(path, prefix, collections, key)
  except (ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
    raise ConfigError(f"{key}: {path}: cannot be read: {e}") from e
  specs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}
  return File(specs, lambda names: {name: arrays[name] for name in names})


def find_checkpoint(path: str, step: int | None, key: str) -> str:
  """The directory of a checkpoint that a config names.

  Raises:
    ConfigError: there is none.
    DamagedError: it is damaged.
  """
  path = os.path.expanduser(path)
  try:
    if not paths.exists(path):
      raise CheckpointError(f"no such file or directory: {path}.")
    return folders.find(path, step)
  except DamagedError:
    raise
  except CheckpointError as e:
    raise ConfigError(f"{key}: {e}") from e


def _open_checkpoint(
  directory: str, prefix: str | None, collections: Sequence[str], key: str
) -> File:
  manifest = folders.read_manifest(directory)
  places = _places(manifest.arrays, prefix, collections, key)
  specs = {}
  for name, full in places.items():
    array = manifest.arrays[full]
    dtype = manifest_lib.dtype_of(array.dtype)
    specs[name] = jax.ShapeDtypeStruct(array.shape, dtype)

  def read(names: Sequence[str]) -> dict[str, np.ndarray]:
    full = [places[name] for name in names]
    problems = integrity.inspect(directory, manifest, full)
    if problems:
      raise DamagedError(f"{directory}: damaged: {problems[0]}.")
    parts = [
      (name, (slice(None),) * len(manifest.arrays[name].shape)) for name in full
    ]
    return dict(zip(names, integrity.read(directory, manifest, parts)))

  return File(specs, read, (directory, manifest, places))


def _places(
  names: Iterable[str],
  prefix: str | None,
  collections: Sequence[str],
  key: str,
) -> dict[str, str]:
  """{name: full name} of the parameters and of the collections in a file."""
  names = list(names)
  found = _find_prefix(names, prefix, key)
  places = {}
  for full in names:
    beside = full.removeprefix(_MUTABLE)
    if beside.split("/")[0] in collections:
      places[beside] = full
    elif full.startswith(found):
      places[full.removeprefix(found)] = full
  return places


def _find_prefix(names: Iterable[str], prefix: str | None, key: str) -> str:
  """The tree that the parameters are in, with its slash; "" for none."""
  names = list(names)
  if prefix is None:
    there = [p for p in _PREFIXES if any(n.startswith(p + "/") for n in names)]
    return there[0] + "/" if there else ""
  if not prefix:
    return ""
  found = prefix.strip("/") + "/"
  if not any(name.startswith(found) for name in names):
    hint = did_you_mean(prefix, {name.split("/")[0] for name in names})
    raise ConfigError(f"{key}.prefix: {prefix!r} is not there.{hint}")
  return found


def _load_npz(
  path: str, prefix: str | None, collections: Sequence[str], key: str
) -> dict[str, Any]:
  opened = np.load(path, allow_pickle=False)
  if not isinstance(opened, np.lib.npyio.NpzFile):
    raise ConfigError(f"{key}: {path}: expected an .npz with named arrays.")
  arrays = {}
  with opened:
    places = _places(opened.files, prefix, collections, key)
    for name, full in places.items():
      try:
        array = opened[full]
      except ValueError as e:
        raise ConfigError(
          f"{key}: {path}: array {full!r} is refused: {e}; pickled objects may "
          "run code."
        ) from e
      if array.dtype == np.dtype("V2"):  # A bfloat16, as numpy stores it.
        array = array.view(ml_dtypes.bfloat16)
      arrays[name] = array
  return arrays


def _load_safetensors(
  path: str, prefix: str | None, collections: Sequence[str], key: str
) -> dict[str, Any]:
  arrays = safetensors_files.read(path)
  places = _places(arrays, prefix, collections, key)
  return {name: arrays[full] for name, full in places.items()}
