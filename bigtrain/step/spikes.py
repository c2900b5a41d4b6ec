"""Spikes: steps whose loss or gradient norm is far above those before.

  config.spikes = dict(z=6, window=200, policy="warn")

A step is a spike if its loss or its gradient norm is more than `z` standard
deviations above the mean. Mean and variance are exponential averages over
about `window` steps; the first `window` steps of a run are never spikes. A
spike enters the averages only up to the limit, so that one spike does
not hide another, and a level that stays high becomes normal after some steps.

  "warn"  The state takes the step.
  "skip"  The state stays as it was, and training continues with the next batch.
  "rollback"  The run returns to the last checkpoint and skips the batches from
          there to the spike, see guard.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.config import settings
from bigtrain.config.errors import check_choice, check_kwargs, check_number

POLICIES = ("warn", "skip", "rollback")
_WATCHED = ("loss", "gradient norm")

# The smallest standard deviation, relative to the mean: rounding is no spike.
_LEAST_DEVIATION = 1e-6

Statistics = dict[str, Any]


class Spike(RuntimeError):
  """A spike that ends the run or rolls it back."""


class Spikes(NamedTuple):
  """Settings of config.spikes; `most` skips or rollbacks are allowed."""

  z: float
  window: int
  policy: str
  most: int

  def spec(self) -> Statistics:
    """Shapes and dtypes of the statistics; they start as zeros.

    "counts" are the numbers of steps in the averages and of spikes, the step of
    the newest spike, and the step to roll back (0 for none). "values" are rows
    of [loss, gradient norm]: mean and variance; and of the newest spike its
    values, and mean and standard deviation before it.
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
    counts: jax.Array,
  ) -> tuple[jax.Array, Statistics]:
    """(whether a step that `counts` is a spike, the new statistics)."""
    num_steps, num_spikes, newest, rolled_back = statistics["counts"]
    mean, variance, *last = statistics["values"]
    values = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    deviation = jnp.sqrt(variance)
    deviation = jnp.maximum(deviation, _LEAST_DEVIATION * jnp.abs(mean))
    limit = mean + self.z * deviation
    known = num_steps >= self.window
    spike = counts & known & (values > limit).any()

    # The mean of all steps at first, so that the zeros have no weight.
    weight = 1.0 / jnp.minimum(num_steps + 1, self.window)
    delta = jnp.where(known, jnp.minimum(values, limit), values) - mean
    averages = [
      mean + weight * delta,
      (1.0 - weight) * (variance + weight * jnp.square(delta)),
    ]
    newest_values = jnp.stack([values, mean, deviation])
    of_spike = jnp.where(spike, newest_values, jnp.stack(last))
    new = {
      "counts": jnp.stack(
        [
          jnp.minimum(num_steps + 1, self.window),
          num_spikes + spike,
          jnp.where(spike, step, newest),
          jnp.where(spike & self.rolls_back, step, rolled_back),
        ]
      ).astype(jnp.int32),
      "values": jnp.concatenate([jnp.stack(averages), of_spike]),
    }
    choose = lambda new, old: jnp.where(counts, new, old)
    return spike, jax.tree.map(choose, new, statistics)

  @property
  def rolls_back(self) -> bool:
    return self.policy == "rollback"

  def is_active(self, statistics: Statistics) -> jax.Array:
    return statistics["counts"][3] == 0

  def bad_step(self, statistics: Mapping[str, Any]) -> int:
    """The step to roll back; 0 for none. Raises Spike after too many."""
    num_spikes = int(statistics["counts"][1])
    if self.policy == "skip" and num_spikes > self.most:
      raise Spike(
        f"skipped {num_spikes} spikes, more than config.spikes.most="
        f"{self.most}; the newest: {describe(statistics)}."
      )
    return int(statistics["counts"][3])


def row(statistics: Mapping[str, Any]) -> dict[str, int]:
  _, num_spikes, newest, _ = map(int, statistics["counts"])
  if not num_spikes:
    return {}
  return {"spike_steps": num_spikes, "spike_last_step": newest}


def describe(statistics: Mapping[str, Any]) -> str:
  values, means, deviations = np.asarray(statistics["values"])[2:]
  words = [
    f"{name} {value:.6g} ({(value - mean) / max(deviation, 1e-30):+.1f} "
    f"standard deviations from the mean {mean:.6g})"
    for name, value, mean, deviation in zip(_WATCHED, values, means, deviations)
  ]
  return f"step {int(statistics['counts'][2])} has {' and '.join(words)}"


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
    float(check_number(f"{path}.z", z, above=0)),
    check_number(f"{path}.window", window, least=2, whole=True),
    policy,
    check_number(f"{path}.most", most, least=0, whole=True),
  )
