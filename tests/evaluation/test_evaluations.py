"""Entries of config.evals: checks, due steps, options, and batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

from bigtrain.cluster import process
from bigtrain.config import lengths, settings
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import evaluations

N, C = 21, 7  # Batches of 8: the last has 5 examples.
RNG = np.random.default_rng(0)
LOGITS = RNG.integers(-3, 4, size=(N, C)).astype(np.float32)
LABELS = RNG.integers(0, C, size=N)
DATA = dict(
  type="arrays",
  arrays=dict(x=LOGITS, labels=LABELS, id=np.arange(N) + 100),
)
VARIABLES = {"scale": jnp.float32(1.0)}


def from_config(entries, weights=("params",), total_steps=100, **changes):
  def logits(variables, batch, *, temperature=1.0):
    return variables["scale"] * batch["x"] / temperature

  config = settings.Config({"evals": entries})
  result = evaluations.from_config(
    config,
    {"logits": logits},
    lengths.Units(batch_size=8, total_steps=total_steps),
    evaluating.context(name="", **changes),
    dict.fromkeys(weights),
  )
  assert config.unread() == []
  return result


def entry(**changes):
  values = dict(type="classification", pred="logits", data=DATA)
  return {k: v for k, v in (values | changes).items() if v is not None}


def test_due_steps():
  a, b = from_config({"a": entry(log_steps=30), "b": entry()})
  due = [s for s in range(101) if a.due(s, 100)]
  assert due == [30, 60, 90, 100]
  assert [s for s in range(101) if b.due(s, 100)] == [100]
  (c,) = from_config({"c": entry(log_percent=25)})
  assert [s for s in range(101) if c.due(s, 100)] == [25, 50, 75, 100]


def test_due_later():
  (a,) = from_config({"a": entry(log_steps=30)})
  for step in range(1, 100, 7):
    for last in range(step, 101, 9):
      due = any(a.due(s, 100) for s in range(step, last + 1))
      assert a.due_later(step, last, 100) == due, (step, last)


def test_owned_metrics():
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
  results = evaluation.build().run(VARIABLES, 1)
  assert set(results) == {"loss", "top2_acc"}
  assert results["loss"] == pytest.approx(np.log(C), rel=1e-6)


class Evaluator:
  """A user's evaluator that takes `cache` itself."""

  def __init__(self, batches, *, factor=1.0, cache=False):
    self.factor, self.cache, self.batches = factor, cache, batches
    self.sums = batches.map(lambda variables, batch: batch["id"].sum())

  def run(self, variables, step):
    return {"sum": self.factor * float(sum(self.sums(variables)))}


def test_an_evaluator_receives_the_arguments_it_has_parameters_for():
  def build(**options):
    predict_fn = lambda variables, batch: batch
    return evaluating.build(__name__, predict_fn, **options)

  built = build(
    data=DATA, factor=2.0, cache=True, pp="keep('id')", num_examples=16
  )
  assert built.run({}, 1) == {"sum": 2 * sum(range(100, 116))}
  assert built.cache and built.batches.num_examples == 16
  with pytest.raises(ConfigError, match=r"val.num_exmples: .*'num_examples'"):
    build(data=DATA, num_exmples=1)
  with pytest.raises(ConfigError, match=r"config.evals.val.data: missing"):
    build()


def test_no_data_is_opened_before_the_evaluation_is_due(tmp_path):
  data = dict(type="arrays", path=str(tmp_path / "later.npz"))
  with pytest.raises(ConfigError, match=r"a.data.path: .*later.npz: no such"):
    from_config({"a": entry(data=data)})
  (tmp_path / "later.npz").write_text("not yet")
  (evaluation,) = from_config({"a": entry(data=data)})
  with pytest.raises(ConfigError, match=r"config.evals.a.data: .*later.npz"):
    evaluation.build()
  np.savez(tmp_path / "later.npz", **DATA["arrays"])
  assert evaluation.build().run(VARIABLES, 1)["acc"] > 0


