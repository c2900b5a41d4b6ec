"""Generated texts and their metrics."""

import json

import numpy as np
import pytest
from tiny import evaluating

from bigtrain.config.errors import ConfigError
from bigtrain.text import tokenizers

BYTES = tokenizers.get("bytes")


def padded(texts, length=24, end=True):
  rows = np.zeros((len(texts), length), np.int32)
  for row, text in zip(rows, texts):
    ids = [*BYTES.encode(text), *([BYTES.eos_id] if end else [])]
    row[: len(ids)] = ids
  return rows


SAMPLES = ["the cat sat on the mat", " a dog", "füll"]
REFERENCES = [
  ["the cat sat on a mat", "a cat sat on the mat"],
  ["a dog", ""],
  ["empty", "full"],
]


def build(workdir="", **changes):
  arrays = dict(
    prompt=padded(["1", "2", "3"], end=False),
    sample=padded(SAMPLES),
    labels=np.stack([padded(texts) for texts in REFERENCES]),
  )
  # Tokens after the end token do not count.
  arrays["sample"][1, 8:12] = BYTES.encode("junk")
  options = dict(
    data=dict(type="arrays", arrays=arrays), reference_key="labels"
  )
  return evaluating.build(
    "generate",
    lambda variables, batch: batch["sample"],
    evaluating.context(workdir=str(workdir)),
    **options | changes,
  )


def test_generations_are_written_and_compared(tmp_path):
  evaluator = build(tmp_path, prompt_key="prompt", metrics=["exact_match"])
  results = evaluating.save(evaluator.run({}, 7), tmp_path, 7)
  assert results == {
    "num_examples": 3.0,
    "exact_match": pytest.approx(1 / 3),
    "texts": "generations/val-00000007.jsonl",
  }
  (path,) = (tmp_path / "generations").iterdir()
  assert path.name == "val-00000007.jsonl"
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert rows[1] == dict(
    number=1, prompt="2", sample=" a dog", references=["a dog"]
  )
  assert [row["sample"] for row in rows] == SAMPLES


def test_bleu_and_rouge(tmp_path):
  pytest.importorskip("sacrebleu")
  pytest.importorskip("rouge_score")
  results = build(tmp_path, metrics=["bleu", "rouge"]).run({}, 1)
  # By hand: 5 of 6, 2 of 2, and 0 of 1 words, against the better reference.
  assert results["rouge1"] == pytest.approx((5 / 6 + 1 + 0) / 3)
  assert results["rougeL"] == results["rouge1"]
  # All n-grams are in a reference except one of the two "the", and "füll".
  assert results["bleu"] == pytest.approx(100 * (7 / 9) ** 0.25)


def test_mistakes():
  for changes, message in (
    (dict(metrics=["blue"]), "mean 'bleu'"),
    (dict(metrics=["bleu"], reference_key=None), "reference_key: missing"),
  ):
    with pytest.raises(ConfigError, match=message):
      build(**changes)
  with pytest.raises(ConfigError, match="no feature 'label'"):
    build(reference_key="label").run({}, 1)
