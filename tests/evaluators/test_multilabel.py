"""Metrics of several labels against scikit-learn."""

import warnings

import numpy as np
import pytest
from tiny.evaluating import build, context

from bigtrain import sharding
from bigtrain.arrays.types import ClassCount
from bigtrain.config.errors import ConfigError
from bigtrain.evaluators import multilabel

pytestmark = pytest.mark.golden


@pytest.fixture(scope="module")
def sklearn():
  return pytest.importorskip("sklearn.metrics")


N, C = 45, 6  # Batches of 8: the last has 5 examples.
RNG = np.random.default_rng(0)
# Multiples of 1/2, so that many are equal.
LOGITS = np.round(RNG.normal(size=(N, C)) * 2).astype(np.float32) / 2
LABELS = (LOGITS + RNG.normal(size=(N, C)) * 2 > 1).astype(np.int32)
LABELS[:, 3] = 0  # A class without examples,
LABELS[:, 4] = 1  # one without counterexamples,
LOGITS[:, 5] = -1.0  # and one that is never predicted.


def data(**changes):
  arrays = dict(x=LOGITS, labels=LABELS) | changes
  return dict(type="arrays", arrays=arrays)


def predict(variables, batch):
  return batch["x"]


@pytest.mark.parametrize("mesh", [(1, 8), (8, 1)])
@pytest.mark.parametrize("threshold", [0.5, 0.3])
def test_metrics_are_scikit_learns(sklearn, mesh, threshold):
  of = context(mesh=sharding.make_mesh(*mesh))
  results = build(
    "multilabel", predict, of, data=data(), threshold=threshold
  ).run({}, 1)
  scores = LOGITS.astype(np.float64)
  predicted = 1 / (1 + np.exp(-scores)) > threshold
  expected = {}
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for name, average in (("", "macro"), ("_micro", "micro")):
      options = dict(average=average, zero_division=0)
      p, r, f1, _ = sklearn.precision_recall_fscore_support(
        LABELS, predicted, **options
      )
      expected |= {f"precision{name}": p, f"recall{name}": r, f"f1{name}": f1}
    known = LABELS.any(0)
    expected["mAP"] = sklearn.average_precision_score(
      LABELS[:, known], scores[:, known]
    )
    known &= ~LABELS.all(0)
    expected["auc"] = sklearn.roc_auc_score(LABELS[:, known], scores[:, known])
  assert results == pytest.approx(expected, rel=1e-12)


def test_the_table_of_classes(sklearn):
  names = ["cat", "dog", "owl", "none", "all", "rare"]
  of = context(
    class_names={"labels": names},
    vocab_sizes={"labels": ClassCount(C, "model.num_classes")},
  )
  options = dict(per_class=True, trust_class_numbers=True)
  results = build("multilabel", predict, of, data=data(), **options).run({}, 1)
  rows = {row["class"]: row for row in results["classes"].rows}
  assert list(rows) == names
  auc = sklearn.roc_auc_score(LABELS[:, 1], LOGITS[:, 1])
  assert rows["dog"]["auc"] == round(auc, 4)
  assert rows["dog"]["examples"] == LABELS[:, 1].sum()
  assert rows["none"]["ap"] is None and rows["none"]["examples"] == 0
  assert rows["all"]["ap"] == 1.0 and rows["all"]["auc"] is None
  assert rows["rare"]["precision"] == 0.0


def test_random_scores_with_ties(sklearn):
  for seed in range(20):
    rng = np.random.default_rng(seed)
    n = rng.integers(2, 60)
    scores = rng.integers(0, rng.integers(1, 30), n) / 7.0
    labels = rng.random(n) < 0.4
    labels[:2] = True, False
    ap, auc = multilabel.average_precision_and_auc(scores, labels)
    assert ap == pytest.approx(sklearn.average_precision_score(labels, scores))
    assert auc == pytest.approx(sklearn.roc_auc_score(labels, scores))


def test_logits_that_are_not_finite():
  values = LOGITS.copy()
  values[3, 1], values[4] = np.nan, np.inf
  results = build("multilabel", predict, data=data(x=values)).run({}, 1)
  assert results["nonfinite"] == 2
  values[4] = -np.inf
  lower = build("multilabel", predict, data=data(x=values)).run({}, 1)
  assert lower["recall_micro"] == results["recall_micro"]
  assert np.isnan([results["mAP"], results["auc"], results["f1"]]).all()


def test_mistakes():
  numbers = data(labels=np.zeros(N, np.int32))
  of = context(vocab_sizes={"labels": ClassCount(C, "model.num_classes")})
  for options, message in (
    (dict(data=numbers), r"label_key: 'labels' has the shape \(8,\); expected"),
    (dict(data=data(), threshold=1.5), r"val.threshold: expected"),
    (dict(data=data(), label_key="label"), r"'label'.* mean 'labels'"),
  ):
    with pytest.raises(ConfigError, match=message):
      build("multilabel", predict, of, **options).run({}, 1)


def test_extreme_thresholds():
  for threshold, share in ((0.0, 1.0), (1.0, 0.0)):
    evaluator = build("multilabel", predict, data=data(), threshold=threshold)
    assert evaluator.run({}, 1)["recall_micro"] == share
