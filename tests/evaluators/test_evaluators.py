"""Evaluators by themselves: exact means, files, and what a config may say."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import lengths, settings, sharding
from bigtrain.cluster import process
from bigtrain.evaluation import evaluations
from bigtrain.evaluators import classification, mean, save
from bigtrain.settings import ConfigError

N, C = 21, 7  # Batches of 8: the last has 5 examples.
RNG = np.random.default_rng(0)
# Ties and rows whose best class is not the first of them.
LOGITS = RNG.integers(-3, 4, size=(N, C)).astype(np.float32)
LABELS = RNG.integers(0, C, size=N)
DATA = dict(
  type="arrays",
  arrays=dict(x=LOGITS, labels=LABELS, id=np.arange(N) + 100),
)


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


def predict(variables, batch):
  """The logits are in the data."""
  return variables["scale"] * batch["x"]


VARIABLES = {"scale": jnp.float32(1.0)}


def cross_entropy(logits, labels):
  shifted = logits - logits.max(-1, keepdims=True)
  log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  return -(log_probs * labels).sum(-1)


def top_k(logits, labels, k):
  """Ties go to the lower class."""
  best = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
  return np.mean([label in row for row, label in zip(best, labels)])


@pytest.mark.parametrize("mesh", [(1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("batch_size", [8, 16, 32])
def test_classification_is_exact_however_the_batches_are_cut(mesh, batch_size):
  evaluator = classification.Evaluator(
    predict,
    context(mesh=sharding.make_mesh(*mesh), batch_size=batch_size),
    data=DATA,
    top_k=(1, 3, 5, 99),
  )
  found = evaluator.run(VARIABLES, step=1)
  one_hot = np.eye(C)[LABELS]
  assert found == pytest.approx(
    {
      "loss": cross_entropy(LOGITS, one_hot).mean(),
      "acc": top_k(LOGITS, LABELS, 1),
      "top3_acc": top_k(LOGITS, LABELS, 3),
      "top5_acc": top_k(LOGITS, LABELS, 5),
    },
    rel=1e-6,
  )
  # Again with other variables: nothing of the first is left.
  assert evaluator.run({"scale": jnp.float32(0)}, step=2)[
    "loss"
  ] == pytest.approx(np.log(C))


def test_classification_with_several_labels_and_sigmoid():
  labels = RNG.integers(0, 2, size=(N, C)).astype(np.float32)
  arrays = dict(x=LOGITS, several=labels)
  found = classification.Evaluator(
    predict,
    context(),
    data=dict(type="arrays", arrays=arrays),
    loss="sigmoid_xent",
    label_key="several",
  ).run(VARIABLES, step=1)
  p = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
  loss = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).sum(-1).mean()
  hits = labels[np.arange(N), LOGITS.argmax(-1)].mean()
  assert found["loss"] == pytest.approx(loss, rel=1e-6)
  assert found["acc"] == pytest.approx(hits)
  assert set(found) == {"loss", "acc", "top5_acc"}


def test_only_some_examples():
  found = classification.Evaluator(
    predict, context(), data=DATA, num_examples=10
  ).run(VARIABLES, step=1)
  assert found["acc"] == pytest.approx(top_k(LOGITS[:10], LABELS[:10], 1))


def test_logits_of_low_precision_are_compared_in_float32():
  def low(variables, batch):
    return (batch["x"] * 100).astype(jnp.bfloat16)

  found = classification.Evaluator(low, context(), data=DATA).run({}, 1)
  rounded = np.asarray((LOGITS * 100).astype(jnp.bfloat16), np.float32)
  loss = cross_entropy(rounded, np.eye(C)[LABELS]).mean()
  assert found["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("cache", [True, False])
def test_the_mean_is_weighted_over_all_batches(cache):
  def pairs(variables, batch):
    weight = batch["_mask"] * (batch["id"] % 2)
    return {
      "odd": ((batch["id"] * weight).sum(), weight.sum()),
      "never": (jnp.zeros(()), jnp.zeros(())),
    }

  evaluator = mean.Evaluator(pairs, context(), data=DATA, cache=cache)
  odd = np.arange(101, 100 + N, 2).mean()
  for step in (1, 2):  # The second time from the cache, if there is one.
    found = evaluator.run({}, step)
    assert found["odd"] == pytest.approx(odd, rel=1e-7)
    assert np.isnan(found["never"])


def test_saved_predictions_have_one_row_for_each_example(tmp_path):
  def several(variables, batch):
    return {"logits": batch["x"], "sums": {"all": batch["x"].sum(-1)}}

  evaluator = save.Evaluator(
    several,
    context(workdir=str(tmp_path), name="out"),
    data=DATA,
    keys=["id", "labels"],
  )
  assert evaluator.run({}, 12) == {"num_examples": N}
  assert os.listdir(tmp_path / "predictions") == ["out-00000012.npz"]
  with np.load(tmp_path / "predictions" / "out-00000012.npz") as file:
    found = dict(file)
  assert set(found) == {
    "predictions/logits",
    "predictions/sums/all",
    "id",
    "labels",
  }
  np.testing.assert_array_equal(found["id"], np.arange(N) + 100)
  np.testing.assert_array_equal(found["labels"], LABELS)
  np.testing.assert_array_equal(found["predictions/logits"], LOGITS)
  np.testing.assert_allclose(found["predictions/sums/all"], LOGITS.sum(-1))


def test_progress_is_told_after_each_batch_and_may_stop_it():
  told = []

  def progress(done, batches):
    told.append((done, batches))
    if len(told) == 5:
      raise process.Preempted("a signal")

  evaluator = classification.Evaluator(
    predict, context(progress=progress), data=DATA
  )
  evaluator.run(VARIABLES, 1)
  assert told == [(1, 3), (2, 3), (3, 3)]
  with pytest.raises(process.Preempted):
    evaluator.run(VARIABLES, 2)
  evaluator.run(VARIABLES, 2)  # And it can be run again.
  assert told[-1] == (3, 3)


@pytest.mark.parametrize(
  ("make", "options", "message"),
  [
    (classification, dict(loss="softmax"), r"val.loss: .* mean 'softmax_xent'"),
    (classification, dict(label_key="label"), r"label_key: .* mean 'labels'"),
    (classification, dict(num_examples=99), r"num_examples=99: .* 1 to 21"),
    (classification, dict(batch_size=12), r"config.evals.val.batch_size=12"),
    (save, dict(keys=["ids"]), r"config.evals.val.keys: .*'ids'.* mean 'id'"),
  ],
)
def test_mistakes(make, options, message):
  with pytest.raises(ConfigError, match=message):
    make.Evaluator(predict, context(), data=DATA, **options).run(VARIABLES, 1)


# From the config.


def from_config(entries, weights=("params",), total_steps=100, **changes):
  def logits(variables, batch, *, temperature=1.0):
    return variables["scale"] * batch["x"] / temperature

  config = settings.Config({"evals": entries})
  found = evaluations.from_config(
    config,
    {"logits": logits},
    lengths.Units(batch_size=8, total_steps=total_steps),
    context(name="", **changes),
    dict.fromkeys(weights),
  )
  assert config.unread() == []
  return found


def entry(**changes):
  values = dict(type="classification", pred="logits", data=DATA)
  return {k: v for k, v in (values | changes).items() if v is not None}


def test_when_an_evaluation_is_due():
  a, b = from_config({"a": entry(log_steps=30), "b": entry()})
  due = [s for s in range(101) if a.due(s, 100)]
  assert due == [30, 60, 90, 100]
  assert [s for s in range(101) if b.due(s, 100)] == [100]
  (c,) = from_config({"c": entry(log_percent=25)})
  assert [s for s in range(101) if c.due(s, 100)] == [25, 50, 75, 100]


def test_whether_an_evaluation_is_due_some_time():
  (a,) = from_config({"a": entry(log_steps=30)})
  for step in range(1, 100, 7):
    for last in range(step, 101, 9):
      due = any(a.due(s, 100) for s in range(step, last + 1))
      assert a.due_later(step, last, 100) == due, (step, last)


def test_an_evaluation_knows_its_metrics():
  a, ab = from_config({"a": entry(), "a/b": entry()})
  assert a.owns("a/loss") and not a.owns("ab/loss") and not a.owns("loss")
  assert ab.owns("a/b/loss") and not ab.owns("a/loss")


def test_options_reach_the_predict_function_and_the_evaluator():
  (evaluation,) = from_config(
    {
      "hot": entry(
        pred_kw=dict(temperature=1e9), top_k=[2], weights="ema", num_examples=10
      )
    },
    weights=("params", "ema"),
  )
  assert evaluation.weights == "ema"
  found = evaluation.build().run(VARIABLES, 1)
  assert set(found) == {"loss", "top2_acc"}
  assert found["loss"] == pytest.approx(np.log(C), rel=1e-6)


def test_nothing_is_opened_before_it_is_due(tmp_path):
  data = dict(type="arrays", path=str(tmp_path / "later.npz"))
  with pytest.raises(ConfigError, match=r"a.data.path: .*later.npz: no such"):
    from_config({"a": entry(data=data)})
  (tmp_path / "later.npz").write_text("not yet")
  (evaluation,) = from_config({"a": entry(data=data)})
  with pytest.raises(ConfigError, match=r"config.evals.a.data: .*later.npz"):
    evaluation.build()
  np.savez(tmp_path / "later.npz", **DATA["arrays"])
  assert evaluation.build().run(VARIABLES, 1)["acc"] > 0


def test_an_entry_that_is_switched_off_is_not_even_checked():
  assert from_config({"a": entry(enabled=False, type="unheard_of")}) == []


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(type=None), r"config.evals.a.type: missing"),
    (dict(pred=None), r"config.evals.a.pred: missing"),
    (dict(data=None), r"config.evals.a.data: missing"),
    (dict(data="digits"), r"config.evals.a.data: expected dict.type="),
    (dict(type="classificatio"), r"a.type: .* mean 'classification'"),
    (dict(type="common"), r"a.type: no evaluators module 'common'"),
    (dict(pred="logit"), r"a.pred: .* mean 'logits'"),
    (dict(pred_kw=dict(temprature=1)), r"pred_kw.temprature: .*'temperature'"),
    (dict(weights="ema"), r"a.weights: the state has no 'ema'"),
    (dict(log_steps=1, log_epochs=1), r"a.log_steps and .*: give the length"),
    (dict(log_epochs=1), r"a.log_epochs: this unit needs a training set"),
    (dict(loss_kind="x"), r"config.evals.a.loss_kind: unknown key"),
    (dict(data=dict(type="arrays", pth=1)), r"a.data.pth: .* mean 'path'"),
    (dict(pp="kep('x')"), r"config.evals.a.pp: .* mean 'keep'"),
    (dict(batch_size=9), r"config.evals.a.batch_size=9 does not divide"),
  ],
)
def test_mistakes_in_the_config(changes, message):
  with pytest.raises(ConfigError, match=message):
    from_config({"a": entry(**changes)})


_NAMES = dict(class_names=["a", "b"], pp_text="tokenize(max_len=8)")


@pytest.mark.parametrize(
  ("kind", "options", "message"),
  [
    ("scoring", dict(class_names="no.txt"), "a.class_names: no such file: no"),
    ("scoring", dict(prompt="a"), "a.prompt: expected one {}"),
    ("scoring", dict(pp_text="tokenize('x.model')"), "tokenizer 'x.model'"),
    ("scoring", dict(pp_text="tokenise"), "mean 'tokenize'"),
    ("scoring", dict(pp_text="tokenize"), "a.pp_text: .*vocabulary has 258"),
    ("zeroshot", dict(class_names="no.txt"), "a.class_names: no such file: no"),
    ("zeroshot", dict(prompts="no.txt"), "a.prompts: no such file: no.txt"),
    ("zeroshot", dict(prompts=["{}", "a"]), "a.prompts: expected one {}"),
    ("captions", dict(tokenizer="no.model"), "a.tokenizer: .*'no.model': no"),
    ("captions", dict(metrics=["blue"]), "a.metrics: .* mean 'bleu'"),
    ("choice", dict(tokenizer="no.json"), "a.tokenizer: .*'no.json': no such"),
    ("choice", dict(), "a.tokenizer: .* vocabulary has 258"),
    ("generate", dict(tokenizer="no.json"), "a.tokenizer: .*'no.json': no"),
    ("generate", dict(metrics=["blue"]), "a.metrics: .* mean 'bleu'"),
    ("generate", dict(metrics=["bleu"]), "a.reference_key: missing"),
  ],
)
def test_missing_files_are_told_at_the_start(kind, options, message):
  needed = {
    "captions": dict(tokenizer="bytes"),
    "choice": dict(length=8),
    "generate": {},
  }.get(kind, _NAMES)
  config = {"a": entry(type=kind, **needed | options)}
  sizes = {"labels": 258, "tokens": 258}
  if message.count("258") == 0:
    sizes = {}
  with pytest.raises(ConfigError, match=message):
    from_config(config, vocab_sizes=sizes)


def test_class_names_and_prompts_are_read_when_they_are_needed(tmp_path):
  names, prompts = tmp_path / "names.txt", tmp_path / "prompts.txt"
  names.write_text("cat\ndog\n")
  prompts.write_text("a {}\nthe {}\n")
  options = dict(class_names=str(names), pp_text=_NAMES["pp_text"])
  found = from_config(
    {
      "a": entry(type="scoring", **options),
      "b": entry(type="zeroshot", prompts=str(prompts), **options),
    }
  )
  assert [evaluation.name for evaluation in found] == ["a", "b"]


def test_results_are_the_same_on_every_device():
  batches = evaluations.Batches(
    lambda variables, batch: batch["x"].sum(),
    context(),
    data=DATA,
    pp="",
  )
  found = batches.map({})
  assert len(found) == 3
  assert all(isinstance(x, np.ndarray | np.generic) for x in found)
  padded = np.concatenate([LOGITS, LOGITS[-1:].repeat(3, 0)])
  expected = padded.reshape(3, 8, C).sum((1, 2))
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  assert jax.device_count() == 8
