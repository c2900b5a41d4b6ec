"""Metrics: any split into batches, devices and steps gives the same values."""

import functools
import json
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import strategies
from tiny import evaluating

from bigtrain import main, metrics, sharding
from bigtrain.config.errors import ConfigError
from bigtrain.objective import gradients
from bigtrain.step import running_metrics
from bigtrain.step.guard import Verdict

B, STEPS, LOW, HIGH, BINS = 16, 5, -4.0, 4.0, 8


def measured(x, weight, last):
  """A metric of each kind."""
  return {
    "mean": metrics.pair(x, weight),
    "sum": metrics.Sum.of(x, weight),
    "max": metrics.Max.of(x, weight),
    "min": metrics.Min.of(x, weight),
    "last": metrics.Last.of(last),
    "bins": metrics.Histogram.of(x, weight, low=LOW, high=HIGH, bins=BINS),
  }


def expected(x, weight, last):
  """The same in numpy, from all values at once."""
  x, weight = np.float64(x).ravel(), np.float64(weight).ravel()
  real = x[weight != 0]
  clipped = np.clip(x, LOW, HIGH)
  # numpy's bins have their lower edge: mirrored, they have the upper one.
  counts, _ = np.histogram(
    -clipped, np.linspace(-HIGH, -LOW, BINS + 1), weights=weight
  )
  return {
    "mean": (x * weight).sum() / weight.sum() if len(real) else np.nan,
    "sum": (x * weight).sum(),
    "max": real.max() if len(real) else np.nan,
    "min": real.min() if len(real) else np.nan,
    "last": last,
    "bins": counts[::-1],
  }


def assert_equal(values, wanted):
  values = {**values, "bins": values["bins"].counts}
  for name, value in wanted.items():
    # The values are multiples of 1/4, so sums have no rounding.
    np.testing.assert_array_equal(np.float64(values[name]), value, name)


def loss_fn(variables, batch, rng):
  scale = variables["params"]["scale"]
  x, weight = batch["x"], batch["weight"]
  loss = metrics.pair(scale * x, weight)
  return {"loss": loss, **measured(x, weight, scale)}, {}


@functools.cache
def step_fn(microbatches, mesh):
  """(running, scale, batch, step, is good, follows a log step) -> running."""
  gradients_fn = gradients.make(
    loss_fn, trainable={"scale": True}, mesh=mesh, microbatches=microbatches
  )

  @jax.jit
  def step(now, scale, batch, number, good, after_log):
    state = {"params": {"scale": scale}, "step": number - 1}
    _, sums, _ = gradients_fn(state, batch)
    verdict = Verdict(good, ~good, False)
    return running_metrics.add_step(
      now,
      verdict,
      step=number,
      after_log=after_log,
      step_metrics=sums,
      grad_norm=jnp.float32(1.0),
      last={},
    )

  return step


@pytest.fixture(scope="module")
def spec():
  batch = {"x": jnp.zeros(B), "weight": jnp.zeros(B)}
  variables = {"params": {"scale": jnp.float32(0)}}
  return running_metrics.spec(
    jax.eval_shape(loss_fn, variables, batch, None)[0], []
  )


MULTIPLES = strategies.integers(-20, 20).map(lambda x: x / 4)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=strategies.data())
def test_rows_do_not_depend_on_the_split(spec, data):
  draw = data.draw
  lists = functools.partial(strategies.lists, min_size=B, max_size=B)
  x = np.float32([draw(lists(MULTIPLES)) for _ in range(STEPS)])
  weights = lists(strategies.sampled_from([0, 0, 1, 2]))
  weight = np.float32([draw(weights) for _ in range(STEPS)])
  good = draw(
    strategies.lists(strategies.booleans(), min_size=STEPS, max_size=STEPS)
  )
  sizes = draw(strategies.sampled_from([(1, 1), (2, 4), (8, 1)]))
  microbatches = draw(strategies.sampled_from([1, 2]))
  resumes = draw(strategies.sets(strategies.integers(1, STEPS)))
  devices = jax.devices()[: sizes[0] * sizes[1]]
  mesh = sharding.make_mesh(*sizes, devices=devices)
  replicated = sharding.replicated(mesh)
  now = jax.device_put(running_metrics.zeros(spec), replicated)
  # The values of an earlier row must not count.
  for number in (0, *range(1, STEPS + 1)):
    i = max(number - 1, 0)
    is_good = number == 0 or good[i]
    # A skipped step may have values that are not finite.
    batch = {
      "x": x[i] if is_good else np.full(B, np.nan, np.float32),
      "weight": weight[i],
    }
    scale, *flags = jax.device_put(
      (np.float32(number), np.int32(number), np.bool_(is_good)), replicated
    )
    batch = jax.device_put(batch, sharding.batch(mesh))
    first = jax.device_put(np.bool_(number <= 1), replicated)
    now = step_fn(microbatches, mesh)(now, scale, batch, *flags, first)
    if number in resumes:
      saved = json.loads(
        json.dumps(running_metrics.to_host(jax.device_get(now)))
      )
      now = running_metrics.from_host(saved, spec, mesh)
  row = running_metrics.log_values(jax.device_get(now))
  if any(good):
    last = max(i for i in range(STEPS) if good[i]) + 1
    assert_equal(row, expected(x[good], weight[good], last))
  else:
    assert not row.keys() & {"mean", "sum", "bins"}


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
  x=strategies.lists(MULTIPLES, min_size=1, max_size=30), data=strategies.data()
)
def test_evaluations_do_not_depend_on_the_batches(x, data):
  weights = strategies.sampled_from([0.0, 1.0, 2.0])
  weight = data.draw(strategies.lists(weights, min_size=len(x)))[: len(x)]
  cuts = data.draw(strategies.sets(strategies.integers(1, len(x))))
  bounds = sorted({0, len(x), *cuts})
  x, weight = np.float32(x), np.float32(weight)
  parts = [
    jax.device_get(measured(jnp.array(x[a:b]), jnp.array(weight[a:b]), b))
    for a, b in zip(bounds, bounds[1:])
  ]
  values = metrics.host_values(parts)
  assert_equal(values, expected(x, weight, len(x)))
  # Merging on the device gives the same.
  merged = jax.device_get(functools.reduce(metrics.merge, parts))
  assert_equal(metrics.host_values([merged]), expected(x, weight, len(x)))


