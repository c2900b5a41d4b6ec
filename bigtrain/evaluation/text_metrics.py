"""Metrics that compare texts with their reference texts.

exact, exact_match    fraction equal to a reference; the second one leaves out
                      surrounding space
squad                 exact match and F1 of words, from 0 to 100
vqa                   accuracy of VQA: each person who gave the answer counts a
                      third
anls                  similarity of characters, as for DocVQA
relaxed_accuracy      equal, or a number within 5%, as for ChartQA
boxes                 of boxes in PaliGemma's format: mean IoU, and COCO's
                      average precisions, without scores; the first reference
                      counts
accuracy, matthews    of labels; here and below, the first reference counts
pearson, spearman     of numbers
bleu                  corpus BLEU-4, from 0 to 100
cider                 CIDEr-D, from 0 to 10
rouge                 F-measures of rouge1, rouge2 and rougeL, with stemming,
                      of the best reference
"""

import collections
import importlib.util
import itertools
import math
import re
import string
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_choice
from bigtrain.config.modules import find_attribute
from bigtrain.evaluation import detection
from bigtrain.text import box_texts

Texts = Sequence[str]

# {metric: (the package that computes it, the extra that installs that)}.
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
  """Computes metrics by name, or by the dotted path of a user's function.

  Such a function gets the samples and the references of each sample. It returns
  a number, which is named after the function, or a dict of numbers.
  """
  results: dict[str, float] = {}
  for name in names:
    if "." not in name:
      results |= _METRICS[name](samples, references)
      continue
    value = find_attribute(name, "metrics")(samples, references)
    if isinstance(value, dict):
      results |= value
    else:
      results[name.rpartition(".")[2]] = value
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
  """From 0 to 100, as computed by the official script of SQuAD 2.0."""
  exact, f1 = [], []
  for sample, texts in zip(samples, references):
    answers = [_words(text) for text in texts]
    # A question without any answer is answered by no words.
    answers = [words for words in answers if words] or [[]]
    words = _words(sample)
    exact.append(words in answers)
    f1.append(max(_f1(words, answer) for answer in answers))
  return {
    "squad_exact": 100 * float(np.mean(exact)),
    "squad_f1": 100 * float(np.mean(f1)),
  }


