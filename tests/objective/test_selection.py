"""Steps that choose what they learn from: config.select."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from support import objectives
from tiny import towers

from bigtrain import main, metrics
from bigtrain.config.errors import ConfigError
from bigtrain.losses import joint_selection
from bigtrain.step import keys
from bigtrain.tasks import contrastive
from bigtrain.tools.plan import program

B, L, V = 32, 5, 11
RNG = np.random.default_rng(0)
ARRAYS = {
  "image": RNG.normal(size=(B, 4, 4, 1)).astype(np.float32),
  "labels": RNG.integers(0, V, size=(B, L)).astype(np.int32),
  "clean": np.float32(np.arange(B) % 2),
}
TEACHER = dict(
  model_name="tiny.towers", model=dict(vocab_size=V, width=24), model_init=None
)
SELECT = dict(keep=0.5, chunks=4, report=["clean"])
CONFIG = dict(
  total_steps=6,
  log_steps=1,
  ckpt_steps=3,
  tensorboard=False,
  task="contrastive",
  input=dict(
    data=dict(type="arrays", arrays=ARRAYS), batch_size=B, shuffle=False
  ),
  model_name="tiny.towers",
  model=dict(vocab_size=V),
  optimizer=dict(name="adam"),
  lr=0.01,
  schedule=dict(decay_type="constant"),
  select=SELECT,
  teacher=TEACHER,
)
IN_DOUBLE = {"model.dtype": "float64", "teacher.model.dtype": "float64"}


def config(**changes):
  """CONFIG with {"dotted.key": value}; None removes a key."""
  result = copy.deepcopy({k: x for k, x in CONFIG.items() if k != "input"})
  result["input"] = {**CONFIG["input"]}
  for key, value in changes.items():
    *parents, last = key.split(".")
    node = result
    for parent in parents:
      node = node[parent]
    if value is None:
      del node[last]
    else:
      node[last] = value
  return result


def step(changes, **sizes):
  return objectives.gradients(config(**IN_DOUBLE, **changes), **sizes)


@pytest.fixture(scope="module")
def one_device():
  return step({})


def chosen_by_hand():
  """Numbers of the chosen pairs, and their loss by the reference."""
  inputs = contrastive.inputs(ARRAYS)

  def pairs(model, prefix):
    params = jax.eval_shape(model.init, jax.random.key(0), **inputs)["params"]
    for name in prefix:
      params = {name: params}
    params = objectives.draw(params)
    for name in reversed(prefix):
      params = params[name]
    image, text, _ = model.apply({"params": params}, **inputs)
    scale, bias = jnp.exp(params["t"][0]), params["b"][0]
    return joint_selection.Pairs(image, text, scale, bias)

  with jax.enable_x64():
    learner = pairs(towers.Model(V, dtype="float64"), ())
    reference = pairs(
      towers.Model(V, 24, dtype="float64"), ("params", "teacher")
    )
    key = jax.random.fold_in(keys.step_key(0, 0), 0x5E1EC7ED)
    chosen, _ = joint_selection.select(
      reference, learner, jnp.ones(B), key, number=B // 2, chunks=4
    )
  image, text, scale, bias = map(np.asarray, reference)
  chosen = np.asarray(chosen)
  logits = scale * image[chosen] @ text[chosen].T + bias
  signs = 2 * np.eye(B // 2) - 1
  return chosen, np.log1p(np.exp(-signs * logits)).sum() / (B // 2)


def test_the_gradient_is_that_of_the_chosen_pairs_alone(one_device):
  grads, sums = one_device
  chosen, reference_loss = chosen_by_hand()
  arrays = {name: x[chosen] for name, x in ARRAYS.items()}
  data = dict(type="arrays", arrays=arrays)
  plain = {"select": None, "teacher": None}
  alone, alone_sums = objectives.gradients(
    config(
      **plain,
      **{
        "model.dtype": "float64",
        "input.data": data,
        "input.batch_size": B // 2,
      },
    )
  )
  for name, g in alone.items():
    np.testing.assert_allclose(grads[name], g, rtol=1e-9, atol=1e-12)
  means = metrics.means(sums)
  assert means["loss"] == pytest.approx(metrics.means(alone_sums)["loss"])
  assert sums["loss"][1] == B // 2
  assert means["reference_loss"] == pytest.approx(reference_loss, rel=1e-6)
  assert means["all_clean"] == 0.5
  assert means["selected_clean"] == pytest.approx(np.mean(chosen % 2))
  assert means["selected_score"] > means["score"]


@pytest.mark.parametrize(
  ("sizes", "microbatches"),
  [(dict(replica=2, fsdp=4), 1), (dict(fsdp=2, sequence=2), 4)],
)
def test_any_mesh_and_microbatches_choose_the_same(
  one_device, sizes, microbatches
):
  grads, sums = one_device
  others, other_sums = step({"microbatches": microbatches}, **sizes)
  for name, g in grads.items():
    np.testing.assert_allclose(others[name], g, rtol=1e-7, atol=1e-10)
  expected = metrics.means(sums)
  for name, x in metrics.means(other_sums).items():
    assert x == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.slow
def test_the_reference_may_be_the_teacher_of_a_second_term(one_device):
  """ACED. Its embeddings of the chosen pairs are computed only once."""
  grads, sums = step({"loss": dict(distill_weight=2.0)})
  others, other_sums = step(
    {"loss": dict(distill_weight=2.0), "microbatches": 2},
    replica=2,
    fsdp=4,
  )
  means, before = metrics.means(sums), metrics.means(one_device[1])
  assert means["contrastive_loss"] == pytest.approx(before["loss"], rel=1e-9)
  terms = means["contrastive_loss"] + 2 * means["distill_loss"]
  assert means["loss"] == pytest.approx(terms, rel=1e-9)
  assert np.abs(grads["img/kernel"] - one_device[0]["img/kernel"]).max() > 1e-3
  for name, g in grads.items():
    np.testing.assert_allclose(others[name], g, rtol=1e-7, atol=1e-10)
  other_loss = metrics.means(other_sums)["distill_loss"]
  assert other_loss == pytest.approx(means["distill_loss"], rel=1e-6)


def test_steps_draw_differently(one_device):
  # An epoch is one batch, so both steps choose from the same pairs.
  _, sums = objectives.gradients(config(**IN_DOUBLE), step=1)
  first, second = metrics.means(one_device[1]), metrics.means(sums)
  assert second["score"] == pytest.approx(first["score"], rel=1e-9)
  assert second["selected_score"] != pytest.approx(first["selected_score"])


def test_the_easy_reference_needs_no_pass_of_the_learner(tmp_path):
  """Its model FLOPs are those of the chosen pairs, and of the reference."""

  def flops(score):
    on_update = lambda run, fn, specs, _: program.measure(run, fn, specs)
    changes = {"select.score": score, "mesh": dict(fsdp=1, replica=-1)}
    facts = main.train(
      config(**changes), str(tmp_path / score), on_update=on_update
    )
    return facts["model_flops"]

  number, chunk = B // 2, B // 2 // 4
  tower = lambda width: 2 * 16 * width  # Of one image.
  products = lambda width: 2 * width  # Of an image with a text.
  loss = 3 * (number * tower(8) + number**2 * products(8))
  # Own pairs, and images and texts with those of each chunk.
  scores = lambda width: B * products(width) * (1 + 2 * 4 * chunk)
  reference = B * tower(24) + scores(24) + number**2 * products(24)
  learner = B * tower(8) + scores(8)
  assert flops("easy_reference") == loss + reference
  assert flops("learnability") == loss + reference + learner


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory):
  """A trained reference."""
  workdir = tmp_path_factory.mktemp("reference")
  changes = {"model": TEACHER["model"], "select": None, "teacher": None}
  main.train(config(**changes), str(workdir))
  return str(workdir)


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit_and_saves_no_reference(
  reference_run, tmp_path
):
  changes = {"teacher.model_init": reference_run, "model.dropout": 0.1}
  changes["microbatches"] = 2
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  main.train(config(**changes), str(whole))
  for stop in (3, None):
    main.train(config(**changes) | {"stop_at_steps": stop}, str(cut))
  tiny.assert_same(tiny.arrays(whole), tiny.arrays(cut))
  assert tiny.rows(whole) == tiny.rows(cut)
  assert not [name for name in tiny.arrays(whole) if "teacher" in name]
  row = tiny.rows(whole)[6]
  names = {"score", "selected_score", "reference_loss", "selected_clean"}
  assert names < {*row}
  assert row["examples_seen"] == 6 * B


def test_one_of_several_tasks_may_choose(one_device):
  task = dict(type="contrastive", weight=1.0)
  tasks = dict(all=task, some=task | dict(select=SELECT, weight=2.0))
  total, sums = step({"select": None, "task": tasks})
  del tasks["some"]
  all_pairs, _ = objectives.gradients(
    config(
      **{
        "select": None,
        "teacher": None,
        "task": tasks,
        "model.dtype": "float64",
      }
    )
  )
  for name, g in one_device[0].items():
    np.testing.assert_allclose(total[name], all_pairs[name] + 2 * g, rtol=1e-9)
  assert {"some/score", "some/loss", "all/loss"} < {*sums}
  assert "all/score" not in sums


MISTAKES = {
  "no reference": (
    {"teacher": None},
    "config.teacher: missing: config.select needs a reference model",
  ),
  "a share of all": (
    {"select.keep": 1.0},
    "config.select.keep: expected a number above 0 and below 1, got 1.0",
  ),
  "a share below 0": (
    {"select.keep": -0.5},
    "config.select.keep: expected a number above 0 and below 1, got -0.5",
  ),
  "no share": (
    {"select.keep": None},
    "config.select.keep: expected a number above 0 and below 1, got None",
  ),
  "a batch that does not divide": (
    {"select.keep": 0.4},
    r"config.select.keep=0.4: 12.8 of a batch of 32 do not divide among 8 "
    r"devices; the nearest number that does is 16, keep=16/32",
  ),
  "chunks that do not divide": (
    {"select.chunks": 3},
    "config.select.chunks=3 does not divide the 16 chosen pairs; the nearest "
    "sizes that do: 2 and 4",
  ),
  "microbatches that do not divide": (
    {"microbatches": 4},
    "config.microbatches=4: a batch of 16 on 8 devices does not divide",
  ),
  "an unknown score": (
    {"select.score": "learnable"},
    "config.select.score: unknown 'learnable'.*mean 'learnability'",
  ),
  "an unknown option": ({"select.kep": 1}, "config.select.kep: .*mean 'keep'"),
  "an unknown feature": (
    {"select.report": ["clen"]},
    "config.select.report: no feature 'clen'.*mean 'clean'",
  ),
  "another loss": (
    {"loss": dict(kind="softmax")},
    "config.select: expected config.loss.kind='sigmoid'.*got 'softmax'",
  ),
  "another task": (
    {"task": "captioning"},
    "config.select: the task 'captioning' cannot choose examples",
  ),
  "another tokenizer": (
    {"teacher.model.vocab_size": 20},
    "config.teacher.model: takes 20 token ids, and config.model 11",
  ),
  "embeddings of two sizes": (
    {"teacher.model.text_width": 7},
    r"config.teacher.model.out_dim: .*\{'image': 24, 'text': 7\}",
  ),
  "a reference without a bias": (
    {"teacher.model.with_bias": False},
    "config.teacher.model.bias_init: config.select needs",
  ),
  "a reference that reads no texts": (
    {
      "teacher": dict(
        model_name="tiny.net", model=dict(num_classes=2), model_init=None
      )
    },
    "config.teacher.model_name: 'tiny.net' does not take the inputs",
  ),
  "several references": (
    {"teacher": dict(a=TEACHER, b=TEACHER)},
    "config.teacher: config.select needs one frozen model",
  ),
  "a reference that learns": (
    {"teacher": dict(ema=True), "ema_decay": 0.9},
    "config.teacher: config.select needs one frozen model",
  ),
  "a distance without a reference": (
    {"select": None, "teacher": None, "loss": dict(distill_weight=1.0)},
    "config.loss.distill_weight=1.0: expected config.select",
  ),
  "gsam": (
    {"gsam": dict(rho_max=0.1)},
    "config.select: not with config.gsam",
  ),
  "a teacher without a use": (
    {"select": None},
    "config.teacher: config.task='contrastive' does not use a teacher.*"
    "with config.select",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, tmp_path):
  changes, message = MISTAKES[name]
  with pytest.raises(ConfigError, match=message):
    main.train(config(**changes), str(tmp_path))
