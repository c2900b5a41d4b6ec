"""Losses of answers with rewards equal TRL's, with their gradients."""

import json
import pathlib

import jax
import numpy as np
import pytest

from bigtrain.losses import rewards

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / "golden/trl_rewards.json").read_text()
)


def grouped(name):
  array = np.asarray(GOLDEN[name], np.float32)
  return array.reshape(*np.shape(GOLDEN["reward"]), -1)


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_losses_and_gradients_are_those_of_trl(name):
  case = GOLDEN["cases"][name]
  reward_BG = np.asarray(GOLDEN["reward"], np.float32)

  def mean(log_prob):
    total, number = rewards.loss(
      case["kind"],
      log_prob,
      grouped("mask") != 0,
      reward_BG,
      np.ones(len(reward_BG)),
      max_new=GOLDEN["max_new"],
      reference_BGL=grouped("reference") if case["beta"] else None,
      beta=case["beta"],
    )
    return total / number

  loss, grad = jax.value_and_grad(mean)(grouped("log_prob"))
  np.testing.assert_allclose(loss, case["loss"], rtol=1e-6, atol=1e-6)
  expected = np.asarray(case["grad"]).reshape(grad.shape)
  size = np.abs(expected).max()
  np.testing.assert_allclose(grad / size, expected / size, atol=1e-6)


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
