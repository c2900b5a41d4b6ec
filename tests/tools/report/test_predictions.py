"""Predictions that the evaluator `save` has written."""

import re

import numpy as np
import pytest

from bigtrain.tools.report import predictions
from bigtrain.tools.report.panels import Run

LABELS = np.array([0, 0, 0, 1, 1, 2, -1])
ANSWERS = np.array([0, 0, 1, 1, 1, 0, 2])
LOGITS = 3.0 * np.eye(3)[ANSWERS] + np.arange(7)[:, None]
IMAGES = np.arange(7 * 4 * 4, dtype=np.float32).reshape(7, 4, 4, 1)
NAMES = ("cat", "dog", "<owl>")


@pytest.fixture
def write(tmp_path):
  (tmp_path / "predictions").mkdir()

  def call(step=10, name="val", **arrays):
    path = tmp_path / "predictions" / f"{name}-{step:08d}.npz"
    np.savez(path, **arrays)
    config = {"evals": {"val": {"class_names": NAMES}}}
    return Run("a", config, {}, [], str(tmp_path))

  return call


def test_the_confusion_matrix(write):
  run = write(predictions=LOGITS, labels=LABELS)
  (read,) = predictions.read(run)
  counts = predictions.confusion(read)
  assert counts == [(0, 0, 2), (1, 1, 2), (0, 1, 1), (2, 0, 1)]
  assert read.names == [*NAMES]
  np.testing.assert_allclose(
    read.probability_N, 1 / (1 + 2 * np.exp(-3)), rtol=1e-6
  )
  log_sum = np.log(1 + 2 * np.exp(-3))
  np.testing.assert_allclose(
    read.loss_N, log_sum + 3 * np.array([0, 0, 1, 0, 0, 1]), rtol=1e-5
  )


def test_logits_that_are_not_finite_are_no_class(write):
  logits = LOGITS.copy()
  logits[0] = np.nan  # Of class 0, which an argmax would give.
  run = write(predictions=logits, labels=LABELS)
  (read,) = predictions.read(run)
  assert (0, 3, 1) in predictions.confusion(read)
  assert read.names[3:] == ["(not finite)"]
  html = predictions.section(run)
  assert "6 examples, accuracy 0.5<" in html
  assert html.index("#0, loss inf") < html.index("#5, loss")


def test_one_hot_labels_and_several_predictions(write):
  one_hot = np.eye(3)[np.maximum(LABELS, 0)] * (LABELS >= 0)[:, None]
  arrays = {"predictions/logits": LOGITS, "labels": one_hot}
  (read,) = predictions.read(write(**arrays))
  np.testing.assert_array_equal(read.label_N, LABELS[:-1])
  # With several labels an example has no true class.
  one_hot[0, 1] = 1
  (read,) = predictions.read(write(**arrays | {"labels": one_hot}))
  np.testing.assert_array_equal(read.rows_N, [1, 2, 3, 4, 5])


def test_the_newest_step_of_each_evaluation(write):
  write(step=9, predictions=LOGITS, labels=LABELS)
  write(step=100, predictions=LOGITS, labels=LABELS)
  run = write(step=5, name="a-b", predictions=LOGITS, labels=LABELS)
  read = [(p.evaluation, p.step) for p in predictions.read(run)]
  assert sorted(read) == [("a-b", 5), ("val", 100)]


def test_the_page(write):
  run = write(predictions=LOGITS, labels=LABELS, image=IMAGES)
  html = predictions.section(run)
  assert "&lt;owl&gt;" in html and "<owl>" not in html
  assert "6 examples, accuracy 0.6667" in html
  # The worst class and the worst example come first.
  classes = html.partition("Most often taken for")[2]
  cells = re.findall(r"<td>([^<]*)</td>", classes)
  assert cells[:5] == ["&lt;owl&gt;", "1", "0.0%", "\N{EN DASH}", "cat (1)"]
  assert '<td style="background:rgba(213,94,0,0.35)' in html  # 1 of 3.
  assert re.findall(r"#(\d), loss", html) == ["2", "5", "0", "1", "3", "4"]
  assert html.count("<img") == 6


def test_many_classes_have_a_table_of_pairs(write):
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 50, 500)
  logits = np.eye(50)[np.where(np.arange(500) < 7, 3, labels)]
  labels[:7] = 4
  html = predictions.section(write(predictions=logits, labels=labels))
  assert 'class="matrix"' not in html
  first = html.partition("<tbody>")[2]
  assert re.findall(r"<td>([^<]*)</td>", first)[:3] == ["4", "3", "7"]


@pytest.mark.parametrize(
  "arrays",
  [
    {"predictions": LOGITS},
    {"predictions": LOGITS[:, 0], "labels": LABELS},
    {"predictions": LOGITS, "labels": LABELS * 0 - 1},
    {"predictions/embedding": LOGITS, "labels": LABELS},
  ],
)
def test_other_predictions_are_left_out(write, arrays):
  assert predictions.section(write(**arrays)) == ""


def test_a_run_without_predictions(tmp_path):
  assert predictions.section(Run("a", {}, {}, [], str(tmp_path))) == ""
