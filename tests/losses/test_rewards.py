"""Losses of answers with rewards equal TRL's, with their gradients."""

import json
import pathlib

import jax
import numpy as np
import pytest
from support import rounding

from bigtrain.losses import rewards

pytestmark = pytest.mark.golden

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / "golden/trl_rewards.json").read_text()
)


def grouped(name, dtype=np.float32):
  array = np.asarray(GOLDEN[name], dtype)
  return array.reshape(*np.shape(GOLDEN["reward"]), -1)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_losses_and_gradients_are_those_of_trl(name):
  case = GOLDEN["cases"][name]
  reward_BG = np.asarray(GOLDEN["reward"], np.float64)
  reference = grouped("reference", np.float64) if case["beta"] else None

  def mean(log_prob):
    total, number = rewards.loss(
      case["kind"],
      log_prob,
      grouped("mask") != 0,
      reward_BG,
      np.ones(len(reward_BG)),
      max_new=GOLDEN["max_new"],
      reference_BGL=reference,
      beta=case["beta"],
    )
    return total / number

  loss, grad = jax.value_and_grad(mean)(grouped("log_prob", np.float64))
  # Only the sums over a batch are in float32, of numbers up to 1.
  atol = rounding.ROUNDINGS * rounding.EPSILON
  np.testing.assert_allclose(loss, case["loss"], rtol=0, atol=atol)
  expected = np.asarray(case["grad"]).reshape(grad.shape)
  size = np.abs(expected).max()
  np.testing.assert_allclose(grad, expected, rtol=0, atol=atol * size)


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
