"""Shardings of batches, and the mesh while a program is traced.

Dimension 0 of a batch is split over `replica`, `fsdp` and `pipeline`, that of a
microbatch in a stage over `fsdp` alone; the devices of a `sequence` or
`tensor` group hold the same rows. While a program is traced, the mesh is that
of jax.set_mesh. Without one, the functions for models do nothing.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bigtrain.config.errors import ConfigError, check_number
from bigtrain.sharding.mesh import BATCH_AXES, Schedule, in_words, schedule_of

_FREE = PartitionSpec.UNCONSTRAINED
_STAGES = {"pipeline", "replica"}  # Axes of the shard_map that is a stage.


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def batch_axes(mesh: Mesh | AbstractMesh | None = None) -> tuple[str, ...]:
  """The axes that split dimension 0, of the ambient mesh by default."""
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  if set(getattr(mesh, "manual_axes", ())) == _STAGES:
    return ("fsdp",)
  split = mesh.shape.get("pipeline", 1) > 1
  return (*BATCH_AXES, "pipeline") if split else BATCH_AXES


def batch(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
  return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def in_stage() -> bool:
  """Whether a stage of a pipeline is traced."""
  return set(jax.sharding.get_abstract_mesh().manual_axes) == _STAGES


def _manual(mesh: AbstractMesh) -> bool:
  return bool(set(mesh.manual_axes) - _STAGES)


def schedule(batch_size: int) -> Schedule | None:
  """The schedule of a batch in the stages of the ambient mesh, if any."""
  mesh = ambient(batch_size)
  if mesh is None or mesh.shape.get("pipeline", 1) == 1 or in_stage():
    return None
  return schedule_of(mesh).split(batch_size // _groups())


def _groups() -> int:
  """Number of parts of a batch that pass different devices of a stage."""
  sizes = jax.sharding.get_abstract_mesh().shape
  return math.prod(sizes[axis] for axis in BATCH_AXES)


def to_microbatches(x: jax.Array, by: Schedule) -> jax.Array:
  """[B, ...] as [microbatches, examples, ...], the first over the stages.

  Each device's examples stay there.
  """
  x = x.reshape(_groups(), by.microbatches, -1, *x.shape[1:])
  x = jnp.swapaxes(x, 0, 1).reshape(by.microbatches, -1, *x.shape[3:])
  spec = PartitionSpec("pipeline", BATCH_AXES, *[_FREE] * (x.ndim - 2))
  return jax.lax.with_sharding_constraint(x, spec)


def from_microbatches(x: jax.Array, by: Schedule) -> jax.Array:
  x = x.reshape(by.microbatches, _groups(), -1, *x.shape[2:])
  x = jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])
  spec = PartitionSpec(batch_axes(), *[_FREE] * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, spec)


def batch_spec(
  spec: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch(mesh))
    for name, x in spec.items()
  }


def one_example(spec: Mapping[str, Any]) -> dict[str, jax.Array]:
  zeros = lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype)
  return {name: zeros(x) for name, x in spec.items()}


def check_batch(batch_size: int, mesh: Mesh, key: str) -> None:
  check_number(key, batch_size, least=1, whole=True)
  ways = batch_ways(mesh)
  if batch_size % ways:
    down = batch_size // ways * ways
    near = [n for n in (down, down + ways) if n]
    parts = "devices" if ways == mesh.size else "groups of devices"
    raise ConfigError(
      f"{key}={batch_size} does not divide among {ways} {parts} "
      f"({in_words(mesh.shape)}); "
      f"the nearest sizes that do: {' and '.join(map(str, near))}."
    )


def ambient(batch_size: int) -> AbstractMesh | None:
  """The mesh of jax.set_mesh if it splits a batch of this size, else None.

  None also inside a shard_map, and for batches that do not divide.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not set(BATCH_AXES) <= set(mesh.axis_names) or _manual(mesh):
    return None
  return None if batch_size % batch_ways(mesh) else mesh


def over_batch(x: jax.Array) -> jax.Array:
  """Constrains dimension 0 to be split, so that XLA does not replicate x."""
  if ambient(x.shape[0]) is None:  # An export may leave the size open.
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(batch_axes()))


def length_ways(batch_size: int, length: int) -> int:
  """Number of devices that share an example; 1 if it is too short."""
  mesh = ambient(batch_size)
  ways = 1 if mesh is None else mesh.shape.get("sequence", 1)
  return int(ways) if ways > 1 and length >= ways else 1


def split_batch(fn: Callable[..., Any], *args: Any, by_heads: int = 0) -> Any:
  """Calls a kernel, which XLA cannot split, with each device's part.

  All arrays have the batch as first dimension. The first `by_heads` arguments,
  and then the result, have heads as dimension 2, which are split over `tensor`
  if they divide.
  """
  mesh = ambient(args[0].shape[0])
  if mesh is None:
    return fn(*args)
  ways = mesh.shape.get("tensor", 1)
  front = spec = PartitionSpec(batch_axes(mesh))
  whole = [x for x in args[:by_heads] if x is not None]
  if ways > 1 and all(x.shape[2] % ways == 0 for x in whole):
    front = PartitionSpec(batch_axes(mesh), None, "tensor")
  return jax.shard_map(
    fn,
    in_specs=(front,) * by_heads + (spec,) * (len(args) - by_heads),
    out_specs=front if by_heads else spec,
    check_vma=False,
  )(*args)


def splits(batch_size: int) -> bool:
  """Whether `split_batch` splits a batch, or nothing is to split."""
  mesh = jax.sharding.get_abstract_mesh()
  alone = mesh.empty or mesh.size == 1 or _manual(mesh)
  return alone or ambient(batch_size) is not None


def device() -> tuple[str, str]:
  """Platform, such as "gpu", and kind of the ambient mesh's devices."""
  of_mesh = jax.sharding.get_abstract_mesh().abstract_device
  if of_mesh is not None:
    return of_mesh.platform, of_mesh.device_kind
  return jax.default_backend(), jax.devices()[0].device_kind
