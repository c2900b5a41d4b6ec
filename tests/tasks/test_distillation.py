"""Distillation from a teacher, frozen or the student's average."""

import copy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from bigtrain import main, sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.inputs.named_features import Features
from bigtrain.losses import mixup
from bigtrain.tasks import distillation
from bigtrain.tools import evaluate
from bigtrain.tools.plan import program

TEACHER = dict(model_name="tiny.net", model=dict(num_classes=10, width=64))


@pytest.fixture(scope="module")
def configure(tiny_config, tmp_path_factory):
  """configure(changes): a config with the checkpoint of a trained teacher."""
  workdir = tmp_path_factory.mktemp("teacher")
  main.train(
    tiny_config({"model": TEACHER["model"], "evals": {}, "lr": 0.1}),
    str(workdir),
  )
  changes = {
    "task": "distillation",
    "teacher": TEACHER | {"model_init": dict(path=str(workdir), step=6)},
    "model.dropout": 0.1,
    "microbatches": 2,
    "loss": dict(mixup_alpha=0.5, temperature=2.0),
    "evals.agree": tiny_config()["evals"]["val"] | {"type": "mean"},
    "evals.agree.pred": "loss",
    "evals.agree.pred_kw": dict(temperature=2.0),
    "evals.teacher": tiny_config()["evals"]["val"] | {"pred": "teacher_logits"},
  }

  def make(**more):
    return tiny_config(copy.deepcopy(changes | more))

  return make


def on_one_device(monkeypatch):
  monkeypatch.setattr(
    sharding,
    "from_config",
    lambda config: sharding.make_mesh(devices=jax.devices()[:1]),
  )


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_and_resumes(
  configure, tmp_path, monkeypatch
):
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  main.train(configure(), str(whole))
  rows = tiny.rows(whole)
  assert rows[6]["loss"] < rows[1]["loss"]
  assert rows[6]["agree/agreement"] > 0
  assert rows[3]["teacher/loss"] == rows[6]["teacher/loss"]
  assert rows[6]["teacher/acc"] == rows[6]["agree/teacher_accuracy"]
  for name in ("accuracy", "teacher_accuracy", "entropy", "teacher_entropy"):
    assert rows[6][name] > 0
  # The tool loads the teacher again; it needs no training data.
  evaluated = {
    name: value
    for name, value in rows[6].items()
    if name.startswith(("val/", "agree/", "teacher/"))
  }
  assert tiny.without_times(evaluate.evaluate(str(whole))) == (
    tiny.without_times({"step": 6, **evaluated})
  )
  # It leaves a teacher alone that no evaluation needs.
  moved = ["teacher.model_init=nowhere"]
  with pytest.raises(ConfigError, match=r"config.teacher.model_init: .*nowher"):
    evaluate.evaluate(str(whole), changes=moved)
  alone = [*moved, "evals.agree.enabled=False", "evals.teacher.enabled=False"]
  results = evaluate.evaluate(str(whole), changes=alone)
  assert results["val/loss"] == rows[6]["val/loss"]
  assert "teacher/loss" not in results
  # Checkpoints hold the student alone.
  arrays = tiny.arrays(whole)
  assert not [name for name in arrays if "teacher" in name]
  assert arrays["params/head/kernel"].shape == (32, 10)

  for stop in (3, None):
    main.train(configure() | {"stop_at_steps": stop}, str(cut))
  tiny.assert_same(arrays, tiny.arrays(cut))
  assert rows == tiny.rows(cut)

  with monkeypatch.context() as patch:
    on_one_device(patch)
    main.train(configure(**{"model.dropout": 0.0}), str(tmp_path / "1"))
  main.train(configure(**{"model.dropout": 0.0}), str(tmp_path / "8"))
  one, eight = (tiny.rows(tmp_path / name) for name in ("1", "8"))
  for step, row in one.items():
    for name in ("loss", "agree/loss", "teacher_accuracy"):
      if name in row:
        assert row[name] == pytest.approx(eight[step][name], rel=1e-4)


