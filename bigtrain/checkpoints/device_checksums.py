"""Checksums of arrays (checksums.py), made by the devices that hold them.

Shards of CPU devices are summed by numpy, which needs no compilation.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain.checkpoints import checksums
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.sharding import on_device

# {name: {device of this process: sums of its shard}}
DeviceSums = dict[str, dict[jax.Device, checksums.Sums]]


def start(
  named: Iterable[tuple[str, Any]], *, compiled: bool = False
) -> Callable[[], DeviceSums]:
  """Starts to sum the shards of jax's arrays, which may be donated afterwards.

  Returns a function that waits for the sums. If `compiled`, a program sums on
  CPU devices too.
  """
  started: dict[str, Any] = {}  # Sums, or the array of a compiled program.
  for name, x in named:
    if not isinstance(x, jax.Array):
      continue
    if compiled or next(iter(x.devices())).platform != "cpu":
      # uint32 [devices, 2], one row on each device.
      started[name] = _program(x.shape, x.dtype, x.sharding)(x)
      continue
    started[name] = {
      shard.device: checksums.of_part(
        np.asarray(shard.data),
        checksums.explicit(shard.index, x.shape),
        x.shape,
      )
      for shard in x.addressable_shards
    }

  def wait() -> DeviceSums:
    for name, sums in started.items():
      if isinstance(sums, jax.Array):
        started[name] = {
          shard.device: tuple(np.asarray(shard.data).reshape(2).tolist())
          for shard in sums.addressable_shards
        }
    return started

  return wait


@functools.lru_cache(maxsize=1024)
def _program(
  shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array], jax.Array]:
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
      index = jax.lax.axis_index(axes) if axes else 0
      starts.append(index * local_shape[dim])
    return _sum(x, tuple(starts), shape)[None]

  # Devices with the same shard give results of their own.
  specs: Any = dict(in_specs=spec, out_specs=PartitionSpec(mesh.axis_names))
  of_shards = jax.shard_map(of_shard, mesh=mesh, check_vma=False, **specs)
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
