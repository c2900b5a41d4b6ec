"""Statistics of activations in rows: config.activation_stats.

A log step computes its loss once more, without gradients, and records what
modules return. Without the key the program of the step does not change.
"""

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
from bigtrain.objective.variants import Variant

_KEY = "activation_stats"  # Also names a collection, see models.layers.stack.
_METHOD = "__call__"


def loss_fns(
  config: Config, task: Any, variants: Sequence[Variant], teacher: Any
) -> list[LossFn]:
  """Losses with the metric "activation", by variant; [] without the key."""
  if not (regex := config.get(_KEY)):
    return []
  pattern = errors.regex(f"config.{_KEY}", regex)

  def make(model: nn.Module) -> LossFn:
    def with_activations(*args: Any) -> Any:
      recorder = _Recorder(model, pattern)
      loss_fn = task_functions.loss_fn(config, task, recorder, teacher)
      of_loss, mutable = loss_fn(*args)
      return {**of_loss, "activation": recorder.metric()}, mutable

    return jax.jit(with_activations)  # Traced only once.

  return [make(variant.model) for variant in variants]


class _Recorder:
  """Stands for a model, and records the first results of its modules."""

  def __init__(self, model: nn.Module, pattern: Any):
    self._model, self._pattern = model, pattern
    self._names: set[str] = set()
    self._stats: dict[str, ArrayStats] = {}

  def __getattr__(self, name: str) -> Any:
    return getattr(self._model, name)

  def apply(self, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
    both = flax.core.scope.union_filters(mutable, _KEY)
    with nn.intercept_methods(self._intercept):
      out, new = self._model.apply(*args, mutable=both, **kwargs)
    new = dict(new)
    stats = flax.traverse_util.flatten_dict(new.pop(_KEY, {}), sep="/")
    for name, one in stats.items():
      old = self._stats.get(name)
      self._stats[name] = old.merge(one) if old else one
    return (out, new) if mutable is not False else out

  def _intercept(
    self, next_fn: Any, args: Any, kwargs: Any, context: Any
  ) -> Any:
    module = context.module
    if context.method_name != _METHOD or module.scope is None:
      return next_fn(*args, **kwargs)
    stored = lambda: module.get_variable(_KEY, _METHOD)
    before, result = stored(), next_fn(*args, **kwargs)
    arrays = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    if floats and floats[0].size and module.is_mutable_collection(_KEY):
      name = "/".join(module.path) or "model"
      self._names.add(name)
      # With scan or remat, the module has called and recorded itself by now.
      if stored() is before and self._pattern.fullmatch(name):
        new = ArrayStats.of(floats[0])
        new = before.merge(new) if before else new
        module.put_variable(_KEY, _METHOD, new)
    return result

  def metric(self) -> ArrayStats:
    """Everything recorded; layers of a loop have numbers after the name."""
    if not self._stats:
      hint = did_you_mean(self._pattern.pattern, self._names)
      raise ConfigError(
        f"config.{_KEY}: {self._pattern.pattern!r} matches no module.{hint}"
      )
    names = [
      "/".join([path.removesuffix(f"/{_METHOD}"), *map(str, place)])
      for path, stats in self._stats.items()
      for place in np.ndindex(stats.largest.shape)
    ]
    names = ["model" if name == _METHOD else name for name in names]
    all_stats = self._stats.values()
    sums = jnp.concatenate([x.sums.reshape(-1, 4) for x in all_stats])
    largest = jnp.concatenate([x.largest.reshape(-1) for x in all_stats])
    return ArrayStats(sums, largest, tuple(names))
