"""Scoring and captions: class names as tokens, files, pictures, metrics."""

import json
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from bigtrain import sharding
from bigtrain.evaluation import class_names, evaluations
from bigtrain.evaluators import captions, scoring
from bigtrain.pp import tokenizers
from bigtrain.settings import ConfigError

N = 21  # Batches of 8: the last has 5 examples.
RNG = np.random.default_rng(0)
NAMES = ["a cat", "two dogs", "an eight", "mice", "a whale", "snow"]
LABELS = np.arange(N) % len(NAMES)
TOKENIZE = "tokenize(max_len=12)"
DATA = dict(
  type="arrays",
  arrays=dict(
    image=RNG.uniform(-1, 1, (N, 4, 6, 3)).astype(np.float32),
    label=LABELS,
    labels=np.zeros((N, 12), np.int32),
    right=(np.arange(N) % 3 > 0).astype(np.int32),
  ),
)


def context(tmp_path="", **changes):
  values = dict(
    name="val",
    workdir=str(tmp_path),
    mesh=sharding.make_mesh(),
    batch_size=8,
    pp_modules=(),
    progress=lambda done, batches: None,
  )
  return evaluations.Context(**values | changes)


def ids(text):
  row = np.zeros(12, np.int32)
  found = [*tokenizers.get("bytes").encode(text), 2]
  row[: len(found)] = found
  return row


def likelihoods(variables, batch):
  """The right class is first or second, as "right" in the data says."""
  tokens_CL = batch["class_tokens"]
  assert tokens_CL.shape == (len(NAMES), 12)
  classes = jnp.arange(len(NAMES))
  scores_BC = -1.0 * (classes != batch["label"][:, None])
  # The numbers of the tokens must be those of the names in their order.
  expected = jnp.asarray(np.stack([ids(name) for name in NAMES]))
  scores_BC += jnp.where(jnp.all(tokens_CL == expected), 0.0, jnp.nan)
  wrong = (classes == (batch["label"][:, None] + 1) % len(NAMES)) * 2.0
  return scores_BC + wrong * (1 - batch["right"])[:, None]


def score(tmp_path="", **options):
  evaluator = scoring.Evaluator(
    likelihoods,
    context(tmp_path),
    **dict(data=DATA, class_names=NAMES, pp_text=TOKENIZE) | options,
  )
  return evaluator.run({}, step=1)


def test_scoring_names_from_a_list_or_a_file(tmp_path):
  expected = {"acc": 14 / 21, "top2_acc": 1.0}
  assert score(top_k=(1, 2, 7)) == pytest.approx(expected)
  path = tmp_path / "names.txt"
  path.write_text("\n".join(NAMES) + "\n")
  found = score(class_names=str(path), top_k=(1, 2))
  assert found == pytest.approx(expected)


def test_a_label_beyond_the_names_is_not_merely_wrong():
  arrays = DATA["arrays"] | {"label": LABELS + len(NAMES) * (LABELS == 2)}
  assert np.isnan(score(data=dict(type="arrays", arrays=arrays))["acc"])
  arrays = DATA["arrays"] | {"label": np.where(np.arange(N) < 9, LABELS, -1)}
  found = score(data=dict(type="arrays", arrays=arrays))
  assert found["acc"] == pytest.approx(6 / 9)


def test_a_prompt_stands_around_each_name():
  texts = class_names.fill("see {}!", ["a", "b"], "key")
  tokens = class_names.tokens(texts, TOKENIZE, context(), key="key")
  np.testing.assert_array_equal(tokens, [ids("see a!"), ids("see b!")])
  assert tokens.dtype == np.int32


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(class_names="no/such.txt"), "val.class_names: no such file: no/such"),
    (dict(class_names=["a", " "]), "val.class_names: class 1 is ' '"),
    (dict(class_names=[]), "val.class_names: there is no name"),
    (dict(prompt="a photo"), "val.prompt: expected one {}"),
    (dict(pp_text="lower"), "val.pp_text: the ops leave no 'labels'"),
    (dict(pp_text="choice|" + TOKENIZE), "val.pp_text: expected ops that draw"),
    (dict(label_key="lable"), "val.label_key: .*Did you mean 'label'"),
  ],
)
def test_mistakes_in_scoring(options, message):
  with pytest.raises(ConfigError, match=f"config.evals.{message}"):
    score(**options)


