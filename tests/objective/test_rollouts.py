"""Several updates from one set of rollouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import policy_runs
from support.policy_runs import (
  config_of,
  kill_after,
  metrics_of,
  rows_of,
  start,
)

from bigtrain import main, sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.objective import rollouts
from bigtrain.step import guard
from bigtrain.tasks import policy_gradient

# Two minibatches, twice: a set has four updates.
SETS = dict(minibatches=2, iterations=2)
NAMES = (*policy_runs.NAMES, "clipped_low", "clipped_high")


def config_of_sets(**changes):
  loss = dict(kind="gspo", samples=4, max_new=4)
  return config_of(**dict(loss=loss, rollouts=SETS) | changes)


def train(config, workdir):
  return main.train(settings.plain(config), str(workdir))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run of ten updates from two and a half sets."""
  folder = tmp_path_factory.mktemp("sets")
  assert start(config_of_sets(total_steps=10), folder, "run").wait() == 0
  return folder / "run"


def test_a_set_is_written_once_and_used_several_times(whole):
  rows = rows_of(whole)
  assert len(rows) == 10
  rewards = [(row["reward"], row["length"]) for row in rows]
  for first in (0, 4):
    # Minibatches 0, 1, 0, 1 of each set, and the next set has others.
    assert rewards[first] == rewards[first + 2] != rewards[first + 1]
    assert rewards[first + 1] == rewards[first + 3]
    assert rewards[first : first + 2] != rewards[first + 4 : first + 6]
  for row in rows:
    is_first = row["step"] % 4 == 1
    assert 0 < row["log_prob_difference"] < 1e-5
    # Before the first update of a set, the ratio is 1 but for rounding.
    clipped = row["clipped_low"] + row["clipped_high"]
    assert (clipped == 0) == is_first


@pytest.mark.slow
def test_a_run_killed_within_a_set_ends_bit_equal(whole, tmp_path):
  """Steps 2, 4, ... are saved: 6 is in the middle of the second set."""
  config = config_of_sets(total_steps=10)
  kill_after(start(config, tmp_path, "run"), tmp_path / "run", 6)
  assert start(config, tmp_path, "run").wait() == 0
  run = tmp_path / "run"
  assert metrics_of(run, NAMES) == metrics_of(whole, NAMES)
  params = policy_runs.params_of(run)
  for name, value in policy_runs.params_of(whole).items():
    np.testing.assert_array_equal(value, params[name])


@pytest.mark.slow
def test_a_run_resumes_within_a_set_on_another_mesh(whole, tmp_path):
  """Eight devices continue what one has begun, with its set."""
  assert jax.device_count() == 8
  stopped = config_of_sets(total_steps=10, stop_at_steps=6)
  assert start(stopped, tmp_path, "run").wait() == 0
  mesh = dict(replica=2, fsdp=4)
  train(config_of_sets(total_steps=10, mesh=mesh), tmp_path / "run")
  again, rows = metrics_of(tmp_path / "run", NAMES), metrics_of(whole, NAMES)
  assert again[:6] == rows[:6]
  # Updates 7 and 8 have the set of one device, and equal up to rounding.
  np.testing.assert_allclose(again, rows, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "rloo", "gspo", "cispo"])
def test_devices_and_microbatches_change_nothing(kind, tmp_path):
  loss = dict(kind=kind, samples=4, max_new=4)
  for name, devices, microbatches in (("one", 1, 1), ("four", 4, 2)):
    config = config_of_sets(loss=loss, microbatches=microbatches, total_steps=8)
    assert start(config, tmp_path, name, devices).wait() == 0
  one, four = (metrics_of(tmp_path / name, NAMES) for name in ("one", "four"))
  assert len(one) == 8
  np.testing.assert_allclose(four, one, rtol=1e-4, atol=1e-6)


