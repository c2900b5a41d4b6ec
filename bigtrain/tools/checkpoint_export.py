"""Exports arrays to one file, or in the layout in which a model is published.

The module of a model defines its layouts by to_published(model, shapes, layout)
-> (config, [Tensor, ...]), from {name: shape} of its parameters to the content
of config.json and the arrays of the file.
"""

import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Protocol

import numpy as np

from bigtrain import parts, settings
from bigtrain.checkpoints import averages, folders, integrity
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import CheckpointError, Manifest
from bigtrain.files import paths
from bigtrain.reports import record
from bigtrain.settings import ConfigError, did_you_mean


class Tensor(Protocol):
  """An array of the exported file.

  Attributes:
    parts: (name, index) of the slices of parameters that it is built from.
    build: function from these slices to the array.
  """

  name: str
  shape: Sequence[int]
  parts: Sequence[tuple[str, tuple[Any, ...]]]
  build: Callable[[list[np.ndarray]], np.ndarray]


def to_file(
  path: str, out: str, prefix: str = "", step: int | None = None
) -> int:
  """Writes arrays of a checkpoint into one file; returns their number.

  Arrays keep their full names, such as "params/encoder/kernel", even with a
  prefix, so the file can be config.model_init. The .npz format has no bfloat16
  or float8: these become float32, without loss.
  """
  directory, manifest, names = _find(path, step, prefix.strip("/"))
  slices = [
    (name, (slice(None),) * len(manifest.arrays[name].shape)) for name in names
  ]
  is_state = any(name.startswith("opt/") for name in names)
  read = integrity.read if is_state else averages.read
  arrays = read(directory, manifest, slices)
  with paths.replacing(out, "wb") as file:
    if out.endswith(".npz"):
      _write_npz(file, names, arrays)
    else:
      specs = {
        n: (manifest.arrays[n].shape, manifest.arrays[n].dtype) for n in names
      }
      about = {"step": str(manifest.step)}
      try:
        safetensors_files.write(file.name, specs, arrays, about)
      except ValueError as e:
        raise ConfigError(f"{e}.") from e
    _write_about(f"{out}.json", manifest)
  return len(names)


def _find(
  path: str, step: int | None, prefix: str
) -> tuple[str, Manifest, list[str]]:
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  names = [
    name
    for name in manifest.arrays
    if not prefix or name == prefix or name.startswith(prefix + "/")
  ]
  if not names:
    hint = did_you_mean(prefix, {n.split("/")[0] for n in manifest.arrays})
    raise ConfigError(f"--prefix={prefix}: no such tree in {directory}.{hint}")
  if problems := integrity.inspect(directory, manifest, names):
    raise CheckpointError(f"{directory}: damaged: {problems[0]}")
  return directory, manifest, names


def _write_npz(
  file: IO[bytes], names: Sequence[str], arrays: Iterator[np.ndarray]
) -> None:
  with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
    for name, array in zip(names, arrays):
      if array.dtype.kind == "V":  # numpy's kind of ml_dtypes.
        array = array.astype(np.float32)
      with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, array, allow_pickle=False)


def _write_about(path: str, manifest: Manifest) -> None:
  """Writes step, config and description of the data, for bigtrain.load."""
  host = manifest.host_state
  about = {
    "step": manifest.step,
    "config": host.config,
    "data": host.data,
    "fingerprints": host.fingerprints,
  }
  record.write_json(path, about)


def to_layout(
  path: str, out: str, layout: str, prefix: str, step: int | None = None
) -> tuple[int, int]:
  """Writes model.safetensors and config.json, one array in memory at a time.

  `layout` is one of the model's, such as "gpt2"; `prefix` is "params" or "ema".

  Returns:
    (number of arrays, bytes of the file).
  """
  prefix = prefix.strip("/")
  directory, manifest, names = _find(path, step, prefix)
  config = manifest.host_state.config
  if not config or "model_name" not in config:
    raise ConfigError(f"{directory}: no config with a model_name is saved.")
  module, model = parts.model(settings.Config(config))
  if not hasattr(module, "to_published"):
    raise ConfigError(
      f"--layout={layout}: the model of {directory} has no published layout."
    )
  shapes = {
    n.removeprefix(f"{prefix}/"): manifest.arrays[n].shape for n in names
  }
  published, tensors = module.to_published(model, shapes, layout)
  dtypes = {manifest.arrays[name].dtype for name in names}
  if len(dtypes) > 1:
    raise ConfigError(f"{directory}: parameters of several dtypes: {dtypes}.")
  (dtype,) = dtypes

  os.makedirs(out, exist_ok=True)
  specs = {t.name: (t.shape, dtype) for t in tensors}
  weights = os.path.join(out, safetensors_files.MODEL)
  with paths.replacing(weights, "wb") as file:
    values = _built(directory, manifest, tensors, prefix)
    # transformers requires the framework of the layout.
    safetensors_files.write(file.name, specs, values, {"format": "pt"})
  with paths.replacing(os.path.join(out, "config.json")) as file:
    json.dump({**published, "dtype": dtype}, file, indent=2)
  _write_about(os.path.join(out, "bigtrain.json"), manifest)
  return len(tensors), os.path.getsize(weights)


def _built(
  directory: str, manifest: Manifest, tensors: Sequence[Tensor], prefix: str
) -> Iterator[np.ndarray]:
  for tensor in tensors:
    slices = [(f"{prefix}/{name}", index) for name, index in tensor.parts]
    value = tensor.build(list(averages.read(directory, manifest, slices)))
    if tuple(value.shape) != tuple(tensor.shape):
      raise ValueError(
        f"{tensor.name}: expected shape {tensor.shape}, got {value.shape}"
      )
    yield value
