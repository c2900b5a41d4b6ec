"""Averages of the parameters over steps: exponential, or by a power."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays.types import Params
from bigtrain.config import lengths
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config

# (average, parameters after an update, updates before it) -> average.
Ema = Callable[[Params, Params, Any], Params]

# The mean of all steps has this width.
_WIDEST = 1 / math.sqrt(12)


def is_used(cfg: Config) -> bool:
  return any(cfg.get(key) is not None for key in ("ema_decay", "ema_width"))


def from_config(cfg: Config, units: Units) -> Ema | None:
  """Reads ema_decay or ema_width, and ema_start_{steps,epochs,...}.

  None without an average.
  """
  decay, width = cfg.get("ema_decay"), cfg.get("ema_width")
  start = lengths.steps(cfg, "ema_start", units) or 0
  if width is not None:
    key = f"{cfg.path}.ema_width"
    if decay is not None:
      raise ConfigError(f"{key}: expected none beside {cfg.path}.ema_decay.")
    check_number(key, width, above=0, most=_WIDEST)
    return functools.partial(
      update_by_power, power=power_of(float(width)), start_step=start
    )
  if decay is None:
    return None
  check_number(f"{cfg.path}.ema_decay", decay, least=0, below=1)
  return functools.partial(update, decay=float(decay), start_step=start)


def power_of(width: float) -> float:
  """The power g of an average with weights t^g that has a given relative width.

  The width is the standard deviation of t under these weights, as a share of
  the run: sqrt((g + 1) / ((g + 2)^2 (g + 3))), arXiv 2312.02696, appendix C.2.
  """
  inverse = width**-2
  roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
  return float(max(x.real for x in roots if abs(x.imag) < 1e-9))


def init(params: Any) -> Any:
  """Float32 copies: bfloat16 would round (1 - decay) * (params - ema) to 0."""
  return jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)


def update(
  ema: Any, params: Any, step: Any, decay: float, start_step: int = 0
) -> Any:
  """Averages the parameters after an update.

  Before `start_step` the average is a copy of the parameters. After that, the
  decay warms up as (1 + t) / (10 + t), so that the average soon forgets the
  parameters that it started from.
  """
  t = jnp.asarray(step - start_step, jnp.float32)
  warm = jnp.minimum(decay, (1 + t) / (10 + jnp.maximum(t, 0)))
  d = jnp.where(t < 0, 0.0, warm)

  def average(e: jax.Array, p: jax.Array) -> jax.Array:
    return (d * e + (1 - d) * p.astype(jnp.float32)).astype(e.dtype)

  return jax.tree.map(average, ema, params)


def update_by_power(
  ema: Any, params: Any, step: Any, power: float, start_step: int = 0
) -> Any:
  """The average in which step t, from `start_step` on, has the weight t^power.

  So it always covers the same share of the run (arXiv 2312.02696, section 3.1).
  Before `start_step` it is a copy of the parameters.
  """
  t = jnp.maximum(jnp.asarray(step - start_step + 1, jnp.float32), 1.0)
  # 1 - (1 - 1 / t)^(power + 1), without cancellation; 1 in the first step.
  share = -jnp.expm1((power + 1) * jnp.log1p(-1 / t))

  def average(e: jax.Array, p: jax.Array) -> jax.Array:
    p = p.astype(jnp.float32)
    return jnp.where(t == 1, p, e + share * (p - e)).astype(e.dtype)

  return jax.tree.map(average, ema, params)
