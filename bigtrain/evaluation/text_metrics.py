"""Metrics that compare texts with one or several references each."""

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bigtrain import settings
from bigtrain.settings import ConfigError

Texts = Sequence[str]

# {metric: (package that it needs, extra of bigtrain that installs it)}.
_PACKAGES = {
  "bleu": ("sacrebleu", "metrics"),
  "cider": ("pycocoevalcap", "cider"),
  "rouge": ("rouge_score", "metrics"),
}


def check(key: str, metrics: Iterable[str], options: Iterable[str]) -> None:
  for name in metrics:
    settings.check_choice(key, name, options)
    if name in _PACKAGES:
      check_package(key, *_PACKAGES[name])


def check_package(key: str, package: str, extra: str) -> None:
  if importlib.util.find_spec(package) is None:
    raise ConfigError(
      f"{key}: needs {package}: pip install 'bigtrain[{extra}]'."
    )


def compute(
  names: Iterable[str], samples: Texts, references: Sequence[Texts]
) -> dict[str, float]:
  results: dict[str, float] = {}
  for name in names:
    results |= _METRICS[name](samples, references)
  return results


def _exact(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  hits = [sample in texts for sample, texts in zip(samples, references)]
  return {"exact": float(np.mean(hits))}


def _exact_match(
  samples: Texts, references: Sequence[Texts]
) -> dict[str, float]:
  stripped = [sample.strip() for sample in samples]
  answers = [[text.strip() for text in texts] for texts in references]
  return {"exact_match": _exact(stripped, answers)["exact"]}


def _bleu(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  import sacrebleu

  # sacrebleu takes the first references of all samples, the second ones, ...
  streams: Any = [
    [texts[i] if i < len(texts) else None for texts in references]
    for i in range(max(map(len, references)))
  ]
  return {"bleu": float(sacrebleu.corpus_bleu(list(samples), streams).score)}


def _cider(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  from pycocoevalcap.cider.cider import Cider

  # Lower-case words without punctuation, as the package's Java tokenizer.
  clean = lambda text: " ".join(
    "".join(c if c.isalnum() else " " for c in text.lower()).split()
  )
  gold = {i: [clean(t) for t in texts] for i, texts in enumerate(references)}
  candidates = {i: [clean(sample)] for i, sample in enumerate(samples)}
  return {"cider": float(Cider().compute_score(gold, candidates)[0])}


def _rouge(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  from rouge_score import rouge_scorer

  names = ["rouge1", "rouge2", "rougeL"]
  scorer = rouge_scorer.RougeScorer(names, use_stemmer=True)
  scores = [
    scorer.score_multi(list(texts), sample)
    for sample, texts in zip(samples, references)
  ]
  return {
    name: float(np.mean([score[name].fmeasure for score in scores]))
    for name in names
  }


_METRICS = {
  "exact": _exact,
  "exact_match": _exact_match,
  "bleu": _bleu,
  "cider": _cider,
  "rouge": _rouge,
}
