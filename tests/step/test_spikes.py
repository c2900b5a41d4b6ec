"""Spikes, in single judgements and in whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.config.settings import Config
from bigtrain.step import spikes

WINDOW = 3


def read(**options):
  return spikes.from_config(Config({"spikes": options}))


def judge(rules, values, counts=None):
  """Judges (loss, gradient norm) pairs; returns spikes, and statistics."""
  now = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rules.spec())
  judged = jax.jit(rules.judge)
  found, every = [], []
  for i, (loss, norm) in enumerate(values):
    counted = jnp.asarray(counts is None or counts[i])
    spike, now = judged(now, i + 1, jnp.float32(loss), norm, counted)
    found.append(bool(spike))
    every.append(jax.device_get(now))
  return found, every


def test_statistics_are_exponential_averages():
  rng = np.random.default_rng(0)
  values = rng.normal(2.0, 0.1, size=(50, 2)).astype(np.float32)
  found, every = judge(read(z=1e6, window=20), values)
  assert not any(found)
  mean, square = np.zeros(2), np.zeros(2)
  for i, value in enumerate(values.astype(np.float64)):
    weight = 1 / min(i + 1, 20)
    mean += weight * (value - mean)
    square += weight * (value**2 - square)
    np.testing.assert_allclose(every[i]["values"][0], mean, rtol=1e-5)
    np.testing.assert_allclose(
      every[i]["values"][1], square - mean**2, rtol=1e-2, atol=1e-5
    )


def test_what_is_a_spike():
  quiet = [(1.0, 5.0), (1.2, 5.2), (0.8, 4.8), (1.1, 5.1)] * 3
  rules = read(z=4, window=len(quiet))
  high = [(9.0, 5.0), (1.0, 50.0), (-9.0, 0.0), (1.1, 5.1)]
  found, every = judge(rules, quiet + high)
  assert found == [False] * len(quiet) + [True, True, False, False]
  newest = spikes.log_values(every[-1])
  assert newest == {"spike_steps": 2, "spike_last_step": 14}
  assert spikes.describe(every[12]).startswith("step 13 has loss 9 (+5")
  assert spikes.log_values(every[11]) == {}
  # Not in the first steps of a run, and not if the step does not count.
  assert not any(judge(rules, quiet[:11] + high[:1])[0])
  counts = [True] * len(quiet) + [False]
  found, every = judge(rules, quiet + high[:1], counts)
  assert not any(found)
  tiny.assert_same(every[-1], every[-2])
  # A very high one does not hide the next.
  found, _ = judge(rules, [*quiet, (1e6, 5.0), *high[:1]])
  assert found[-2:] == [True, True]
  # A level that stays high becomes normal.
  found, _ = judge(rules, quiet + [(9.0, 5.0)] * 60)
  assert found[12] and not any(found[50:])


@pytest.fixture(scope="module")
def runs(tiny_config, tmp_path_factory):
  """runs(options, **changes): workdir of a run with a spike at step 5."""
  folder = tmp_path_factory.mktemp("spikes")
  with np.load(tiny_config()["input"]["data"]["path"]) as file:
    data = dict(file)
  data["image"][64:80] *= 1e3  # The fifth batch.
  np.savez(folder / "high.npz", **data)

  def train(name, policy, **changes):
    config = tiny_config(
      {
        "input.data.path": str(folder / "high.npz"),
        "input.shuffle": False,
        "spikes": dict(z=50, window=WINDOW, policy=policy),
        "log_steps": 3,
        "ckpt_steps": 1,
        "keep_ckpts": 10,
        "evals": {},
        **changes,
      }
    )
    main.train(config, str(folder / name))
    return folder / name

  return train


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_spike_is_reported_or_skipped(runs, policy):
  # "skip" with microbatches, and with a skipping policy for NaN.
  changes = {"microbatches": 2, "nonfinite": "skip"} if policy == "skip" else {}
  workdir = runs(policy, policy, **changes)
  row = tiny.rows(workdir)[6]
  assert (row["spike_steps"], row["spike_last_step"]) == (1, 5)
  before, after = tiny.arrays(workdir, 4), tiny.arrays(workdir, 5)
  assert (before.pop("step"), after.pop("step")) == (4, 5)
  same = [np.array_equal(before[name], after[name]) for name in before]
  assert all(same) if policy == "skip" else not any(same)
  assert (row["loss"] > 100) == (policy == "warn")
  changed = tiny.arrays(workdir, 6)["params/head/bias"]
  assert (changed != after["params/head/bias"]).any()


def test_a_spike_is_rolled_back(runs, tiny_config):
  workdir = runs("rollback", "rollback", ckpt_steps=3)
  rows = tiny.rows(workdir)
  assert list(rows) == [1, 3, 6] and "spike_steps" not in rows[6]
  assert rows[6]["loss"] < 100
  with pytest.raises(spikes.Spike, match="step 5 has loss .* a spike. No"):
    runs("no checkpoint", "rollback", ckpt_steps=6)
  options = dict(z=50, window=WINDOW, policy="skip", most=0)
  with pytest.raises(spikes.Spike, match="skipped 1 spikes, more than"):
    runs("too many", "skip", spikes=options)


def test_decisions_are_the_same_after_a_resume(runs):
  whole = runs("whole", "skip")
  runs("parts", "skip", stop_at_steps=2)
  runs("parts", "skip", stop_at_steps=4)
  parts = runs("parts", "skip")
  tiny.assert_same(tiny.arrays(whole), tiny.arrays(parts))
  row = tiny.rows(parts)[6]
  assert row == tiny.rows(whole)[6] and row["spike_steps"] == 1


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(policy="skp"), "unknown 'skp'. Did you mean 'skip'"),
    (dict(z=0), "config.spikes.z: expected a number above 0"),
    (dict(windw=3), "config.spikes.windw.*window"),
    (dict(window=1), "config.spikes.window: expected a whole number"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    read(**options)
