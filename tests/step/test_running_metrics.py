"""Metrics between log steps, and the guard's judgement of single steps."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.config.settings import Config
from bigtrain.step import guard, loss_scale, running_metrics
from bigtrain.step import norms as norms_of_step

NAN = float("nan")


def make_guard(policy, scale=None, by_branch=True):
  return guard.Guard(policy, 3, scale, by_branch)


def run_guard(rules, verdict, state, new):
  advance = lambda with_norms: (new, norms_of_step.LogNorms("none", ()).zeros())
  return rules.run(verdict, state, advance)[0]


def run(losses, policy="stop", log_steps=3, norms=None, by_branch=True):
  """Runs steps with these losses; returns states, rows and running metrics."""
  rules = make_guard(policy, by_branch=by_branch)
  now = running_metrics.zeros(
    running_metrics.spec({"loss": (0.0, 0.0)}, ["lr"])
  )
  state = {"x": jnp.zeros(()), "step": jnp.zeros((), jnp.int32)}

  @jax.jit
  def step_fn(state, now, loss, weight, norm, i):
    step = state["step"] + 1
    pair = (loss * weight, weight)
    verdict = rules.judge(state, now, pair, norm)
    now = running_metrics.add_step(
      now,
      verdict,
      step=i,
      after_log=(i - 1) % log_steps == 0,
      step_metrics={"loss": pair},
      grad_norm=norm,
      last={"lr": i * 0.5},
    )
    new = {"x": state["x"] + loss, "step": step}
    return run_guard(rules, verdict, state, new), now

  states, rows = [], {}
  norms = norms or [1.0] * len(losses)
  for i, (loss, norm) in enumerate(zip(losses, norms), 1):
    state, now = step_fn(state, now, loss, float(i), norm, i)
    states.append(jax.device_get(state))
    if i % log_steps == 0:
      rows[i] = running_metrics.log_values(jax.device_get(now))
  return states, rows, jax.device_get(now)


def test_a_row_is_the_weighted_mean_of_its_steps():
  losses = [3.0, 1.0, 2.0, 5.0, 4.0, 6.0]
  _, rows, _ = run(losses, norms=[1.0, 2.0, 6.0, 1.0, 1.0, 4.0])
  assert rows[3]["loss"] == pytest.approx((3 + 2 + 6) / 6)
  assert rows[6]["loss"] == pytest.approx((20 + 20 + 36) / 15)
  assert rows[3]["grad_norm"] == pytest.approx(3.0)
  assert rows[6]["grad_norm_last"] == 4.0
  assert rows[6]["loss_last"] == 6.0
  assert rows[6]["lr"] == 3.0
  assert "skipped_steps" not in rows[6]


@pytest.mark.parametrize(
  "losses, norms",
  [
    ([1.0, 1.0, NAN, 1.0, 1.0], None),
    ([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, float("inf"), 1.0, 1.0]),
  ],
)
def test_stop_freezes_the_state_before_the_bad_step(losses, norms):
  states, _, last = run(losses, norms=norms)
  assert [s["x"] for s in states] == [1.0, 2.0, 2.0, 2.0, 2.0]
  assert [s["step"] for s in states] == [1, 2, 2, 2, 2]
  assert last["bad_step"] == 3


def test_skip_continues_with_the_next_batch_and_counts():
  states, rows, last = run([1.0, NAN, 1.0, NAN, NAN, 1.0], policy="skip")
  assert [s["x"] for s in states] == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0]
  assert [s["step"] for s in states] == [1, 2, 3, 4, 5, 6]
  assert rows[3]["loss"] == 1.0
  assert rows[3]["skipped_steps"] == 1
  assert rows[6]["skipped_steps"] == 3
  assert last["sums"]["steps"] == 1


def test_a_row_with_only_skipped_steps_has_no_mean():
  _, rows, _ = run([1.0, 1.0, 5.0, NAN, NAN, NAN], policy="skip")
  assert "loss" not in rows[6] and "grad_norm" not in rows[6]
  assert rows[6]["skipped_steps"] == 3
  # The newest values are those of the last good step.
  assert rows[6]["loss_last"] == 5.0
  assert all(map(np.isfinite, rows[6].values()))


@pytest.mark.parametrize("policy", guard.POLICIES)
def test_an_overflow_changes_only_the_loss_scale(policy):
  now = running_metrics.zeros(running_metrics.spec({"loss": (0.0, 0.0)}, []))
  pair, inf = (jnp.float32(2.0), jnp.float32(1.0)), jnp.float32("inf")
  new = {"x": jnp.float32(2.0), "step": jnp.int32(5)}

  def state(scale):
    scale = {
      "scale": jnp.float32(scale),
      "good_steps": jnp.int32(0),
      "overflows": jnp.float32(0),
    }
    step = jnp.int32(4)
    return {"x": jnp.float32(1.0), "step": step, "loss_scale": scale}

  rules = make_guard(policy, loss_scale.LossScale(init=8.0, least=4.0))
  verdict = rules.judge(state(8.0), now, pair, inf)
  assert jax.tree.leaves(verdict) == [False, False, True]
  now = running_metrics.add_step(
    now,
    verdict,
    step=jnp.int32(5),
    after_log=False,
    step_metrics={"loss": pair},
    grad_norm=inf,
    last={},
  )
  assert now["bad_step"] == now["skipped"] == now["sums"]["steps"] == 0
  kept = run_guard(rules, verdict, state(8.0), new)
  assert kept["x"] == 1.0 and kept["step"] == 5
  assert kept["loss_scale"]["scale"] == 4.0
  # Nothing helps if the scale cannot shrink or the loss itself is not finite.
  for loss, scale in ((pair, 4.0), ((inf, pair[1]), 8.0)):
    verdict = rules.judge(state(scale), now, loss, inf)
    assert jax.tree.leaves(verdict) == [False, True, False]
    kept = run_guard(rules, verdict, state(scale), new)
    assert kept["loss_scale"]["scale"] == scale and kept["x"] == 1.0
    assert kept["step"] == (5 if policy == "skip" else 4)


@pytest.mark.parametrize("policy", guard.POLICIES)
def test_a_selection_gives_the_bits_of_a_branch(policy):
  losses = [1.1, NAN, 0.3, float("inf"), -0.7]
  branch, selection = (run(losses, policy, by_branch=b) for b in (True, False))
  jax.tree.map(np.testing.assert_array_equal, branch, selection)


def test_tpus_select_and_others_branch():
  state = {"x": jnp.zeros(3), "step": jnp.int32(0)}
  now = running_metrics.zeros(running_metrics.spec({"loss": (0.0, 0.0)}, []))
  for platform, branches in {"cpu": 1, "tpu": 0}.items():
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(devices=np.array([[device]], object))
    rules = guard.from_config(Config({}), mesh)

    def select(state, now, loss):
      verdict = rules.judge(state, now, (loss, 1.0), loss)  # noqa: B023
      return run_guard(rules, verdict, state, state)  # noqa: B023

    text = str(jax.make_jaxpr(select)(state, now, 1.0))
    assert text.count("cond[") == branches, platform


def test_policies_are_checked():
  mesh = sharding.make_mesh()
  read = lambda **keys: guard.from_config(Config(keys), mesh)
  assert read(nonfinite="skip").max_nonfinite == 100
  assert read().policy == "stop"
  with pytest.raises(ConfigError, match="unknown 'skp'. Did you mean 'skip'"):
    read(nonfinite="skp")
  with pytest.raises(ConfigError, match="config.max_nonfinite: expected"):
    read(max_nonfinite=-1)
