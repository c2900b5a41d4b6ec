"""Reads checkpoints that other programs wrote with tensorstore or TensorFlow.

big_vision   NAME.bv-000001000/params~img~head~kernel/.zarray ...
             jax's GlobalAsyncCheckpointManager writes a folder for each array;
             "~" is in place of "/". The file NAME.bv-LAST names the newest.
T5X          MODEL_DIR/checkpoint_1000/checkpoint, and target.encoder...kernel/
             The file has the tree of the state in flax's msgpack format. It
             contains small arrays, and tensorstore specs of the others.
Orbax        MODEL_DIR/checkpoint_1000/state/target.encoder...kernel/.zarray
             T5X's other format; "." is in place of "/". Since 2023 such folders
             are inside a database:
             MODEL_DIR/checkpoint_1000/state/manifest.ocdbt
Mesh TF      MODEL_DIR/model.ckpt-1000.index, and model.ckpt-1000.data-...
             T5's checkpoints before T5X, one array for each variable and slot.
             They are returned as trees like those of T5X, with Mesh TF's names.

The arrays are zarr of version 2; see google-research/big_vision, utils.py, and
google-research/t5x, checkpoints.py and checkpoint_importer.py.

`find` looks for a checkpoint at a path from a user, and `open_folder` opens
it. An array is read only when it is indexed; tensorstore reads only the part
that is needed.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bigtrain.checkpoints import integrity
from bigtrain.checkpoints.manifest import DamagedError
from bigtrain.config.errors import import_package

_T5X_FILE = "checkpoint"
_INDEX = ".index"
_STEP = re.compile(r"checkpoint_(\d+)|.*\.ckpt-(\d+)\.index")
_BV_STEP = re.compile(r".*-(\d{9,})(-tmp)?")
_METADATA = ".zarray"
_ORBAX = "state"
_ZERO: Any = np.int64(0)  # Step of a state that does not contain its step.
_SLOT = re.compile("(.*)_slot_(vr|vc|v|m)")
# T5X's fields for Mesh TF's slots. If both dimensions have the same size, Mesh
# TF takes the mean over the first one for "vr", and T5X over the second one for
# "v_row".
_T5X_SLOTS = dict(vr="v_col", vc="v_row", v="v", m="m")


class Stored:
  """An array in a file, read when it is indexed."""

  def __init__(
    self, read: Callable[[Any], Any], shape: Sequence[int], dtype: Any
  ):
    self._read = read
    self.dtype = np.dtype(dtype)
    self.shape = tuple(shape)

  def __getitem__(self, index: Any) -> np.ndarray:
    try:
      values = np.asarray(self._read(index))
    except ValueError as e:
      raise DamagedError(f"damaged: {e}") from e
    return values if values.dtype == self.dtype else values.view(self.dtype)


class Folder(NamedTuple):
  """A checkpoint of another program."""

  arrays: dict[str, Any]
  step: int  # 0 if the folder does not contain it.


def find(path: str, step: int | None = None) -> str | None:
  """Returns the path of one of these programs' checkpoints, or None.

  Args:
    path: big_vision's NAME.bv or one of its folders; a model directory of T5X,
      a checkpoint in it, or the file in that; a model directory of Mesh TF, or
      a checkpoint in it.
    step: its step, by default the newest.
  """
  folder, name = os.path.split(path.rstrip("/"))
  last = f"{path}-LAST"
  if os.path.isfile(last):
    if step is None:
      with open(last) as file:
        return f"{path}-{file.read().strip()}"
    steps = {}
    for entry in _names(folder):
      match = _BV_STEP.fullmatch(entry)
      if match and entry.startswith(f"{name}-"):
        steps[int(match[1])] = os.path.join(folder, entry)
    return _of_step(path, steps, step)
  prefix = path.removesuffix(_INDEX)
  if os.path.isfile(prefix + _INDEX):
    return prefix
  if os.path.isfile(path) and name == _T5X_FILE:
    return path
  if not os.path.isdir(path):
    return None
  steps = {}
  for name in _names(path):
    entry = os.path.join(path, name.removesuffix(_INDEX))
    match = _STEP.fullmatch(name)
    if match and (match[2] or _is_t5x(entry)):
      steps[int(match[1] or match[2])] = entry
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
  """Names of the folders that are arrays."""
  return [
    name
    for name in _names(folder)
    if os.path.isfile(os.path.join(folder, name, _METADATA))
  ]


def open_folder(path: str) -> Folder:
  """Opens a checkpoint that `find` has found."""
  if os.path.isfile(path + _INDEX):
    return _open_tensorflow(path)
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
  return Folder(arrays, int(match[1]) if match else 0)


def _folder(*path: str) -> dict[str, Any]:
  """The tensorstore spec of a local folder."""
  return {"driver": "file", "path": os.path.join(*path, "")}


def _open(place: Mapping[str, Any], dtype: Any = None) -> Stored:
  """Opens a zarr array, whose bits may stand for another dtype."""
  import tensorstore as ts

  kvstore = ts.KvStore.open(place).result()
  fill_value = json.loads(kvstore[_METADATA]).get("fill_value")
  store = ts.open(
    {
      "driver": "zarr",
      "kvstore": place,
      # Without a fill value every chunk has been written. A missing file is
      # then damage, and must not be read as zeros.
      "fill_missing_data_reads": fill_value is not None,
    },
    open=True,
    read=True,
    context=integrity.tensorstore_context(),
  ).result()
  dtype = store.dtype.numpy_dtype if dtype is None else dtype
  return Stored(lambda i: store[i].read().result(), store.shape, dtype)


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
  return Folder(arrays, int(arrays.get("state/step", _ZERO)[()]))


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
  step = arrays.get("state/step", arrays.get("step", _ZERO))
  return Folder(arrays, int(step[()]))


def _collect(node: Any, name: str, folder: str, arrays: dict[str, Any]) -> None:
  """Adds the arrays of a tree, some of which are tensorstore specs."""
  if isinstance(node, Mapping) and {"driver", "kvstore"} <= node.keys():
    inside = node["kvstore"].get("path") or node.get("path", "")
    path = os.path.normpath(os.path.join(folder, inside))
    if os.path.dirname(path) != os.path.normpath(folder):
      raise ValueError(f"{name}: its path {inside!r} leads out of {folder}")
    # Before tensorstore had bfloat16, T5X wrote it as uint16.
    stored_dtype = node.get("dtype", node.get("metadata", {}).get("dtype"))
    is_bfloat16 = stored_dtype in ("uint16", "<u2")
    dtype = ml_dtypes.bfloat16 if is_bfloat16 else None
    arrays[name] = _open(_folder(path), dtype)
  elif isinstance(node, Mapping):
    for key, child in node.items():
      _collect(child, f"{name}/{key}" if name else str(key), folder, arrays)
  elif node is not None and not isinstance(node, str):
    arrays[name] = np.asarray(node)


def _open_tensorflow(prefix: str) -> Folder:
  tf = import_package("tensorflow", prefix, "tensorflow-cpu")

  def call(function: Callable[[str], Any], name: str) -> Any:
    try:
      return function(name)
    except (tf.errors.OpError, IndexError) as e:  # IndexError: truncated.
      raise ValueError(f"{prefix}: {e}") from e

  reader = call(tf.train.load_checkpoint, prefix)
  get = functools.partial(call, reader.get_tensor)
  dtypes = reader.get_variable_to_dtype_map()
  arrays = {}
  for name, shape in sorted(reader.get_variable_to_shape_map().items()):
    t5x_name = f"target/{name}"
    slot = _SLOT.fullmatch(name)
    if slot:
      t5x_name = f"state/param_states/{slot[1]}/{_T5X_SLOTS[slot[2]]}"
    dtype = dtypes[name].as_numpy_dtype
    read = lambda index, name=name: get(name)[index]
    arrays[t5x_name] = Stored(read, shape, dtype)
  return Folder(arrays, int(arrays.pop("target/global_step", _ZERO)[()]))
