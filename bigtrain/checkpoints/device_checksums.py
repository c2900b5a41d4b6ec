"""Checksums of arrays (checksums.py), computed on the devices that hold them.

They are computed before an array is copied to the host, so they reveal
corruption in host memory or on the way to disk. numpy sums the shards of CPU
devices, so that nothing has to be compiled there.
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
  """Starts to sum the shards of jax arrays, which may be donated afterwards.

  Args:
    named: (name, array) pairs; numpy arrays are left out.
    compiled: whether CPU devices, too, use a compiled program.

  Returns: a function that waits for the sums.
  """
  # {name: the sums, or the array in which a program returns them}.
  started: dict[str, Any] = {}
  for name, x in named:
    if not isinstance(x, jax.Array):
      continue
    if compiled or next(iter(x.devices())).platform != "cpu":
      # uint32 [devices, 2], split over the devices.
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
  """A program that sums each device's shard of an array."""
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

  of_shards = jax.shard_map(
    of_shard,
    mesh=mesh,
    in_specs=spec,
    # Each device returns its own sums, also if others have the same shard.
    out_specs=PartitionSpec(mesh.axis_names),
    check_vma=False,
  )
  return jax.jit(lambda x: of_shards(on_device(x)))


def _sum(
  x: jax.Array, starts: tuple[Any, ...], shape: tuple[int, ...]
) -> jax.Array:
  """uint32 [2]: the sums of a shard that starts at `starts` in an array."""
  words = _words(x)
  shape = (*shape, words.shape[-1])
  position = jnp.ones(words.shape, jnp.uint32)
  for dim, first in enumerate((*starts, 0)):
    stride = jnp.uint32(math.prod(shape[dim + 1 :]) % 2**32)
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    position += (index + jnp.asarray(first, jnp.uint32)) * stride
  total = jnp.sum(words, dtype=jnp.uint32)
  weighted = jnp.sum(words * position, dtype=jnp.uint32)
  return jnp.stack([total, weighted])


def _words(x: jax.Array) -> jax.Array:
  """The elements as uint32 [*shape, words of an element]."""
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