def test_model_flops_count_the_teacher_once(configure, tmp_path):
  on_update = lambda run, fn, specs, _: program.measure(run, fn, specs)
  facts = main.train(configure(), str(tmp_path), on_update=on_update)
  student, teacher = (2 * 16 * (64 * width + width * 10) for width in (32, 64))
  assert facts["model_flops"] == pytest.approx(3 * student + teacher, rel=1e-5)
  assert facts["state_bytes"]["teacher"] > 0


class MeanNet(nn.Module):
  """Two classes from the mean of all pixels, whatever the resolution."""

  @nn.compact
  def __call__(self, image, *, train=False):
    return nn.Dense(2, name="head")(image.mean((1, 2))), {}


@pytest.mark.parametrize("mixup_alpha", [0.0, 0.8])
def test_the_teacher_sees_the_same_blend_at_its_resolution(mixup_alpha):
  image = jax.random.normal(jax.random.key(0), (6, 4, 4, 3))
  batch = {"image": image, "teacher_image": image.repeat(2, 1).repeat(2, 2)}
  variables = MeanNet().init(jax.random.key(1), image)
  given = dict(model=MeanNet(), teacher=MeanNet(), train=True, distance="l2")

  def loss(batch):
    return distillation.loss_fn(
      {**variables, "teacher": variables},
      Features(batch, ""),
      jax.random.key(2),
      mixup_alpha=mixup_alpha,
      **given,
    )[0]["loss"][0]

  assert loss(batch) == pytest.approx(0, abs=1e-6)
  # In another order they are other examples.
  assert loss({**batch, "teacher_image": batch["teacher_image"][::-1]}) > 0.01


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"teacher": {}}, r"config.teacher: missing: .*model_init"),
    ({"task": "classification", "loss": {}}, "'distillation' and"),
    ({"teacher": TEACHER}, r"config.teacher.model_init: missing"),
    (
      {"teacher": TEACHER | {"model_name": "vitt", "model_init": None}},
      r"config.teacher.model_name: .* mean 'vit'",
    ),
    ({"teacher.model": dict(classes=1)}, r"config.teacher.model.classes"),
    ({"teacher.extra": 1}, r"config.teacher.extra: unknown key"),
    ({"loss": dict(distance="kll")}, r"config.loss.distance: .* mean 'kl'"),
    ({"loss": dict(temperature=0.0)}, "loss.temperature: .* above 0, got 0.0"),
    (
      {"loss": dict(distance="l2", temperature=2.0)},
      "config.loss.temperature: used only with distance='kl', got 'l2'",
    ),
    ({"loss": dict(label_smoothing=0.1)}, "used only with distance='hard'"),
    (
      {"loss": dict(mixup_alpha=0.1, cutmix_alpha=1.0, cutmix_prob=7.0)},
      "config.loss.cutmix_prob: expected a number at least 0 and at most 1",
    ),
    (
      {"loss": dict(weights=dict(teacher=-1.0))},
      "config.loss.weights.teacher: expected a number at least 0, got -1.0",
    ),
    (
      {"teacher.model": dict(num_classes=10, width=8)},
      r"(?s)config.teacher.model_init: .* does not fit",
    ),
  ],
)
def test_mistakes(configure, tmp_path, changes, message):
  with pytest.raises(ConfigError, match=message):
    main.train(configure(**changes), str(tmp_path))


