"""Votes of neighbours against scikit-learn."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import neighbors
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config.errors import ConfigError

pytestmark = pytest.mark.golden

RNG = np.random.default_rng(0)
VARIABLES = {"scale": jnp.float32(1.0)}
C, D = 7, 5
CENTRES = RNG.normal(size=(C, D))


def examples(n):
  y = RNG.integers(0, C, size=n)
  x = CENTRES[y] + 0.9 * RNG.normal(size=(n, D))
  return x.astype(np.float32), y


TRAIN = examples(90)


def clear(x, train_x):
  """Which examples have neighbours and votes that rounding does not change.

  It changes cosines by 2e-7, and votes by as much divided by the temperature.
  """
  unit = lambda a: a / np.linalg.norm(a, axis=1, keepdims=True)
  cosines = unit(x.astype(np.float64)) @ unit(train_x.astype(np.float64)).T
  result = np.ones(len(x), bool)
  for k, temperature in itertools.product((1, 5, 40), (0.07, 1.0)):
    nearest = np.argsort(-cosines, axis=1)[:, : k + 1]
    near = np.take_along_axis(cosines, nearest, 1)
    result &= near[:, k - 1] - near[:, k] > 1e-5
    weights = np.exp((near[:, :k] - 1) / temperature)
    votes = weights[..., None] * np.eye(C)[TRAIN[1][nearest[:, :k]]]
    votes = -np.sort(-votes.sum(1) / weights.sum(1, keepdims=True))
    for top in (1, 3):
      apart = votes[:, top - 1] - votes[:, top] > 1e-4
      result &= apart | (votes[:, top] == 0)
  return result


def clear_examples(n):
  """Examples that are clear by all of their features, and by the first two."""
  x, y = examples(2 * n)
  chosen = clear(x, TRAIN[0]) & clear(x[:, :2], TRAIN[0][:, :2])
  x, y = x[chosen][:n], y[chosen][:n]
  assert len(y) == n
  return x, y


TEST = clear_examples(61)


def arrays(x, y):
  return dict(type="arrays", arrays=dict(x=x, label=y))


def features(variables, batch):
  return variables["scale"] * batch["x"]


def build(mesh=(2, 4), of=features, **options):
  context = evaluating.context(mesh=sharding.make_mesh(*mesh), batch_size=16)
  few = dict(data=arrays(*TRAIN), test_data=arrays(*TEST))
  return evaluating.build("knn", of, context, **few | options)


def expected(k, temperature, top, train=TRAIN, test=TEST):
  """Accuracy by scikit-learn; its cosine distance is 1 - cosine."""
  model = neighbors.KNeighborsClassifier(
    k, metric="cosine", weights=lambda d: np.exp((1 - d) / temperature)
  )
  probabilities = model.fit(*train).predict_proba(test[0])
  best = model.classes_[np.argsort(-probabilities, axis=1, kind="stable")]
  voted = np.sort(-probabilities, axis=1)[:, :top] < 0
  return ((best[:, :top] == test[1][:, None]) & voted).any(1).mean()


# The whole batch on eight devices, or two rows of the mesh with the same rows.
@pytest.mark.parametrize("mesh", [(2, 4), (1, 8)])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_votes_are_scikit_learns(mesh, temperature):
  results = build(
    mesh, k=(1, 5, 40), top_k=(1, 3, 99), temperature=temperature
  ).run(VARIABLES, 1)
  assert results == {
    f"{k}nn_{name}": pytest.approx(expected(k, temperature, top))
    for k in (1, 5, 40)
    for top, name in ((1, "acc"), (3, "top3_acc"))
  }
  assert 1 / C < results["5nn_acc"] < results["5nn_top3_acc"] < 1


def test_layers_have_results_of_their_own():
  def layers(variables, batch):
    return {"all": batch["x"], "first": batch["x"][:, :2]}

  results = build(of=layers, k=(5,), top_k=(1,)).run(VARIABLES, 1)
  first = [(x[:, :2], y) for x, y in (TRAIN, TEST)]
  assert results == {
    "all/5nn_acc": pytest.approx(expected(5, 0.07, 1)),
    "first/5nn_acc": pytest.approx(expected(5, 0.07, 1, *first)),
  }


def test_examples_without_a_label_or_that_are_not_finite():
  x, y = (np.concatenate([a, a[:9]]) for a in TRAIN)
  x[-9:] = np.nan  # They have no vote.
  y[-2:] = -1
  test_x, test_y = (np.tile(a.T, 2).T for a in TEST)
  test_x[61:] = np.inf
  given = dict(data=arrays(x, y), test_data=arrays(test_x, test_y))
  results = build(**given, k=(5,), top_k=(1,)).run(VARIABLES, 1)
  assert results == {
    "5nn_acc": pytest.approx(expected(5, 0.07, 1) / 2),
    "nonfinite": 7 + 61,
  }


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(k=(0,)), "val.k: expected a whole number at least 1, got 0"),
    (dict(temperature=0), "val.temperature: expected a number above 0"),
    (dict(k=(91,)), "val.k: 91 neighbours, but 90 training examples"),
    (dict(label_key="labl"), "no feature 'labl'.* mean 'label'"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    build(**options).run(VARIABLES, 1)


def test_training_and_test_examples_have_noise_of_their_own():
  """Example i of both would be neighbours if they had the same noise."""
  arrays = dict(image=np.zeros((20, 8, 8, 1), np.uint8), label=np.arange(20))
  evaluator = evaluating.build(
    "knn",
    lambda variables, batch: batch["image"],
    data=dict(type="arrays", arrays=arrays),
    test_data=dict(type="arrays", arrays=arrays),
    pp="random_background(1)|value_range(-1,1,0,1)",
    k=(1,),
    top_k=(1,),
  )
  assert evaluator.run(VARIABLES, 0)["1nn_acc"] < 0.5
