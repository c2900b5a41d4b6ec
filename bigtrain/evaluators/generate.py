"""Writes what a model generates beside what it should, and compares them.

Legend: B batch, L and T lengths, R references of an example.
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
  evaluations.tokenizer(options.get("tokenizer", "bytes"), context)
  metrics = options.get("metrics", ())
  for name in metrics:
    if name not in _METRICS:
      hint = did_you_mean(name, _METRICS)
      raise ConfigError(f"{path}.metrics: no metric {name!r}.{hint}")
    package = _PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
      raise ConfigError(
        f"{path}.metrics: {name!r} needs {package}: "
        "pip install 'bigtrain[metrics]'."
      )
  if metrics and options.get("reference_key") is None:
    raise ConfigError(f"{path}.reference_key: missing; metrics compare to it.")


class Evaluator:
  """Saves <workdir>/generations/<name>-<step>.jsonl.

  Row i is {"number": i, "prompt": ..., "sample": ..., "references": [...]} of
  example i of the data set; what is not known is left out.

  Args:
    predict_fn: (variables, batch) -> int [B, T], generated tokens. Those from
      the tokenizer's end token on do not count.
    context: where it runs.
    data: source, as in config.input.data.
    tokenizer: of samples, prompts and references, see pp/tokenizers.py.
    pp: preprocessing string; leaves what the predict function needs, and:
    prompt_key: tokens of the prompt, int [B, L].
    reference_key: tokens of the right answer, int [B, L], or of several, int
      [B, R, L]; needed for metrics.
    metrics: "exact_match", the share of samples that are a reference but for
      space around them; "bleu", corpus BLEU from 0 to 100 (sacrebleu's
      defaults); "rouge", the F-measures rouge1, rouge2 and rougeL from 0 to 1
      (with stemming), of the best reference, averaged.
    batch_size: that of training unless given.
    num_examples: only so many from the start.
    cache: keep the preprocessed batches in host memory.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], jax.Array],
    context: evaluations.Context,
    *,
    data: Mapping[str, Any],
    tokenizer: str = "bytes",
    pp: str = "",
    prompt_key: str | None = None,
    reference_key: str | None = None,
    metrics: Sequence[str] = (),
    batch_size: int | None = None,
    num_examples: int | None = None,
    cache: bool = True,
  ):
    path = f"config.evals.{context.name}"
    given = dict(
      tokenizer=tokenizer, metrics=metrics, reference_key=reference_key
    )
    check(given, context, path)
    self._metrics = [_METRICS[name]() for name in metrics]
    self._context = context
    self._tokenizer = evaluations.tokenizer(tokenizer, context)
    keys = {"prompt": prompt_key, "references": reference_key}

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      result = {
        "sample": predict_fn(variables, batch),
        "_mask": batch["_mask"],
      }
      for name, key in keys.items():
        if key is not None:
          if key not in batch:
            raise ConfigError(
              f"{path}: the batch has no {key!r}.{did_you_mean(key, batch)}"
            )
          result[name] = batch[key]
      return result

    self._batches = evaluations.Batches(
      outputs,
      context,
      data=data,
      pp=pp,
      batch_size=batch_size,
      num_examples=num_examples,
      cache=cache,
    )

  def run(self, variables: Any, step: int) -> dict[str, float]:
    """Writes the file; returns the metrics and "num_examples"."""
    rows: list[dict[str, Any]] = []
    for result in self._batches.map(variables):
      real = result.pop("_mask") > 0
      columns = {name: value[real] for name, value in result.items()}
      for i in range(int(real.sum())):
        row: dict[str, Any] = {"number": len(rows)}
        if "prompt" in columns:
          row["prompt"] = self._tokenizer.decode(columns["prompt"][i])
        row["sample"] = self._decode(columns["sample"][i])
        if "references" in columns:
          found = np.atleast_2d(columns["references"][i])
          texts = [self._decode(reference) for reference in found]
          # Fewer references than others have are filled up with padding.
          row["references"] = [text for text in texts if text] or [""]
        rows.append(row)
    if jax.process_index() == 0:
      self._write(rows, step)
    results = {"num_examples": float(len(rows))}
    if self._metrics:
      samples = [row["sample"] for row in rows]
      references = [row["references"] for row in rows]
      for metric in self._metrics:
        results |= metric(samples, references)
    return results

  def _decode(self, ids: np.ndarray) -> str:
    """The text up to the end token."""
    ends = np.flatnonzero(ids == self._tokenizer.eos_id)
    return self._tokenizer.decode(ids[: ends[0]] if ends.size else ids)

  def _write(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    folder = os.path.join(self._context.workdir, "generations")
    paths.make_folder(folder)
    path = os.path.join(folder, f"{self._context.name}-{step:08d}.jsonl")
    with paths.replacing(path) as file:
      for row in rows:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


Texts = Sequence[str]
Metric = Callable[[Texts, Sequence[Texts]], dict[str, float]]


def _exact_match() -> Metric:
  def metric(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
    hits = [
      sample.strip() in [text.strip() for text in texts]
      for sample, texts in zip(samples, references)
    ]
    return {"exact_match": float(np.mean(hits))}

  return metric


def _bleu() -> Metric:
  import sacrebleu

  def metric(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
    # sacrebleu wants the first references of all, then the second ones, ...
    most = max(map(len, references))
    streams = [
      [texts[i] if i < len(texts) else None for texts in references]
      for i in range(most)
    ]
    return {"bleu": float(sacrebleu.corpus_bleu(list(samples), streams).score)}

  return metric


def _rouge() -> Metric:
  from rouge_score import rouge_scorer

  names = ["rouge1", "rouge2", "rougeL"]
  scorer = rouge_scorer.RougeScorer(names, use_stemmer=True)

  def metric(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
    scores = [
      scorer.score_multi(list(texts), sample)
      for sample, texts in zip(samples, references)
    ]
    return {
      name: float(np.mean([score[name].fmeasure for score in scores]))
      for name in names
    }

  return metric


_PACKAGES = {"bleu": "sacrebleu", "rouge": "rouge_score"}

_METRICS: dict[str, Callable[[], Metric]] = {
  "exact_match": _exact_match,
  "bleu": _bleu,
  "rouge": _rouge,
}
