"""Sums between rows, and the guard against steps that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.settings import ConfigError
from bigtrain.step import tally

NAN = float("nan")


def run(losses, policy="stop", log_steps=3, norms=None):
  """Plays steps with these losses; returns states, rows and the tally."""
  now = tally.zeros(tally.spec({"loss": (0.0, 0.0)}, ["lr"]))
  state = {"x": jnp.zeros(()), "step": jnp.zeros((), jnp.int32)}

  @jax.jit
  def step_fn(state, now, loss, weight, norm, i):
    step = state["step"] + 1
    pair = (loss * weight, weight)
    verdict = tally.judge(now, pair, norm, policy)
    now = tally.count(
      now,
      verdict,
      step=i,
      new_row=(i - 1) % log_steps == 0,
      pairs={"loss": pair},
      grad_norm=norm,
      last={"lr": i * 0.5},
    )
    new = {"x": state["x"] + loss, "step": step}
    return tally.select(verdict, lambda: new, lambda: state, policy), now

  states, rows = [], {}
  norms = norms or [1.0] * len(losses)
  for i, (loss, norm) in enumerate(zip(losses, norms), 1):
    state, now = step_fn(state, now, loss, float(i), norm, i)
    states.append(jax.device_get(state))
    if i % log_steps == 0:
      rows[i] = tally.row(jax.device_get(now))
  return states, rows, jax.device_get(now)


def test_a_row_is_the_weighted_mean_of_its_own_steps():
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


def test_skip_goes_on_with_the_next_batch_and_counts():
  states, rows, last = run([1.0, NAN, 1.0, NAN, NAN, 1.0], policy="skip")
  assert [s["x"] for s in states] == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0]
  assert [s["step"] for s in states] == [1, 2, 3, 4, 5, 6]
  assert rows[3]["loss"] == 1.0
  assert rows[3]["skipped_steps"] == 1
  assert rows[6]["skipped_steps"] == 3
  assert last["sums"]["steps"] == 1


def test_a_row_of_skipped_steps_alone_has_no_mean():
  _, rows, _ = run([1.0, 1.0, 5.0, NAN, NAN, NAN], policy="skip")
  assert "loss" not in rows[6] and "grad_norm" not in rows[6]
  assert rows[6]["skipped_steps"] == 3
  # What is the newest comes from the last step that counted.
  assert rows[6]["loss_last"] == 5.0
  assert all(map(np.isfinite, rows[6].values()))


@pytest.mark.parametrize("policy", tally.POLICIES)
def test_an_overflow_changes_the_loss_scale_alone(policy):
  now = tally.zeros(tally.spec({"loss": (0.0, 0.0)}, []))
  pair, inf = (jnp.float32(2.0), jnp.float32(1.0)), jnp.float32("inf")
  new = {"x": 2.0, "step": 5}
  kept, scales = {"x": 1.0, "step": 4}, (8.0, 4.0)

  def select(verdict):
    return tally.select(verdict, lambda: new, lambda: kept, policy, scales)

  verdict = tally.judge(now, pair, inf, policy, may_shrink=True)
  assert jax.tree.leaves(verdict) == [False, False, True]
  now = tally.count(
    now,
    verdict,
    step=jnp.int32(5),
    new_row=False,
    pairs={"loss": pair},
    grad_norm=inf,
    last={},
  )
  assert now["bad_step"] == now["skipped"] == now["sums"]["steps"] == 0
  assert select(verdict) == {
    "x": 1.0,
    "step": 5,
    "loss_scale": 4.0,
  }
  # Where it cannot shrink, or the loss itself is not finite, nothing helps.
  for loss, may_shrink in ((pair, False), ((inf, pair[1]), True)):
    verdict = tally.judge(now, loss, inf, policy, may_shrink)
    assert jax.tree.leaves(verdict) == [False, True, False]
    found = select(verdict)
    assert found["loss_scale"] == 8.0 and found["x"] == 1.0
    assert found["step"] == (5 if policy == "skip" else 4)


def test_policies_are_checked():
  tally.check_policy("skip")
  with pytest.raises(ConfigError, match="no policy 'skp'. Did you mean 'skip'"):
    tally.check_policy("skp")
