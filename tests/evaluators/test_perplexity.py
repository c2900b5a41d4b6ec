"""Perplexity and bits per byte."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

from bigtrain.config.errors import ConfigError
from bigtrain.evaluators import perplexity

# A model that knows only the frequency of each byte.
NATS = np.random.default_rng(0).uniform(1, 6, 259).astype(np.float32)


def unigram(variables, batch):
  weights = batch["loss_mask"] * batch["_mask"][:, None]
  loss = jnp.asarray(NATS)[batch["targets"]]
  return {
    "loss": (jnp.sum(loss * weights), jnp.sum(weights)),
    "accuracy": (jnp.sum(weights) / 2, jnp.sum(weights)),
    "bytes": (jnp.sum(batch["num_bytes"] * batch["_mask"]), jnp.float32(1)),
  }


@pytest.mark.parametrize("batch_size, length", [(8, 100), (64, 37)])
def test_results_are_exact_for_any_windows(batch_size, length, tmp_path):
  text = bytes(np.random.default_rng(1).integers(0, 256, 3000, np.uint8))
  (tmp_path / "x").write_bytes(text)
  results = evaluating.build(
    "perplexity",
    unigram,
    evaluating.context(batch_size=batch_size),
    data=dict(type="text", path=str(tmp_path / "x"), length=length),
  ).run({}, 1)
  loss = np.mean([NATS[b + 3] for b in text], dtype=np.float64)
  assert results == pytest.approx(
    {
      "loss": loss,
      "perplexity": math.exp(loss),
      "bits_per_byte": loss / math.log(2),
      "accuracy": 0.5,
    },
    # Sums of 2,400 float32 numbers, which are off by about sqrt(2,400) * 6e-8;
    # exp(loss) is off by `loss`, 3.5, times as much.
    rel=1e-5,
  )


def test_summary_without_bytes_and_of_a_model_that_diverged():
  batches = [{"loss": (6.0, 2.0)}, {"loss": (0.0, 1.0)}]
  assert perplexity.summary(batches) == {
    "loss": 2.0,
    "perplexity": pytest.approx(math.exp(2)),
  }
  results = perplexity.summary([{"loss": (9e9, 1.0), "bytes": (0.0, 1.0)}])
  assert results["perplexity"] == math.inf
  assert math.isnan(results["bits_per_byte"])


@pytest.mark.parametrize(
  ("result", "hint"),
  [({"los": (1.0, 1.0)}, " Did you mean 'los'?"), (jnp.ones(4), "")],
)
def test_a_predict_function_without_loss_is_refused(result, hint):
  evaluator = evaluating.build(
    "perplexity",
    lambda variables, batch: jax.tree.map(jnp.asarray, result),
    data=dict(type="text", name="pydoc", split="test[:8]", length=8),
  )
  expected = f"pred: expected a predict function that returns 'loss'.{hint}"
  with pytest.raises(ConfigError, match=rf"{re.escape(expected)}(\n|$)"):
    evaluator.run({}, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
