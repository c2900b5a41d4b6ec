"""Shardings of batches: dimension 0 is split over `replica` and `fsdp`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bigtrain.settings import ConfigError
from bigtrain.sharding import mesh as mesh_lib


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of an array that every device holds in full."""
  return NamedSharding(mesh, PartitionSpec())


def batch(mesh: Mesh) -> NamedSharding:
  """Sharding of an array whose first dimension is split over the batch axes.

  The devices of a `sequence` or `tensor` group hold the same rows.
  """
  return NamedSharding(mesh, PartitionSpec(mesh_lib.BATCH_AXES))


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
  """Number of parts into which a mesh splits the batch."""
  return mesh.shape["replica"] * mesh.shape["fsdp"]


def batch_spec(
  spec: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  """Adds the batch sharding to each ShapeDtypeStruct."""
  return {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch(mesh))
    for name, x in spec.items()
  }


def one_example(spec: Mapping[str, Any]) -> dict[str, jax.Array]:
  """A batch of one example of zeros, for the initialisation of a model."""
  return {
    name: jnp.zeros((1, *x.shape[1:]), x.dtype) for name, x in spec.items()
  }


def check_batch(batch_size: int, mesh: Mesh, key: str) -> None:
  """Raises ConfigError unless each device gets the same number of examples."""
  if not isinstance(batch_size, int) or batch_size < 1:
    raise ConfigError(
      f"{key}: expected a positive whole number, got {batch_size!r}."
    )
  ways = batch_ways(mesh)
  if batch_size % ways:
    down = batch_size // ways * ways
    near = [n for n in (down, down + ways) if n]
    parts = "devices" if ways == mesh.size else "groups of devices"
    raise ConfigError(
      f"{key}={batch_size} does not divide among {ways} {parts} "
      f"({mesh_lib.in_words(mesh)}); "
      f"the nearest sizes that do: {' and '.join(map(str, near))}."
    )
