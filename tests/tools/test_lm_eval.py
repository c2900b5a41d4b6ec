"""The harness's scores of a model of ours, against its logits by hand."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import saved_models

from bigtrain.config.errors import ConfigError
from bigtrain.tools import lm_eval as tool

LENGTH = 32
CONFIG = dict(
  task="language_modeling",
  input=dict(data=dict(type="text", name="pydoc", length=LENGTH)),
  model_name="decoder",
  model=dict(
    **saved_models.TOWER, variant="llama", vocab_size=259, max_len=LENGTH
  ),
)
QUESTIONS = [
  {"context": "The sky is", "choices": ["blue", "a dog", "7"], "answer": 0},
  {"context": "def f(x):\n  return ", "choices": ["x", "zebra"], "answer": 1},
  {"context": "A" * 40, "choices": ["AAA", "ü"], "answer": 1},
]
TASK = """\
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""


def test_without_the_package(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  with pytest.raises(ConfigError, match=r"bigtrain\[lm_eval\]"):
    tool.model(tmp_path)


@pytest.fixture(scope="module")
def harness():
  """The real library."""
  return pytest.importorskip("lm_eval", reason="needs the extra lm_eval")


@pytest.fixture(scope="module")
def model(harness, tmp_path_factory):
  folder = tmp_path_factory.mktemp("lm")
  tokens = ((LENGTH,), "int32")
  saved_models.saved(folder, CONFIG, tokens=tokens, targets=tokens)
  model = tool.model(folder, batch_size=8)
  model.folder = folder
  return model


@pytest.fixture(scope="module")
def by_hand(model):
  """log_probabilities(ids): [len(ids) - 1, V], each given all ids before it."""
  predictor = model.predictor
  apply = jax.jit(lambda v, t: predictor.model.apply(v, t, train=False)[0])

  def log_probabilities(ids):
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(ids) - 1] = ids[:-1]
    logits = apply(predictor.variables, padded)[0, : len(ids) - 1]
    logits = np.asarray(logits.astype(jnp.float32), np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

  return log_probabilities


def requests(harness, kind, *arguments):
  from lm_eval.api.instance import Instance

  return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


def scored(by_hand, context, rest):
  ids = [*context, *rest][-LENGTH - 1 :]
  table = by_hand(ids)[-len(rest) :]
  chosen = ids[-len(rest) :]
  values = table[np.arange(len(rest)), chosen]
  return values.sum(), bool((table.argmax(-1) == chosen).all())


def ids_of(text):
  return [3 + byte for byte in text.encode()]


def test_log_likelihoods(harness, model, by_hand):
  pairs = [(q["context"], f" {c}") for q in QUESTIONS for c in q["choices"]] + [
    ("", "an empty context"),
    ("ends with a space ", "x"),
  ]
  results = model.loglikelihood(requests(harness, "loglikelihood", *pairs))
  for (context, rest), (value, greedy) in zip(pairs, results):
    ids = ids_of(context) or [1]
    if context.endswith(" "):  # It belongs to what is scored.
      ids, rest = ids[:-1], f" {rest}"
    expected = scored(by_hand, ids, ids_of(rest))
    assert value == pytest.approx(expected[0], rel=1e-5)
    assert greedy == expected[1]


def test_a_continuation_that_is_greedy(harness, model, by_hand):
  context = ids_of("abc")
  best = int(by_hand([*context, 0])[-1].argmax())
  for number in (best, best - 1):
    ((value, greedy),) = model._loglikelihood_tokens(
      [(None, context, [number])]
    )
    assert greedy == (number == best)
    assert value == pytest.approx(scored(by_hand, context, [number])[0])


def test_rolling_log_likelihoods_of_long_texts(harness, model, by_hand):
  texts = ["short", "x" * LENGTH, "the quick brown fox " * 4]
  results = model.loglikelihood_rolling(
    requests(harness, "loglikelihood_rolling", *[(t,) for t in texts])
  )
  for text, value in zip(texts, results):
    ids, total = [1, *ids_of(text)], 0.0
    # Full windows side by side; the last one is as long, and overlaps.
    for start in range(1, len(ids), LENGTH):
      end = min(start + LENGTH, len(ids))
      context = ids[max(0, end - LENGTH - 1) : start]
      total += scored(by_hand, context, ids[start:end])[0]
    assert value == pytest.approx(total, rel=1e-5)


def test_texts_are_generated_up_to_a_stop(harness, model, by_hand, monkeypatch):
  # The harness asks for greedy decoding, whatever the folder's default is.
  saved = model.predictor._saved
  monkeypatch.setitem(saved.generation, "temperature", 9.0)
  prompts = ["once", "upon a time"]
  given = {"until": [], "max_gen_toks": 6}
  expected = []
  for prompt in prompts:
    ids = ids_of(prompt)
    for _ in range(6):
      ids.append(int(by_hand([*ids, 0])[-1].argmax()))
      if ids[-1] == 2:
        break
    new = [i for i in ids[len(ids_of(prompt)) :] if i != 2]
    expected.append(model.predictor.tokenizer.decode(np.asarray(new)))
  make = lambda given: model.generate_until(
    requests(harness, "generate_until", *[(p, given) for p in prompts])
  )
  assert make(given) == expected
  stop = expected[0][2]
  cut = make(given | {"until": ["never", stop]})
  assert cut == [text.partition(stop)[0] for text in expected]
  # A prompt longer than the window keeps its end.
  long = make(given | {"until": ["?" * 99]}) and model.generate_until(
    requests(harness, "generate_until", ("z" * 90 + prompts[0], given))
  )
  assert len(long) == 1


@pytest.mark.slow
def test_the_command_on_a_task_of_ones_own(
  harness, model, by_hand, tmp_path, capsys, monkeypatch
):
  monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  data = tmp_path / "colours.jsonl"
  data.write_text("\n".join(map(json.dumps, QUESTIONS)))
  (tmp_path / "colours.yaml").write_text(TASK.format(data=data))
  output = tmp_path / "scores.json"
  words = [str(model.folder), "--tasks=colours", f"--include_path={tmp_path}"]
  assert tool.main([*words, f"--output={output}"]) == 0
  right = [
    int(
      np.argmax(
        [
          scored(by_hand, ids_of(q["context"]), ids_of(f" {c}"))[0]
          for c in q["choices"]
        ]
      )
      == q["answer"]
    )
    for q in QUESTIONS
  ]
  results = json.loads(output.read_text())["results"]["colours"]
  assert results["acc,none"] == pytest.approx(np.mean(right))
  assert "colours" in capsys.readouterr().out
  assert tool.main([str(model.folder), "--tasks=colour", *words[2:]]) == 2
  assert "no task 'colour'" in capsys.readouterr().err
