"""The table of a model's parameters: parameters.txt of a run.

The mean and the standard deviation of each parameter are computed where its
shards are, so nothing but two numbers of each reaches the host.
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

from bigtrain import sharding, trees
from bigtrain.files import paths

_FILE = "parameters.txt"


@dataclasses.dataclass
class _Row:
  """A line of the table; the attributes are the columns."""

  name: str
  shape: tuple[int, ...]
  dtype: str
  size: int
  trained: bool


@dataclasses.dataclass
class _RowWithMoments(_Row):
  mean: float
  std: float


@functools.cache
def _moments(mesh: Any) -> Any:
  """Compiled once for each shape: array -> [mean, standard deviation]."""
  fn = functools.partial(_mean_and_std, jnp)
  return jax.jit(fn, out_shardings=sharding.replicated(mesh))


def _mean_and_std(module: Any, array: Any) -> Any:
  """Computed by jax.numpy or numpy, the `module`."""
  values = array.astype(module.float32)
  mean = module.mean(values)
  std = module.sqrt(module.mean(module.square(values - mean)))
  return module.stack([mean, std])


def moments(params: Any, mesh: Any) -> dict[str, Any]:
  """Starts to compute the moments of all parameters.

  With several processes, all of them call this at the same point of the
  program. `params` may be donated afterwards.

  Args:
    params: tree of global arrays.

  Returns:
    {name: float32 (2,) of mean and standard deviation, as arrays of jax or
    numpy}; {} if `params` are jax.ShapeDtypeStructs.
  """
  on_cpu = mesh.devices.flat[0].platform == "cpu"
  result = {}
  for name, array in trees.flatten_with_names(params):
    if not isinstance(array, jax.Array) or not array.size:
      continue
    if on_cpu and array.is_fully_addressable:
      # It is in the host's memory already. To load and run a program for each
      # shape would take a tenth of the time to the first step.
      result[name] = _mean_and_std(np, np.asarray(array))
    else:
      result[name] = _moments(mesh)(array)
      if on_cpu:
        # Simulated devices share a few threads. In several programs at a time,
        # each of them may wait for threads that the others hold.
        result[name].block_until_ready()
  return result


def facts(params: Any, trainable: Any) -> dict[str, int]:
  """Returns num_params, num_trained_params and param_bytes, for run.json.

  Args:
    params: tree of arrays or ShapeDtypeStructs; param_bytes are of one copy.
    trainable: tree of bools with the structure of `params`.
  """
  leaves, flags = jax.tree.leaves(params), jax.tree.leaves(trainable)
  sizes = [math.prod(leaf.shape) for leaf in leaves]
  return {
    "num_params": sum(sizes),
    "num_trained_params": sum(n for n, flag in zip(sizes, flags) if flag),
    "param_bytes": sum(n * x.dtype.itemsize for n, x in zip(sizes, leaves)),
  }


def write(
  workdir: str,
  params: Any,
  trainable: Any,
  values: Mapping[str, Any],
  origin: str,
) -> str:
  """Writes parameters.txt, on process 0.

  Args:
    params: tree of arrays or ShapeDtypeStructs.
    trainable: tree of bools with the structure of `params`.
    origin: where the parameters come from, such as "from scratch".

  Returns:
    The table and its totals.
  """
  from clu import parameter_overview

  on_host = jax.device_get(dict(values))
  flags = dict(trees.flatten_with_names(trainable))
  rows: list[_Row] = []
  for name, leaf in sorted(trees.flatten_with_names(params)):
    row = (
      *(name, tuple(leaf.shape), str(leaf.dtype)),
      *(math.prod(leaf.shape), flags[name]),
    )
    if name in on_host:
      mean, std = map(float, on_host[name])
      rows.append(_RowWithMoments(*row, mean, std))
    elif values:  # An empty parameter.
      rows.append(_RowWithMoments(*row, math.nan, math.nan))
    else:
      rows.append(_Row(*row))
  numbers = facts(params, trainable)
  text = (
    f"{parameter_overview.make_table(rows)}\n"
    f"{numbers['num_params']:,} parameters, "
    f"{numbers['num_trained_params']:,} of them trained, "
    f"{numbers['param_bytes']:,} bytes"
  )
  if origin:
    text += f"; mean and std at the start: {origin}"
  if jax.process_index() == 0:
    with paths.replacing(os.path.join(workdir, _FILE)) as file:
      file.write(f"{text}\n")
  return text
