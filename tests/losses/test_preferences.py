"""Losses of preferences equal TRL's, with their gradients."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.losses import preferences

pytestmark = pytest.mark.golden

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / "golden" / "trl.json").read_text()
)
# The file has ten decimals, of the inputs too.
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-8)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", preferences.KINDS)
def test_losses_and_gradients_are_those_of_trl(kind):
  case = GOLDEN["cases"][kind]
  options = preferences.read_options(
    kind, "config.loss", **{"sft": None, **case["options"]}
  )
  sums, tokens, reference = (
    np.asarray(GOLDEN[name], np.float64)
    for name in ("sums", "tokens", "reference")
  )

  def mean(sums_B2):
    given = reference if kind in preferences.WITH_REFERENCE else None
    drift = case.get("drift", 0.0)
    pairs = preferences.Pairs(sums_B2, tokens, given, drift)
    loss_B = preferences.losses(kind, pairs, options)
    return loss_B.sum() / (sums.size if kind == "kto" else len(sums))

  loss, grad = jax.value_and_grad(mean)(sums)
  close(loss, case["loss"])
  close(grad, case["grad"])


@pytest.mark.usefixtures("float64")
def test_label_smoothing_of_dpo_by_its_definition():
  sums = np.asarray(GOLDEN["sums"])
  reference = np.asarray(GOLDEN["reference"])
  pairs = preferences.Pairs(sums, np.asarray(GOLDEN["tokens"]), reference)
  options = preferences.Options(beta=0.3, label_smoothing=0.2)
  ratio = sums - reference
  d = 0.3 * (ratio[:, 0] - ratio[:, 1])
  want = 0.8 * np.log1p(np.exp(-d)) + 0.2 * np.log1p(np.exp(d))
  got = preferences.losses("sigmoid", pairs, options)
  close(got, want)


@pytest.mark.usefixtures("float64")
def test_the_loss_of_rewards_is_that_of_trl():
  case = GOLDEN["reward"]
  rewards, margin = np.float64(case["rewards"]), np.float64(case["margin"])
  mean = lambda x: preferences.reward_losses(x, margin, 0.02).mean()
  loss, grad = jax.value_and_grad(mean)(rewards)
  close(loss, case["loss"])
  close(grad, case["grad"])


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(kind="sigmod"), "config.loss.kind"),
    (dict(kind="ipo", beta=0.0), "config.loss.beta"),
    (dict(kind="robust", label_smoothing=0.5), "label_smoothing"),
    (
      dict(kind="ipo", label_smoothing=0.1),
      "label_smoothing: used only by sig",
    ),
    (dict(kind="sigmoid", gamma=0.3), "gamma: used only by simpo"),
    (dict(kind="orpo", desirable=2.0), "desirable: used only by kto"),
  ],
)
def test_wrong_options_are_named(options, message):
  with pytest.raises(ConfigError, match=message):
    preferences.read_options(key="config.loss", sft=None, **options)
