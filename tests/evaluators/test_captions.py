"""Captions: files, pictures and metrics."""

import json
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tiny import evaluating

from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import sheets, text_metrics
from bigtrain.text import tokenizers

N = 21  # Batches of 8: the last has 5 examples.
RNG = np.random.default_rng(0)
NAMES = ["a cat", "two dogs", "an eight", "mice", "a whale", "snow"]
LABELS = np.arange(N) % len(NAMES)
ARRAYS = dict(
  image=RNG.uniform(-1, 1, (N, 4, 6, 3)).astype(np.float32),
  right=(np.arange(N) % 3 > 0).astype(np.int32),
)


def ids(text):
  row = np.zeros(12, np.int32)
  encoded = [*tokenizers.get("bytes").encode(text), 2]
  row[: len(encoded)] = encoded
  return row


TEXTS = np.stack([ids(NAMES[label]) for label in LABELS])


def write_captions(tmp_path, references=TEXTS, **options):
  wrong = ids("a $2 cat")

  def caption(variables, batch, *, eos_id=None):
    assert eos_id == 2
    right = batch["right"][:, None] > 0
    first = batch["labels"]
    first = first if first.ndim == 2 else first[:, 0]
    return jnp.where(right, first, wrong)

  evaluator = evaluating.build(
    "captions",
    caption,
    evaluating.context(workdir=str(tmp_path)),
    data=dict(type="arrays", arrays=ARRAYS | {"labels": references}),
    **dict(tokenizer="bytes") | options,
  )
  return evaluating.save(evaluator.run({}, step=7), tmp_path, step=7)


def test_captions_are_written_with_their_references(tmp_path):
  results = write_captions(tmp_path, num_images=7)
  assert results == {
    "exact": pytest.approx(14 / 21),
    "captions": "captions/val-00000007.jsonl",
    "picture": "captions/val-00000007.png",
  }
  file = tmp_path / "captions" / "val-00000007.jsonl"
  rows = [json.loads(line) for line in file.read_text().splitlines()]
  assert [row["number"] for row in rows] == [*range(N)]
  for i, row in enumerate(rows):
    right = NAMES[LABELS[i]]
    assert row["references"] == [right]
    assert row["caption"] == (right if i % 3 else "a $2 cat")
  with Image.open(file.with_suffix(".png")) as image:
    pixels = np.asarray(image.convert("RGB")).astype(int)
  assert pixels.shape == (400, 1300, 3)  # Two rows of five.
  assert len([*file.parent.iterdir()]) == 2


def test_wrong_captions_are_red():
  images = np.ones((1, 4, 4, 1))

  def red(caption):
    is_wrong = [caption != "a cat"]
    pixels = sheets.of_texts(images, [caption], is_wrong).astype(int)
    return ((pixels[..., 0] > 180) & (pixels[..., 1:].max(-1) < 90)).sum()

  assert red("a cat") == 0
  assert red("a dog") > 20


def test_bleu_of_several_references(tmp_path):
  pytest.importorskip("sacrebleu")
  sentences = ["a b c d e", "a b c d e f"]
  rows = np.stack([np.stack([ids(s) for s in sentences])] * N)
  results = write_captions(
    tmp_path, rows, metrics=("exact", "bleu"), num_images=0
  )
  assert not [*(tmp_path / "captions").glob("*.png")]
  assert results["exact"] == pytest.approx(14 / 21)
  # The wrong captions share no 4-gram, and little else, with any reference.
  assert 50 < results["bleu"] < 90
  perfect = text_metrics.compute(
    ["bleu"], ["a b c d e f", "x y z w"], [sentences, ["x y z w"]]
  )
  assert perfect == {"bleu": pytest.approx(100)}


def test_cider_calls_its_package(monkeypatch):
  calls = []

  class Cider:
    def compute_score(self, gold, candidates):
      calls.append((gold, candidates))
      return 1.5, None

  module = types.ModuleType("pycocoevalcap.cider.cider")
  module.Cider = Cider
  for name in ("pycocoevalcap", "pycocoevalcap.cider"):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
  monkeypatch.setitem(sys.modules, module.__name__, module)
  references = [["a cat, asleep", "Cats!"]]
  values = text_metrics.compute(["cider"], ["A cat."], references)
  assert values == {"cider": 1.5}
  assert calls == [({0: ["a cat asleep", "cats"]}, {0: ["a cat"]})]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(tokenizer="byte"), "tokenizer 'byte': no such file.*'bytes'"),
    (dict(metrics=("blue",)), "val.metrics: .*Did you mean 'bleu'"),
    (dict(labels_key="label s"), "val: .*'label s'.*Did you mean 'labels'"),
  ],
)
def test_mistakes(tmp_path, options, message):
  with pytest.raises(ConfigError, match=message):
    write_captions(tmp_path, **options)


def test_a_missing_package(tmp_path, monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=r"metrics: needs pycocoevalcap: pip"):
    write_captions(tmp_path, metrics=("cider",), num_images=0)
