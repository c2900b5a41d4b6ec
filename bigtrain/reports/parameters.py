"""The table of a model's parameters: parameters.txt of a run.

Means and standard deviations are computed where the shards are.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import dims, trees
from bigtrain.arrays.types import Params
from bigtrain.files import paths


@dataclasses.dataclass
class _Row:
  name: str
  shape: tuple[int, ...]
  dtype: str
  size: int
  trained: bool
  dims: str
  axes: str  # Of the mesh, one for each dimension.
  mean: float = math.nan
  std: float = math.nan


@functools.cache
def _moments(mesh: Mesh) -> Any:
  fn = functools.partial(_mean_and_std, jnp)
  return jax.jit(fn, out_shardings=sharding.replicated(mesh))


def _mean_and_std(module: Any, array: Any) -> Any:  # jax.numpy or numpy.
  values = array.astype(module.float32)
  mean = module.mean(values)
  std = module.sqrt(module.mean(module.square(values - mean)))
  return module.stack([mean, std])


def moments(params: Params, mesh: Mesh) -> dict[str, Any]:
  """Starts to compute {name: [mean, std]}, on all processes.

  `params` may be donated afterwards.
  """
  on_cpu = mesh.devices.flat[0].platform == "cpu"
  result = {}
  for name, array in trees.flatten_with_names(params):
    if not isinstance(array, jax.Array) or not array.size:
      continue
    if on_cpu and array.is_fully_addressable:
      # A program for each shape would take long to load.
      result[name] = _mean_and_std(np, np.asarray(array))
    else:
      result[name] = _moments(mesh)(array)
      if on_cpu:
        # Simulated devices share a few threads: several programs at a time
        # may wait for threads that the others hold.
        result[name].block_until_ready()
  return result


def facts(params: Params, trainable: Any) -> dict[str, int]:
  """Numbers for run.json; param_bytes are of one copy."""
  leaves, flags = jax.tree.leaves(params), jax.tree.leaves(trainable)
  sizes = [math.prod(leaf.shape) for leaf in leaves]
  return {
    "num_params": sum(sizes),
    "num_trained_params": sum(n for n, flag in zip(sizes, flags) if flag),
    "param_bytes": sum(n * x.dtype.itemsize for n, x in zip(sizes, leaves)),
  }


def write(
  workdir: str,
  params: Params,
  trainable: Any,
  values: Mapping[str, Any],
  origin: str,
  param_dims: dims.Table | None = None,
) -> str:
  """Writes parameters.txt, on process 0; returns the table and its totals."""
  from clu import parameter_overview

  on_host = jax.device_get(dict(values))
  flags = dict(trees.flatten_with_names(trainable))
  rows = []
  for name, leaf in sorted(trees.flatten_with_names(params)):
    shape, size = tuple(leaf.shape), math.prod(leaf.shape)
    spec = getattr(getattr(leaf, "sharding", None), "spec", ())
    axes = ["+".join(a) if isinstance(a, tuple) else a or "-" for a in spec]
    axes += ["-"] * (len(shape) - len(axes)) if any(spec) else []
    named = dims.text(param_dims or {}, name)
    row = _Row(
      name, shape, str(leaf.dtype), size, flags[name], named, " ".join(axes)
    )
    if name in on_host:
      row.mean, row.std = map(float, on_host[name])
    rows.append(row)
  columns = [field.name for field in dataclasses.fields(_Row)]
  columns = columns if values else columns[:-2]
  table = parameter_overview.make_table(rows, column_names=columns)
  size, num_trained, num_bytes = facts(params, trainable).values()
  trained = "all" if num_trained == size else f"{num_trained:,} of them"
  text = f"{table}\n{size:,} parameters, {trained} trained, {num_bytes:,} bytes"
  if origin:
    text += f", {origin}"
  if jax.process_index() == 0:
    with paths.replacing(os.path.join(workdir, "parameters.txt")) as file:
      file.write(f"{text}\n")
  return text
