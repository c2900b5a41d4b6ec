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


def test_average_of_bfloat16_parameters_is_float32():
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  average = ema.update(ema.init(params), params, 0, 0.999)
  assert average["w"].dtype == jnp.float32
