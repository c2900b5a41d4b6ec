"""Moments in bfloat16: their rounding, which arrays they are, and training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from optim.small_training import SHAPES, make, train, tree

from bigtrain import main, sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.optim import moments
from bigtrain.step import keys

BFLOAT16 = dict(moment_dtype="bfloat16")


@pytest.mark.parametrize("value", [1.001, -3.14159, 2.7e-30, 0.0019531])
def test_stochastic_rounding_is_unbiased_between_two_neighbours(value):
  exact = np.float32(value)
  count = 1 << 18
  rounded = moments.round_stochastically(
    jnp.full((count,), exact), jax.random.key(3)
  )
  rounded = np.asarray(rounded, np.float64)
  neighbours = np.unique(rounded)
  assert len(neighbours) == 2 and neighbours[0] < exact < neighbours[1]
  low, high = neighbours
  upper = np.float64(jnp.nextafter(jnp.bfloat16(low), jnp.bfloat16(high)))
  assert upper == high
  share = (float(exact) - low) / (high - low)
  error = np.sqrt(share * (1 - share) / count)
  assert np.mean(rounded == high) == pytest.approx(share, abs=5 * error)


def test_rounding_keeps_what_bfloat16_has():
  values = [0.0, -0.0, 1.5, -(2.0**100), np.inf, -np.inf, np.nan, 2.0**-126]
  x = jnp.asarray(values, jnp.float32)
  for seed in range(5):
    rounded = moments.round_stochastically(x, jax.random.key(seed))
    np.testing.assert_array_equal(np.asarray(rounded, np.float32), values)
  nan = jax.lax.bitcast_convert_type(jnp.uint32(0x7FFFFFFF), jnp.float32)
  assert jnp.isnan(moments.round_stochastically(nan, jax.random.key(0)))


@pytest.mark.parametrize(
  "options, fields",
  [
    (dict(name="adam"), ("0/mu", "0/nu")),
    (dict(name="lion"), ("0/mu",)),
    (dict(name="sgd", momentum=0.9), ("0/trace",)),
    (dict(name="big_vision_adafactor"), ("0/v", "2/ema")),
    (dict(name="lamb"), ("0/mu", "0/nu")),  # Its state is folded by views.
  ],
)
def test_all_moments_of_each_element_have_the_dtype(options, fields):
  optimizer = make(optimizer=options | BFLOAT16)
  plain = jax.eval_shape(make(optimizer=options).tx.init, tree(0))
  state = jax.eval_shape(optimizer.tx.init, tree(0))
  assert trees.names(state) == trees.names(plain)
  halves = {
    n for n, x in trees.flatten_with_names(state) if x.dtype == "bfloat16"
  }
  assert halves == {f"{field}/{n}" for field in fields for n in SHAPES}


def test_copies_of_parameters_and_factors_stay_in_float32():
  options = dict(name="schedule_free_adamw", **BFLOAT16)
  state = jax.eval_shape(make(optimizer=options).tx.init, tree(0))
  dtypes = dict(trees.flatten_with_names(state))
  assert dtypes["z/embedding"].dtype == jnp.float32
  assert all(x.dtype == "bfloat16" for n, x in dtypes.items() if "/nu/" in n)
  options = dict(name="adafactor", min_dim_size_to_factor=8, **BFLOAT16)
  options["momentum"] = 0.9
  state = jax.eval_shape(make(optimizer=options).tx.init, tree(0))
  dtypes = {n: str(x.dtype) for n, x in trees.flatten_with_names(state)}
  assert dtypes["0/v_row/body/dense/kernel"] == "float32"
  assert {d for n, d in dtypes.items() if "/ema/" in n} == {"bfloat16"}


def test_only_stochastic_rounding_lets_a_second_moment_shrink():
  """After a gradient of 1, zeros: float32's moment decays by 0.999 a step."""
  size, steps = 4096, 100
  grads = lambda step: {"w": jnp.full((size,), float(step == 1))}
  mean = {}
  for rounding in ("stochastic", "nearest"):
    options = dict(name="adam", moment_rounding=rounding, **BFLOAT16)
    optimizer = make({"w": jnp.zeros(size)}, optimizer=options)
    _, state = train(optimizer, {"w": jnp.zeros(size)}, steps, grads, jit=True)
    mean[rounding] = float(jnp.mean(state[0].nu["w"].astype(jnp.float32)))
  exact = 0.001 * 0.999 ** (steps - 1)
  assert mean["stochastic"] == pytest.approx(exact, rel=0.002)
  assert mean["nearest"] == pytest.approx(0.001, rel=0.004)


