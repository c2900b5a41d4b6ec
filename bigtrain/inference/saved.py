"""Reads a trained model: config, description of its data, arrays."""

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding, trees
from bigtrain.checkpoints import averages, folders, manifest, restore
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import Manifest
from bigtrain.files import paths
from bigtrain.settings import ConfigError, did_you_mean

# Sets of parameters in a train state.
WEIGHTS = ("params", "ema")


class Saved(NamedTuple):
  """A checkpoint or an export with a config.

  Attributes:
    data: description of the run's data, see inputs/description.py; {} if a
      checkpoint is older.
    fingerprints: of the files of the run's preprocessing, by path.
    manifest: None of an export.
  """

  path: str
  step: int
  config: dict[str, Any]
  data: dict[str, Any]
  fingerprints: dict[str, str]
  manifest: Manifest | None


def find(path: str, step: int | None, key: str = "bigtrain.load") -> Saved:
  """Finds the checkpoint or the export of a path; reads none of its arrays."""
  if path.endswith((".npz", ".safetensors")):
    return _find_export(paths.absolute(path), key)
  directory = folders.find_named(path, step, key)
  content = folders.read_manifest(directory)
  host = content.host_state
  if not host.config or "model_name" not in host.config:
    raise ConfigError(f"{key}: {directory}: no config is saved in it.")
  return Saved(
    directory, content.step, host.config, host.data, host.fingerprints, content
  )


def _find_export(path: str, key: str) -> Saved:
  if not os.path.isfile(path):
    raise ConfigError(f"{key}: no such file: {path}.")
  try:
    about = json.loads(paths.read_bytes(f"{path}.json"))
    return Saved(path, manifest=None, **about)
  except (OSError, ValueError, TypeError) as e:
    raise ConfigError(
      f"{key}: {path}: expected {os.path.basename(path)}.json beside it, as "
      f"bigtrain.tools.checkpoint export writes it ({e}). To train from this "
      "file, use config.model_init."
    ) from e


def variables(saved: Saved, weights: str, mesh: Mesh) -> dict[str, Any]:
  """Reads the variables of the model, sharded over all devices."""
  if saved.manifest is not None:
    shapes = {
      name: jax.ShapeDtypeStruct(array.shape, manifest.dtype_of(array.dtype))
      for name, array in saved.manifest.arrays.items()
    }
    specs = _placed(shapes, weights, mesh)
    names = dict(zip(specs, specs))
    arrays = restore.load(saved.path, saved.manifest, names, specs)
  else:
    if saved.path.endswith(".npz"):
      with np.load(saved.path, allow_pickle=False) as archive:
        values = dict(archive)
    else:
      values = safetensors_files.read(saved.path)
    specs = _placed(values, weights, mesh)
    arrays = {
      name: jax.device_put(values[name], spec.sharding)
      for name, spec in specs.items()
    }
  tree = trees.from_flat(arrays)
  params = averages.evaluation_form(tree[weights], tree.get("opt", {}))
  return {"params": params, **tree.get("mutable", {})}


def _placed(
  arrays: Mapping[str, Any], weights: str, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  tops = {name.partition("/")[0] for name in arrays}
  if weights not in WEIGHTS or weights not in tops:
    hint = did_you_mean(weights, tops & set(WEIGHTS))
    raise ConfigError(f"weights={weights!r}: not in the checkpoint.{hint}")
  needed = {n for n in arrays if n.partition("/")[0] in (weights, "mutable")}
  iterates = averages.averaged(arrays)
  if weights == "params" and iterates:
    # What a schedule-free optimizer averages with.
    needed |= {*iterates.values(), *averages.STATE}
  shapes = {
    name: jax.ShapeDtypeStruct(array.shape, array.dtype)
    for name, array in arrays.items()
    if name in needed
  }
  # The run's own rules may demand a split that these devices cannot make.
  places, _ = sharding.state_shardings(shapes, mesh)
  return {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name])
    for name, x in shapes.items()
  }
