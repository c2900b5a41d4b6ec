"""Few-shot probes against ridge regression in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import rounding
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.evaluators import fewshot

pytestmark = pytest.mark.golden

RNG = np.random.default_rng(0)
VARIABLES = {"scale": jnp.float32(1.0)}


def context(**changes):
  values = dict(mesh=sharding.make_mesh(2, 4), batch_size=16)
  return evaluating.context(**values | changes)


def arrays(**columns):
  return dict(type="arrays", arrays=columns)


C, D = 3, 12
CENTRES = RNG.normal(size=(C, D)) * 0.7


def examples(n):
  y = RNG.integers(0, C, size=n)
  x = CENTRES[y] + RNG.normal(size=(n, D)) * RNG.uniform(0.1, 5, size=D)
  return x.astype(np.float32), y


TRAIN, TEST = examples(61), examples(43)
FEW = dict(
  data=arrays(x=TRAIN[0], label=TRAIN[1]),
  test_data=arrays(x=TEST[0], label=TEST[1]),
)


def features(variables, batch):
  return variables["scale"] * batch["x"]


def build(**options):
  return evaluating.build("fewshot", features, context(), **FEW | options)


def ridge_accuracy(x, y, test_x, test_y, l2):
  """Accuracy of the textbook formula, in float64; the bias has no penalty."""
  mean, std = x.mean(0), x.std(0) + 1e-5
  x, test_x = (x - mean) / std, (test_x - mean) / std
  targets = 2.0 * np.eye(C)[y] - 1
  x = np.concatenate([x, np.ones((len(x), 1))], 1).astype(np.float64)
  test_x = np.concatenate([test_x, np.ones((len(test_x), 1))], 1)
  penalty = l2 * np.diag([1.0] * D + [0.0])
  weights = np.linalg.solve(x.T @ x + penalty, x.T @ targets)
  scores = test_x @ weights
  # float32 is off by epsilon times the condition of the matrix, 1e-5.
  assert (rounding.leads(scores) > 1e-4).all()
  return (np.argmax(scores, 1) == test_y).mean()


# More examples than features (11 shots), and fewer (2).
@pytest.mark.parametrize("shots", [2, 11])
def test_probes_are_ridge_regression(shots):
  results = build(shots=(shots,), l2=(3.0,), seeds=2).run(VARIABLES, 1)
  expected = []
  for seed in range(2):
    chosen, _ = fewshot._draw(TRAIN[1], shots, seed)
    x, y = TRAIN[0][chosen], TRAIN[1][chosen]
    assert np.array_equal(np.bincount(y), [shots] * C)
    expected.append(ridge_accuracy(x, y, *TEST, 3.0))
  assert results[f"{shots}shot"] == pytest.approx(np.mean(expected))
  assert results[f"{shots}shot_std"] == pytest.approx(np.std(expected))
  assert np.mean(expected) > 1 / C


def test_the_seed_determines_the_shots():
  first, others = fewshot._draw(TRAIN[1], 4, seed=0)
  assert sorted([*first, *others]) == list(range(61))
  np.testing.assert_array_equal(first, fewshot._draw(TRAIN[1], 4, seed=0)[0])
  assert set(first) != set(fewshot._draw(TRAIN[1], 4, seed=1)[0])
  more, _ = fewshot._draw(TRAIN[1], 6, seed=0)
  assert set(first) < set(more)
  everything, none = fewshot._draw(TRAIN[1], 99, seed=0)
  assert len(everything) == 61 and not len(none)


def test_the_penalty_is_chosen_on_training_examples():
  l2 = (1e-3, 30.0, 1e3)
  results = build(shots=(5,), l2=l2, seeds=1).run(VARIABLES, 1)
  chosen, others = fewshot._draw(TRAIN[1], 5, seed=0)
  shots = TRAIN[0][chosen], TRAIN[1][chosen]
  tuning = TRAIN[0][others], TRAIN[1][others]
  best = max(l2, key=lambda p: ridge_accuracy(*shots, *tuning, p))
  assert results == {
    "5shot": pytest.approx(ridge_accuracy(*shots, *TEST, best)),
    "5shot_l2": pytest.approx(best),
  }


def test_examples_without_a_label_do_not_count():
  x = np.concatenate([TEST[0], 100 + TEST[0]])
  y = np.concatenate([TEST[1], np.full(len(TEST[1]), -1)])
  results, expected = (
    build(**test_data, shots=(5,), seeds=1).run(VARIABLES, 1)
    for test_data in ({"test_data": arrays(x=x, label=y)}, {})
  )
  assert results == expected
  unlabelled = arrays(x=x, label=np.full(len(x), -1))
  with pytest.raises(DataError, match="no example has a label"):
    build(data=unlabelled).run(VARIABLES, 1)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(shots=(0,)), "val.shots: expected a whole number at least 1, got 0"),
    (dict(l2=()), "val.l2: expected a list of numbers"),
    (dict(l2=(0,)), "val.l2: expected a number above 0, got 0"),
    (dict(seeds=0), "val.seeds: expected a whole number at least 1, got 0"),
    (dict(label_key="lable"), "no feature 'lable'.* mean 'label'"),
    (dict(shots=(99,), l2=(1, 2)), "99 shots leave no training examples"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    build(**options).run(VARIABLES, 1)


def test_features_that_are_not_finite_are_wrong_and_counted():
  x, y = TEST[0].copy(), np.zeros(len(TEST[1]), int)
  good = build(test_data=arrays(x=x, label=y), shots=(5,), seeds=1)
  expected = good.run(VARIABLES, 1)["5shot"]
  assert expected > 0
  test_data = arrays(x=np.concatenate([x, x * np.nan]), label=np.tile(y, 2))
  results = build(test_data=test_data, shots=(5,), seeds=1).run(VARIABLES, 1)
  assert results == {"5shot": pytest.approx(expected / 2), "nonfinite": len(y)}
