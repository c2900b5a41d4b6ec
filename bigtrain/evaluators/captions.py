"""Writes captions, and says how often and how well they fit the references.

Legend: B batch, L length, R references of an image.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bigtrain.evaluation import evaluations
from bigtrain.files import paths
from bigtrain.settings import ConfigError, did_you_mean


def check(
  options: Mapping[str, Any], context: evaluations.Context, path: str
) -> None:
  """Raises ConfigError for a tokenizer or a metric that there is not."""
  evaluations.tokenizer(options["tokenizer"], context)
  metrics = options.get("metrics", ("exact",))
  for name in metrics:
    if name not in METRICS:
      hint = did_you_mean(name, METRICS)
      raise ConfigError(f"{path}.metrics: no metric {name!r}.{hint}")
  _check_packages(metrics, options.get("num_images", 40), path)


class Evaluator:
  """Saves <workdir>/captions/<name>-<step>.jsonl, and a picture of some.

  Row i of the file is {"number": i, "caption": ..., "references": [...]} of
  example i of the data set. The picture, <name>-<step>.png, shows the first
  images with their captions, and the wrong ones in red: those that are none of
  their references.

  Args:
    predict_fn: (variables, batch, eos_id=...) -> tokens int [B, L].
    context: where it runs.
    data: source, as in config.input.data.
    tokenizer: that of the captions, see pp/tokenizers.py.
    pp: preprocessing string; leaves the image and, for metrics, `labels_key`.
    labels_key: tokens of the references, int [B, L] or several for an image,
      [B, R, L].
    metrics: "exact", the share of captions that are a reference; "bleu",
      corpus BLEU-4 from 0 to 100 (arXiv 1804.08771; needs sacrebleu); "cider",
      CIDEr-D from 0 to 10 (arXiv 1411.5726; needs pycocoevalcap).
    image_key: the images of the picture, of any range of values.
    num_images: how many it shows; 0 for no picture.
    batch_size: that of training unless given.
    num_examples: only so many from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[..., jax.Array],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    tokenizer: str,
    pp: str = "",
    labels_key: str = "labels",
    metrics: Sequence[str] = ("exact",),
    image_key: str = "image",
    num_images: int = 40,
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = True,
  ):
    self._context, self._metrics = context, metrics
    self._num_images = num_images
    path = f"config.evals.{context.name}"
    given = dict(tokenizer=tokenizer, metrics=metrics, num_images=num_images)
    check(given, context, path)
    self._tokenizer = evaluations.tokenizer(tokenizer, context)

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      result = {
        "caption": predict_fn(variables, batch, eos_id=self._tokenizer.eos_id),
        "_mask": batch["_mask"],
      }
      if metrics and labels_key not in batch:
        raise ConfigError(
          f"{path}.labels_key: the batch has no {labels_key!r}."
          f"{did_you_mean(labels_key, batch)}"
        )
      if labels_key in batch:
        result["references"] = batch[labels_key]
      return result

    def images(variables: Any, batch: Mapping[str, Any]) -> Any:
      return batch[image_key], batch["_mask"]

    options: dict[str, Any] = dict(data=data, pp=pp, batch_size=batch_size)
    self._batches = evaluations.Batches(
      outputs, context, num_examples=num_examples, cache=cache, **options
    )
    # Only these few images come back from the devices.
    shown = min(num_images, self._batches.input.num_examples)
    self._images = None
    if shown:
      self._images = evaluations.Batches(
        images, context, num_examples=shown, cache=False, **options
      )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Writes the files; returns the metrics."""
    results = self._batches.map(variables)
    images = self._images.map(variables) if self._images else []
    real = np.concatenate([r["_mask"] for r in results]) > 0
    join = lambda key: np.concatenate([r[key] for r in results])[real]
    captions = [self._tokenizer.decode(row) for row in join("caption")]
    references: list[list[str]] = [[] for _ in captions]
    if "references" in results[0]:
      for found, rows in zip(references, join("references")):
        texts = map(self._tokenizer.decode, np.atleast_2d(rows))
        found += [text for text in texts if text]
    if jax.process_index() == 0:
      folder = os.path.join(self._context.workdir, "captions")
      paths.make_folder(folder)
      stem = os.path.join(folder, f"{self._context.name}-{step:08d}")
      _write_rows(f"{stem}.jsonl", captions, references)
      if images:
        pictures = np.concatenate([x[mask > 0] for x, mask in images])
        draw(f"{stem}.png", pictures, captions, references)
    return {name: METRICS[name](captions, references) for name in self._metrics}


def _write_rows(
  path: str, captions: Sequence[str], references: Sequence[Sequence[str]]
) -> None:
  with paths.replacing(path) as file:
    for number, (caption, found) in enumerate(zip(captions, references)):
      row = {"number": number, "caption": caption, "references": found}
      file.write(json.dumps(row, ensure_ascii=False) + "\n")


def draw(
  path: str,
  images: np.ndarray,
  captions: Sequence[str],
  references: Sequence[Sequence[str]],
) -> None:
  """A sheet of the images, five in a row, with their captions below."""
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure

  columns = min(5, len(images))
  rows = -(-len(images) // columns)
  figure = Figure(figsize=(2.6 * columns, 2.0 * rows), dpi=100)
  backend_agg.FigureCanvasAgg(figure)
  low, high = float(images.min()), float(images.max())
  scaled = (images - low) / max(high - low, 1e-6)
  if scaled.shape[-1] == 1:
    scaled = np.repeat(scaled, 3, axis=-1)
  for i in range(rows * columns):
    axes = figure.add_subplot(rows, columns, i + 1)
    axes.axis("off")
    if i < len(images):
      wrong = bool(references[i]) and captions[i] not in references[i]
      axes.imshow(scaled[i], interpolation="nearest")
      text = "\n".join(_lines(captions[i], 28))
      # A dollar would begin a formula.
      axes.set_title(
        text.replace("$", r"\$"),
        fontsize=8,
        color="tab:red" if wrong else "black",
      )
  figure.tight_layout()
  with paths.replacing(path, "wb") as file:
    figure.savefig(file, format="png")


def _lines(text: str, width: int) -> list[str]:
  lines = [""]
  for word in text.split():
    if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
      lines.append("")
    lines[-1] = f"{lines[-1]} {word}".strip()
  return lines


def _check_packages(metrics: Sequence[str], num_images: int, path: str) -> None:
  needed = []
  if num_images:
    needed.append(("num_images", "matplotlib", "report"))
  if "bleu" in metrics:
    needed.append(("metrics", "sacrebleu", "metrics"))
  if "cider" in metrics:
    needed.append(("metrics", "pycocoevalcap", "cider"))
  for key, package, extra in needed:
    if importlib.util.find_spec(package) is None:
      raise ConfigError(
        f"{path}.{key}: needs {package}: pip install 'bigtrain[{extra}]'."
      )


def _exact(
  captions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  return float(np.mean([c in r for c, r in zip(captions, references)]))


def _bleu(
  captions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  import sacrebleu

  # The library wants the first reference of all, the second of all, ...
  most = max(map(len, references))
  columns = [
    [found[i] if i < len(found) else None for found in references]
    for i in range(most)
  ]
  return float(sacrebleu.corpus_bleu(list(captions), columns).score)


def _cider(
  captions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  from pycocoevalcap.cider.cider import Cider

  # Lower case words without punctuation, as its Java tokenizer leaves them.
  clean = lambda text: " ".join(
    "".join(c if c.isalnum() else " " for c in text.lower()).split()
  )
  gold = {i: [clean(t) for t in r] for i, r in enumerate(references)}
  found = {i: [clean(caption)] for i, caption in enumerate(captions)}
  return float(Cider().compute_score(gold, found)[0])


METRICS = {"exact": _exact, "bleu": _bleu, "cider": _cider}
