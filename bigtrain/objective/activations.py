"""Statistics of activations in log entries: config.activation_stats.

A log step computes its loss once more, without gradients, and records the
outputs of the modules whose names match the regular expression. Without the
key, the program of a step does not change.

`_Recorder` replaces the model: it intercepts the calls of flax modules and
stores statistics in a separate collection, so that they come out of scans and
rematerialised layers.
"""

import re
from collections.abc import Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays.types import LossFn
from bigtrain.config import errors
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.config.settings import Config
from bigtrain.metrics import ArrayStats
from bigtrain.objective import task_functions
from bigtrain.objective.model_variants import Variant
from bigtrain.objective.task_sum import Entry

_KEY = "activation_stats"  # Also names a collection, see models.layers.stack.
# The only method of a module whose results are recorded.
_METHOD = "__call__"


def loss_fns(
  config: Config, entry: Entry, variants: Sequence[Variant], teacher: Any
) -> list[LossFn]:
  """Losses with the metric "activation", by variant; [] without the key."""
  if not (regex := config.get(_KEY)):
    return []
  pattern = errors.regex(f"config.{_KEY}", regex)

  def make(model: nn.Module) -> LossFn:
    def with_activations(*args: Any) -> Any:
      recorder = _Recorder(model, pattern)
      loss_fn = task_functions.loss_fn(
        entry.part, entry.module, recorder, teacher, entry.input_key
      )
      loss_metrics, mutable = loss_fn(*args)
      return {**loss_metrics, "activation": recorder.metric()}, mutable

    return jax.jit(with_activations)  # Traced only once.

  return [make(variant.model) for variant in variants]


class _Recorder:
  """Takes a model's place, and records the first output of each module."""

  def __init__(self, model: nn.Module, pattern: re.Pattern[str]):
    self._model = model
    self._pattern = pattern
    self._names: set[str] = set()  # Of all modules, for messages.
    self._stats: dict[str, ArrayStats] = {}  # By the module's path.

  def __getattr__(self, name: str) -> Any:
    return getattr(self._model, name)

  def apply(self, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
    with_stats = flax.core.scope.union_filters(mutable, _KEY)
    with nn.intercept_methods(self._intercept):
      out, collections = self._model.apply(*args, mutable=with_stats, **kwargs)
    collections = dict(collections)
    recorded = collections.pop(_KEY, {})
    # A task may apply the model several times.
    for name, new in flax.traverse_util.flatten_dict(recorded, sep="/").items():
      old = self._stats.get(name)
      self._stats[name] = old.merge(new) if old else new
    return (out, collections) if mutable is not False else out

  def _intercept(
    self, next_fn: Any, args: Any, kwargs: Any, context: Any
  ) -> Any:
    module = context.module
    if context.method_name != _METHOD or module.scope is None:
      return next_fn(*args, **kwargs)
    before = module.get_variable(_KEY, _METHOD)
    result = next_fn(*args, **kwargs)
    floats = [
      x
      for x in jax.tree.leaves(result)
      if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if not (floats and floats[0].size and module.is_mutable_collection(_KEY)):
      return result
    name = "/".join(module.path) or "model"
    self._names.add(name)
    # With scan or remat, the module has called and recorded itself by now.
    is_recorded = module.get_variable(_KEY, _METHOD) is not before
    if self._pattern.fullmatch(name) and not is_recorded:
      stats = ArrayStats.of(floats[0])
      if before:
        stats = before.merge(stats)
      module.put_variable(_KEY, _METHOD, stats)
    return result

  def metric(self) -> ArrayStats:
    """Everything recorded; layers of a loop have numbers after the name."""
    if not self._stats:
      hint = did_you_mean(self._pattern.pattern, self._names)
      raise ConfigError(
        f"config.{_KEY}: {self._pattern.pattern!r} matches no module.{hint}"
      )
    names = []
    for path, stats in self._stats.items():
      module = "model" if path == _METHOD else path.removesuffix(f"/{_METHOD}")
      # A scan stacks the statistics of its layers.
      for place in np.ndindex(stats.largest.shape):
        names.append("/".join([module, *map(str, place)]))
    all_stats = self._stats.values()
    sums = jnp.concatenate([x.sums.reshape(-1, 4) for x in all_stats])
    largest = jnp.concatenate([x.largest.reshape(-1) for x in all_stats])
    return ArrayStats(sums, largest, tuple(names))
