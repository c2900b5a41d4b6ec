"""Multiple choice by likelihood."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.evaluators import choice
from bigtrain.text import tokenizers

BYTES = tokenizers.get("bytes")
# A model that knows only the frequency of each byte.
NATS = np.random.default_rng(0).uniform(1, 6, 259).astype(np.float32)


def log_likelihood(variables, batch):
  scores = -jnp.asarray(NATS)[batch["targets"]] * batch["loss_mask"]
  return {"log_likelihood": scores.sum(axis=1)}


QUESTIONS = [
  dict(context="What?", choices=["yes", "no", "perhaps so"], answer=1),
  dict(context="", choices=["ééé", "abcd"], answer=0),
  dict(context="A long context of many words ", choices=["x", "y"], answer=1),
]


def write(path, questions):
  path.write_text("".join(json.dumps(q) + "\n" for q in questions))
  return dict(type="jsonl", path=str(path))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_choices_are_scored_as_in_the_harness(tmp_path):
  data = write(tmp_path / "q.jsonl", QUESTIONS)
  results = evaluating.build(
    "choice", log_likelihood, data=data, length=16, tokenizer="bytes"
  ).run({}, 1)
  expected = {"acc": [], "acc_norm": [], "acc_bytes": []}
  for question in QUESTIONS:
    scores = []
    for text in question["choices"]:
      spaces = len(question["context"]) - len(question["context"].rstrip())
      ids = BYTES.encode(" " * spaces + " " + text)
      scores.append(-NATS[ids].sum(dtype=np.float64))
    for name, size in (
      ("acc", lambda c: 1),
      ("acc_norm", len),
      ("acc_bytes", lambda c: len(c.encode())),
    ):
      sizes = np.asarray([size(c) for c in question["choices"]])
      expected[name].append(np.argmax(scores / sizes) == question["answer"])
  assert results == {name: np.mean(hits) for name, hits in expected.items()}


def test_a_likelihood_that_is_not_a_number_is_wrong(tmp_path):
  questions = [question | dict(answer=0) for question in QUESTIONS]
  data = write(tmp_path / "q.jsonl", questions)

  def of_nan(variables, batch):
    return {"log_likelihood": jnp.full(len(batch["tokens"]), jnp.nan)}

  results = evaluating.build("choice", of_nan, data=data, length=16).run({}, 1)
  assert results == dict(acc=0, acc_norm=0, acc_bytes=0, nonfinite=3)


def test_the_window_of_a_choice():
  row = choice.window(BYTES, 12, " ", False, "ab ", "cd")
  assert BYTES.decode(row["tokens"]) == "ab  c"
  assert BYTES.decode(row["targets"][row["loss_mask"] > 0]) == "  cd"
  # A long context loses its beginning; an empty one gets a begin token.
  row = choice.window(BYTES, 12, " ", False, "0123456789abcdef", "cd")
  assert BYTES.decode(row["tokens"]) == "6789abcdef c"
  assert BYTES.decode(row["targets"]) == "789abcdef cd"
  row = choice.window(BYTES, 12, " ", False, "", "cd")
  assert row["tokens"][0] == BYTES.bos_id
  assert BYTES.decode(row["targets"][row["loss_mask"] > 0]) == " cd"
  row = choice.window(BYTES, 12, "", True, "ab", "cd")
  assert row["tokens"][:4].tolist() == [1, *BYTES.encode("abc")]


def test_an_encoder_decoder_reads_the_context_as_its_inputs(tmp_path):
  def of_targets(variables, batch):
    scores = -jnp.asarray(NATS)[batch["targets"]] * (batch["targets"] != 0)
    return {"log_likelihood": scores.sum(axis=1)}

  data = write(tmp_path / "q.jsonl", QUESTIONS)
  context = evaluating.context(vocab_sizes={"inputs": 259, "targets": 259})
  results = evaluating.build(
    "choice", of_targets, context, data=data, length=16, metrics=["accuracy"]
  ).run({}, 1)
  hits = []
  for question in QUESTIONS:
    ids = [[*BYTES.encode(c), BYTES.eos_id] for c in question["choices"]]
    scores = [-NATS[row].sum(dtype=np.float64) for row in ids]
    hits.append(np.argmax(scores) == question["answer"])
  assert results["acc"] == results["accuracy"] == np.mean(hits)
  row = choice.pair_window(BYTES, 8, "What?", "no")
  assert BYTES.decode(row["inputs"][:5]) == "What?"
  assert row["inputs"].tolist()[5:] == [BYTES.eos_id, 0, 0]
  assert row["targets"].tolist() == [
    *BYTES.encode("no"),
    BYTES.eos_id,
    *[0] * 5,
  ]
  with pytest.raises(ValueError, match="choice of 9 tokens does not fit"):
    choice.pair_window(BYTES, 8, "", "x" * 8)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(answer=3), r"line 2: expected an answer from 0 to 2, got 3"),
    (dict(choices=["one"]), "two choices"),
    (dict(choices=["one", ""]), "none empty"),
    (dict(choices=["one", "x" * 20]), "choice of 21 tokens does not fit"),
  ],
)
def test_errors_in_questions_name_the_line(tmp_path, change, message):
  data = write(tmp_path / "q.jsonl", [QUESTIONS[0], QUESTIONS[0] | change])
  with pytest.raises(DataError, match=message):
    evaluating.build("choice", log_likelihood, data=data, length=16)


def test_mistakes(tmp_path):
  data = write(tmp_path / "q.jsonl", QUESTIONS)
  options = dict(data=data, length=16)
  with pytest.raises(ConfigError, match="There are: answer, choices, context"):
    evaluating.build("choice", log_likelihood, answer_key="gold", **options)
  small = evaluating.context(vocab_sizes={"tokens": 100})
  with pytest.raises(ConfigError, match=r"val.tokenizer.*vocabulary has 100"):
    evaluating.build("choice", log_likelihood, small, **options)
  with pytest.raises(ConfigError, match="'log_likelihood'"):
    evaluating.build(
      "choice", lambda variables, batch: batch["loss_mask"], **options
    ).run({}, 1)
