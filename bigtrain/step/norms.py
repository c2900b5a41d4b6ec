"""Norms and statistics of parameters, gradients and updates, for log steps."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import trees
from bigtrain.arrays.types import Params
from bigtrain.config import settings
from bigtrain.config.errors import check_choice

DETAILS = ("none", "global", "per_param", "per_param_mean")


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("values",),
  meta_fields=("names", "of_each_step"),
)
@dataclasses.dataclass(frozen=True)
class NamedScalars:
  """Scalars by name, in one array, because every output costs microseconds."""

  names: tuple[str, ...]
  values: Any
  # Whether each good step computes them. The running metrics then hold their
  # sums over the good steps since the last log step.
  of_each_step: bool = False

  def log_values(self, steps: float) -> dict[str, float]:
    """The scalars of a log entry after `steps` good steps, as means."""
    if self.of_each_step and not steps:
      return {}
    num_summed = steps if self.of_each_step else 1.0
    values = {}
    for name, value in zip(self.names, self.values):
      values[name] = float(value) / num_summed
    if any("/" in name for name in self.names):  # Statistics by parameter.
      values["stats_steps"] = num_summed
    return values


class LogNorms(NamedTuple):
  """The norms that log steps report; `detail` is config.weight_stats."""

  detail: str
  names: tuple[str, ...]

  @property
  def of_each_step(self) -> bool:
    return self.detail == "per_param_mean"

  def due(self, log_step: jax.Array) -> jax.Array | bool:
    """Whether a step computes the norms."""
    return self.of_each_step or (bool(self.names) and log_step)

  def zeros(self) -> NamedScalars:
    values = jnp.zeros(len(self.names), jnp.float32)
    return NamedScalars(self.names, values, self.of_each_step)

  def __call__(
    self, before: Params, params: Params, grads: Params, updates: Params
  ) -> NamedScalars:
    if not self.names:
      return self.zeros()
    named = _norms(before, params, grads, updates, self.detail)
    # jax.lax and not jax.numpy, as in metrics.global_norm.
    values = [jax.lax.reshape(named[name], (1,)) for name in self.names]
    return NamedScalars(
      self.names, jax.lax.concatenate(values, 0), self.of_each_step
    )


def from_config(
  config: settings.Config, params: Params, trainable: Any
) -> LogNorms:
  detail = config.get("weight_stats", "global")
  check_choice("config.weight_stats", detail, DETAILS)
  trained, _ = trees.partition(params, trainable)

  def compute(params: Params, trained: Params) -> dict[str, jax.Array]:
    # Gradients and updates have the shapes of the trained parameters.
    return _norms(params, params, trained, trained, detail)

  names = tuple(jax.eval_shape(compute, params, trained))
  return LogNorms(detail, names)


def _norms(
  before: Params, params: Params, grads: Params, updates: Params, detail: str
) -> dict[str, jax.Array]:
  if detail == "none":
    return {}
  values = {
    "param_norm": metrics.global_norm(params),
    "update_norm": metrics.global_norm(updates),
  }
  if detail.startswith("per_param"):
    values |= weight_stats(before, params, grads, updates)
  return values


def weight_stats(
  before: Params, params: Params, grads: Params, updates: Params
) -> dict[str, jax.Array]:
  """Statistics of every parameter, as in T5X; ratios to 0 are infinite."""

  def rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))

  stats = {}
  old_weights = dict(trees.flatten_with_names(before))
  for name, leaf in trees.flatten_with_names(params):
    stats[f"weight_rms/{name}"] = rms(leaf)
    stats[f"weight_max/{name}"] = jnp.max(jnp.abs(leaf)).astype(jnp.float32)
  for name, leaf in trees.flatten_with_names(grads):
    stats[f"grad_rms/{name}"] = rms(leaf)
    stats[f"grad_norm/{name}"] = metrics.global_norm(leaf)
  for name, leaf in trees.flatten_with_names(updates):
    stats[f"update_rms/{name}"] = rms(leaf)
    old = old_weights[name].astype(jnp.float32)
    ratio = jnp.where(leaf == 0, 0.0, leaf / old)  # 0 / 0 is 0.
    stats[f"weight_update_divided_by_weight_rms/{name}"] = rms(ratio)
  return stats
