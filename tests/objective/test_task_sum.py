"""Several tasks over one model: config.task as a dict."""

import numpy as np
import pytest
import tiny
from support import objectives

import bigtrain
from bigtrain import main
from bigtrain.config.errors import ConfigError

B, L, V = 16, 6, 13
WEIGHTS = dict(caption=0.5, pairs=2.0, single=1.0)
TYPES = dict(
  caption=dict(type="captioning", loss=dict(normalize="tokens")),
  # Needs the whole batch at once.
  pairs=dict(type="contrastive", loss=dict(kind="softmax", chunk=5)),
  single=dict(type="captioning", features=dict(labels="names")),
)


@pytest.fixture(scope="module")
def arrays():
  rng = np.random.default_rng(0)

  def text(lengths):
    ids = rng.integers(1, V, (B, L))
    return np.where(np.arange(L) < lengths[:, None], ids, 0).astype(np.int32)

  return {
    "image": rng.normal(size=(B, 4, 8, 1)),
    "labels": text(rng.integers(1, L + 1, B)),
    "names": text(np.full(B, 2)),
  }


def config(arrays, names, microbatches=1, **changes):
  """A CoCa in float64 that learns some of the tasks."""
  sizes = dict(patch_size=4, width=8, depth=1, mlp_dim=8, num_heads=2)
  return dict(
    total_steps=10,
    input=dict(data=dict(type="arrays", arrays=arrays), batch_size=B),
    microbatches=microbatches,
    model_name="coca",
    model=dict(
      **dict(vocab_size=V, max_len=L, num_queries=3, dtype="float64"),
      **sizes,
      **changes,
    ),
    task={n: dict(TYPES[n], weight=WEIGHTS[n]) for n in names},
  )


@pytest.fixture(scope="module")
def apart(arrays):
  """Weighted sum of the gradients of each task alone."""
  total, losses = {}, {}
  for name, weight in WEIGHTS.items():
    one = config(arrays, [name])
    one["task"], entry = TYPES[name]["type"], TYPES[name]
    one["loss"] = entry.get("loss", {})
    if name == "single":
      pp = "drop('labels')|copy('names','labels')"
      one["input"] = {**one["input"], "pp": pp}
    grads, sums = objectives.gradients(one)
    losses[name] = sums["loss"][0] / sums["loss"][1]
    for key, g in grads.items():
      total[key] = total.get(key, 0) + weight * g
  return total, losses


@pytest.mark.parametrize(
  "sizes, microbatches, changes",
  [
    (dict(replica=2, fsdp=4), 2, dict(remat_policy="nothing_saveable")),
    pytest.param(dict(fsdp=1), 4, {}, marks=pytest.mark.slow),
    pytest.param(dict(fsdp=2, tensor=2), 2, {}, marks=pytest.mark.slow),
  ],
)
def test_the_gradient_of_a_sum_is_the_sum_of_the_gradients(
  arrays, apart, sizes, microbatches, changes
):
  expected, losses = apart
  total, sums = objectives.gradients(
    config(arrays, WEIGHTS, microbatches, **changes), **sizes
  )
  loss, weight = sums["loss"]
  wanted = sum(WEIGHTS[name] * x for name, x in losses.items())
  assert loss / weight == pytest.approx(wanted, rel=1e-6)
  for name, x in losses.items():
    one, number = sums[f"{name}/loss"]
    assert one / number == pytest.approx(x, rel=1e-6)
  largest = max(abs(g).max() for g in expected.values())
  assert largest > 1e-3 and total.keys() == expected.keys()
  for name, g in total.items():
    np.testing.assert_allclose(
      g, expected[name], rtol=1e-6, atol=1e-6 * largest, err_msg=name
    )


# Runs of the program.


def both(late=None, **changes):
  """A net that learns classes, and later smoothed ones of another batch."""
  main_task = dict(type="classification", weight=1.0)
  late_task = dict(
    type="classification",
    weight=dict(at_steps=[3, 6], values=[0.5, 1.0]),
    loss=dict(label_smoothing=0.2),
    from_steps=3,
  )
  tasks = {"main": main_task, "late": late_task | (late or {})}
  return {"task": tasks, "log_steps": 1, "ckpt_steps": 2, **changes}


@pytest.fixture(scope="module")
def own_input(tiny_config):
  data = tiny_config()["input"]["data"]
  pp = "random_crop(8,pad=1)|keep('image','labels')"
  return dict(data=data, pp=pp, batch_size=8)


@pytest.fixture(scope="module")
def finished(tiny_config, own_input, tmp_path_factory):
  """(config, workdir) of a run with a task from step 3 on its own input."""
  workdir = tmp_path_factory.mktemp("sum")
  config = tiny_config(both(dict(input=own_input)) | EVERYTHING)
  main.train(config, str(workdir))
  return config, workdir


