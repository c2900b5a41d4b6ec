"""Evaluators of language models: perplexity, choice and generate."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.evaluation import evaluations
from bigtrain.evaluators import choice, generate, perplexity
from bigtrain.pp import tokenizers
from bigtrain.settings import ConfigError, DataError

BYTES = tokenizers.get("bytes")


def context(**changes):
  values = dict(
    name="val",
    workdir="",
    mesh=sharding.make_mesh(),
    batch_size=8,
    pp_modules=(),
    progress=lambda done, batches: None,
  )
  return evaluations.Context(**values | changes)


# A model that knows how often each byte occurs and nothing else.
NATS = np.random.default_rng(0).uniform(1, 6, 259).astype(np.float32)


def unigram(variables, batch):
  weights = batch["loss_mask"] * batch["_mask"][:, None]
  loss = jnp.asarray(NATS)[batch["targets"]]
  return {
    "loss": (jnp.sum(loss * weights), jnp.sum(weights)),
    "accuracy": (jnp.sum(weights) / 2, jnp.sum(weights)),
    "bytes": (jnp.sum(batch["num_bytes"] * batch["_mask"]), jnp.float32(1)),
  }


@pytest.mark.parametrize("batch_size, length", [(8, 100), (64, 37)])
def test_perplexity_is_exact_however_the_text_is_cut(
  batch_size, length, tmp_path
):
  text = bytes(np.random.default_rng(1).integers(0, 256, 3000, np.uint8))
  (tmp_path / "x").write_bytes(text)
  found = perplexity.Evaluator(
    unigram,
    context(batch_size=batch_size),
    data=dict(type="text", path=str(tmp_path / "x"), length=length),
  ).run({}, 1)
  loss = np.mean([NATS[b + 3] for b in text], dtype=np.float64)
  assert found == pytest.approx(
    {
      "loss": loss,
      "perplexity": math.exp(loss),
      "bits_per_byte": loss / math.log(2),
      "accuracy": 0.5,
    },
    rel=1e-6,
  )


def test_perplexity_without_bytes_and_of_a_model_that_diverged():
  batches = [{"loss": (6.0, 2.0)}, {"loss": (0.0, 1.0)}]
  assert perplexity.summary(batches) == {
    "loss": 2.0,
    "perplexity": pytest.approx(math.exp(2)),
  }
  found = perplexity.summary([{"loss": (9e9, 1.0), "bytes": (0.0, 1.0)}])
  assert found["perplexity"] == math.inf
  assert math.isnan(found["bits_per_byte"])


def test_perplexity_needs_a_loss():
  data = dict(type="text", name="pydoc", split="test[:8]", length=8)
  evaluator = perplexity.Evaluator(
    lambda variables, batch: {"los": (jnp.ones(()), jnp.ones(()))},
    context(),
    data=data,
  )
  with pytest.raises(ConfigError, match="'loss'"):
    evaluator.run({}, 1)


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


def test_choices_are_scored_as_the_harness_does(tmp_path):
  data = write(tmp_path / "q.jsonl", QUESTIONS)
  found = choice.Evaluator(
    log_likelihood, context(), data=data, length=16, tokenizer="bytes"
  ).run({}, 1)
  want = {"acc": [], "acc_norm": [], "acc_bytes": []}
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
      want[name].append(np.argmax(scores / sizes) == question["answer"])
  assert found == {name: np.mean(hits) for name, hits in want.items()}


def test_the_window_of_a_choice():
  maker = choice._Maker(BYTES, 12, " ", False, "")
  row = maker.row("ab ", "cd")
  assert BYTES.decode(row["tokens"]) == "ab  c"
  assert BYTES.decode(row["targets"][row["loss_mask"] > 0]) == "  cd"
  # The end of a context that is too long, and a begin token before none.
  row = maker.row("0123456789abcdef", "cd")
  assert BYTES.decode(row["tokens"]) == "6789abcdef c"
  assert BYTES.decode(row["targets"]) == "789abcdef cd"
  row = maker.row("", "cd")
  assert row["tokens"][0] == BYTES.bos_id
  assert BYTES.decode(row["targets"][row["loss_mask"] > 0]) == " cd"
  row = choice._Maker(BYTES, 12, "", True, "").row("ab", "cd")
  assert row["tokens"][:4].tolist() == [1, *BYTES.encode("abc")]


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(answer=3), r"line 2: answer 3 is none of 3"),
    (dict(choices=["one"]), "two choices"),
    (dict(choices=["one", ""]), "none empty"),
    (dict(choices=["one", "x" * 20]), "choice of 21 tokens does not fit"),
  ],
)
def test_questions_that_are_none_name_their_line(tmp_path, change, message):
  data = write(tmp_path / "q.jsonl", [QUESTIONS[0], QUESTIONS[0] | change])
  with pytest.raises(DataError, match=message):
    choice.Evaluator(log_likelihood, context(), data=data, length=16)


def test_choice_says_what_is_missing(tmp_path):
  data = write(tmp_path / "q.jsonl", QUESTIONS)
  with pytest.raises(ConfigError, match="There are: answer, choices, context"):
    choice.Evaluator(
      log_likelihood, context(), data=data, length=16, answer_key="gold"
    )
  small = context(vocab_sizes={"tokens": 100})
  with pytest.raises(ConfigError, match=r"val.tokenizer.*vocabulary has 100"):
    choice.Evaluator(log_likelihood, small, data=data, length=16)
  with pytest.raises(ConfigError, match="'log_likelihood'"):
    choice.Evaluator(
      lambda v, batch: batch["loss_mask"], context(), data=data, length=16
    ).run({}, 1)


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


def generations(**changes):
  arrays = dict(
    prompt=padded(["1", "2", "3"], end=False),
    sample=padded(SAMPLES),
    labels=np.stack([padded(texts) for texts in REFERENCES]),
  )
  # What a model writes after its end does not count.
  arrays["sample"][1, 8:12] = BYTES.encode("junk")
  options = dict(
    data=dict(type="arrays", arrays=arrays), reference_key="labels"
  )
  return options | changes


def test_generations_are_written_and_compared(tmp_path):
  found = generate.Evaluator(
    lambda variables, batch: batch["sample"],
    context(workdir=str(tmp_path)),
    **generations(prompt_key="prompt", metrics=["exact_match"]),
  ).run({}, 7)
  assert found == {"num_examples": 3.0, "exact_match": pytest.approx(1 / 3)}
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
  found = generate.Evaluator(
    lambda variables, batch: batch["sample"],
    context(workdir=str(tmp_path)),
    **generations(metrics=["bleu", "rouge"]),
  ).run({}, 1)
  # By hand: 5 of 6, 2 of 2, and 0 of 1 words, against the better reference.
  assert found["rouge1"] == pytest.approx((5 / 6 + 1 + 0) / 3)
  assert found["rougeL"] == found["rouge1"]
  # All runs of words are in a reference but one of two "the", and "füll".
  assert found["bleu"] == pytest.approx(100 * (7 / 9) ** 0.25)


def test_mistakes_of_generate():
  for changes, message in (
    (dict(metrics=["blue"]), "mean 'bleu'"),
    (dict(metrics=["bleu"], reference_key=None), "reference_key: missing"),
  ):
    with pytest.raises(ConfigError, match=message):
      generate.Evaluator(lambda v, b: b, context(), **generations(**changes))
  with pytest.raises(ConfigError, match="no 'label'"):
    generate.Evaluator(
      lambda variables, batch: batch["sample"],
      context(),
      **generations(reference_key="label"),
    ).run({}, 1)
