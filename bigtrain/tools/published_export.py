"""Exports parameters in the layouts in which models are published.

The module of a model defines its layouts by a function

  to_published(model, shapes, layout) -> (config, [Tensor, ...])

Its arguments are the model, {name: shape} of its parameters and the name of the
layout; it returns the content of config.json and the arrays of the file.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from bigtrain.checkpoints import averages, folders, integrity
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import CheckpointError, Manifest
from bigtrain.settings import ConfigError
from bigtrain.tools import saved_model


class Tensor(Protocol):
  """An array of the exported file.

  Attributes:
    name: name in the file.
    shape: shape in the file.
    parts: (name, index) of the slices of parameters that it is built from.
    build: function from these slices to the array.
  """

  name: str
  shape: Sequence[int]
  parts: Sequence[tuple[str, tuple[Any, ...]]]
  build: Callable[[list[np.ndarray]], np.ndarray]


def export(
  path: str, out: str, layout: str, prefix: str, step: int | None = None
) -> tuple[int, int]:
  """Writes model.safetensors and config.json into a folder.

  Holds one array of the file in memory at a time.

  Args:
    out: folder to write to; created if missing.
    layout: name of a layout of the model, such as "gpt2".
    prefix: tree of the checkpoint: "params" or "ema".
    step: step of the workdir's checkpoint; the newest unless given.

  Returns:
    (number of arrays, bytes of the file).

  Raises:
    ConfigError: the model has no such layout, or does not fit it.
    CheckpointError: the checkpoint is damaged or cannot be read.
  """
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  prefix = prefix.strip("/") + "/"
  names = [name for name in manifest.arrays if name.startswith(prefix)]
  if not names:
    raise ConfigError(f"--prefix={prefix}: no such tree in {directory}.")
  problems = integrity.inspect(directory, manifest, names)
  if problems:
    raise CheckpointError(f"{directory}: damaged: {problems[0]}")
  module, model = saved_model.build(manifest, directory)
  if not hasattr(module, "to_published"):
    raise ConfigError(
      f"--layout={layout}: the model of {directory} has no published layout."
    )
  shapes = {n.removeprefix(prefix): manifest.arrays[n].shape for n in names}
  config, tensors = module.to_published(model, shapes, layout)
  dtypes = {manifest.arrays[name].dtype for name in names}
  if len(dtypes) > 1:
    raise ConfigError(f"{directory}: parameters of several dtypes: {dtypes}.")
  (dtype,) = dtypes
  config = {**config, "dtype": dtype}

  os.makedirs(out, exist_ok=True)
  specs = {t.name: (t.shape, dtype) for t in tensors}
  # An interrupted export must not look like a model.
  with tempfile.TemporaryDirectory(dir=out) as tmp:
    weights = os.path.join(tmp, safetensors_files.MODEL)
    values = _values(directory, manifest, tensors, prefix)
    # transformers requires the framework of the layout.
    safetensors_files.write(weights, specs, values, {"format": "pt"})
    with open(os.path.join(tmp, "config.json"), "w") as f:
      json.dump(config, f, indent=2)
    for name in (safetensors_files.MODEL, "config.json"):
      os.replace(os.path.join(tmp, name), os.path.join(out, name))
  size = os.path.getsize(os.path.join(out, safetensors_files.MODEL))
  return len(tensors), size


def _values(
  directory: str, manifest: Manifest, tensors: Sequence[Tensor], prefix: str
) -> Iterator[np.ndarray]:
  for tensor in tensors:
    parts = [(prefix + name, index) for name, index in tensor.parts]
    slices = list(averages.read(directory, manifest, parts))
    value = tensor.build(slices)
    if tuple(value.shape) != tuple(tensor.shape):
      raise ValueError(
        f"{tensor.name}: expected shape {tensor.shape}, got {value.shape}"
      )
    yield value