def test_updates_differ_from_float32_only_by_the_rounding_of_moments():
  options = dict(name="adam", b2=0.95)
  exact, _ = train(make(optimizer=options), tree(0), 6, jit=True)
  optimizer = make(optimizer=options | BFLOAT16)
  rounded, state = train(optimizer, tree(0), 6, jit=True)
  moved = jax.tree.map(lambda x, y: x - y, exact, tree(0))
  error = jax.tree.map(lambda x, y: x - y, exact, rounded)
  relative = optax.global_norm(error) / optax.global_norm(moved)
  assert 1e-5 < relative < 5e-3
  assert all(x.dtype == "bfloat16" for x in jax.tree.leaves(state[0].nu))


def test_roundings_follow_from_seed_step_and_name_on_every_mesh():
  params = {"w": tree(0)["embedding"].repeat(8, axis=0)}

  def state_after(mesh, seed=0):
    optimizer = make(params, optimizer=dict(name="adam", **BFLOAT16))
    seed = {"seed": keys.seed_word(seed)}
    place = lambda x: jax.device_put(
      x, sharding.state_shardings(x, mesh, [(".*", "fsdp(min_size=1)")])[0]
    )
    placed, state = place((params, optimizer.tx.init(params)))
    _, state = jax.jit(optimizer.tx.update)(
      placed, state, placed, step=7, hparams=optimizer.hparams(7) | seed
    )
    return jax.device_get(state[0].nu["w"])

  one = sharding.make_mesh(devices=jax.devices()[:1])
  expected = state_after(one)
  eight = state_after(sharding.make_mesh(replica=4, fsdp=2))
  np.testing.assert_array_equal(eight, expected)
  other = state_after(one, seed=1)
  assert (expected != other).any()


@pytest.mark.slow
def test_an_interrupted_run_is_bit_equal_and_close_to_float32(
  tiny_config, tmp_path
):
  changes = {"evals": {}, "log_steps": 1, "optimizer": dict(name="adam")}
  main.train(tiny_config(changes), str(tmp_path / "float32"))
  changes["optimizer"] |= BFLOAT16
  main.train(tiny_config(changes), str(tmp_path / "whole"))
  for last in (3, 6):
    main.train(
      tiny_config(changes | {"stop_at_steps": last}), str(tmp_path / "parts")
    )
  parts, whole = (tiny.arrays(tmp_path / n, 6) for n in ("parts", "whole"))
  assert parts["opt/0/nu/head/kernel"].dtype == "bfloat16"
  jax.tree.map(np.testing.assert_array_equal, parts, whole)
  losses = {
    name: [row["loss"] for row in tiny.rows(tmp_path / name).values()]
    for name in ("float32", "whole")
  }
  assert losses["whole"] == pytest.approx(losses["float32"], rel=1e-3)
  assert losses["whole"] != losses["float32"]


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(moment_dtype="bfloat"), "moment_dtype: unknown 'bfloat'. Did you"),
    (
      dict(moment_rounding="random", **BFLOAT16),
      "moment_rounding: unknown 'random'",
    ),
    (dict(moment_rounding="stochastic"), "expected .*moment_dtype='bfloat16'"),
    (
      dict(moment_arithmetic="stored", **BFLOAT16),
      "expected moment_arithmetic='float32'",
    ),
    (
      dict(mu_dtype="bfloat16", **BFLOAT16),
      "mu_dtype='bfloat16': expected none",
    ),
  ],
)
def test_mistakes_are_errors(changes, message):
  with pytest.raises(ConfigError, match=message):
    make(optimizer={"name": "adam", **changes})


def test_an_optimizer_without_moments_is_an_error():
  optimizer = make(optimizer=dict(name="sgd", **BFLOAT16))
  with pytest.raises(ConfigError, match="stores no moments"):
    optimizer.tx.init(tree(0))
