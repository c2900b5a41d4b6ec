"""The table of a model's parameters, which a run writes to parameters.txt.

`moments` starts to compute means and standard deviations on the devices, where
the shards are, before the first update donates the parameters. `write` waits
for them and writes the table, in a background thread.
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
def _compiled_mean_and_std(mesh: Mesh) -> Any:
  fn = functools.partial(_mean_and_std, jnp)
  return jax.jit(fn, out_shardings=sharding.replicated(mesh))


def _mean_and_std(numpy: Any, array: Any) -> Any:
  """[mean, std] of an array, with `numpy` either jax.numpy or numpy itself."""
  values = array.astype(numpy.float32)
  mean = numpy.mean(values)
  std = numpy.sqrt(numpy.mean(numpy.square(values - mean)))
  return numpy.stack([mean, std])


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
      result[name] = _compiled_mean_and_std(mesh)(array)
      if on_cpu:
        # Simulated devices share a few threads: several programs at a time
        # may wait for threads that the others hold.
        result[name].block_until_ready()
  return result


def facts(params: Params, trainable: Any) -> dict[str, int]:
  """Numbers for run.json; param_bytes is the size of one copy."""
  num_params, num_trained, num_bytes = 0, 0, 0
  flags = jax.tree.leaves(trainable)
  for leaf, is_trained in zip(jax.tree.leaves(params), flags):
    size = math.prod(leaf.shape)
    num_params += size
    num_trained += size if is_trained else 0
    num_bytes += size * leaf.dtype.itemsize
  return {
    "num_params": num_params,
    "num_trained_params": num_trained,
    "param_bytes": num_bytes,
  }


def write(
  workdir: str,
  params: Params,
  trainable: Any,
  values: Mapping[str, Any],
  origin: str,
  param_dims: dims.Table | None = None,
  task_state: Any = None,
) -> str:
  """Writes parameters.txt, on process 0; returns the table and its totals.

  `values` are the results of `moments`; without them, the table has no columns
  for the mean and the standard deviation. A second table has the states of
  tasks, such as teachers.
  """
  from clu import parameter_overview

  on_host = jax.device_get(dict(values))
  flags = dict(trees.flatten_with_names(trainable))
  rows = []
  for name, leaf in sorted(trees.flatten_with_names(params)):
    row = _row(name, leaf, flags[name], dims.text(param_dims or {}, name))
    if name in on_host:
      row.mean, row.std = map(float, on_host[name])
    rows.append(row)
  columns = [field.name for field in dataclasses.fields(_Row)]
  no_moments = [name for name in columns if name not in ("mean", "std")]
  table = parameter_overview.make_table(
    rows, column_names=columns if values else no_moments
  )
  if jax.tree.leaves(task_state):
    named = trees.flatten_with_names({"tasks": task_state})
    rows = [_row(name, leaf, False) for name, leaf in sorted(named)]
    of_tasks = parameter_overview.make_table(rows, column_names=no_moments)
    table = f"State of tasks:\n{of_tasks}\n\nParameters:\n{table}"
  totals = facts(params, trainable)
  size, num_trained = totals["num_params"], totals["num_trained_params"]
  trained = "all" if num_trained == size else f"{num_trained:,} of them"
  text = (
    f"{table}\n{size:,} parameters, {trained} trained, "
    f"{totals['param_bytes']:,} bytes"
  )
  if origin:
    text += f", {origin}"
  if jax.process_index() == 0:
    with paths.replacing(os.path.join(workdir, "parameters.txt")) as file:
      file.write(f"{text}\n")
  return text


def _row(name: str, leaf: Any, trained: bool, roles: str = "") -> _Row:
  return _Row(
    name,
    shape=tuple(leaf.shape),
    dtype=str(leaf.dtype),
    size=math.prod(leaf.shape),
    trained=trained,
    dims=roles,
    axes=_axes(leaf),
  )


def _axes(leaf: Any) -> str:
  """The mesh axes of each dimension, such as "fsdp -"; "" if none is split."""
  spec = getattr(getattr(leaf, "sharding", None), "spec", ())
  if not any(spec):
    return ""
  # A spec may end before the array's last dimensions.
  axes = ["-"] * len(leaf.shape)
  for i, axis in enumerate(spec):
    if axis:
      axes[i] = "+".join(axis) if isinstance(axis, tuple) else axis
  return " ".join(axes)
