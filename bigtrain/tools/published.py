"""Exports parameters in the layouts that models are published in.

A model's module says how, by a function

  to_published(model, shapes, layout) -> (config, [Tensor, ...])

from the model, {name: shape} of its parameters and the layout's name to what
config.json is to hold and to the arrays of the file; see `Tensor`.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from bigtrain import settings
from bigtrain.checkpoints import folders, integrity, safetensors_files
from bigtrain.checkpoints.manifest import CheckpointError, Manifest
from bigtrain.settings import ConfigError


class Tensor(Protocol):
  """One array of the file.

  Attributes:
    name: there.
    shape: there.
    parts: (parameter's name, index into it) of what it is made of.
    build: makes it of these parts.
  """

  name: str
  shape: Sequence[int]
  parts: Sequence[tuple[str, tuple[Any, ...]]]
  build: Callable[[list[np.ndarray]], np.ndarray]


def export(
  path: str, out: str, layout: str, prefix: str, step: int | None = None
) -> tuple[int, int]:
  """Writes model.safetensors and config.json into a folder.

  One array of the file is in memory at a time.

  Args:
    path: a checkpoint or a workdir.
    out: the folder; made if it is not there.
    layout: such as "gpt2", as the model's module knows it.
    prefix: which tree of the checkpoint: "params" or "ema".
    step: of the workdir; the newest unless given.

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
  module, model = model_of(manifest, directory)
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
  # A folder that is cut short must not look like a model.
  with tempfile.TemporaryDirectory(dir=out) as tmp:
    weights = os.path.join(tmp, safetensors_files.MODEL)
    values = _values(directory, manifest, tensors, prefix)
    # transformers wants to know which library's layout it is.
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
    found = list(integrity.read(directory, manifest, parts))
    value = tensor.build(found)
    if tuple(value.shape) != tuple(tensor.shape):
      raise ValueError(f"{tensor.name}: {value.shape} is not {tensor.shape}")
    yield value


class Run(NamedTuple):
  """The parts of a run that its checkpoint remembers by name."""

  module: Any
  model: Any


def model_of(manifest: Manifest, directory: str) -> Run:
  """(module, model) that the checkpoint's config names.

  Raises:
    ConfigError: the checkpoint does not say, or there is no such model.
  """
  # Imports jax, which `checkpoint show` does without.
  from bigtrain import parts as parts_lib

  config = manifest.host_state.config
  if not config or "model_name" not in config:
    raise ConfigError(f"{directory}: does not say of which model it is.")
  module = parts_lib.find_module("models", config["model_name"], "model_name")
  options = config.get("model", {})
  settings.check_kwargs(module.Model, options, "config.model")
  return Run(module, module.Model(**options))
