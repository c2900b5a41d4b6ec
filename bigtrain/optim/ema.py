"""Exponential moving average (EMA) of the parameters."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain.arrays.types import Params
from bigtrain.config import lengths
from bigtrain.config.errors import check_number
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config

# (average, parameters after an update, updates before it) -> average.
Ema = Callable[[Params, Params, Any], Params]


def from_config(cfg: Config, units: Units) -> Ema | None:
  """Reads ema_decay and ema_start_{steps,epochs,...}; None without a decay."""
  decay = cfg.get("ema_decay")
  start = lengths.steps(cfg, "ema_start", units) or 0
  if decay is None:
    return None
  check_number(f"{cfg.path}.ema_decay", decay, least=0, below=1)
  return functools.partial(update, decay=float(decay), start_step=start)


def init(params: Any) -> Any:
  """Float32 copies, as bfloat16 rounds (1 - decay) * (params - ema) to 0."""
  return jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)


def update(
  ema: Any, params: Any, step: Any, decay: float, start_step: int = 0
) -> Any:
  """Averages the parameters after an update.

  Before `start_step` the average is a copy of the parameters. After it the
  decay warms up as (1 + t) / (10 + t), so that the average soon forgets the
  parameters with which it began.
  """
  t = jnp.asarray(step - start_step, jnp.float32)
  warm = jnp.minimum(decay, (1 + t) / (10 + jnp.maximum(t, 0)))
  d = jnp.where(t < 0, 0.0, warm)

  def average(e: jax.Array, p: jax.Array) -> jax.Array:
    return (d * e + (1 - d) * p.astype(jnp.float32)).astype(e.dtype)

  return jax.tree.map(average, ema, params)
