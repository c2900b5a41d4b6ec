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

_MOST_CLASSES = 30  # Of a whole confusion matrix.
_MOST_PAIRS = 30
_MOST_ROWS = 1000  # Of the table of classes.
_MOST_EXAMPLES = 24
_LABEL_KEYS = ("labels", "label")
_NO_ORDER = "(not finite)"


class Predictions(NamedTuple):
  """Predictions of a classifier for labelled examples."""

  evaluation: str
  step: int
  label_N: np.ndarray
  predicted_N: np.ndarray
  probability_N: np.ndarray  # Of the predicted class.
  loss_N: np.ndarray  # Negative logarithm of the true class's probability.
  rows_N: np.ndarray  # Place of each example in the data set.
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
    names.append(_NO_ORDER)
  with np.errstate(invalid="ignore"):
    logits -= logits.max(axis=1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  loss_N = -log_probs[np.arange(len(rows_N)), label_N.astype(np.int64)]
  images = (x for x in arrays.values() if x.ndim == 4 and x.shape[-1] in (1, 3))
  return Predictions(
    evaluation,
    step,
    label_N.astype(np.int64),
    np.where(ordered_N, log_probs.argmax(axis=1), num_classes),
    np.exp(log_probs.max(axis=1)),
    np.where(ordered_N, loss_N, np.inf),
    rows_N,
    next(images, None),
    names,
  )


def _class_names(
  workdir: str, options: dict[str, Any], key: str, num_classes: int
) -> list[str]:
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
  counts, number = confusion(p), len(p.names)
  has_matrix = number <= _MOST_CLASSES
  matrix = np.zeros((number, number) if has_matrix else (0, 0), int)
  for i, j, count in counts if has_matrix else ():
    matrix[i, j] = count
  wrong = [(i, j, count) for i, j, count in counts if i != j]
  classes = _per_class(p, wrong)
  worst = np.argsort(-p.loss_N, kind="stable")[:_MOST_EXAMPLES].tolist()
  return markup.render(
    "predictions.jinja",
    p=p,
    accuracy=np.mean(p.label_N == p.predicted_N),
    matrix=matrix.tolist(),
    pairs=[
      (p.names[i], p.names[j], f"{n:,}") for i, j, n in wrong[:_MOST_PAIRS]
    ],
    classes=classes[:_MOST_ROWS],
    more_classes=len(classes) - _MOST_ROWS,
    worst=zip(worst, _pictures(p, worst)),
  )


def _per_class(
  p: Predictions, wrong: Sequence[tuple[int, int, int]]
) -> list[tuple[str | None, ...]]:
  """A row of texts for each class that has examples, the worst first."""
  right_N = p.label_N[p.label_N == p.predicted_N]
  true_C, predicted_C, right_C = (
    np.bincount(x, minlength=len(p.names))
    for x in (p.label_N, p.predicted_N, right_N)
  )
  recall_C = right_C / np.maximum(true_C, 1)
  precision_C = right_C / np.maximum(predicted_C, 1)
  # The largest numbers come first.
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
