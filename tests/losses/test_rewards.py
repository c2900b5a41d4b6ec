"""Losses of answers with rewards equal TRL's, with their gradients."""

import json
import pathlib

import jax
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.losses import rewards

pytestmark = pytest.mark.golden

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / "golden/trl_rewards.json").read_text()
)


def grouped(name, dtype=np.float32):
  array = np.asarray(GOLDEN[name], dtype)
  return array.reshape(*np.shape(GOLDEN["reward"]), -1)


def mean_loss(kind, beta=0.0, old=None):
  """The mean loss as a function of log-probabilities, in float64."""
  reference = grouped("reference", np.float64) if beta else None

  def mean(log_prob):
    total, number = rewards.loss(
      kind,
      log_prob,
      grouped("mask") != 0,
      np.asarray(GOLDEN["reward"], np.float64),
      np.ones(len(GOLDEN["reward"])),
      max_new=GOLDEN["max_new"],
      old_BGL=old,
      bounds=rewards.ratio_bounds(kind, None, None),
      reference_BGL=reference,
      beta=beta,
    )
    return total / number

  return jax.value_and_grad(mean)


# Only the sums over a batch are in float32: a few roundings of numbers up to 1.
ATOL = 1e-6


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_losses_and_gradients_are_those_of_trl(name):
  case = GOLDEN["cases"][name]
  old = grouped("old", np.float64) if case["old"] else None
  compute = mean_loss(case["kind"], case["beta"], old)
  log_prob = grouped("log_prob", np.float64)
  loss, grad = compute(log_prob)
  np.testing.assert_allclose(loss, case["loss"], rtol=0, atol=ATOL)
  expected = np.asarray(case["grad"]).reshape(grad.shape)
  size = np.abs(expected).max()
  np.testing.assert_allclose(grad, expected, rtol=0, atol=ATOL * size)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", rewards.KINDS)
def test_several_updates_of_a_rollout_are_those_of_trl(kind):
  expected = GOLDEN["updates"][kind]
  old = now = grouped("log_prob", np.float64)
  losses = []
  for _ in expected["losses"]:
    loss, grad = mean_loss(kind, old=old)(now)
    now = now - GOLDEN["step_size"] * np.asarray(grad)
    losses.append(float(loss))
  np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=ATOL)
  log_prob = np.reshape(expected["log_prob"], now.shape)
  np.testing.assert_allclose(now, log_prob, rtol=0, atol=ATOL)
  assert ATOL < 1e-4 * np.abs(now - old).max()


@pytest.mark.parametrize("kind", rewards.KINDS)
def test_clipped_ratios_have_no_gradient(kind):
  """Except CISPO's, which are weights of at most the bound."""
  args = kind, grouped("log_prob"), grouped("old"), grouped("mask") != 0
  bounds = rewards.ratio_bounds(kind, None, None)
  if kind == "cispo":  # None of the golden file reaches 5.
    bounds = 0.0, 1.3
  reward = np.asarray(GOLDEN["reward"], np.float32)
  low, high = rewards.clipped(*args, reward, bounds)
  is_clipped = np.broadcast_to(low | high, args[1].shape) & args[3]
  assert is_clipped.any() and (~is_clipped & args[3]).any()

  def mean(log_prob, bounds):
    return rewards.loss(
      kind,
      log_prob,
      args[3],
      reward,
      np.ones(3),
      max_new=9,
      old_BGL=args[2],
      bounds=bounds,
    )[0]

  grad = jax.grad(mean)(args[1], bounds)
  free = jax.grad(mean)(args[1], (0.0, np.inf))
  # Answers of equal rewards have no gradient at all.
  changed = np.abs(grad - free) > 1e-6 * np.abs(free).max()
  np.testing.assert_array_equal(changed, is_clipped & (free != 0))
  if kind != "cispo":
    assert (grad[is_clipped] == 0).all()


def test_bounds_of_ratios_are_checked():
  assert rewards.ratio_bounds("grpo", 0.1, None) == (0.9, 1.1)
  assert rewards.ratio_bounds("dapo", 0.1, None) == (0.9, 1.28)
  with pytest.raises(ConfigError, match="cispo.*no lower bound"):
    rewards.ratio_bounds("cispo", 0.2, None)
  with pytest.raises(ConfigError, match="config.loss.epsilon"):
    rewards.ratio_bounds("grpo", 0.0, None)


def test_examples_of_weight_zero_do_not_count():
  reward_BG = np.asarray(GOLDEN["reward"], np.float32)
  args = lambda n: (
    grouped("log_prob")[:n],
    grouped("mask")[:n] != 0,
    reward_BG[:n],
  )
  weights = np.asarray([1.0, 1.0, 0.0])
  for kind in rewards.KINDS:
    whole = rewards.loss(kind, *args(3), weights, max_new=9)
    part = rewards.loss(kind, *args(2), weights[:2], max_new=9)
    np.testing.assert_allclose(whole, part, rtol=1e-6)
