"""Metrics of texts, against the published scripts: golden/text_metrics.py."""

import importlib.util
import json
import math
import pathlib

import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.evaluation import text_metrics

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "text_metrics.py"
VALUES = json.loads(GOLDEN.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def golden():
  spec = importlib.util.spec_from_file_location("text_metrics_golden", GOLDEN)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def compute(name, pairs):
  samples, references = zip(*pairs)
  texts = [[r] if isinstance(r, str) else r for r in references]
  return text_metrics.compute([name], samples, texts)


def test_squad_equals_the_official_script(golden):
  results = compute("squad", golden.answers())
  assert results == {
    name: pytest.approx(VALUES[name], abs=1e-9)
    for name in ("squad_exact", "squad_f1")
  }


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", ["accuracy", "matthews"])
def test_metrics_of_labels_equal_scikit_learns(golden, name, number):
  (value,) = compute(name, golden.labels(number)).values()
  assert value == pytest.approx(VALUES[f"{name}_{number}"], abs=1e-12)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_correlations_equal_scipys(golden, name):
  pairs = golden.numbers()
  (value,) = compute(name, pairs).values()
  assert value == pytest.approx(VALUES[name], abs=1e-12)
  # What is no number counts as -1.
  wrong = [("?", pairs[0][1]), *pairs[1:]]
  assert compute(name, wrong) == compute(
    name, [("-1", wrong[0][1]), *pairs[1:]]
  )
  with pytest.raises(DataError, match="a reference is not a number: 'five'"):
    compute(name, [("1", "five")])


@pytest.mark.parametrize(
  ("sample", "answers", "value"),
  [
    ("two", ["2"], 1.0),
    ("The  cat.", ["cat"], 1.0),
    ("dont know", ["don't know"], 1.0),
    ("1,000", ["1000"], 1.0),
    ("dog", ["cat"], 0.0),
    # Of ten people: those who agree, without each one in turn.
    ("yes", ["yes"] * 10, 1.0),
    ("yes", ["yes"] * 3 + ["no"] * 7, (3 * 2 / 3 + 7 * 1) / 10),
    ("yes", ["yes"] + ["no"] * 9, (0 + 9 / 3) / 10),
  ],
)
def test_vqa_counts_the_people_who_agree(sample, answers, value):
  assert compute("vqa", [(sample, answers)]) == {"vqa": pytest.approx(value)}


@pytest.mark.parametrize(
  ("sample", "answers", "value"),
  [
    ("Coca  Cola", ["coca cola"], 1.0),
    ("coca cola", ["cola", "coca colas"], 0.9),
    ("abcd", ["abxy"], 0.0),  # Half of the characters is not enough.
    ("abcd", ["abcx"], 0.75),
    ("", ["a"], 0.0),
  ],
)
def test_anls(sample, answers, value):
  assert compute("anls", [(sample, answers)]) == {"anls": pytest.approx(value)}


@pytest.mark.parametrize(
  ("sample", "answer", "value"),
  [
    ("104.9", "100", 1),
    ("105.1", "100", 0),
    ("-95", "-100", 1),
    ("0.5", "50%", 1),
    ("0.01", "0", 0),
    ("Blue ", "blue", 1),
    ("blue", "3", 0),
  ],
)
def test_relaxed_accuracy(sample, answer, value):
  result = compute("relaxed_accuracy", [(sample, answer)])
  assert result == {"relaxed_accuracy": value}


def test_values_without_a_definition():
  same = [("yes", "yes"), ("yes", "yes")]
  assert compute("matthews", same) == {"matthews": 0.0}
  assert math.isnan(compute("pearson", [("1", "1"), ("1", "2")])["pearson"])


def lengths(samples, references):
  return {
    "shorter": sum(len(s) < len(r[0]) for s, r in zip(samples, references))
  }


def first(samples, references):
  return float(samples[0] == references[0][0])


def test_functions_of_the_user():
  pairs = [("a", "a"), ("b", "cd")]
  here = __name__
  text_metrics.check("key", [f"{here}.lengths", f"{here}.first", "squad"])
  assert compute(f"{here}.lengths", pairs) == {"shorter": 1}
  assert compute(f"{here}.first", pairs) == {"first": 1.0}
  with pytest.raises(ConfigError, match="has no 'firts'.*mean 'first'"):
    text_metrics.check("key", [f"{here}.firts"])
  with pytest.raises(ConfigError, match="mean 'spearman'"):
    text_metrics.check("key", ["spearmann"])