def test_one_update_of_a_set_is_an_update_without_sets(tmp_path):
  train(config_of(total_steps=2), tmp_path / "plain")
  sets = dict(minibatches=1, iterations=1)
  train(config_of(total_steps=2, rollouts=sets), tmp_path / "sets")
  plain, sets = (metrics_of(tmp_path / name) for name in ("plain", "sets"))
  assert plain == sets


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(rollouts=dict(iterations=0)), "config.rollouts.iterations"),
    (dict(rollouts=dict(minibatch=2)), "rollouts.minibatch: unknown key"),
    (
      dict(loss=dict(kind="cispo", samples=4, max_new=4, epsilon=0.2)),
      "config.loss.epsilon=0.2: kind='cispo'",
    ),
  ],
)
def test_mistakes_are_told(changes, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    train(config_of(**changes), tmp_path / "run")


def test_a_step_that_is_not_finite_is_explained(tmp_path):
  config = config_of_sets(lr=3e37, optimizer=dict(name="sgd"))
  with pytest.raises(guard.NotFinite, match="step 2 .*arithmetic train, row"):
    train(config, tmp_path / "run")


@pytest.mark.slow
def test_a_rollback_skips_updates_within_a_set(tmp_path, monkeypatch):
  """Update 2 of set 1, step 7, is bad once; the run returns to step 6."""
  loss_fn = policy_gradient.loss_fn
  number = 0

  def bad_once(variables, batch, rng, **options):
    result, mutable = loss_fn(variables, batch, rng, **options)
    total, weight = result["loss"]
    total = jnp.where(batch["bad"][0] == 1, jnp.nan, total)
    return result | {"loss": (total, weight)}, mutable

  of_set = rollouts.Rollout._of_set
  indices = []

  def marked(self, batches, update):
    nonlocal number
    batch = of_set(self, batches, update)
    is_bad = number == 0 and self._number == 1 and update == 2
    mark = np.full(len(self._input.placement.rows), is_bad, np.int32)
    indices.append((self._number, update))
    return batch | self._input.placement.put({"bad": mark})

  init = rollouts.Rollout.__init__

  def init_marked(self, *args):
    init(self, *args)
    B = self._input.batch_size
    bad = sharding.batch_spec(
      {"bad": jax.ShapeDtypeStruct((B,), jnp.int32)}, self._mesh
    )
    spec = self.spec | bad
    self.spec, self.drawn = spec, [(spec, 1.0)]

  monkeypatch.setattr(rollouts.Rollout, "_of_set", marked)
  monkeypatch.setattr(rollouts.Rollout, "__init__", init_marked)
  monkeypatch.setattr(policy_gradient, "loss_fn", bad_once)
  add_to = guard.Rollback.add_to

  def counted(self, rollbacks):
    nonlocal number
    number += 1
    return add_to(self, rollbacks)

  monkeypatch.setattr(guard.Rollback, "add_to", counted)
  config = config_of_sets(total_steps=9, nonfinite="rollback")
  train(config, tmp_path / "run")
  steps = [row["step"] for row in rows_of(tmp_path / "run")]
  assert steps == [*range(1, 10)]
  assert number == 1
  # Steps 1 to 7, step 7 again to explain it with the next one, and then steps
  # 7 to 9 as the updates from 3 of set 1 on.
  assert indices[:6] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
  assert indices[-3:] == [(1, 3), (2, 0), (2, 1)]


def test_a_sampler_that_rounds_more_clips_nothing(tmp_path, monkeypatch):
  """Old log-probabilities are the loss's: GSPO's bounds are narrow."""
  write = policy_gradient.rollout

  @functools.wraps(write)
  def write_roughly(*args, **options):
    made = write(*args, **options)
    return made | {"log_probs": made["log_probs"] + 0.01 * made["loss_mask"]}

  monkeypatch.setattr(policy_gradient, "rollout", write_roughly)
  # At this rate, the weights stay as they are.
  train(config_of_sets(total_steps=2, lr=1e-12), tmp_path / "run")
  for row in rows_of(tmp_path / "run"):
    np.testing.assert_allclose(row["log_prob_difference"], 0.01, rtol=0.01)
    assert row["clipped_low"] == row["clipped_high"] == 0
