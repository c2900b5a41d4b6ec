"""What the evaluator `save` has written about a classifier, as HTML.

Legend: N examples, C classes.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain import metrics
from bigtrain.checkpoints import folders
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.reports import media
from bigtrain.tools.report import markup
from bigtrain.tools.report.panels import Run

# Largest number of classes for a confusion matrix. With more, the page lists
# the pairs that are confused most often.
_MAX_MATRIX = 30
_MAX_PAIRS = 30
_MAX_CLASSES = 1000  # In the table of classes.
_MAX_EXAMPLES = 24  # With the largest loss.
_LABEL_KEYS = ("labels", "label")
# The class that stands for logits with NaN or infinity.
_NOT_FINITE = "(not finite)"


class Predictions(NamedTuple):
  """Predictions of a classifier for labelled examples."""

  evaluation: str
  step: int
  label_N: np.ndarray
  predicted_N: np.ndarray
  probability_N: np.ndarray  # Of the predicted class.
  loss_N: np.ndarray  # Negative logarithm of the true class's probability.
  rows_N: np.ndarray  # Index of each example in the data set.
  images: np.ndarray | None  # [all examples, height, width, channels].
  names: list[str]  # Of the C classes, and of logits that are not finite.


def section(run: Run) -> str:
  return "".join(map(_html, read(run)))


def read(run: Run) -> list[Predictions]:
  predictions = []
  for name, (step, path) in newest(run.workdir, "predictions", "npz").items():
    with np.load(path, allow_pickle=False) as file:
      arrays = dict(file)
    if read_one := _read(name, step, arrays, run):
      predictions.append(read_one)
  return predictions


def newest(
  workdir: str, folder: str, suffix: str
) -> dict[str, tuple[int, str]]:
  """Returns {evaluation: (step, path)} of the newest files NAME-STEP.suffix."""
  path = os.path.join(workdir, folder)
  files = sorted(os.listdir(path)) if os.path.isdir(path) else []
  matches = [re.fullmatch(rf"(.+)-(\d{{8,}})\.{suffix}", f) for f in files]
  return {m[1]: (int(m[2]), os.path.join(path, m[0])) for m in matches if m}


def _read(
  evaluation: str, step: int, arrays: dict[str, np.ndarray], run: Run
) -> Predictions | None:
  """The predictions in a file; None unless they are logits with labels."""
  options = (run.config.get("evals") or {}).get(evaluation, {})
  logits = arrays.get("predictions", arrays.get("predictions/logits"))
  keys = [key for key in _LABEL_KEYS if key in arrays]
  if logits is None or logits.ndim != 2 or not keys:
    return None
  labels = arrays[keys[0]]
  if labels.ndim == 2:
    is_one_hot = (labels > 0).sum(axis=1) == 1  # Multi-hot has no true class.
    labels = np.where(is_one_hot, labels.argmax(axis=1), -1)
  num_classes = logits.shape[1]
  if labels.ndim != 1 or len(labels) != len(logits):
    return None
  rows_N = np.flatnonzero((labels >= 0) & (labels < num_classes))
  if not len(rows_N):
    return None
  logits, label_N = logits[rows_N].astype(np.float32), labels[rows_N]
  names = _class_names(run.workdir, options, keys[0], num_classes)
  if not (ordered_N := metrics.has_order(logits)).all():
    names.append(_NOT_FINITE)
  with np.errstate(invalid="ignore"):
    logits -= logits.max(axis=1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  loss_N = -log_probs[np.arange(len(rows_N)), label_N.astype(np.int64)]
  images = None
  for array in arrays.values():
    if array.ndim == 4 and array.shape[-1] in (1, 3):
      images = array
      break
  return Predictions(
    evaluation=evaluation,
    step=step,
    label_N=label_N.astype(np.int64),
    predicted_N=np.where(ordered_N, log_probs.argmax(axis=1), num_classes),
    probability_N=np.exp(log_probs.max(axis=1)),
    loss_N=np.where(ordered_N, loss_N, np.inf),
    rows_N=rows_N,
    images=images,
    names=names,
  )


def _class_names(
  workdir: str, options: dict[str, Any], key: str, num_classes: int
) -> list[str]:
  """Class names of the config, else of the data, else numbers."""
  names = options.get("class_names")
  try:
    step = folders.newest(workdir)
    if not isinstance(names, list | tuple) and step is not None:
      manifest = folders.read_manifest(folders.find(workdir, step))
      known = manifest.host_state.data.get("class_names", {})
      names = known.get(key) or next(iter(known.values()), None)
  except (CheckpointError, OSError):
    names = None
  if isinstance(names, list | tuple) and len(names) == num_classes:
    return [str(name) for name in names]
  return [str(i) for i in range(num_classes)]


def confusion(predictions: Predictions) -> list[tuple[int, int, int]]:
  """Returns (true class, predicted class, number), largest numbers first."""
  size = len(predictions.names)
  pairs = predictions.label_N * size + predictions.predicted_N
  pairs, counts = np.unique(pairs, return_counts=True)
  order = np.argsort(-counts, kind="stable")
  columns = (pairs[order] // size, pairs[order] % size, counts[order])
  return list(zip(*(column.tolist() for column in columns)))


def _html(p: Predictions) -> str:
  counts = confusion(p)
  num_classes = len(p.names)
  matrix: list[list[int]] = []
  if num_classes <= _MAX_MATRIX:
    matrix = [[0] * num_classes for _ in range(num_classes)]
    for i, j, count in counts:
      matrix[i][j] = count
  wrong = [(i, j, count) for i, j, count in counts if i != j]
  classes = _per_class(p, wrong)
  worst = np.argsort(-p.loss_N, kind="stable")[:_MAX_EXAMPLES].tolist()
  return markup.render(
    "predictions.jinja",
    p=p,
    accuracy=np.mean(p.label_N == p.predicted_N),
    matrix=matrix,
    pairs=[
      (p.names[i], p.names[j], f"{n:,}") for i, j, n in wrong[:_MAX_PAIRS]
    ],
    classes=classes[:_MAX_CLASSES],
    more_classes=len(classes) - _MAX_CLASSES,
    worst=zip(worst, _pictures(p, worst)),
  )


def _per_class(
  p: Predictions, wrong: Sequence[tuple[int, int, int]]
) -> list[tuple[str | None, ...]]:
  """Texts about each class that has examples, the worst class first."""
  num_classes = len(p.names)
  is_right_N = p.label_N == p.predicted_N
  true_C = np.bincount(p.label_N, minlength=num_classes)
  predicted_C = np.bincount(p.predicted_N, minlength=num_classes)
  right_C = np.bincount(p.label_N[is_right_N], minlength=num_classes)
  recall_C = right_C / np.maximum(true_C, 1)
  precision_C = right_C / np.maximum(predicted_C, 1)
  # `wrong` begins with the largest numbers, which overwrite the others here.
  most_often = {i: f"{p.names[j]} ({n})" for i, j, n in reversed(wrong)}
  return [
    (
      p.names[i],
      f"{true_C[i]:,}",
      f"{recall_C[i]:.1%}",
      f"{precision_C[i]:.1%}" if predicted_C[i] else None,
      most_often.get(i, ""),
    )
    for i in np.lexsort((-true_C, recall_C)).tolist()
    if true_C[i]
  ]


def _pictures(p: Predictions, worst: Sequence[int]) -> list[bytes]:
  if p.images is None:
    return [b""] * len(worst)
  low, high = float(p.images.min()), float(p.images.max())
  images = p.images[p.rows_N[worst]].astype(np.float64)
  scaled = 255 * (images - low) / max(high - low, 1e-9)
  return [media.Image(x.round().astype(np.uint8)).png() for x in scaled]