def test_a_disabled_entry_is_not_checked():
  assert from_config({"a": entry(enabled=False, type="unheard_of")}) == []
  assert from_config(None) == []  # --config.evals=None switches all off.


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(type=None), r"config.evals.a.type: missing"),
    (dict(pred=None), r"config.evals.a.pred: missing"),
    (dict(data=None), r"config.evals.a.data: missing"),
    (dict(data="digits"), r"config.evals.a.data: expected dict.type="),
    (dict(type="classificatio"), r"a.type: .* mean 'classification'"),
    (dict(type="common"), r"a.type: unknown evaluator 'common'"),
    (dict(type="class_names"), r"a.type: unknown evaluator 'class_names'"),
    (dict(pred="logit"), r"a.pred: .* mean 'logits'"),
    (dict(pred_kw=dict(temprature=1)), r"pred_kw.temprature: .*'temperature'"),
    (dict(weights="ema"), r"a.weights: the state has no 'ema'"),
    (dict(log_steps=1, log_epochs=1), r"a.log_steps and .*: give the length"),
    (dict(log_epochs=1), r"a.log_epochs: this unit needs a training set"),
    (dict(loss_kind="x"), r"config.evals.a.loss_kind: unknown key"),
    (dict(data=dict(type="arrays", pth=1)), r"a.data.pth: .* mean 'path'"),
    (dict(pp="kep('x')"), r"config.evals.a.pp: .* mean 'keep'"),
    (dict(batch_size=9), r"config.evals.a.batch_size=9 does not divide"),
    (dict(top_k=[1, 0]), r"a.top_k: expected a whole number at least 1, got 0"),
    (dict(top_k=1), r"config.evals.a.top_k: expected a list of numbers, got 1"),
  ],
)
def test_config_mistakes(changes, message):
  with pytest.raises(ConfigError, match=message):
    from_config({"a": entry(**changes)})


_NAMES = dict(class_names=["a", "b"], pp_text="tokenize(max_len=8)")


@pytest.mark.parametrize(
  ("kind", "options", "message"),
  [
    (
      "scoring",
      dict(class_names="no.txt"),
      "a.class_names: no such file: .*",
    ),
    ("scoring", dict(prompt="a"), "a.prompt: expected a prompt with one {}"),
    ("scoring", dict(pp_text="tokenize('x.model')"), "tokenizer 'x.model'"),
    ("scoring", dict(pp_text="tokenise"), "mean 'tokenize'"),
    ("scoring", dict(pp_text="tokenize"), "a.pp_text: .*vocabulary has 258"),
    (
      "zeroshot",
      dict(class_names="no.txt"),
      "a.class_names: no such file: .*",
    ),
    ("zeroshot", dict(prompts="no.txt"), "a.prompts: no such file: .*no.txt"),
    (
      "zeroshot",
      dict(prompts=["{}", "a"]),
      "a.prompts: expected a prompt",
    ),
    ("captions", dict(tokenizer="no.model"), "a.tokenizer: .*'no.model': no"),
    ("captions", dict(metrics=["blue"]), "a.metrics: .* mean 'bleu'"),
    ("choice", dict(tokenizer="no.json"), "a.tokenizer: .*'no.json': no such"),
    ("choice", dict(), "a.tokenizer: .* vocabulary has 258"),
    ("generate", dict(tokenizer="no.json"), "a.tokenizer: .*'no.json': no"),
    ("generate", dict(metrics=["blue"]), "a.metrics: .* mean 'bleu'"),
    ("generate", dict(metrics=["bleu"]), "a.reference_key: missing"),
  ],
)
def test_missing_files_are_reported_at_the_start(kind, options, message):
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


def test_files_of_class_names_and_prompts_pass_the_check(tmp_path):
  names, prompts = tmp_path / "names.txt", tmp_path / "prompts.txt"
  names.write_text("cat\ndog\n")
  prompts.write_text("a {}\nthe {}\n")
  options = dict(class_names=str(names), pp_text=_NAMES["pp_text"])
  result = from_config(
    {
      "a": entry(type="scoring", **options),
      "b": entry(type="zeroshot", prompts=str(prompts), **options),
    }
  )
  assert [evaluation.name for evaluation in result] == ["a", "b"]


def test_results_are_replicated():
  batches = evaluations.Batches(evaluating.context(), DATA)
  sums = batches.map(lambda variables, batch: batch["x"].sum())({})
  assert len(sums) == 3
  assert all(isinstance(x, np.ndarray | np.generic) for x in sums)
  padded = np.concatenate([LOGITS, LOGITS[-1:].repeat(3, 0)])
  expected = padded.reshape(3, 8, C).sum((1, 2))
  np.testing.assert_allclose(sums, expected, rtol=1e-6)
  assert jax.device_count() == 8


def test_a_missing_feature_is_reported_with_the_nearest_one():
  batches = evaluations.Batches(evaluating.context(), DATA)
  message = "evals.val: after pp, .* no feature 'label'.* mean 'labels'"
  with pytest.raises(ConfigError, match=message):
    batches.map(lambda variables, batch: batch["label"])({})


def test_progress_is_reported_after_each_batch_and_can_stop_the_evaluation():
  reports = []

  def progress(done, batches):
    reports.append((done, batches))
    if len(reports) == 5:
      raise process.Preempted("a signal")

  batches = evaluations.Batches(evaluating.context(progress=progress), DATA)
  run = batches.map(lambda variables, batch: batch["x"])
  run(VARIABLES)
  assert reports == [(1, 3), (2, 3), (3, 3)]
  with pytest.raises(process.Preempted):
    run(VARIABLES)
  run(VARIABLES)  # It can run again.
  assert reports[-1] == (3, 3)