# https://visualqa.org/evaluation.html.
_VQA_NUMBERS = "zero one two three four five six seven eight nine ten".split()
_VQA_NUMBERS_TO = {name: str(i) for i, name in enumerate(_VQA_NUMBERS)}
_VQA_NUMBERS_TO["none"] = "0"
_ARTICLES = ("a", "an", "the")
# Contractions that people write without the apostrophe, unless the result is
# another word.
_CONTRACTIONS = {
  word.replace("'", ""): word
  for word in (
    "ain't aren't can't couldn't didn't doesn't don't hadn't hasn't haven't "
    "he'd he's how'd how's i'd've i'm i've isn't it'd it'll let's ma'am "
    "mightn't mustn't needn't o'clock oughtn't shan't she's should've "
    "shouldn't somebody's someone's that'd that's there'd there's they'd "
    "they'll they're they've wasn't we've weren't what'll what're what's "
    "when's where'd where's who'd who'll who's why's won't would've wouldn't "
    "y'all you'd you'll you're you've"
  ).split()
}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def _vqa(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  """Accuracy by the answers of several people, ten in VQA v2.

  An answer is right if three people gave it, and partly right if fewer did. The
  people are compared with each other by the same rule, so each person's answer
  is left out once, and the score is the mean.
  """
  scores = []
  for sample, answers in zip(samples, references):
    given = _vqa_answer(sample)
    agrees = [_vqa_answer(answer) == given for answer in answers]
    if len(agrees) == 1:
      scores.append(float(agrees[0]))
      continue
    without_one = []
    for own in agrees:
      others = sum(agrees) - own
      without_one.append(min(1.0, others / 3))
    scores.append(float(np.mean(without_one)))
  return {"vqa": float(np.mean(scores))}


def _vqa_answer(text: str) -> str:
  """An answer in VQA's normal form: digits, no articles, no punctuation."""
  text = text.replace("\n", " ").replace("\t", " ").strip()
  has_decimal_comma = re.search(r"\d,\d", text) is not None
  for mark in _PUNCTUATION:
    # As in the official script, a mark between two letters becomes a space.
    is_beside_space = f"{mark} " in text or f" {mark}" in text
    without_space = is_beside_space or has_decimal_comma
    text = text.replace(mark, "" if without_space else " ")
  text = re.sub(r"\.(?!\d)", "", text)  # Not in decimal numbers.
  words = []
  for word in text.lower().split():
    word = _VQA_NUMBERS_TO.get(word, word)
    if word not in _ARTICLES:
      words.append(_CONTRACTIONS.get(word, word))
  return " ".join(words)


# Below this similarity, an answer of DocVQA counts as wrong.
_LEAST_SIMILARITY = 0.5


def _anls(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  """Average normalized Levenshtein similarity (Biten et al. 2019)."""
  values = []
  for sample, answers in zip(samples, references):
    given = _plain(sample)
    best = max(_similarity(given, _plain(answer)) for answer in answers)
    values.append(best if best > _LEAST_SIMILARITY else 0.0)
  return {"anls": float(np.mean(values))}


def _plain(text: str) -> str:
  return " ".join(text.lower().split())


def _similarity(a: str, b: str) -> float:
  longer = max(len(a), len(b))
  return 1 - _edit_distance(a, b) / longer if longer else 1.0


def _edit_distance(a: str, b: str) -> int:
  """Levenshtein distance: fewest insertions, deletions and replacements."""
  # distances[j] is that of the letters of `a` so far and the first j of `b`.
  distances = list(range(len(b) + 1))
  for i, letter in enumerate(a, start=1):
    before = distances
    distances = [i]
    for j, other in enumerate(b, start=1):
      deleted = before[j] + 1
      inserted = distances[j - 1] + 1
      replaced = before[j - 1] + (letter != other)
      distances.append(min(deleted, inserted, replaced))
  return distances[-1]


# Relative error that ChartQA allows (Masry et al. 2022, arXiv 2203.10244).
_TOLERANCE = 0.05


def _relaxed(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  hits = [
    any(_is_about(sample, answer) for answer in answers)
    for sample, answers in zip(samples, references)
  ]
  return {"relaxed_accuracy": float(np.mean(hits))}


def _is_about(sample: str, answer: str) -> bool:
  given, right = _amount(sample), _amount(answer)
  if given is None or right is None or right == 0:
    return _plain(sample) == _plain(answer)
  return abs(given - right) / abs(right) <= _TOLERANCE


def _amount(text: str) -> float | None:
  """The value of a number, which may be a percentage."""
  text = text.strip()
  if text.endswith("%"):
    number = _number(text[:-1])
    return None if number is None else number / 100
  return _number(text)


def _boxes(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  given, right = _labels(samples, references)
  predicted = [box_texts.read(text) for text in given]
  expected = [box_texts.read(text) for text in right]
  # Thresholds of the IoU from 0.5 to 0.95, in steps of 0.05.
  precisions = []
  for threshold in detection.THRESHOLDS.tolist():
    precision = detection.average_precision(predicted, expected, threshold)
    precisions.append(precision)
  return {
    "box_iou": detection.mean_iou(predicted, expected),
    "box_ap": float(np.mean(precisions)),
    "box_ap50": precisions[0],
    "box_ap75": precisions[5],
  }


def _words(text: str) -> list[str]:
  """Lower-case words without punctuation and articles."""
  kept = "".join(c for c in text.lower() if c not in string.punctuation)
  return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _f1(first: Texts, second: Texts) -> float:
  if not first or not second:
    return float(first == second)
  common = collections.Counter(first) & collections.Counter(second)
  return 2 * common.total() / (len(first) + len(second))


def _labels(samples: Texts, references: Sequence[Texts]) -> list[list[str]]:
  """Samples and their first references, without surrounding space."""
  given = [sample.strip() for sample in samples]
  right = [texts[0].strip() if texts else "" for texts in references]
  return [given, right]


def _accuracy(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  given, right = _labels(samples, references)
  hits = [a == b for a, b in zip(given, right)]
  return {"accuracy": float(np.mean(hits))}


def _matthews(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  """The coefficient R_K of any number of classes; 0 where it is undefined."""
  given, right = _labels(samples, references)
  index = {label: i for i, label in enumerate(sorted({*given, *right}))}
  counts_CC = np.zeros((len(index), len(index)))  # Right class, given class.
  for right_label, given_label in zip(right, given):
    counts_CC[index[right_label], index[given_label]] += 1
  right_C, given_C = counts_CC.sum(1), counts_CC.sum(0)
  total = len(given)
  covariance = total * np.trace(counts_CC) - right_C @ given_C
  variances = (total**2 - right_C @ right_C) * (total**2 - given_C @ given_C)
  value = covariance / math.sqrt(variances) if variances else 0.0
  return {"matthews": float(value)}


def _pearson(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  return _correlation("pearson", *_values(samples, references))


def _spearman(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  return _correlation("spearman", *map(_ranks, _values(samples, references)))


def _correlation(name: str, *rows: np.ndarray) -> dict[str, float]:
  """Pearson's correlation of two vectors; NaN if one of them is constant."""
  with np.errstate(invalid="ignore", divide="ignore"):
    return {name: float(np.corrcoef(rows)[0, 1])}


def _ranks(values: np.ndarray) -> np.ndarray:
  """Ranks from 1. Equal values get the mean of their ranks."""
  _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
  last_ranks = np.cumsum(counts)
  mean_ranks = last_ranks - (counts - 1) / 2
  return mean_ranks[index]


def _values(samples: Texts, references: Sequence[Texts]) -> list[np.ndarray]:
  """Texts as numbers. A sample that is not a number counts as -1, as in T5."""
  given, right = _labels(samples, references)
  right_numbers = []
  for text in right:
    number = _number(text)
    if number is None:
      raise DataError(f"correlation: a reference is not a number: {text!r}.")
    right_numbers.append(number)
  given_numbers = [_number(text) for text in given]
  filled = [-1.0 if number is None else number for number in given_numbers]
  return [np.asarray(filled), np.asarray(right_numbers, np.float64)]


def _number(text: str) -> float | None:
  try:
    number = float(text)
  except ValueError:
    return None
  return number if math.isfinite(number) else None


def _bleu(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  import sacrebleu

  # sacrebleu wants a list of all first references, one of all second ones, and
  # so on, with None where a sample has fewer.
  by_number: Any = itertools.zip_longest(*references)
  streams = [list(texts) for texts in by_number]
  return {"bleu": float(sacrebleu.corpus_bleu(list(samples), streams).score)}


def _cider(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  from pycocoevalcap.cider.cider import Cider

  def clean(text: str) -> str:
    """Lower-case words without punctuation, as the package's Java tokenizer."""
    kept = "".join(c if c.isalnum() else " " for c in text.lower())
    return " ".join(kept.split())

  gold = {}
  candidates = {}
  for i, (sample, texts) in enumerate(zip(samples, references)):
    gold[i] = [clean(text) for text in texts]
    candidates[i] = [clean(sample)]
  score, _ = Cider().compute_score(gold, candidates)
  return {"cider": float(score)}


def _rouge(samples: Texts, references: Sequence[Texts]) -> dict[str, float]:
  from rouge_score import rouge_scorer

  names = ["rouge1", "rouge2", "rougeL"]
  scorer = rouge_scorer.RougeScorer(names, use_stemmer=True)
  scores: dict[str, list[float]] = {name: [] for name in names}
  for sample, texts in zip(samples, references):
    best = scorer.score_multi(list(texts), sample)
    for name in names:
      scores[name].append(best[name].fmeasure)
  return {name: float(np.mean(values)) for name, values in scores.items()}


_METRICS = {
  "exact": _exact,
  "exact_match": _exact_match,
  "squad": _squad,
  "vqa": _vqa,
  "anls": _anls,
  "relaxed_accuracy": _relaxed,
  "boxes": _boxes,
  "accuracy": _accuracy,
  "matthews": _matthews,
  "pearson": _pearson,
  "spearman": _spearman,
  "bleu": _bleu,
  "cider": _cider,
  "rouge": _rouge,
}
