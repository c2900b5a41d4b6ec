"""What the evaluator `save` has written about a classifier, as HTML.

Legend: N examples, C classes.
"""

import collections
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


def _html(predictions: Predictions) -> str:
  p = predictions
  counts = confusion(p)
  accuracy = np.mean(p.label_N == p.predicted_N)
  return (
    f"<h4>{markup.text(p.evaluation)}, step {p.step:,}: "
    f"{len(p.label_N):,} examples, accuracy {accuracy:.4g}</h4>"
    + (_matrix if len(p.names) <= _MOST_CLASSES else _pairs)(counts, p.names)
    + _per_class(counts, p.names)
    + _worst(p)
  )


def _pairs(counts: Sequence[tuple[int, int, int]], names: Sequence[str]) -> str:
  rows = [
    (markup.text(names[i]), markup.text(names[j]), f"{count:,}")
    for i, j, count in counts
    if i != j
  ]
  title = "<p>Classes that are confused most often:</p>"
  head = ("True class", "Predicted", "Examples")
  return title + markup.table(head, rows[:_MOST_PAIRS])


def _matrix(
  counts: Sequence[tuple[int, int, int]], names: Sequence[str]
) -> str:
  cells = {(i, j): count for i, j, count in counts}
  head = "".join(f"<th>{markup.text(name)}</th>" for name in names)
  body = ""
  for i, name in enumerate(names):
    total = sum(cells.get((i, j), 0) for j in range(len(names)))
    line = ""
    for j, other in enumerate(names):
      count = cells.get((i, j), 0)
      # Right answers are blue, wrong ones orange; a small share is visible.
      color = "0,114,178" if i == j else "213,94,0"
      depth = 0.12 + 0.68 * count / total if count else 0.0
      ink = ";color:#fff" if depth > 0.55 else ""
      line += (
        f'<td style="background:rgba({color},{depth:.2f}){ink}" '
        f'title="{markup.text(name)}, predicted as {markup.text(other)}: '
        f'{count}">{count or ""}</td>'
      )
    body += f"<tr><th>{markup.text(name)}</th>{line}</tr>"
  return (
    '<p class="note">Confusion matrix: a row for each true class, a column for '
    "each predicted class. Blue: right; orange: wrong; stronger: a larger "
    "share of the row.</p>"
    f'<div class="wide"><table class="matrix"><thead><tr><th></th>{head}</tr>'
    f"</thead><tbody>{body}</tbody></table></div>"
  )


def _per_class(
  counts: Sequence[tuple[int, int, int]], names: Sequence[str]
) -> str:
  true, predicted, right = (collections.Counter[int]() for _ in range(3))
  most_often: dict[int, str] = {}
  for i, j, count in counts:
    true[i] += count
    predicted[j] += count
    if i == j:
      right[i] = count
    else:
      most_often.setdefault(i, f"{markup.text(names[j])} ({count})")
  worst = sorted(true, key=lambda i: (right[i] / true[i], -true[i]))
  rows = [
    (
      markup.text(names[i]),
      f"{true[i]:,}",
      f"{right[i] / true[i]:.1%}",
      f"{right[i] / predicted[i]:.1%}" if predicted[i] else "&ndash;",
      most_often.get(i, ""),
    )
    for i in worst[:_MOST_ROWS]
  ]
  more = len(worst) - len(rows)
  note = f'<p class="note">{more:,} more classes.</p>' if more else ""
  head = ("Class", "Examples", "Recall", "Precision", "Most often taken for")
  return (
    "<details open><summary>Classes, the worst first</summary>"
    f"{markup.table(head, rows)}{note}</details>"
  )


def _worst(predictions: Predictions) -> str:
  p = predictions
  order = np.argsort(-p.loss_N, kind="stable")[:_MOST_EXAMPLES]
  rows = p.rows_N
  if p.images is not None:
    low, high = float(p.images.min()), float(p.images.max())
  items = []
  for i in order:
    true, predicted = p.names[p.label_N[i]], p.names[p.predicted_N[i]]
    kind = "right" if p.label_N[i] == p.predicted_N[i] else "wrong"
    picture = ""
    if p.images is not None:
      image = p.images[rows[i]].astype(np.float64)
      scaled = 255 * (image - low) / max(high - low, 1e-9)
      content = media.Image(scaled.round().astype(np.uint8)).png()
      picture = markup.picture(content, description=f"example {rows[i]}")
    items.append(
      f"<div>{picture}<b>{markup.text(true)}</b><br>"
      f'<span class="{kind}">{markup.text(predicted)} '
      f"{p.probability_N[i]:.0%}</span><br>"
      f'<span class="note">#{rows[i]}, loss {p.loss_N[i]:.3g}</span></div>'
    )
  hint = " To see the pictures, add the image to <code>keys</code> of the "
  hint = "" if p.images is not None else f"{hint}evaluation."
  return (
    "<details open><summary>Examples with the largest loss</summary>"
    '<p class="note"><b>True class</b>; below it the predicted class with its '
    'probability, <span class="right">right</span> or <span class="wrong">'
    "wrong</span>; number of the example in the data set; loss."
    f'{hint}</p><div class="pictures">{"".join(items)}</div></details>'
  )
