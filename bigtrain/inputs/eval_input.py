"""Batches for evaluation: a fixed set of examples in a fixed order."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.config.errors import check_number
from bigtrain.inputs import checks, order, pipeline, sources
from bigtrain.inputs.cache import fits
from bigtrain.inputs.engine import Batch, Batches, Engine, Part
from bigtrain.inputs.transfer import Placement, Prefetch
from bigtrain.pp import registry

# Share of the free memory that the cached batches of an evaluation may fill.
_MAX_SHARE = 0.5


class EvalInput(pipeline.Input):
  """The batches of an evaluation. Made by `make_eval`.

  The last batch is padded with copies of the last example. The feature
  `_mask`, float32 [B], is 1 for examples and 0 for padding.
  """

  def __init__(
    self,
    engine: Engine,
    placement: Placement,
    num_examples: int,
    prefetch: int,
    cache: bool,
    path: str,
  ):
    super().__init__(engine, placement, num_examples, prefetch, path)
    self.num_batches = -(-num_examples // self.batch_size)
    mask = jax.ShapeDtypeStruct((self.batch_size,), np.dtype(np.float32))
    self.spec["_mask"] = mask
    self._cached: list[Batch] | None = None
    self._cache = cache and self._fits()

  def _fits(self) -> bool:
    example_bytes = sum(
      dtype.itemsize * int(np.prod(shape, dtype=np.int64))
      for dtype, shape in self.engine.spec.values()
    )
    size = example_bytes * self.engine.num_rows * self.num_batches
    if fits(size, f"{self._path}: its {self.num_batches} batches", _MAX_SHARE):
      return True
    logging.warning(
      "%s: too large for cache=True: each evaluation makes its batches again.",
      self._path,
    )
    return False

  def batches(self) -> Prefetch:
    return self._ahead(self._local_batches)

  def _local_batches(self, stopping: threading.Event) -> Batches:
    if self._cached is not None:
      yield from self._cached
      return
    batches = []
    made = self.engine.batches(0, self.num_batches, stopping)
    for i, batch in enumerate(made):
      rows = i * self.batch_size + self.placement.rows
      batch["_mask"] = (rows < self.num_examples).astype(np.float32)
      if self._cache:
        batches.append(batch)
      yield batch
    if self._cache and not stopping.is_set():
      self._cached = batches


def make_eval(
  *,
  data: Mapping[str, Any],
  pp: str,
  batch_size: int,
  mesh: Mesh,
  num_examples: int | None = None,
  cache: bool = False,
  pp_modules: Sequence[str] = (),
  prefetch: int = 2,
  num_threads: int | None = None,
  path: str = "evaluation input",
  seed: int = 0,
) -> EvalInput:
  """Makes the input of an evaluation.

  `evaluations.Batches` describes the arguments; `seed` is that of random ops.
  """
  sharding.check_batch(batch_size, mesh, f"{path}.batch_size")
  source = sources.make_source(data, f"{path}.data")
  if num_examples is None:
    num_examples = len(source)
  check_number(
    f"{path}.num_examples", num_examples, least=1, most=len(source), whole=True
  )
  ops = sources.parse_ops(pp, pp_modules, f"{path}.pp")
  part = Part(path, source, ops, registry.compose(ops), seed=seed)
  placement = Placement(mesh, batch_size)

  def plan(step: int, start: int, stop: int) -> order.Order:
    rows = step * batch_size + placement.rows[start:stop]
    index = np.minimum(rows, num_examples - 1)  # The padding.
    return order.Order(
      source=np.zeros(len(index), np.int32),
      index=index,
      epoch=np.zeros_like(index),
    )

  num_rows = len(placement.rows)
  engine = pipeline.make_engine([part], plan, num_rows, num_threads, path)
  return EvalInput(engine, placement, num_examples, prefetch, cache, path)


def check(
  *,
  data: Mapping[str, Any],
  pp: str = "",
  pp_modules: Sequence[str] = (),
  vocab_sizes: Mapping[str, int] | None = None,
  path: str,
) -> None:
  """Checks the arguments of `make_eval` without opening the source."""
  module, _ = sources.find_source(data, f"{path}.data")
  op = registry.compose(sources.parse_ops(pp, pp_modules, f"{path}.pp"))
  # The class, because some sources know their ids before they are opened.
  checks.check_sizes(checks.sizes(op, module.Source), vocab_sizes or {}, path)
