"""Opens files to load parameters from: .npz, .safetensors, checkpoints.

`open_file` returns the specs of the arrays and a function that reads them. If
the file contains more than parameters, only the tree `prefix` and the model's
mutable collections are read. Pickled objects are never loaded, because loading
them would run code.
"""

import functools
import logging
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from bigtrain.checkpoints import averages, folders, integrity
from bigtrain.checkpoints.foreign import jax_folders, safetensors_files
from bigtrain.checkpoints.manifest import DamagedError, Manifest, dtype_of
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.files import paths

# Trees of the parameters in files of whole train states.
_PREFIXES = ("params", "opt/target", "target")
# Tree of the mutable collections in our checkpoints. In other files they are at
# the top, as "params" is.
_MUTABLE = "mutable/"

# (names in a file) -> {name of an array to read: its name in the file}.
_Choose = Callable[[Iterable[str]], dict[str, str]]


class File(NamedTuple):
  """An open file; the names of its arrays do not have the prefix."""

  specs: dict[str, jax.ShapeDtypeStruct]
  # (names) -> arrays, of which some are read only when they are indexed.
  read: Callable[[Sequence[str]], dict[str, Any]]
  # (directory, manifest, {name: full name}) of a checkpoint of this program.
  checkpoint: tuple[str, Manifest, dict[str, str]] | None = None
  step: int = 0  # 0 if it is unknown.


def open_file(
  path: str,
  *,
  step: int | None,
  prefix: str | None,
  key: str,
  collections: Sequence[str] = (),
) -> File:
  """Opens a file or a checkpoint.

  Args:
    path: file, checkpoint or workdir.
    step: step of the checkpoint, by default the newest.
    prefix: the tree to read, such as "ema"; by default "params" if there is
      such a tree, and otherwise everything.
    key: key of the config, for messages.
    collections: mutable collections to read as well, such as "batch_stats".
      The names of their arrays begin with it.
  """
  path = paths.absolute(path)
  choose = functools.partial(
    _full_names, prefix=prefix, collections=collections, key=key
  )
  published = safetensors_files.is_folder(path)
  if not paths.is_remote(path):
    try:
      folder = jax_folders.find(path, step)
      if folder is not None:
        stored, saved_step = jax_folders.open_folder(folder)
        arrays = {name: stored[full] for name, full in choose(stored).items()}
        if step in (None, saved_step):
          return _of_arrays(arrays, saved_step)
        raise ValueError(f"it is of step {saved_step}, not {step}")
    except (ValueError, OSError) as e:
      raise ConfigError(f"{key}: {path}: cannot be read: {e}") from e
  if not path.endswith((".npz", ".safetensors")) and not published:
    if os.path.isfile(path):
      raise ConfigError(
        f"{key}: {path}: expected a folder, an .npz or a .safetensors file. "
        "Pickled objects, such as PyTorch's .pth, may run code: "
        "docs/checkpoints.md shows how PyTorch writes their tensors again."
      )
    directory = folders.find_named(path, step, key)
    return _open_checkpoint(directory, choose, as_stored=prefix == "")
  if step is not None:
    raise ConfigError(
      f"{key}.step={step}: {path} holds one state only; remove the key."
    )
  if paths.is_remote(path):
    raise ConfigError(
      f"{key}: {path}: only checkpoints are read from object stores; copy the "
      "file to a local folder."
    )
  if not os.path.lexists(path):
    raise ConfigError(f"{key}: no such file: {path}.")
  try:
    if path.endswith(".npz"):
      arrays = _load_npz(path, choose, key)
    else:
      stored = safetensors_files.read(path)
      arrays = {name: stored[full] for name, full in choose(stored).items()}
  except (ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
    raise ConfigError(f"{key}: {path}: cannot be read: {e}") from e
  return _of_arrays(arrays)


def _open_checkpoint(
  directory: str, choose: _Choose, *, as_stored: bool
) -> File:
  """Opens a checkpoint of this program.

  Unless `as_stored`, the parameters of a schedule-free optimizer are averages,
  which are computed when they are read.
  """
  manifest = folders.read_manifest(directory)
  full_names = choose(manifest.arrays)
  arrays = {name: manifest.arrays[full] for name, full in full_names.items()}
  specs = {
    name: jax.ShapeDtypeStruct(array.shape, dtype_of(array.dtype))
    for name, array in arrays.items()
  }

  def read(names: Sequence[str]) -> dict[str, np.ndarray]:
    stored = [full_names[name] for name in names]
    problems = integrity.inspect(directory, manifest, stored)
    if problems:
      raise DamagedError(f"{directory}: damaged: {problems[0]}.")
    parts = [
      (full_names[name], (slice(None),) * len(arrays[name].shape))
      for name in names
    ]
    source = integrity.read if as_stored else averages.read
    return dict(zip(names, source(directory, manifest, parts)))

  averaged = averages.averaged(manifest.arrays).keys() & {*full_names.values()}
  if averaged and not as_stored:
    return File(specs, read, step=manifest.step)
  return File(specs, read, (directory, manifest, full_names), manifest.step)


def _of_arrays(arrays: Mapping[str, Any], step: int = 0) -> File:
  """A `File` of arrays that are open already."""
  specs = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()
  }

  def read(names: Sequence[str]) -> dict[str, Any]:
    return {name: arrays[name] for name in names}

  return File(specs, read, step=step)


def _load_npz(path: str, choose: _Choose, key: str) -> dict[str, Any]:
  opened = np.load(path, allow_pickle=False)
  if not isinstance(opened, np.lib.npyio.NpzFile):
    raise ConfigError(f"{key}: {path}: expected an .npz with named arrays.")
  arrays = {}
  with opened:
    for name, full_name in choose(opened.files).items():
      try:
        array = opened[full_name]
      except ValueError as e:
        raise ConfigError(
          f"{key}: {path}: array {full_name!r} is refused: {e}; pickled "
          "objects may run code."
        ) from e
      if array.dtype == np.dtype("V2"):  # How numpy stores bfloat16.
        array = array.view(ml_dtypes.bfloat16)
      arrays[name] = array
  return arrays


def _full_names(
  names: Iterable[str], prefix: str | None, collections: Sequence[str], key: str
) -> dict[str, str]:
  """{name without prefix: name in the file} of the arrays to read."""
  names = list(names)
  tree = _find_tree(names, prefix, key)
  full_names = {}
  others: Counter[str] = Counter()
  for full_name in names:
    short_name = full_name.removeprefix(_MUTABLE)
    if short_name.split("/")[0] in collections:
      full_names[short_name] = full_name
    elif full_name.startswith(tree):
      full_names[full_name.removeprefix(tree)] = full_name
    else:
      others[full_name.split("/")[0]] += 1
  if others:
    skipped = ", ".join(f"{name} ({n})" for name, n in others.items())
    logging.info(
      f"{key}: only arrays of the tree {tree!r} are read; skipped: {skipped}."
    )
  return full_names


def _find_tree(names: Sequence[str], prefix: str | None, key: str) -> str:
  """The tree to read, such as "params/"; "" for everything."""
  if prefix is None:
    for tree in _PREFIXES:
      if any(name.startswith(tree + "/") for name in names):
        return tree + "/"
    return ""
  if not prefix:
    return ""
  tree = prefix.strip("/") + "/"
  if not any(name.startswith(tree) for name in names):
    hint = did_you_mean(prefix, {name.split("/")[0] for name in names})
    raise ConfigError(f"{key}.prefix={prefix!r}: no such tree.{hint}")
  return tree