def test_a_tally_of_an_older_checkpoint_restores(spec):
  """Pairs keep their names; metrics that it lacks start without values."""
  mesh = sharding.make_mesh()
  saved = {
    "sums/steps": 2.0,
    "sums/grad_norm": 3.0,
    "sums/pairs/loss/0": 6.0,
    "sums/pairs/loss/1": 4.0,
    "last/loss_last": 1.0,
    "norms/values": [],
  }
  restored = running_metrics.from_host(saved, spec, mesh)
  row = running_metrics.log_values(jax.device_get(restored))
  assert row["loss"] == 1.5 and row["grad_norm"] == 1.5
  assert np.isnan([row["max"], row["last"], row["mean"]]).all()
  assert row["bins"].counts.sum() == 0


def test_nan_reaches_extremes_and_no_bin():
  x = jnp.array([1.0, np.nan, -9.0, 9.0])
  values = metrics.host_values([jax.device_get(measured(x, None, x[1]))])
  assert np.isnan([values[n] for n in ("max", "min", "last", "sum")]).all()
  assert list(values["bins"].counts) == [1, 0, 0, 0, 1, 0, 0, 1]
  # Padding may hold anything.
  weight = jnp.array([1.0, 0.0, 1.0, 1.0])
  values = metrics.host_values([jax.device_get(measured(x, weight, 0))])
  assert values["max"] == 9 and values["min"] == -9 and values["sum"] == 1


def test_what_is_no_metric_is_an_error():
  for value, kind in ((jnp.zeros(()), "ArrayImpl"), ([1.0, 2.0], "list")):
    with pytest.raises(ConfigError, match=f"metric 'acc' is {kind}; expected"):
      running_metrics.spec({"loss": (0.0, 1.0), "acc": value}, [])
  with pytest.raises(ConfigError, match="metric 'loss' is Sum; expected a"):
    running_metrics.spec({"loss": metrics.Sum.of(jnp.ones(1))}, [])
  evaluator = lambda: evaluating.build(
    "mean",
    lambda variables, batch: {"mean_id": batch["id"].mean()},
    data=dict(type="arrays", arrays=dict(id=np.arange(8))),
  ).run({}, 1)
  with pytest.raises(ConfigError, match=r"evals.val.pred: metric 'mean_id' is"):
    evaluator()
  with pytest.raises(ValueError, match="0 bins"):
    metrics.Histogram.of(jnp.ones(1), bins=0)


def test_rows_of_a_run_with_every_kind(tiny_config, tmp_path):
  path = "tiny.mine"
  changes = {
    "task": path,
    "model_name": path,
    "model": {},
    "input.data": dict(type=path, length=64),
    "input.pp": "",
    "input.shuffle": False,
    "evals": {},
    "log_steps": 3,
    "total_steps": 6,
  }
  config = tiny_config(changes)
  size = config["input"]["batch_size"]
  main.train(config | {"stop_at_steps": 5}, str(tmp_path))
  main.train(config, str(tmp_path))  # Resumes in the middle of a row.
  row = tiny.rows(tmp_path)[6]
  x = np.arange(3 * size, 6 * size) % 64
  assert row["seen"] == x.mean() and row["largest"] == x.max()
  assert row["values"] == "media/values/00000006.json"
  histogram = json.loads((tmp_path / row["values"]).read_text())
  assert histogram["edges"] == [0, 32, 64, 96, 128]
  counts = [(x <= 32).sum(), ((x > 32) & (x <= 64)).sum(), 0, 0]
  assert histogram["counts"] == counts


@pytest.mark.parametrize("shape", ["numbers", "multi-hot"])
def test_scores_that_are_not_finite_are_no_hits(shape):
  rng = np.random.default_rng(0)
  special = np.float32([np.nan, np.inf, -np.inf])
  scores_BC = rng.integers(0, 3, size=(400, 6)).astype(np.float32)
  where = rng.random(scores_BC.shape) < 0.2
  scores_BC[where] = rng.choice(special, size=where.sum())
  scores_BC[:3] = special[:, None]
  label_B = rng.integers(0, 6, size=400)
  label_B[:3] = 0
  labels = label_B if shape == "numbers" else np.eye(6, dtype="f")[label_B]
  for k in (1, 3, 6):
    expected = []
    for scores, label in zip(scores_BC.tolist(), label_B):
      before = [s > scores[label] for s in scores]
      before = sum(before) + scores[:label].count(scores[label])
      unknown = any(math.isnan(s) or s == math.inf for s in scores)
      expected.append(not unknown and scores[label] > -math.inf and before < k)
    hits = metrics.top_k_hits(jnp.asarray(scores_BC), jnp.asarray(labels), k)
    np.testing.assert_array_equal(hits, expected)
    assert 0 < np.mean(expected) < 1


def test_results_lack_faults_that_are_zero():
  faults = metrics.Faults.of(jnp.asarray([True, False, True]))
  none = metrics.Faults.of(jnp.asarray([False]))
  batches = [{"a": none, "b": none}, {"a": faults, "b": none}]
  assert metrics.host_values(batches) == {"a": 2.0}
  assert metrics.merge(*batches)["a"].total == 2
