"""Batches of samples that a predict function makes.

The function gets a batch of numbers, "_index" [B], one for each sample. A
sample's noise and class depend only on its number, so samples are the same on
any mesh and with any batch size.

Legend: B batch.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from bigtrain import sharding
from bigtrain.arrays.types import PredictFn, Variables
from bigtrain.evaluation import evaluations
from bigtrain.evaluation.evaluations import Context


class Generated:
  """The samples of numbers from 0 to `number` - 1, on the devices."""

  def __init__(
    self,
    predict_fn: PredictFn,
    context: Context,
    number: int,
    batch_size: int | None = None,
  ):
    self.context, self.number = context, number
    ways = sharding.batch_ways(context.mesh)
    # No larger than needed, but a multiple of the devices.
    size = min(batch_size or context.batch_size, number + ways - 1)
    self.batch_size = max(1, size // ways) * ways
    self.num_batches = -(-number // self.batch_size)
    self._layout = sharding.batch(context.mesh)
    spec = jax.ShapeDtypeStruct(
      (self.batch_size,), np.int32, sharding=self._layout
    )
    self._call = evaluations.compile_fn(
      context, predict_fn, {"_index": spec}, out_shardings=self._layout
    )

  def batches(self, variables: Variables) -> Iterator[tuple[Any, int]]:
    """Yields (samples [B, ...] on the devices, number of valid samples)."""
    for start in range(0, self.number, self.batch_size):
      samples = self._call(variables, {"_index": self._numbers(start)})
      yield samples, min(self.batch_size, self.number - start)

  def _numbers(self, start: int) -> jax.Array:
    def part(index: Any) -> np.ndarray:
      return (start + np.arange(self.batch_size, dtype=np.int32))[index]

    return jax.make_array_from_callback((self.batch_size,), self._layout, part)

  def on_host(self, variables: Variables) -> np.ndarray:
    """All samples, on every host."""
    everywhere = jax.jit(
      lambda x: x, out_shardings=sharding.replicated(self.context.mesh)
    )
    sizes: list[int] = []

    def calls() -> Iterator[Any]:
      for samples, size in self.batches(variables):
        sizes.append(size)
        yield everywhere(samples)

    results = evaluations.in_flight(calls(), self.num_batches, self.context)
    return np.concatenate([x[: sizes[i]] for i, x in enumerate(results)])
