"""Placement: this host's rows of a batch, and their transfer to its devices."""

from collections.abc import Generator, Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding


class Placement:
  """This host's rows of the global batch.

  Attributes:
    rows: int64 [local rows], indices into the global batch, ascending.
  """

  def __init__(self, mesh: Mesh, batch_size: int):
    self.batch_size = batch_size
    self.sharding = sharding.batch(mesh)
    owned = {
      device: slices[0].indices(batch_size)[:2]
      for device, slices in self.sharding.addressable_devices_indices_map(
        (batch_size,)
      ).items()
      if slices is not None
    }
    spans = sorted(set(owned.values()))
    self.rows = np.concatenate([np.arange(*span) for span in spans])
    # The same spans as indices into `rows`.
    own = {start: np.searchsorted(self.rows, start) for start, _ in spans}
    self._devices = list(owned)
    self._cuts = [
      slice(own[start], own[start] + stop - start)
      for start, stop in owned.values()
    ]

  def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes global arrays from this host's rows, without waiting for copies."""
    shards = jax.device_put(
      [[array[cut] for cut in self._cuts] for array in batch.values()],
      [self._devices for _ in batch],
    )
    return {
      name: jax.make_array_from_single_device_arrays(
        (self.batch_size, *array.shape[1:]), self.sharding, parts
      )
      for (name, array), parts in zip(batch.items(), shards)
    }

  def put_all(
    self, batches: Generator[Mapping[str, np.ndarray], None, None]
  ) -> Iterator[dict[str, jax.Array]]:
    try:
      for batch in batches:
        yield self.put(batch)
    finally:
      batches.close()

  def spec(
    self, example: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
  ) -> dict[str, jax.ShapeDtypeStruct]:
    return {
      name: jax.ShapeDtypeStruct((self.batch_size, *shape), dtype)
      for name, (dtype, shape) in example.items()
    }
