"""Linear probes against scikit-learn."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import linear_model, metrics, preprocessing
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.evaluators import linear_probe

pytestmark = pytest.mark.golden

RNG = np.random.default_rng(0)
VARIABLES = {"scale": jnp.float32(1.0)}
C, D = 5, 6
CENTRES = RNG.normal(size=(C, D))


def examples(*shape):
  y = RNG.integers(0, C, size=shape)
  x = CENTRES[y] + RNG.normal(size=(*shape, D)) * RNG.uniform(0.5, 3, size=D)
  return x.astype(np.float32), y


TRAIN, TEST = examples(101), examples(61)


def arrays(x, y):
  return dict(type="arrays", arrays=dict(x=x, label=y))


def features(variables, batch):
  return variables["scale"] * batch["x"]


def build(train=TRAIN, test=TEST, mesh=(2, 4), **options):
  context = evaluating.context(mesh=sharding.make_mesh(*mesh), batch_size=16)
  splits = dict(data=arrays(*train), test_data=arrays(*test))
  return evaluating.build("linear_probe", features, context, **splits | options)


def fitted(x, y, l2):
  """scikit-learn's model, and the scaling of its input."""
  scaler = preprocessing.StandardScaler().fit(x)
  model = linear_model.LogisticRegression(C=1 / l2, tol=1e-8, max_iter=9999)
  return model.fit(scaler.transform(x), y), scaler.transform


def clear(logits):
  """Rows of logits whose first and whose first three classes are clear.

  L-BFGS ends where the mean loss is flat but for the rounding of float32, 1e-7.
  Its curvature is at least l2 / 101 >= 0.001. So the weights are off by up to
  (2e-7 / 0.001) ** 0.5 = 0.014, and logits by a few times that.
  """
  ranked = -np.sort(-logits, axis=-1)
  return (ranked[..., [0, 2]] - ranked[..., [1, 3]] > 0.1).all(-1)


def clear_test(l2):
  """The examples of TEST whose predictions rounding does not change."""
  model, scaled = fitted(*TRAIN, l2)
  chosen = clear(model.decision_function(scaled(TEST[0])))
  assert chosen.sum() > 30
  return [a[chosen] for a in TEST]


def expected(x, y, test_x, test_y, l2):
  model, scaled = fitted(x, y, l2)
  probabilities = model.predict_proba(scaled(test_x))
  return {
    "acc": metrics.accuracy_score(test_y, probabilities.argmax(1)),
    "top3_acc": metrics.top_k_accuracy_score(test_y, probabilities, k=3),
    "loss": metrics.log_loss(test_y, probabilities),
  }


# Slices of 16 examples: the last one is mostly padding.
@pytest.mark.parametrize(("mesh", "l2"), [((2, 4), 0.1), ((1, 8), 10.0)])
def test_probes_are_scikit_learns(mesh, l2, monkeypatch):
  monkeypatch.setattr(linear_probe, "_SLICE_ROWS", 16)
  test = clear_test(l2)
  results = build(mesh=mesh, test=test, l2=(l2,), top_k=(1, 3, 99)).run(
    VARIABLES, 1
  )
  assert results == pytest.approx(expected(*TRAIN, *test, l2), rel=1e-3)
  assert 1.5 / C < results["acc"] < results["top3_acc"] < 1


def test_the_penalty_is_chosen_on_training_examples():
  l2 = (0.3, 30.0, 1e6)
  held = np.random.default_rng(0).permutation(101) % 10 == 0
  train, tuning = [[a[rows] for a in TRAIN] for rows in (~held, held)]

  def hits(p):
    model, scaled = fitted(*train, p)
    return (model.predict(scaled(tuning[0])) == tuning[1]).sum()

  second, most = sorted(map(hits, l2))[-2:]
  assert most > second + 1  # Whatever the class of one unclear example.
  best = max(l2, key=hits)
  test = clear_test(best)
  results = build(test=test, l2=l2, top_k=(3,)).run(VARIABLES, 1)
  assert results.pop("l2") == best
  assert results == pytest.approx(expected(*TRAIN, *test, best), rel=1e-3)


def test_examples_that_are_not_finite_train_nothing_and_are_wrong():
  x, y = (np.concatenate([a, a[:9]]) for a in TRAIN)
  x[-9:], y[-2:] = np.nan, -1
  test = clear_test(1.0)
  number = len(test[1])
  test_x, test_y = (np.concatenate([a, a]) for a in test)
  test_x[number:] = np.inf
  results = build((x, y), (test_x, test_y), top_k=(3,)).run(VARIABLES, 1)
  one = expected(*TRAIN, *test, 1.0)
  assert results["acc"] == pytest.approx(one["acc"] / 2)
  assert results["top3_acc"] == pytest.approx(one["top3_acc"] / 2)
  assert np.isnan(results["loss"]) and results["nonfinite"] == 7 + number
  results = build(top_k=(3,)).run({"scale": jnp.float32(np.nan)}, 1)
  assert results["acc"] == results["top3_acc"] == 0
  assert results["nonfinite"] == len(TRAIN[1]) + len(TEST[1])


def test_patches_are_segmented_as_by_scikit_learn():
  """Of 3 x 4 patches with 2 x 2 equal pixels; 255 does not count."""
  (x, y), (test_x, test_y) = examples(9, 3, 4), examples(5, 3, 4)
  pixels, test_pixels = (np.kron(a, np.ones((2, 2), int)) for a in (y, test_y))
  pixels[:2] = test_pixels[0, :3] = 255
  model, scaled = fitted(x[2:].reshape(-1, D), y[2:].reshape(-1), 1.0)
  logits = model.decision_function(scaled(test_x.reshape(-1, D)))
  logits = logits.reshape(5, 3, 4, C)
  for axis, size in ((1, 3), (2, 4)):  # Bilinear, aligned at half pixels.
    at = np.clip((np.arange(2 * size) + 0.5) / 2 - 0.5, 0, size - 1)
    low = np.minimum(at.astype(int), size - 2)
    part = (at - low).reshape([-1 if a == axis else 1 for a in range(4)])
    logits = (
      np.take(logits, low, axis) * (1 - part)
      + np.take(logits, low + 1, axis) * part
    )
  test_pixels[~clear(logits)] = 255
  real = test_pixels != 255
  assert real.mean() > 0.5
  truth, best = test_pixels[real], logits.argmax(-1)[real]
  results = build((x, pixels), (test_x, test_pixels), ignore=255).run(
    VARIABLES, 1
  )
  miou = metrics.jaccard_score(truth, best, average="macro")
  assert results == pytest.approx({"miou": miou, "acc": (truth == best).mean()})
  assert 1 / C < miou < 1
  with pytest.raises(ConfigError, match="12 patches are not a square"):
    build((x.reshape(9, 12, D), pixels)).run(VARIABLES, 1)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(l2=(-1,)), "val.l2: expected a number at least 0, got -1"),
    (dict(max_steps=0), "val.max_steps: expected a whole number at least 1"),
    (dict(label_key="labl"), "no feature 'labl'.* mean 'label'"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    build(**options).run(VARIABLES, 1)