EVERYTHING = {
  "model.statistics": True,
  "model.dropout": 0.3,
  "ema_decay": 0.5,
  "keep_ckpts": 9,
  "microbatches": 1,
}


def test_a_task_that_begins_later_leaves_the_steps_before_as_they_were(
  finished, tiny_config, tmp_path
):
  _, workdir = finished
  for task in ("classification", {"main": both()["task"]["main"]}):
    folder = tmp_path / type(task).__name__
    changes = {"task": task, "log_steps": 1, "ckpt_steps": 2, **EVERYTHING}
    main.train(tiny_config(changes), str(folder))
    tiny.assert_same(tiny.arrays(workdir, 2), tiny.arrays(folder, 2))
    without, rows = tiny.rows(folder), tiny.rows(workdir)
    for step in (1, 2, 3):
      assert rows[step]["loss"] == without[step]["loss"]
      assert not any(name.startswith("late/") for name in rows[step])
    assert rows[5]["loss"] != without[5]["loss"]


def test_metrics_have_the_names_of_tasks_and_the_loss_is_their_sum(finished):
  rows = tiny.rows(finished[1])
  for step, weight in ((4, 0.5), (5, 2 / 3), (6, 5 / 6)):
    row = rows[step]
    wanted = row["main/loss"] + weight * row["late/loss"]
    assert row["loss"] == pytest.approx(wanted, rel=1e-5)
    assert {"main/accuracy", "late/accuracy"} <= row.keys()


def test_the_trained_model_predicts(finished):
  _, workdir = finished
  model = bigtrain.load(str(workdir))
  assert "classification + classification" in repr(model)
  picture = np.random.default_rng(0).normal(size=(8, 8, 1))
  result = model.classify(picture.astype(np.float32), top_k=2)
  assert 0 <= result["index"] < 10 and len(result["top"]) == 2


def test_a_run_that_is_interrupted_continues_bit_for_bit(finished, tmp_path):
  config, workdir = finished
  for stop in (2, 4, None):  # Before the task begins, and after.
    main.train(config | {"stop_at_steps": stop}, str(tmp_path))
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(workdir))
  assert tiny.rows(tmp_path) == tiny.rows(workdir)


def test_meshes_and_microbatches_change_rounding_only(
  tiny_config, own_input, tmp_path
):
  late = dict(input=own_input | dict(batch_size=16))
  states = []
  for changes in (
    {"mesh": dict(fsdp=8)},
    {"mesh": dict(replica=4, fsdp=2), "microbatches": 2},
  ):
    folder = tmp_path / str(len(states))
    main.train(tiny_config(both(late, evals={}) | changes), str(folder))
    states.append(tiny.arrays(folder))
  for name, x in states[0].items():
    np.testing.assert_allclose(
      states[1][name], x, rtol=1e-4, atol=1e-5, err_msg=name
    )


@pytest.mark.parametrize(
  "late, message",
  [
    ({"weight": None}, "config.task.late.weight: expected a number above 0"),
    ({"weight": -1.0}, "config.task.late.weight: expected a number above 0"),
    ({"weight": 0}, "config.task.late.weight: expected a number above 0"),
    ({"from_steps": 6}, "late: begins at step 6, but the run has 6 steps"),
    ({"from_percent": 50}, "from_steps and config.task.late.from_percent"),
    ({"type": "clasification"}, "late.type: unknown task .*'classification'"),
    ({"from_step": 3}, "late.from_step: unknown key.*'from_steps'"),
    (
      {"loss": {"label_smoothin": 1.0}},
      "config.task.late.loss.label_smoothin: unknown.*'label_smoothing'",
    ),
    (
      {"features": {"labels": "label"}},
      "late.features.labels: config.input makes no feature 'label'.*'labels'",
    ),
    ({"features": {"labels": None}}, "late: config.input: .* no feature 'lab"),
    ({"type": "policy_gradient"}, "late.type.*must be the only task"),
  ],
)
def test_mistakes_have_their_line(tiny_config, tmp_path, late, message):
  with pytest.raises(ConfigError, match=message):
    main.train(tiny_config(both(late)), str(tmp_path))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"task.main.weight": None}, "config.task.main.weight: missing"),
    ({"task.main.from_steps": 2}, "no task begins at step 0"),
    ({"loss": {"z": 1}}, "config.loss: with several tasks, each has its own"),
    ({"task.val": dict(type="classification", weight=1)}, "evals.val: both"),
    ({"task.a/b": dict(type="classification", weight=1)}, "letters and dig"),
    ({"task.main": 3}, r"config.task.main: expected dict\(type="),
    ({"task": dict(type="classification")}, "a dict of tasks by name"),
    ({"task.late.input": {"data": {"type": "arrays"}}}, "late.input"),
  ],
)
def test_mistakes_in_several_tasks(tiny_config, tmp_path, changes, message):
  with pytest.raises(ConfigError, match=message):
    main.train(tiny_config(both() | changes), str(tmp_path))