def test_class_names_need_no_more_ids_than_the_model_has():
  small = context(vocab_sizes={"labels": 100})
  with pytest.raises(ConfigError, match=r"pp_text.*vocabulary has 100"):
    class_names.tokens(["a"], TOKENIZE, small, key="config.evals.val.pp_text")


# Captions.

TEXTS = np.stack([ids(NAMES[label]) for label in LABELS])


def write_captions(tmp_path, references=TEXTS, **options):
  wrong = ids("a $2 cat")

  def caption(variables, batch, *, eos_id):
    assert eos_id == 2
    right = batch["right"][:, None] > 0
    first = batch["labels"]
    first = first if first.ndim == 2 else first[:, 0]
    return jnp.where(right, first, wrong)

  data = dict(type="arrays", arrays=DATA["arrays"] | {"labels": references})
  evaluator = captions.Evaluator(
    caption,
    context(tmp_path),
    **dict(data=data, tokenizer="bytes") | options,
  )
  return evaluator.run({}, step=7)


def test_captions_are_written_beside_their_references(tmp_path):
  found = write_captions(tmp_path, num_images=7)
  assert found == {"exact": pytest.approx(14 / 21)}
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


def test_wrong_captions_are_shown_in_red(tmp_path):
  images, references = np.ones((1, 4, 4, 1)), [["a cat"]]

  def red(caption):
    path = str(tmp_path / "sheet.png")
    captions.draw(path, images, [caption], references)
    with Image.open(path) as image:
      pixels = np.asarray(image.convert("RGB")).astype(int)
    return ((pixels[..., 0] > 180) & (pixels[..., 1:].max(-1) < 90)).sum()

  assert red("a cat") == 0
  assert red("a dog") > 20


def test_bleu_of_several_references(tmp_path):
  pytest.importorskip("sacrebleu")
  sentences = ["a b c d e", "a b c d e f"]
  rows = np.stack([np.stack([ids(s) for s in sentences])] * N)
  found = write_captions(
    tmp_path, rows, metrics=("exact", "bleu"), num_images=0
  )
  assert not [*(tmp_path / "captions").glob("*.png")]
  assert found["exact"] == pytest.approx(14 / 21)
  # The others have no 4-gram, nor much else, in common with any reference.
  assert 50 < found["bleu"] < 90
  perfect = captions.METRICS["bleu"](
    ["a b c d e f", "x y z w"], [sentences, ["x y z w"]]
  )
  assert perfect == pytest.approx(100)


def test_cider_is_asked_of_its_library(monkeypatch):
  asked = []

  class Cider:
    def compute_score(self, gold, found):
      asked.append((gold, found))
      return 1.5, None

  module = types.ModuleType("pycocoevalcap.cider.cider")
  module.Cider = Cider
  for name in ("pycocoevalcap", "pycocoevalcap.cider"):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
  monkeypatch.setitem(sys.modules, module.__name__, module)
  score = captions.METRICS["cider"](["A cat."], [["a cat, asleep", "Cats!"]])
  assert score == 1.5
  assert asked == [({0: ["a cat asleep", "cats"]}, {0: ["a cat"]})]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(tokenizer="byte"), "tokenizer 'byte': no such file.*'bytes'"),
    (dict(metrics=("blue",)), "val.metrics: .*Did you mean 'bleu'"),
    (dict(labels_key="label s"), "val.labels_key: .*Did you mean 'labels'"),
  ],
)
def test_mistakes_in_captions(tmp_path, options, message):
  with pytest.raises(ConfigError, match=message):
    write_captions(tmp_path, **options)


def test_a_missing_package_is_told(tmp_path, monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=r"metrics: needs pycocoevalcap: pip"):
    write_captions(tmp_path, metrics=("cider",), num_images=0)