def drawn(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def variables_of(seed):
  return {
    "params": {"head": {"kernel": drawn(seed, 3, 2), "bias": jnp.zeros(2)}}
  }


@pytest.mark.parametrize(
  "weights", [None, dict(a=1.0, b=1.0), dict(a=2, b=0.5)]
)
def test_several_teachers_see_the_same_blend_and_add_up_by_weight(weights):
  batch = {"image": drawn(0, 6, 4, 4, 3)}
  batch["b_image"] = batch["image"].repeat(2, 1).repeat(2, 2) + 1.0
  a, b, student = (variables_of(seed) for seed in (1, 2, 3))

  def loss(student, teacher, batch=batch, rng=jax.random.key(4), **options):
    several = isinstance(teacher, dict) and "params" not in teacher
    models = dict.fromkeys(teacher, MeanNet()) if several else MeanNet()
    result, _ = distillation.loss_fn(
      {**student, "teacher": teacher},
      Features(batch, ""),
      rng,
      **dict(model=MeanNet(), teacher=models, train=True, mixup_alpha=0.8),
      **options,
    )
    return {name: total / weight for name, (total, weight) in result.items()}

  both = loss(student, dict(a=a, b=b), weights=weights)
  of_a = loss(student, a)["loss"]
  view = {"image": batch["image"], "teacher_image": batch["b_image"]}
  of_b = loss(student, b, view)["loss"]
  assert both["a_loss"] == pytest.approx(float(of_a), rel=1e-6)
  assert both["b_loss"] == pytest.approx(float(of_b), rel=1e-6)
  w = weights or dict(a=0.5, b=0.5)
  expected = w["a"] * of_a + w["b"] * of_b
  assert both["loss"] == pytest.approx(float(expected), rel=1e-6)
  if weights is None:  # As big_vision notes, KL learns mean probabilities.
    grad = jax.grad(lambda s: loss(s, dict(a=a, b=b))["loss"])(student)
    model = MeanNet()
    mix = lambda key: mixup.draw(jax.random.split(key)[0], 0.8, 0.0, 0.5)
    images = [
      mix(jax.random.key(4)).images(batch[n]) for n in ("image", "b_image")
    ]
    softmax = lambda v, x: jax.nn.softmax(model.apply(v, x)[0])
    mean = (softmax(a, images[0]) + softmax(b, images[1])) / 2

    def xent(student):
      logits = model.apply(student, images[0])[0]
      return -jnp.mean(jnp.sum(mean * jax.nn.log_softmax(logits), axis=-1))

    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
      grad,
      jax.grad(xent)(student),
    )
    entropy = -jnp.mean(jnp.sum(mean * jnp.log(mean), axis=-1))
    assert both["teacher_entropy"] == pytest.approx(float(entropy), rel=1e-5)


def test_a_run_with_two_teachers(configure, tmp_path):
  one = configure()["teacher"]
  changes = {"teacher": dict(a=one, b=one), "total_steps": 3}
  changes["loss"] = dict(weights=dict(a=0.7, b=0.3))
  changes["evals.agree.pred_kw"] = changes["loss"]
  changes["evals.teacher.enabled"] = False
  main.train(configure(**changes), tmp_path)
  row = tiny.rows(tmp_path)[3]
  assert row["loss"] == pytest.approx(row["a_loss"], rel=1e-5)
  assert row["a_loss"] == pytest.approx(row["b_loss"], rel=1e-5)
  changes["loss"] = dict(weights=dict(a=0.7))
  with pytest.raises(ConfigError, match="weights: expected weights of a, b"):
    main.train(configure(**changes), tmp_path / "wrong")


@pytest.fixture
def mean_teacher(tiny_config):
  """mean_teacher(changes): a config whose teacher is the student's average."""
  changes = {
    "task": "distillation",
    "teacher": dict(ema=True),
    "ema_decay": 0.3,
    "model.statistics": True,
    "input.batch_size": tiny.NUM_TRAIN,  # Their order does not matter.
    "loss": dict(temperature=2.0, label_weight=0.5),
    "optimizer": dict(name="sgd", momentum=0.0),
    "lr": 0.5,
    "schedule": dict(decay_type="constant"),
    "ckpt_steps": 1,
    "log_steps": 1,
    "keep_ckpts": 10,
    "evals": {},
  }
  return lambda **more: tiny_config(copy.deepcopy(changes | more))


