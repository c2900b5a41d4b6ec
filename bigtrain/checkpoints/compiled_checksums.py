"""The sums of checksums.py, compiled for the devices that hold an array."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.sharding import on_device


def start(x: jax.Array) -> jax.Array:
  """Starts to sum an array.

  Returns:
    uint32 [number of devices, 2], one row on each device: the sums of its
    shard. The array may be donated after the call.
  """
  return _program(x.shape, x.dtype, x.sharding)(x)


@functools.lru_cache(maxsize=1024)
def _program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
  """The compiled function for arrays of one kind."""
  if not isinstance(sharding, NamedSharding):
    if len(sharding.device_set) > 1:
      raise CheckpointError(f"cannot sum an array with sharding {sharding}.")
    first = (0,) * len(shape)
    return jax.jit(lambda x: _sum(on_device(x), first, shape)[None])
  mesh, spec = sharding.mesh, sharding.spec
  local_shape = sharding.shard_shape(shape)

  def of_shard(x: jax.Array) -> jax.Array:
    starts = []
    for dim in range(len(shape)):
      axes = spec[dim] if dim < len(spec) else None
      axes = (axes,) if isinstance(axes, str) else axes or ()
      index: Any = 0
      for axis in axes:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
      starts.append(index * local_shape[dim])
    return _sum(x, tuple(starts), shape)[None]

  # Devices with the same shard give results of their own.
  of_shards = jax.shard_map(
    of_shard,
    mesh=mesh,
    in_specs=spec,
    out_specs=PartitionSpec(mesh.axis_names),
    check_vma=False,
  )
  return jax.jit(lambda x: of_shards(on_device(x)))


def _sum(
  x: jax.Array, starts: tuple[Any, ...], shape: tuple[int, ...]
) -> jax.Array:
  words = _words(x)
  shape = (*shape, words.shape[-1])
  position = jnp.ones(words.shape, jnp.uint32)
  for dim, first in enumerate((*starts, 0)):
    stride = jnp.uint32(math.prod(shape[dim + 1 :]) % 2**32)
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    position += (index + jnp.asarray(first, jnp.uint32)) * stride
  add = functools.partial(jnp.sum, dtype=jnp.uint32)
  return jnp.stack([add(words), add(words * position)])


def _words(x: jax.Array) -> jax.Array:
  """uint32 [*shape, words of an item]."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    parts = [_words(jnp.real(x)), _words(jnp.imag(x))]
    return jnp.concatenate(parts, axis=-1)
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  size = min(x.dtype.itemsize, 4)
  words = jax.lax.bitcast_convert_type(x, f"uint{8 * size}")
  if x.dtype.itemsize <= 4:
    words = words[..., None]
  return words.astype(jnp.uint32)
