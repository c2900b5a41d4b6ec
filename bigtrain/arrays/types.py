"""Types that many modules share.

The leaves of a tree may be jax.Arrays, traced arrays or jax.ShapeDtypeStructs,
so their type is `Any`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

# Nested dicts of parameters.
Params: TypeAlias = dict[str, Any]
# Variables of a model: "params", and flax's mutable collections.
Variables: TypeAlias = dict[str, Any]
# Another entry of the variables: {name: value} of a task's arguments that vary
# from step to step, which are options with a schedule, and the task's state.
TASK = "task"
# "params", "opt", "step" and, where used, "mutable", "tasks", "ema" and
# "loss_scale".
TrainState: TypeAlias = dict[str, Any]
# {feature: array [B, ...]}.
Batch: TypeAlias = Mapping[str, Any]
# {name: (sum, weight), or a metric of metrics.py}.
Metrics: TypeAlias = dict[str, Any]
# (variables, batch, rng) -> (metrics with "loss", new mutable collections).
LossFn: TypeAlias = Callable[[Variables, Batch, Any], tuple[Metrics, Variables]]
# (state, batch) -> (gradients, metrics, new mutable collections).
GradientsFn: TypeAlias = Callable[
  [Any, Batch], tuple[Params, Metrics, Variables]
]
# (variables, batch, **options) -> outputs for the evaluator.
PredictFn: TypeAlias = Callable[..., Any]


class PaddedIds(int):
  """Number of ids of a feature whose padding is -1."""


class ClassCount(int):
  """Number of classes of a feature with class numbers, or vectors over them."""

  key: str  # Where the config has the number, or the names, of the classes.

  def __new__(
    cls, value: int, key: str = "config.model.num_classes"
  ) -> "ClassCount":
    result = super().__new__(cls, value)
    result.key = key
    return result
