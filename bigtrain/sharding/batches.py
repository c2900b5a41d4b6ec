"""Shardings of batches, for the host and for models that are being traced.

Dimension 0 of a batch is split over `replica`, `fsdp` and `pipeline`. The
devices of one `sequence` or `tensor` group hold the same examples. Inside a
stage of a pipeline, dimension 0 of a microbatch is split only over `fsdp`.

The functions for the host get the mesh as an argument. Those for models use the
ambient mesh, which jax.set_mesh sets while a program is traced. Without an
ambient mesh they do nothing, so models also run on a single device.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bigtrain.config.errors import ConfigError, check_number
from bigtrain.sharding.mesh import BATCH_AXES, Schedule, in_words, schedule_of

_FREE = PartitionSpec.UNCONSTRAINED  # XLA chooses.
# Manual axes of the shard_map that runs the stages of a pipeline. Inside it,
# models still use the other axes as usual.
_STAGE_AXES = {"pipeline", "replica"}


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def batch_axes(mesh: Mesh | AbstractMesh | None = None) -> tuple[str, ...]:
  """The axes that split dimension 0 of a batch on `mesh` or the ambient one."""
  if mesh is None:
    mesh = jax.sharding.get_abstract_mesh()
  if set(getattr(mesh, "manual_axes", ())) == _STAGE_AXES:
    return ("fsdp",)
  if mesh.shape.get("pipeline", 1) > 1:
    return (*BATCH_AXES, "pipeline")
  return BATCH_AXES


def batch(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
  """Number of parts into which a batch is split."""
  return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def in_stage() -> bool:
  """Whether the code that is being traced runs inside a pipeline's stage."""
  return set(jax.sharding.get_abstract_mesh().manual_axes) == _STAGE_AXES


def _in_shard_map(mesh: AbstractMesh) -> bool:
  """Whether the trace is inside a shard_map other than that of the stages."""
  return bool(set(mesh.manual_axes) - _STAGE_AXES)


def schedule(batch_size: int) -> Schedule | None:
  """The ambient mesh's schedule for a batch; None without a pipeline."""
  mesh = ambient(batch_size)
  if mesh is None or mesh.shape.get("pipeline", 1) == 1 or in_stage():
    return None
  return schedule_of(mesh).split(batch_size // _num_pipelines())


def _num_pipelines() -> int:
  """Number of pipelines side by side, each with its own part of the batch."""
  sizes = jax.sharding.get_abstract_mesh().shape
  return math.prod(sizes[axis] for axis in BATCH_AXES)


def to_microbatches(x: jax.Array, schedule: Schedule) -> jax.Array:
  """Reshapes [B, ...] to [microbatches, examples, ...].

  The microbatches are split over the stages, and no example leaves its device.
  """
  num = schedule.microbatches
  x = x.reshape(_num_pipelines(), num, -1, *x.shape[1:])
  x = jnp.swapaxes(x, 0, 1).reshape(num, -1, *x.shape[3:])
  spec = PartitionSpec("pipeline", BATCH_AXES, *[_FREE] * (x.ndim - 2))
  return jax.lax.with_sharding_constraint(x, spec)


def from_microbatches(x: jax.Array, schedule: Schedule) -> jax.Array:
  """The inverse of `to_microbatches`."""
  x = x.reshape(schedule.microbatches, _num_pipelines(), -1, *x.shape[2:])
  x = jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])
  spec = PartitionSpec(batch_axes(), *[_FREE] * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, spec)


def batch_spec(
  spec: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  """Adds the batch's sharding to the specs of its arrays."""
  return {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch(mesh))
    for name, x in spec.items()
  }


def one_example(spec: Mapping[str, Any]) -> dict[str, jax.Array]:
  """A batch of one example, of zeros, to initialize a model with."""
  return {
    name: jnp.zeros((1, *x.shape[1:]), x.dtype) for name, x in spec.items()
  }


def check_batch(batch_size: int, mesh: Mesh, key: str) -> None:
  """Raises a ConfigError about `key` if the batch does not divide."""
  check_number(key, batch_size, least=1, whole=True)
  ways = batch_ways(mesh)
  if batch_size % ways:
    below = batch_size // ways * ways
    nearest = [str(n) for n in (below, below + ways) if n > 0]
    parts = "devices" if ways == mesh.size else "groups of devices"
    raise ConfigError(
      f"{key}={batch_size} does not divide among {ways} {parts} "
      f"({in_words(mesh.shape)}); "
      f"the nearest sizes that do: {' and '.join(nearest)}."
    )


def ambient(batch_size: int) -> AbstractMesh | None:
  """The ambient mesh if it splits a batch of this size.

  None without an ambient mesh, inside a shard_map, and for batches that do not
  divide.
  """
  mesh = jax.sharding.get_abstract_mesh()
  has_batch_axes = set(BATCH_AXES) <= set(mesh.axis_names)
  if not has_batch_axes or _in_shard_map(mesh):
    return None
  if batch_size % batch_ways(mesh):
    return None
  return mesh


def over_batch(x: jax.Array) -> jax.Array:
  """Constrains dimension 0 to be split, so that XLA does not replicate x."""
  if ambient(x.shape[0]) is None:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(batch_axes()))


def length_ways(batch_size: int, length: int) -> int:
  """Number of parts along the length; 1 if the examples are too short."""
  mesh = ambient(batch_size)
  if mesh is None:
    return 1
  ways = mesh.shape.get("sequence", 1)
  return int(ways) if length >= ways else 1


def split_batch(fn: Callable[..., Any], *args: Any, by_heads: int = 0) -> Any:
  """Calls a kernel, which XLA cannot split, on each device with its part.

  Args:
    fn: the kernel.
    *args: arrays whose first dimension is the batch; some may be None.
    by_heads: number of leading arguments whose dimension 2 is heads. They and
      the result are also split over `tensor`, if all numbers of heads divide.
  """
  mesh = ambient(args[0].shape[0])
  if mesh is None:
    return fn(*args)
  by_batch = PartitionSpec(batch_axes(mesh))
  by_batch_and_heads = by_batch
  ways = mesh.shape.get("tensor", 1)
  with_heads = [x for x in args[:by_heads] if x is not None]
  if ways > 1 and all(x.shape[2] % ways == 0 for x in with_heads):
    by_batch_and_heads = PartitionSpec(batch_axes(mesh), None, "tensor")
  others = len(args) - by_heads
  return jax.shard_map(
    fn,
    in_specs=(by_batch_and_heads,) * by_heads + (by_batch,) * others,
    out_specs=by_batch_and_heads if by_heads else by_batch,
    # Kernels do not say over which axes their results vary.
    check_vma=False,
  )(*args)


def splits(batch_size: int) -> bool:
  """Whether `split_batch` can split the batch, or does not need to."""
  mesh = jax.sharding.get_abstract_mesh()
  no_need = mesh.empty or mesh.size == 1 or _in_shard_map(mesh)
  return no_need or ambient(batch_size) is not None


def device() -> tuple[str, str]:
  """Platform and kind of the devices, such as ("gpu", "NVIDIA H100 80GB HBM3").

  With an ambient mesh, they are those of its devices, which may be absent.
  """
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    return abstract.platform, abstract.device_kind
  return jax.default_backend(), jax.devices()[0].device_kind
