"""Means of metrics over a data set."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

N = 21  # Batches of 8: the last has 5 examples.
DATA = dict(type="arrays", arrays=dict(id=np.arange(N) + 100))


@pytest.mark.parametrize("cache", [True, False])
def test_the_mean_is_weighted_over_all_batches(cache):
  def pairs(variables, batch):
    weight = batch["_mask"] * (batch["id"] % 2)
    return {
      "odd": ((batch["id"] * weight).sum(), weight.sum()),
      "never": (jnp.zeros(()), jnp.zeros(())),
    }

  evaluator = evaluating.build("mean", pairs, data=DATA, cache=cache)
  odd = np.arange(101, 100 + N, 2).mean()
  for step in (1, 2):  # The second run uses the cache, if there is one.
    results = evaluator.run({}, step)
    assert results["odd"] == pytest.approx(odd, rel=1e-7)
    assert np.isnan(results["never"])
