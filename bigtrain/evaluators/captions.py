"""Writes captions of images and compares them with references.

Legend: B batch, L length, R references of an image.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bigtrain import settings
from bigtrain.evaluation import evaluations
from bigtrain.reports import media
from bigtrain.settings import ConfigError, did_you_mean


def check(
  options: Mapping[str, Any], context: evaluations.Context, path: str
) -> None:
  """Raises ConfigError for an unknown tokenizer or metric."""
  evaluations.tokenizer(options["tokenizer"], context)
  metrics = options.get("metrics", ("exact",))
  for name in metrics:
    if name not in METRICS:
      hint = did_you_mean(name, METRICS)
      raise ConfigError(f"{path}.metrics: no metric {name!r}.{hint}")
  num_images = options.get("num_images", 40)
  settings.check_number(f"{path}.num_images", num_images, least=0, whole=True)
  _check_packages(metrics, num_images, path)


class Evaluator:
  """Returns captions as a table, <workdir>/captions/<name>-<step>.jsonl.

  Row i of the table is {"number": i, "caption": ..., "references": [...]} of
  example i of the data set. A picture, <name>-<step>.png, shows the first
  images with their captions. Captions that equal none of their references are
  red.

  Args:
    predict_fn: (variables, batch, eos_id=...) -> tokens int [B, L].
    batches: the evaluation set, with the feature `image_key` and, for metrics,
      `labels_key`.
    context: context of the run.
    tokenizer: tokenizer of the captions, see pp/tokenizers.py.
    labels_key: name of the references' tokens, int [B, L], or [B, R, L] if an
      image has several references.
    metrics: "exact", the fraction of captions that equal a reference; "bleu",
      corpus BLEU-4 from 0 to 100 (arXiv 1804.08771; needs sacrebleu); "cider",
      CIDEr-D from 0 to 10 (arXiv 1411.5726; needs pycocoevalcap).
    image_key: name of the images for the picture, with any range of values.
    num_images: number of images in the picture; 0 for no picture.
  """

  def __init__(
    self,
    predict_fn: Callable[..., jax.Array],
    batches: evaluations.Batches,
    context: evaluations.Context,
    *,
    tokenizer: str,
    labels_key: str = "labels",
    metrics: Sequence[str] = ("exact",),
    image_key: str = "image",
    num_images: int = 40,
  ):
    self._context, self._metrics = context, metrics
    self._tokenizer = evaluations.tokenizer(tokenizer, context)
    eos_id, compares = self._tokenizer.eos_id, bool(metrics)

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      result = {
        "caption": predict_fn(variables, batch, eos_id=eos_id),
        "_mask": batch["_mask"],
      }
      if compares or labels_key in batch:
        result["references"] = batch[labels_key]
      return result

    def images(variables: Any, batch: Mapping[str, Any]) -> Any:
      return batch[image_key], batch["_mask"]

    self._outputs = batches.map(outputs)
    # Only the images of the picture are copied from the devices.
    num_shown = min(num_images, batches.input.num_examples)
    self._images = None
    if num_shown:
      shown = batches.replace(num_examples=num_shown, cache=False)
      self._images = shown.map(images)

  def run(self, variables: Any, step: int) -> dict[str, Any]:
    """Returns the metrics, "captions" and "picture"."""
    results = self._outputs(variables)
    images = self._images(variables) if self._images else []
    real = np.concatenate([r["_mask"] for r in results]) > 0
    join = lambda key: np.concatenate([r[key] for r in results])[real]
    captions = [self._tokenizer.decode(row) for row in join("caption")]
    references: list[list[str]] = [[] for _ in captions]
    if "references" in results[0]:
      for texts, rows in zip(references, join("references")):
        decoded = map(self._tokenizer.decode, np.atleast_2d(rows))
        texts += [text for text in decoded if text]
    values: dict[str, Any] = {
      name: METRICS[name](captions, references) for name in self._metrics
    }
    rows = [
      {"number": i, "caption": caption, "references": texts}
      for i, (caption, texts) in enumerate(zip(captions, references))
    ]
    stem = f"captions/{self._context.name}-{step:08d}"
    values["captions"] = media.Table(rows, f"{stem}.jsonl")
    if images:
      pictures = np.concatenate([x[mask > 0] for x, mask in images])
      sheet = draw(pictures, captions, references)
      values["picture"] = media.Image(sheet, path=f"{stem}.png")
    return values


def draw(
  images: np.ndarray,
  captions: Sequence[str],
  references: Sequence[Sequence[str]],
) -> np.ndarray:
  """Draws a sheet of images, five in a row, with their captions above.

  Args:
    images: [N, height, width, channels], with any range of values.
    captions: at least N captions; wrong ones are red.
    references: references of each caption.

  Returns:
    uint8 [height, width, 3].
  """
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure

  columns = min(5, len(images))
  rows = -(-len(images) // columns)
  figure = Figure(figsize=(2.6 * columns, 2.0 * rows), dpi=100)
  canvas = backend_agg.FigureCanvasAgg(figure)
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
      # matplotlib takes text between dollars for a formula.
      axes.set_title(
        text.replace("$", r"\$"),
        fontsize=8,
        color="tab:red" if wrong else "black",
      )
  figure.tight_layout()
  canvas.draw()
  return np.asarray(canvas.buffer_rgba())[..., :3]


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

  # sacrebleu takes the first references of all captions, the second ones, ...
  most = max(map(len, references))
  columns = [
    [texts[i] if i < len(texts) else None for texts in references]
    for i in range(most)
  ]
  return float(sacrebleu.corpus_bleu(list(captions), columns).score)


def _cider(
  captions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  from pycocoevalcap.cider.cider import Cider

  # Lower-case words without punctuation, as the package's Java tokenizer.
  clean = lambda text: " ".join(
    "".join(c if c.isalnum() else " " for c in text.lower()).split()
  )
  gold = {i: [clean(t) for t in r] for i, r in enumerate(references)}
  candidates = {i: [clean(caption)] for i, caption in enumerate(captions)}
  return float(Cider().compute_score(gold, candidates)[0])


METRICS = {"exact": _exact, "bleu": _bleu, "cider": _cider}
