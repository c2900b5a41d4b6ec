"""The dynamic loss scale, and a run in float16."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from support import float16

from bigtrain import main, metrics, sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.objective import gradients
from bigtrain.step import loss_scale


def test_a_scale_that_always_grows_is_an_error():
  config = settings.Config({"loss_scale": {"growth_steps": 0}})
  with pytest.raises(ConfigError, match="growth_steps: .* at least 1"):
    loss_scale.from_config(config)


def test_the_rule_on_a_random_history():
  rule = loss_scale.LossScale(init=8.0, growth_steps=3, least=1.0, most=32.0)
  state, update = rule.start(), jax.jit(rule.update)
  scale, good, overflows = 8.0, 0, 0
  for overflow in np.random.default_rng(0).random(60) < 0.3:
    state = update(state, jnp.asarray(overflow))
    if overflow:
      scale, good, overflows = max(scale / 2, 1.0), 0, overflows + 1
    else:
      good += 1
      if good == 3:
        scale, good = min(scale * 2, 32.0), 0
    values = {name: float(value) for name, value in state.items()}
    assert values == {
      "scale": scale,
      "good_steps": good,
      "overflows": overflows,
    }
    assert bool(rule.may_shrink(state)) == (scale > 1.0)


def test_which_configs_have_a_loss_scale():
  read = lambda **keys: loss_scale.from_config(settings.Config(keys))
  assert read() is None
  assert read(model=dict(dtype="bfloat16")) is None
  assert read(model=dict(dtype="float16")) == loss_scale.LossScale()
  assert read(model=dict(dtype="float16"), loss_scale=False) is None
  assert read(loss_scale=dict(init=4.0)).init == 4.0
  with pytest.raises(ConfigError, match="growth_steps"):
    read(loss_scale=dict(growth_step=3))
  with pytest.raises(ConfigError, match="least <= init"):
    read(loss_scale=dict(init=2.0**60))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_small_gradients_survive_float16(microbatches):
  float16.require()
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  x = np.full((4, 1), 2e-4, np.float32)

  def loss_fn(variables, batch, rng):
    out = batch["x"].astype(jnp.float16) * variables["params"]["w"].astype(
      jnp.float16
    )
    loss = (out * jnp.float16(1e-4)).astype(jnp.float32)[:, 0]
    return {"loss": metrics.pair(loss)}, {}

  # The arguments are no constants, which XLA would multiply first: to 0.
  @jax.jit
  def compiled(params, batch, scale):
    grads, pairs, _ = gradients.make(
      loss_fn,
      trainable={"w": True},
      microbatches=microbatches,
      mesh=mesh,
    )({"params": params, "step": 0, "loss_scale": {"scale": scale}}, batch)
    return grads["w"][0], pairs["loss"][1]

  def gradient(scale):
    grad, weight = compiled({"w": np.ones(1, np.float32)}, {"x": x}, scale)
    assert weight == 4
    return float(grad)

  true = 2e-4 * 1e-4
  assert gradient(None) == 0  # Below the smallest float16.
  assert gradient(jnp.float32(2.0**12)) == pytest.approx(true, rel=1e-2)
  assert not math.isfinite(gradient(jnp.float32(2.0**50)))


def test_a_run_in_float16(tiny_config, tmp_path):
  float16.require()
  changes = {
    "model_name": "tiny.half",
    "model": dict(num_classes=10, dtype="float16"),
    # Large enough that the first steps overflow and shrink it.
    "loss_scale": dict(init=2.0**24, growth_steps=100),
    "log_steps": 1,
    "evals": {},
    "total_steps": 12,
    "ckpt_steps": 6,
  }
  main.train(tiny_config(changes), str(tmp_path / "straight"))
  rows = tiny.rows(tmp_path / "straight")
  last = rows[12]
  assert 1 <= last["overflow_steps"] < 12 and "skipped_steps" not in last
  assert last["loss_scale"] == 2.0**24 / 2 ** last["overflow_steps"]
  assert all(math.isfinite(v) for row in rows.values() for v in row.values())
  losses = [row["loss"] for row in rows.values() if "loss" in row]
  assert losses[-1] < losses[0]
  # The scale is part of the state.
  config = tiny_config(changes)
  main.train(config | {"stop_at_steps": 6}, str(tmp_path / "cut"))
  main.train(config, str(tmp_path / "cut"))
  tiny.assert_same(
    tiny.arrays(tmp_path / "cut"), tiny.arrays(tmp_path / "straight")
  )
  assert tiny.rows(tmp_path / "cut") == rows
