"""Folders of arrays that other jax programs wrote with tensorstore.

big_vision   NAME.bv-000001000/params~img~head~kernel/.zarray ...
             jax's GlobalAsyncCheckpointManager writes a folder for each array;
             "~" is in place of "/". The file NAME.bv-LAST names the newest.
T5X          MODEL_DIR/checkpoint_1000/checkpoint, and target.encoder...kernel/
             The file has the tree of the state in flax's msgpack format, with
             small arrays themselves and tensorstore specs of the others.
Orbax        MODEL_DIR/checkpoint_1000/state/target.encoder...kernel/.zarray
             T5X's other way; "." is in place of "/". Such folders are inside a
             database since 2023: MODEL_DIR/checkpoint_1000/state/manifest.ocdbt

All are of zarr's second version, see google-research/big_vision, utils.py, and
google-research/t5x, checkpoints.py. An array is read when it is indexed, and
only the part that is needed.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bigtrain.checkpoints import integrity
from bigtrain.checkpoints.manifest import DamagedError

_T5X_FILE = "checkpoint"
_T5X_STEP = re.compile(r"checkpoint_(\d+)")
_BV_STEP = re.compile(r".*-(\d{9,})(-tmp)?")
_METADATA = ".zarray"
_ORBAX = "state"


class Stored:
  """An array in a tensorstore, read by indexing it."""

  def __init__(self, store: Any, dtype: Any):
    self._store = store
    self.dtype = np.dtype(dtype)
    self.shape = tuple(store.shape)

  def __getitem__(self, index: Any) -> np.ndarray:
    try:
      values = np.asarray(self._store[index].read().result())
    except ValueError as e:
      raise DamagedError(f"damaged: {e}") from e
    return values if values.dtype == self.dtype else values.view(self.dtype)


class Folder(NamedTuple):
  """The arrays of a checkpoint; `step` is 0 if the folder does not tell."""

  arrays: dict[str, Any]
  step: int
  path: str


def find(path: str, step: int | None = None) -> str | None:
  """Returns the folder or file of a checkpoint; None if `path` has no such one.

  `path` is NAME.bv or one of its folders; a model directory of T5X, one of its
  checkpoints, or that checkpoint's file. By default the newest step is found.
  """
  folder, name = os.path.split(path.rstrip("/"))
  last = f"{path}-LAST"
  if os.path.isfile(last):
    if step is None:
      with open(last) as file:
        return f"{path}-{file.read().strip()}"
    steps = {
      int(match[1]): os.path.join(folder, entry)
      for entry in _names(folder)
      if entry.startswith(f"{name}-") and (match := _BV_STEP.fullmatch(entry))
    }
    return _of_step(path, steps, step)
  if os.path.isfile(path) and name == _T5X_FILE:
    return path
  if not os.path.isdir(path):
    return None
  steps = {
    int(match[1]): os.path.join(path, entry)
    for entry in _names(path)
    if (match := _T5X_STEP.fullmatch(entry))
    and _is_t5x(os.path.join(path, entry))
  }
  if steps:
    return _of_step(path, steps, max(steps) if step is None else step)
  return path if _is_t5x(path) or _array_names(path) else None


def _is_t5x(path: str) -> bool:
  files = (_T5X_FILE, f"{_ORBAX}/{_T5X_FILE}", f"{_ORBAX}/_METADATA")
  return any(os.path.isfile(os.path.join(path, name)) for name in files)


def _of_step(path: str, steps: Mapping[int, str], step: int) -> str:
  if step not in steps:
    known = ", ".join(map(str, sorted(steps)))
    raise ValueError(
      f"no checkpoint of step {step} at {path}; there are {known}"
    )
  return steps[step]


def _names(folder: str) -> list[str]:
  return sorted(os.listdir(folder or "."))


def _array_names(folder: str) -> list[str]:
  is_array = lambda n: os.path.isfile(os.path.join(folder, n, _METADATA))
  return list(filter(is_array, _names(folder)))


def open_folder(path: str) -> Folder:
  if not os.path.exists(path):
    raise ValueError(f"no such file or directory: {path}")
  file = path if os.path.isfile(path) else os.path.join(path, _T5X_FILE)
  if os.path.isfile(file):
    return _open_t5x(file)
  if _is_t5x(path):
    return _open_orbax(path)
  arrays = {
    name.replace("~", "/"): _open(_folder(path, name))
    for name in _array_names(path)
  }
  match = _BV_STEP.fullmatch(os.path.basename(path.rstrip("/")))
  return Folder(arrays, int(match[1]) if match else 0, path)


def _folder(*path: str) -> dict[str, Any]:
  return {"driver": "file", "path": os.path.join(*path, "")}


def _open(place: Mapping[str, Any], dtype: Any = None) -> Stored:
  import tensorstore as ts

  kvstore = ts.KvStore.open(place).result()
  fill_value = json.loads(kvstore[_METADATA]).get("fill_value")
  store = ts.open(
    {
      "driver": "zarr",
      "kvstore": place,
      # Without a fill value every chunk has been written, so a missing file
      # is damage, and its zeros would be taken for parameters.
      "fill_missing_data_reads": fill_value is not None,
    },
    open=True,
    read=True,
    context=integrity.tensorstore_context(),
  ).result()
  return Stored(store, store.dtype.numpy_dtype if dtype is None else dtype)


def _open_orbax(path: str) -> Folder:
  import tensorstore as ts

  base = _folder(path, _ORBAX)
  names = _array_names(base["path"])
  if not names:
    base = {"driver": "ocdbt", "base": base, "path": ""}
    keys = ts.KvStore.open(base).result().list().result()
    ends = f"/{_METADATA}".encode()
    names = sorted(k.removesuffix(ends).decode() for k in keys if ends in k)
  arrays = {
    name.replace(".", "/"): _open({**base, "path": f"{base['path']}{name}/"})
    for name in names
  }
  step = arrays.get("state/step")
  return Folder(arrays, int(step[()]) if step is not None else 0, path)


def _open_t5x(file: str) -> Folder:
  from flax import serialization

  folder = os.path.dirname(file)
  with open(file, "rb") as content:
    tree = serialization.msgpack_restore(content.read())
  if not isinstance(tree, Mapping):
    raise ValueError(f"{file}: expected a tree of arrays")
  arrays: dict[str, Any] = {}
  # Since version 2 of the format the state is below "optimizer".
  _collect(tree.get("optimizer", tree), "", folder, arrays)
  step = arrays.get("state/step", arrays.get("step", 0))
  return Folder(arrays, int(np.asarray(step[()] if step else 0)), folder)


def _collect(node: Any, name: str, folder: str, arrays: dict[str, Any]) -> None:
  if isinstance(node, Mapping) and {"driver", "kvstore"} <= node.keys():
    inside = node["kvstore"].get("path") or node.get("path", "")
    path = os.path.normpath(os.path.join(folder, inside))
    if os.path.dirname(path) != os.path.normpath(folder):
      raise ValueError(f"{name}: its path {inside!r} leads out of {folder}")
    # Before tensorstore had bfloat16, T5X wrote it as uint16.
    words = node.get("dtype", node.get("metadata", {}).get("dtype"))
    is_half = words in ("uint16", "<u2")
    half = ml_dtypes.bfloat16 if is_half else None
    arrays[name] = _open(_folder(path), half)
  elif isinstance(node, Mapping):
    for key, child in node.items():
      _collect(child, f"{name}/{key}" if name else str(key), folder, arrays)
  elif node is not None and not isinstance(node, str):
    arrays[name] = np.asarray(node)
