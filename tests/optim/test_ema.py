"""The exponential moving average of the parameters."""

import jax.numpy as jnp
import numpy as np
import pytest
from optim.small_training import UNITS, assert_close, tree

from bigtrain.config.errors import ConfigError
from bigtrain.config.settings import Config
from bigtrain.optim import ema


def test_average_matches_its_formula_from_its_start():
  config = Config(dict(ema_decay=0.9, ema_start_epochs=0.2))  # 2 steps.
  update = ema.from_config(config, UNITS)
  assert not config.unread()
  params = tree(0)
  average, expected = ema.init(params), np.float64(params["embedding"])
  for step in range(30):
    params = tree(step + 1)
    average = update(average, params, step)
    t = step - 2
    d = min(0.9, (1 + t) / (10 + t)) if t >= 0 else 0.0
    expected = d * expected + (1 - d) * np.float64(params["embedding"])
    if t < 0:
      assert_close(average, params, rtol=0)
  np.testing.assert_allclose(
    average["embedding"], expected, rtol=1e-5, atol=1e-6
  )
  assert ema.from_config(Config({}), UNITS) is None
  with pytest.raises(ConfigError, match="ema_decay: .* below 1, got 1.0"):
    ema.from_config(Config(dict(ema_decay=1.0)), UNITS)


@pytest.mark.parametrize("width", [0.05, 0.1, 0.25])
def test_average_by_power_weighs_step_t_by_t_to_the_power(width):
  config = Config(dict(ema_width=width, ema_start_epochs=0.2))  # 2 steps.
  update = ema.from_config(config, UNITS)
  assert not config.unread() and ema.is_used(config)
  power = ema.power_of(width)
  assert (power + 1) / (power + 2) ** 2 / (power + 3) == pytest.approx(width**2)
  average = ema.init(tree(0))
  seen = []
  for step in range(40):
    params = tree(step + 1)
    average = update(average, params, step)
    if step >= 2:
      seen.append(np.float64(params["embedding"]))
    else:
      assert_close(average, params, rtol=0)
  # The weight of step t is the integral of its time: t^(g+1) - (t-1)^(g+1).
  t = np.arange(len(seen) + 1)
  weights = np.diff(t ** (power + 1.0))
  expected = np.tensordot(weights / weights.sum(), np.stack(seen), 1)
  np.testing.assert_allclose(
    average["embedding"], expected, rtol=1e-5, atol=1e-6
  )


def test_an_average_has_one_kind():
  with pytest.raises(ConfigError, match="ema_width: expected none beside"):
    ema.from_config(Config(dict(ema_width=0.1, ema_decay=0.9)), UNITS)
  with pytest.raises(ConfigError, match="ema_width: expected a number at most"):
    ema.from_config(Config(dict(ema_width=0.3)), UNITS)


def test_average_of_bfloat16_parameters_is_float32():
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  average = ema.update(ema.init(params), params, 0, 0.999)
  assert average["w"].dtype == jnp.float32
