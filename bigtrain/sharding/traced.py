"""The mesh as the functions see it that a program is traced from.

That is the mesh of jax.set_mesh. Without one, and on a single device, these
functions do nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from bigtrain.sharding import batches
from bigtrain.sharding.mesh import BATCH_AXES


def ambient(batch_size: int) -> Any:
  """The mesh of jax.set_mesh if it splits a batch of this size, else None.

  None also inside a shard_map, and for batches that do not divide, such as the
  single example of an initialisation.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not set(BATCH_AXES) <= set(mesh.axis_names) or mesh.manual_axes:
    return None
  return None if batch_size % batches.batch_ways(mesh) else mesh


def over_batch(x: jax.Array) -> jax.Array:
  """Constrains dimension 0 to be split, so that XLA does not replicate x."""
  if ambient(x.shape[0]) is None:  # An export may leave the size open.
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))


def length_ways(batch_size: int, length: int) -> int:
  """Number of devices among which the positions of an example are split.

  1 where `ambient` is None, and for lengths below the size of `sequence`, such
  as a single token in decoding.
  """
  mesh = ambient(batch_size)
  ways = 1 if mesh is None else mesh.shape.get("sequence", 1)
  return int(ways) if ways > 1 and length >= ways else 1


def split_batch(fn: Callable[..., Any], *args: Any, by_heads: int = 0) -> Any:
  """Calls `fn` with each device's part of the batch, for kernels.

  XLA cannot split a kernel over devices by itself.

  Args:
    fn: function of the arguments that returns arrays; the first dimension of
      all arrays is the batch.
    *args: an array, and arrays or trees of arrays. If the ambient mesh does not
      split the first one's batch, `fn` is called with all of it.
    by_heads: number of arrays at the front with heads as dimension 2, as the
      result then has. These are split over `tensor`, if they divide.
  """
  mesh = ambient(args[0].shape[0])
  if mesh is None:
    return fn(*args)
  ways = mesh.shape.get("tensor", 1)
  front = spec = PartitionSpec(BATCH_AXES)
  if ways > 1 and all(x.shape[2] % ways == 0 for x in args[:by_heads]):
    front = PartitionSpec(BATCH_AXES, None, "tensor")
  return jax.shard_map(
    fn,
    in_specs=(front,) * by_heads + (spec,) * (len(args) - by_heads),
    out_specs=front if by_heads else spec,
    check_vma=False,
  )(*args)


def splits(batch_size: int) -> bool:
  """Whether `split_batch` gives each device its own part of a batch.

  True also for a single device, and inside a shard_map.
  """
  mesh = jax.sharding.get_abstract_mesh()
  alone = mesh.empty or mesh.size == 1 or bool(mesh.manual_axes)
  return alone or ambient(batch_size) is not None


def device() -> tuple[str, str]:
  """Platform and kind of the devices that a program is traced for.

  These are the devices of the ambient mesh, which may be absent
  (config.compile_only); without a mesh, this machine's devices.

  Returns:
    ("cpu", "gpu" or "tpu"; the `device_kind`).
  """
  of_mesh = jax.sharding.get_abstract_mesh().abstract_device
  if of_mesh is not None:
    return of_mesh.platform, of_mesh.device_kind
  return jax.default_backend(), jax.devices()[0].device_kind
