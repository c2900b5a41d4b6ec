"""Spikes: steps whose loss or gradient norm is far above the usual one.

  config.spikes = dict(z=6, window=200, policy="warn")

A step is a spike if its loss or its gradient norm is more than `z` standard
deviations above the mean. Mean and variance are exponential averages over
about `window` steps; the first `window` steps of a run are never spikes. A
spike enters the averages only up to the limit, so that one spike does not hide
the next, but a level that stays high becomes normal after some steps.

  "warn"  The spike is reported, and the state advances as usual.
  "skip"  The state stays as it was, and training continues with the next batch.
  "rollback"  The run returns to the last checkpoint and skips the batches from
          there to the spike, see guard.py.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.config import settings
from bigtrain.config.errors import check_choice, check_kwargs, check_number

POLICIES = ("warn", "skip", "rollback")
_WATCHED = ("loss", "gradient norm")

# The smallest standard deviation, as a fraction of the mean. Without it,
# rounding of a loss that hardly changes would be a spike.
_LEAST_DEVIATION = 1e-6

Statistics = dict[str, Any]


class Spike(RuntimeError):
  """A spike that rolls the run back, or that ends it as one too many."""


class Spikes(NamedTuple):
  """Settings of config.spikes."""

  z: float
  window: int
  policy: str
  most: int  # Largest number of skipped steps, or of rollbacks.

  def spec(self) -> Statistics:
    """Shapes and dtypes of the statistics, which start as zeros.

    "counts" [4]: number of steps in the averages, number of spikes, step of the
      newest spike, step of the spike to roll back from (0 for none).
    "values" [5, 2], of loss and gradient norm: their mean; their variance; and
      for the newest spike its values, the mean and the standard deviation.
    """
    return {
      "counts": jax.ShapeDtypeStruct((4,), jnp.int32),
      "values": jax.ShapeDtypeStruct((5, len(_WATCHED)), jnp.float32),
    }

  def judge(
    self,
    statistics: Statistics,
    step: jax.Array,
    loss: jax.Array,
    grad_norm: jax.Array,
    eligible: jax.Array,
  ) -> tuple[jax.Array, Statistics]:
    """Returns whether the step is a spike, and the new statistics.

    Args:
      statistics: those of the steps before.
      step, loss, grad_norm: of the step.
      eligible: whether the step enters the averages and can be a spike at all:
        it is finite, and no earlier step has ended the run.
    """
    num_steps, num_spikes, newest, rolled_back = statistics["counts"]
    mean, variance = statistics["values"][:2]
    old_spike = statistics["values"][2:]
    values = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    deviation = jnp.sqrt(variance)
    deviation = jnp.maximum(deviation, _LEAST_DEVIATION * jnp.abs(mean))
    limit = mean + self.z * deviation
    known = num_steps >= self.window  # Whether the averages have settled.
    spike = eligible & known & (values > limit).any()

    # In the first window this is the plain mean, so that the zeros with which
    # the averages start have no weight.
    weight = 1.0 / jnp.minimum(num_steps + 1, self.window)
    limited = jnp.where(known, jnp.minimum(values, limit), values)
    delta = limited - mean
    new_mean = mean + weight * delta
    new_variance = (1.0 - weight) * (variance + weight * jnp.square(delta))
    new_spike = jnp.where(
      spike, jnp.stack([values, mean, deviation]), old_spike
    )
    new_counts = [
      jnp.minimum(num_steps + 1, self.window),
      num_spikes + spike,
      jnp.where(spike, step, newest),
      jnp.where(spike & self.rolls_back, step, rolled_back),
    ]
    new = {
      "counts": jnp.stack(new_counts).astype(jnp.int32),
      "values": jnp.concatenate(
        [jnp.stack([new_mean, new_variance]), new_spike]
      ),
    }
    choose = functools.partial(jnp.where, eligible)
    new = jax.tree.map(choose, new, statistics)
    return spike, new

  @property
  def rolls_back(self) -> bool:
    return self.policy == "rollback"

  def is_active(self, statistics: Statistics) -> jax.Array:
    """Whether there is no spike to roll back from."""
    return statistics["counts"][3] == 0

  def bad_step(self, statistics: Mapping[str, Any]) -> int:
    """The step of a spike to roll back from; 0 for none.

    Raises:
      Spike: if too many spikes were skipped.
    """
    num_spikes = int(statistics["counts"][1])
    if self.policy == "skip" and num_spikes > self.most:
      raise Spike(
        f"skipped {num_spikes} spikes, more than config.spikes.most="
        f"{self.most}; the newest: {describe(statistics)}."
      )
    return int(statistics["counts"][3])


def log_values(statistics: Mapping[str, Any]) -> dict[str, int]:
  """Values of a log entry about spikes."""
  _, num_spikes, newest, _ = map(int, statistics["counts"])
  if not num_spikes:
    return {}
  return {"spike_steps": num_spikes, "spike_last_step": newest}


def describe(statistics: Mapping[str, Any]) -> str:
  """Describes the newest spike."""
  values, means, deviations = np.asarray(statistics["values"])[2:]
  parts = []
  for name, value, mean, deviation in zip(_WATCHED, values, means, deviations):
    z = (value - mean) / max(deviation, 1e-30)
    parts.append(
      f"{name} {value:.6g} ({z:+.1f} standard deviations from the mean "
      f"{mean:.6g})"
    )
  return f"step {int(statistics['counts'][2])} has {' and '.join(parts)}"


def from_config(config: settings.Config) -> Spikes | None:
  if not config.get("spikes"):
    return None
  options = config.kwargs("spikes")
  check_kwargs(_make, options, "config.spikes")
  return _make(**options)


def _make(
  z: float = 6.0,
  window: int = 200,
  policy: str = "warn",
  most: int | None = None,
) -> Spikes:
  path = "config.spikes"
  check_choice(f"{path}.policy", policy, POLICIES)
  if most is None:
    most = 3 if policy == "rollback" else 100
  return Spikes(
    z=float(check_number(f"{path}.z", z, above=0)),
    window=check_number(f"{path}.window", window, least=2, whole=True),
    policy=policy,
    most=check_number(f"{path}.most", most, least=0, whole=True),
  )
