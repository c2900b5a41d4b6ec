"""Metrics that compare texts with one or several references each.

exact, exact_match    fraction equal to a reference; the second one leaves out
                      surrounding space
squad                 exact match and F1 of words, from 0 to 100
accuracy, matthews    of labels; here and below, the first reference counts
pearson, spearman     of numbers
bleu                  corpus BLEU-4, from 0 to 100
cider                 CIDEr-D, from 0 to 10
rouge                 F-measures of rouge1, rouge2 and rougeL, with stemming,
                      of the best reference
"""

import collections
import importlib.util
import math
import re
import string
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_choice
from bigtrain.config.modules import find_attribute

Texts = Sequence[str]

# {metric: (package that it needs, extra of bigtrain that installs it)}.
_PACKAGES = {
  "bleu": ("sacrebleu", "metrics"),
  "cider": ("pycocoevalcap", "cider"),
  "rouge": ("rouge_score", "metrics"),
}


def check(key: str, metrics: Iterable[str]) -> None:
  for name in metrics:
    if "." in str(name):
      find_attribute(name, key)
    else:
      check_choice(key, name, _METRICS)
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
  """Computes metrics, of which a dotted path names a function of the user.

  It gets the samples and each one's references, and returns a number, which is
  named after the function, or a dict of numbers.
  """
  results: dict[str, float] = {}
  for name in names:
    if "." in name:
      value = find_attribute(name, "metrics")(samples, references)
      own = {name.rpartition(".")[2]: value}
      results |= value if isinstance(value, dict) else own
    else:
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


def _squad(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  """From 0 to 100, as the official script of SQuAD 2.0."""
  exact, f1 = [], []
  for sample, texts in zip(samples, references):
    answers = [words for text in texts if (words := _words(text))] or [[]]
    words = _words(sample)
    exact.append(words in answers)
    f1.append(max(_overlap(words, answer) for answer in answers))
  return {
    "squad_exact": 100 * float(np.mean(exact)),
    "squad_f1": 100 * float(np.mean(f1)),
  }


def _words(text: str) -> list[str]:
  kept = "".join(c for c in text.lower() if c not in string.punctuation)
  return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _overlap(first: Texts, second: Texts) -> float:
  common = collections.Counter(first) & collections.Counter(second)
  if not first or not second:
    return float(first == second)
  return 2 * common.total() / (len(first) + len(second))


def _labels(samples: Texts, references: Sequence[Texts]) -> list[list[str]]:
  """Samples and their first references, without surrounding space."""
  firsts = [texts[0] if texts else "" for texts in references]
  return [[text.strip() for text in texts] for texts in (samples, firsts)]


def _accuracy(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  given, right = map(np.asarray, _labels(samples, references))
  return {"accuracy": float(np.mean(given == right))}


def _matthews(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  """The coefficient R_K of any number of classes; 0 where it is undefined."""
  given, right = _labels(samples, references)
  classes = {label: i for i, label in enumerate(sorted({*given, *right}))}
  counts_CC = np.zeros((len(classes), len(classes)))
  for pair in zip(right, given):
    counts_CC[classes[pair[0]], classes[pair[1]]] += 1
  right_C, given_C, total = counts_CC.sum(1), counts_CC.sum(0), len(given)
  spread = math.prod(total**2 - x @ x for x in (right_C, given_C))
  value = total * np.trace(counts_CC) - right_C @ given_C
  return {"matthews": float(value / math.sqrt(spread)) if spread else 0.0}


def _pearson(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  return _correlation("pearson", *_values(samples, references))


def _spearman(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  return _correlation("spearman", *map(_ranks, _values(samples, references)))


def _correlation(name: str, *rows: np.ndarray) -> dict[str, float]:
  """NaN where all values of a row are equal."""
  with np.errstate(invalid="ignore", divide="ignore"):
    return {name: float(np.corrcoef(rows)[0, 1])}


def _ranks(values: np.ndarray) -> np.ndarray:
  """Ranks from 1; equal values share the mean of theirs."""
  _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts - 1) / 2)[index]


def _values(samples: Texts, references: Sequence[Texts]) -> list[np.ndarray]:
  """Texts as numbers; a sample that is none counts as -1, as in T5."""
  given, right = _labels(samples, references)
  numbers = [_number(text) for text in right]
  if None in numbers:
    wrong = right[numbers.index(None)]
    raise DataError(f"correlation: a reference is no number: {wrong!r}.")
  filled = [-1.0 if (x := _number(text)) is None else x for text in given]
  return [np.asarray(filled), np.asarray(numbers, np.float64)]


def _number(text: str) -> float | None:
  try:
    return value if math.isfinite(value := float(text)) else None
  except ValueError:
    return None


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


_ALL = (_exact, _exact_match, _squad, _accuracy, _matthews, _pearson, _spearman)
_METRICS = {fn.__name__[1:]: fn for fn in (*_ALL, _bleu, _cider, _rouge)}
