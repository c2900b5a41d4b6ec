"""Dynamic loss scale, for gradients computed in float16.

float16 has no numbers below 6e-8, and many gradients are smaller. So the loss
is multiplied by a scale before backpropagation, and the gradients are divided
by it in float32. If gradients overflow, the scale is halved and the step
changes nothing else. After a number of steps without an overflow, the scale is
doubled (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_kwargs, check_number


class LossScale(NamedTuple):
  """Settings of a dynamic loss scale."""

  init: float = 2.0**15
  growth_steps: int = 2000  # Consecutive good steps before the scale grows.
  factor: float = 2.0  # Growth factor, and shrink factor after an overflow.
  least: float = 2.0**-10  # Smallest scale; an overflow there is an error.
  most: float = 2.0**24  # Largest scale.

  def start(self) -> dict[str, jax.Array]:
    """The "loss_scale" of a new train state."""
    return {
      "scale": jnp.float32(self.init),
      "good_steps": jnp.int32(0),
      "overflows": jnp.float32(0.0),
    }

  def may_shrink(self, state: Mapping[str, jax.Array]) -> jax.Array:
    """Whether a smaller scale is still allowed."""
    return state["scale"] > self.least

  def update(
    self, state: Mapping[str, jax.Array], overflow: jax.Array
  ) -> dict[str, jax.Array]:
    """The scale after a step that was good or overflowed."""
    good_steps = jnp.where(overflow, 0, state["good_steps"] + 1)
    grows = good_steps >= self.growth_steps
    scale = state["scale"]
    larger = jnp.minimum(scale * self.factor, self.most)
    smaller = jnp.maximum(scale / self.factor, self.least)
    return {
      "scale": jnp.where(overflow, smaller, jnp.where(grows, larger, scale)),
      "good_steps": jnp.where(grows, 0, good_steps),
      "overflows": state["overflows"] + overflow.astype(jnp.float32),
    }


def log_values(state: Mapping[str, Any]) -> dict[str, Any]:
  """Values of a log entry about the loss scale."""
  if "loss_scale" not in state:
    return {}
  scale = state["loss_scale"]
  return {"loss_scale": scale["scale"], "overflow_steps": scale["overflows"]}


def from_config(config: settings.Config) -> LossScale | None:
  """Reads config.loss_scale; by default {} if the model computes in float16."""
  dtype = config.get("model", {}).get("dtype")
  default: Any = {} if dtype == "float16" else False
  value = config.get("loss_scale", default)
  if value is False or value is None:
    return None
  options = {} if value is True else config.kwargs("loss_scale", default)
  check_kwargs(LossScale, options, "config.loss_scale")
  scale = LossScale(**options)
  key = "config.loss_scale.growth_steps"
  check_number(key, scale.growth_steps, least=1, whole=True)
  if not (0 < scale.least <= scale.init <= scale.most and scale.factor > 1):
    raise ConfigError(
      "config.loss_scale: expected 0 < least <= init <= most and factor > 1, "
      f"got {dict(scale._asdict())}."
    )
  return scale
