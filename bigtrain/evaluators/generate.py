"""Writes generated texts with their references, and compares the two.

Legend: B batch, L and T lengths, R references of an example.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bigtrain.evaluation import evaluations
from bigtrain.reports import media
from bigtrain.settings import ConfigError, did_you_mean


def check(
  options: Mapping[str, Any], context: evaluations.Context, path: str
) -> None:
  """Raises ConfigError for an unknown tokenizer or metric."""
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
  """Returns texts as a table, <workdir>/generations/<name>-<step>.jsonl.

  Row i is {"number": i, "prompt": ..., "sample": ..., "references": [...]} of
  example i of the data set, without fields that have no key.

  Args:
    predict_fn: (variables, batch) -> generated tokens, int [B, T]. The
      tokenizer's end token and all tokens after it do not count.
    batches: the evaluation set, with the predict function's inputs,
      `prompt_key` and `reference_key`.
    context: context of the run.
    tokenizer: tokenizer of samples, prompts and references, see
      pp/tokenizers.py.
    prompt_key: name of the prompts' tokens, int [B, L].
    reference_key: name of the right answers' tokens, int [B, L], or [B, R, L]
      if there are several; needed for metrics.
    metrics: "exact_match", the fraction of samples that equal a reference,
      apart from surrounding space; "bleu", corpus BLEU from 0 to 100
      (sacrebleu's defaults); "rouge", the F-measures rouge1, rouge2 and rougeL
      from 0 to 1 (with stemming) of the best reference, averaged.
  """

  def __init__(
    self,
    predict_fn: Callable[[Any, Any], jax.Array],
    batches: evaluations.Batches,
    context: evaluations.Context,
    *,
    tokenizer: str = "bytes",
    prompt_key: str | None = None,
    reference_key: str | None = None,
    metrics: Sequence[str] = (),
  ):
    self._metrics = [_METRICS[name]() for name in metrics]
    self._context = context
    self._tokenizer = evaluations.tokenizer(tokenizer, context)
    keys = ("prompt", prompt_key), ("references", reference_key)

    def outputs(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
      features = {k: batch[key] for k, key in keys if key is not None}
      return {
        "sample": predict_fn(variables, batch),
        "_mask": batch["_mask"],
        **features,
      }

    self._outputs = batches.map(outputs)

  def run(self, variables: Any, step: int) -> dict[str, Any]:
    """Returns the metrics, "num_examples" and "texts"."""
    rows: list[dict[str, Any]] = []
    for result in self._outputs(variables):
      real = result.pop("_mask") > 0
      columns = {name: value[real] for name, value in result.items()}
      for i in range(int(real.sum())):
        row: dict[str, Any] = {"number": len(rows)}
        if "prompt" in columns:
          row["prompt"] = self._tokenizer.decode(columns["prompt"][i])
        row["sample"] = self._decode(columns["sample"][i])
        if "references" in columns:
          ids_RL = np.atleast_2d(columns["references"][i])
          texts = [self._decode(ids) for ids in ids_RL]
          # Examples with fewer references have padding in their place.
          row["references"] = [text for text in texts if text] or [""]
        rows.append(row)
    path = f"generations/{self._context.name}-{step:08d}.jsonl"
    results: dict[str, Any] = {
      "num_examples": float(len(rows)),
      "texts": media.Table(rows, path),
    }
    if self._metrics:
      samples = [row["sample"] for row in rows]
      references = [row["references"] for row in rows]
      for metric in self._metrics:
        results |= metric(samples, references)
    return results

  def _decode(self, ids: np.ndarray) -> str:
    """Returns the text before the end token."""
    ends = np.flatnonzero(ids == self._tokenizer.eos_id)
    return self._tokenizer.decode(ids[: ends[0]] if ends.size else ids)


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
    # sacrebleu takes the first references of all samples, the second ones, ...
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
