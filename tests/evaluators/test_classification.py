"""Accuracy and loss of classifiers against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny.evaluating import build, context

from bigtrain import sharding
from bigtrain.config.errors import ConfigError

pytestmark = pytest.mark.golden

N, C = 21, 7  # Batches of 8: the last has 5 examples.
RNG = np.random.default_rng(0)
# With ties, and rows whose best class is not the first one.
LOGITS = RNG.integers(-3, 4, size=(N, C)).astype(np.float32)
LABELS = RNG.integers(0, C, size=N)
DATA = dict(
  type="arrays",
  arrays=dict(x=LOGITS, labels=LABELS, id=np.arange(N) + 100),
)


def predict(variables, batch):
  """The logits are in the data."""
  return variables["scale"] * batch["x"]


VARIABLES = {"scale": jnp.float32(1.0)}


def cross_entropy(logits, labels):
  shifted = logits - logits.max(-1, keepdims=True)
  log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  return -(log_probs * labels).sum(-1)


def top_k(logits, labels, k):
  """Of equal logits the lower class comes first."""
  best = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
  return np.mean([label in row for row, label in zip(best, labels)])


@pytest.mark.parametrize(
  ("mesh", "batch_size"),
  [
    *(((1, 8), 8), ((2, 4), 16), ((8, 1), 32)),
    *(
      pytest.param(mesh, size, marks=pytest.mark.slow)
      for mesh, size in (
        *(((1, 8), 16), ((1, 8), 32), ((2, 4), 8)),
        *(((2, 4), 32), ((8, 1), 8), ((8, 1), 16)),
      )
    ),
  ],
)
def test_results_are_exact_for_any_mesh_and_batch_size(mesh, batch_size):
  evaluator = build(
    "classification",
    predict,
    context(mesh=sharding.make_mesh(*mesh), batch_size=batch_size),
    data=DATA,
    top_k=(1, 3, 5, 99),
  )
  results = evaluator.run(VARIABLES, step=1)
  one_hot = np.eye(C)[LABELS]
  assert results == pytest.approx(
    {
      "loss": cross_entropy(LOGITS, one_hot).mean(),
      "acc": top_k(LOGITS, LABELS, 1),
      "top3_acc": top_k(LOGITS, LABELS, 3),
      "top5_acc": top_k(LOGITS, LABELS, 5),
    },
    rel=1e-6,
  )
  # A second run with other variables keeps nothing of the first.
  assert evaluator.run({"scale": jnp.float32(0)}, step=2)[
    "loss"
  ] == pytest.approx(np.log(C))


def test_several_labels_and_sigmoid():
  labels = RNG.integers(0, 2, size=(N, C)).astype(np.float32)
  arrays = dict(x=LOGITS, several=labels)
  results = build(
    "classification",
    predict,
    data=dict(type="arrays", arrays=arrays),
    loss="sigmoid_xent",
    label_key="several",
  ).run(VARIABLES, step=1)
  p = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
  loss = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).sum(-1).mean()
  hits = labels[np.arange(N), LOGITS.argmax(-1)].mean()
  assert results["loss"] == pytest.approx(loss, rel=1e-6)
  assert results["acc"] == pytest.approx(hits)
  assert set(results) == {"loss", "acc", "top5_acc"}


def test_num_examples():
  evaluator = build("classification", predict, data=DATA, num_examples=10)
  results = evaluator.run(VARIABLES, step=1)
  assert results["acc"] == pytest.approx(top_k(LOGITS[:10], LABELS[:10], 1))


def test_logits_of_low_precision_are_compared_in_float32():
  def low(variables, batch):
    return (batch["x"] * 100).astype(jnp.bfloat16)

  results = build("classification", low, data=DATA).run({}, 1)
  rounded = np.asarray((LOGITS * 100).astype(jnp.bfloat16), np.float32)
  loss = cross_entropy(rounded, np.eye(C)[LABELS]).mean()
  assert results["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(loss="softmax"), r"val.loss: .* mean 'softmax_xent'"),
    (dict(label_key="label"), r"evals.val: .*'label'.* mean 'labels'"),
    (dict(num_examples=99), r"val.num_examples: .* at most 21, got 99"),
    (dict(batch_size=12), r"config.evals.val.batch_size=12"),
    (dict(calibration_bins=-1), r"val.calibration_bins: expected"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    build("classification", predict, data=DATA, **options).run(VARIABLES, 1)


@pytest.mark.parametrize("loss", ["softmax_xent", "sigmoid_xent"])
def test_calibration_error_from_scikit_learns_curve(loss):
  """Guo et al. 2017 (arXiv 1706.04599), equation 3."""
  calibration = pytest.importorskip("sklearn.calibration")
  n, bins = 211, 15
  logits = RNG.normal(size=(n, C)).astype(np.float32) * 3
  labels = np.where(RNG.random(n) < 0.6, logits.argmax(-1), 0)
  labels[::10] = -1  # Have no label.
  labels[-1] = logits[-1].argmax()  # Padding repeats the last example.
  arrays = dict(x=logits, labels=labels)
  data = dict(type="arrays", arrays=arrays)
  if loss == "sigmoid_xent":
    arrays["labels"] = np.float32(np.eye(C)[labels]) * (labels >= 0)[:, None]
  options = dict(loss=loss, calibration_bins=bins)
  results = build("classification", predict, data=data, **options).run(
    VARIABLES, 1
  )
  logits, labels = logits[labels >= 0].astype(np.float64), labels[labels >= 0]
  p = np.exp(logits)
  p = p / p.sum(-1, keepdims=True) if loss == "softmax_xent" else p / (1 + p)
  hit, top = logits.argmax(-1) == labels, p.max(-1)
  true, predicted = calibration.calibration_curve(hit, top, n_bins=bins)
  counts, _ = np.histogram(top, np.linspace(0, 1, bins + 1))
  ece = np.sum(np.abs(true - predicted) * counts[counts > 0]) / len(top)
  assert results["ece"] == pytest.approx(ece, abs=1e-6) and ece > 0.02
  np.testing.assert_array_equal(results["confidence"].counts, counts)
  assert set(results) == {"acc", "top5_acc", "loss", "ece", "confidence"}


@pytest.mark.parametrize("labels", [np.zeros(N, int), LABELS])
def test_logits_that_are_not_finite_are_wrong_and_counted(labels):
  logits = LOGITS.copy()
  logits[[2, 5, 20], [0, 3, 6]] = np.nan, np.inf, np.nan
  logits[7, (labels[7] + 1) % C] = -np.inf  # A class that cannot be.
  data = dict(type="arrays", arrays=dict(x=logits, labels=labels))
  results = build("classification", predict, data=data).run(VARIABLES, 1)
  good = np.isin(np.arange(N), [2, 5, 20], invert=True)
  share = good.mean()
  assert results["nonfinite"] == 3
  for k, name in ((1, "acc"), (5, "top5_acc")):
    expected = share * top_k(logits[good], labels[good], k)
    assert results[name] == pytest.approx(expected)
  results = build("classification", predict, data=data).run(
    {"scale": jnp.float32(np.nan)}, 1
  )
  assert (results["acc"], results["top5_acc"]) == (0, 0)
  assert results["nonfinite"] == N