def test_a_mean_teacher_is_that_of_a_loop_by_hand(mean_teacher, tmp_path):
  """Tarvainen & Valpola 2017: cross-entropy, and the average's predictions."""
  config = mean_teacher()
  main.train(config, str(tmp_path))
  data = np.load(config["input"]["data"]["path"])
  image = data["image"].reshape(tiny.NUM_TRAIN, -1)
  labels = jax.nn.one_hot(data["labels"], 10)

  def net(params, mean):
    first, head = params["first"], params["head"]
    x = image @ first["kernel"] + first["bias"] - mean
    return jax.nn.relu(x) @ head["kernel"] + head["bias"], x

  def loss(params, average, mean):
    logits, x = net(params, mean)
    taught = jax.nn.log_softmax(net(average, mean)[0] / 2)
    own = jax.nn.log_softmax(logits / 2)
    distance = 4 * jnp.sum(jnp.exp(taught) * (taught - own), -1)
    xent = -jnp.sum(labels * jax.nn.log_softmax(logits), -1)
    new_mean = 0.9 * mean + 0.1 * x.mean(0)
    return jnp.mean(distance + 0.5 * xent), (distance.mean(), new_mean)

  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  state = trees.from_flat(tiny.arrays(tmp_path, 1))
  params, average = state["params"], state["ema"]
  mean = state["mutable"]["running"]["mean"]
  for t in range(1, 6):
    (total, (distance, mean)), grads = step(params, average, mean)
    params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    decay = min(0.3, (1 + t) / (10 + t))
    average = jax.tree.map(
      lambda a, p, d=decay: d * a + (1 - d) * p, average, params
    )
    row = tiny.rows(tmp_path)[t + 1]
    assert row["loss"] == pytest.approx(float(total), rel=1e-5)
    assert row["teacher_loss"] == pytest.approx(float(distance), abs=1e-6)
  assert distance > 1e-4
  got = trees.from_flat(tiny.arrays(tmp_path))
  want = dict(params=params, ema=average, mutable=dict(running=dict(mean=mean)))
  for name, tree in want.items():
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got[name], tree
    )
  # No second copy: neither in the checkpoint nor in the memory of the update.
  assert not [name for name in tiny.arrays(tmp_path) if "teacher" in name]
  measure = lambda run, fn, specs, _: program.measure(run, fn, specs)
  facts = main.train(config, str(tmp_path / "plan"), on_update=measure)
  assert facts["state_bytes"]["teacher"] == 0


@pytest.mark.slow
def test_a_mean_teacher_resumes_and_is_the_same_on_any_mesh(
  mean_teacher, tiny_config, tmp_path, monkeypatch
):
  val = tiny_config()["evals"]["val"]
  changes = {
    "model.statistics": False,
    "model.dropout": 0.1,
    "evals.val": val | {"pred": "teacher_logits"},
    "evals.ema": val | {"weights": "ema"},
  }
  main.train(mean_teacher(**changes), str(tmp_path / "whole"))
  rows = tiny.rows(tmp_path / "whole")
  assert rows[6]["val/loss"] == rows[6]["ema/loss"]
  results = evaluate.evaluate(str(tmp_path / "whole"))
  assert results["val/loss"] == rows[6]["val/loss"]
  for stop in (3, None):
    config = mean_teacher(**changes) | {"stop_at_steps": stop}
    main.train(config, str(tmp_path / "cut"))
  tiny.assert_same(*(tiny.arrays(tmp_path / name) for name in ("whole", "cut")))
  assert rows == tiny.rows(tmp_path / "cut")
  changes["model.dropout"] = 0.0
  arrays = []
  for i, more in enumerate([{}, {"mesh.replica": 4}, {"microbatches": 2}]):
    main.train(mean_teacher(**changes, **more), str(tmp_path / str(i)))
    arrays.append(tiny.arrays(tmp_path / str(i)))
  with monkeypatch.context() as patch:
    on_one_device(patch)
    main.train(mean_teacher(**changes), str(tmp_path / "one"))
  for other in (*arrays[1:], tiny.arrays(tmp_path / "one")):
    for name, x in arrays[0].items():
      np.testing.assert_allclose(other[name], x, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({}, "config.ema_decay, of which config.teacher.ema=True.*None"),
    ({"teacher.extra": 1}, "config.teacher.extra: unknown key"),
  ],
)
def test_mistakes_of_a_mean_teacher(mean_teacher, tmp_path, changes, message):
  config = mean_teacher(**changes)
  if "decay" in message:
    del config["ema_decay"]
  with pytest.raises(ConfigError, match=message):
    main.train(config, str(tmp_path))
