"""A loss scale that finds its size, for gradients computed in float16.

float16 has no numbers below 6e-8: many gradients would be zero. The loss is
multiplied by a scale before they are computed, and they are divided by it in
float32. A scale that is too large makes some of them infinite; such a step
changes nothing but the scale, which is halved, and is counted. After some
steps without, it is doubled (Micikevicius et al. 2018, arXiv 1710.03740,
section 3.2). bfloat16 has the range of float32 and needs none of this.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import settings


class LossScale(NamedTuple):
  """How the scale changes.

  Attributes:
    init: the first scale.
    growth_steps: after so many good steps in a row it is multiplied,
    factor: by this; after one with an overflow it is divided by it.
    least: it never gets smaller; an overflow there is an error like any other
      step that is not finite.
    most: it never gets larger.
  """

  init: float = 2.0**15
  growth_steps: int = 2000
  factor: float = 2.0
  least: float = 2.0**-10
  most: float = 2.0**24

  def start(self) -> dict[str, jax.Array]:
    """The part of the train state that holds the scale."""
    return {
      "scale": jnp.float32(self.init),
      "good_steps": jnp.int32(0),
      "overflows": jnp.float32(0.0),
    }

  def may_shrink(self, state: Mapping[str, jax.Array]) -> jax.Array:
    """Whether a smaller scale could help."""
    return state["scale"] > self.least

  def update(
    self, state: Mapping[str, jax.Array], overflow: jax.Array
  ) -> dict[str, jax.Array]:
    """The scale after a step.

    Args:
      state: before it.
      overflow: whether its gradients were not finite.
    """
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


def row(state: Mapping[str, Any]) -> dict[str, Any]:
  """What rows say of it, {} for a train state without a scale."""
  if "loss_scale" not in state:
    return {}
  scale = state["loss_scale"]
  return {"loss_scale": scale["scale"], "overflow_steps": scale["overflows"]}


def from_config(config: settings.Config) -> LossScale | None:
  """Reads config.loss_scale: a dict of options, or False for none.

  Unless it is given there is one where config.model computes in float16.

  Raises:
    ConfigError: an unknown option, or one out of range.
  """
  computes = config.get("model", {}).get("dtype")
  default: Any = {} if computes == "float16" else False
  value = config.get("loss_scale", default)
  if value is False or value is None:
    return None
  options = {} if value is True else config.kwargs("loss_scale", default)
  settings.check_kwargs(LossScale, options, "config.loss_scale")
  made = LossScale(**options)
  if not (0 < made.least <= made.init <= made.most and made.factor > 1):
    raise settings.ConfigError(
      "config.loss_scale: expected 0 < least <= init <= most and factor > 1, "
      f"got {dict(made._asdict())}."
    )
  return made
