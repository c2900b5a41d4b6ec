"""State of tasks: teachers that follow the student, centres, queues."""

import numpy as np
import pytest
import tiny

from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.tools import evaluate
from bigtrain.tools.plan import program

FOLLOWS = dict(
  type="tiny.following",
  weight=0.1,
  loss=dict(pull=0.5, momentum=dict(at_steps=[0, 6], values=[0.5, 1.0])),
)


def config(tiny_config, task, **changes):
  """A run whose optimizer keeps rounding errors small."""
  changes = {
    "task": task,
    "optimizer": dict(name="sgd"),
    "lr": 0.05,
    "schedule": dict(decay_type="constant"),
    "log_steps": 1,
    "ckpt_steps": 1,
    "keep_ckpts": 9,
    **changes,
  }
  return tiny_config(changes)


@pytest.fixture(scope="module")
def follows(tiny_config, tmp_path_factory):
  """(config, workdir) of a classifier that a teacher follows from step 2 on."""
  workdir = tmp_path_factory.mktemp("follows")
  val = tiny_config()["evals"]["val"]
  task = {
    "main": dict(type="classification", weight=1.0),
    "ema": {**FOLLOWS, "from_steps": 2},
  }
  taught = val | {"weights": "ema/teacher"}
  one = config(tiny_config, task, evals={"val": val, "taught": taught})
  main.train(one, str(workdir))
  return one, workdir


def of(arrays, prefix):
  return {
    name.removeprefix(prefix): x
    for name, x in arrays.items()
    if name.startswith(prefix)
  }


def test_the_teacher_is_the_average_that_its_schedule_says(follows):
  _, workdir = follows
  # At its first step it begins as the student.
  teacher = of(tiny.arrays(workdir, 2), "params/")
  for step in (3, 4, 5, 6):
    momentum = 0.5 + 0.5 * (step - 1) / 6
    arrays = tiny.arrays(workdir, step)
    saved = of(arrays, "tasks/ema/teacher/")
    student = of(arrays, "params/")
    assert saved.keys() == student.keys()
    for name, x in saved.items():
      teacher[name] = momentum * teacher[name] + (1 - momentum) * student[name]
      np.testing.assert_allclose(x, teacher[name], rtol=1e-5, atol=1e-7)
  centre = tiny.arrays(workdir, 6)["tasks/ema/centre"]
  assert np.abs(centre).max() > 0


def test_before_the_task_begins_its_state_does_not_change(follows):
  _, workdir = follows
  first = of(tiny.arrays(workdir, 1), "tasks/")
  tiny.assert_same(of(tiny.arrays(workdir, 2), "tasks/"), first)


def test_evaluations_may_use_the_teacher(follows):
  _, workdir = follows
  row = tiny.rows(workdir)[6]
  assert 0 < abs(row["taught/loss"] - row["val/loss"]) < 1
  again = evaluate.evaluate(str(workdir), 6)
  assert again["taught/loss"] == row["taught/loss"]


def test_plans_count_the_state_and_all_tasks(follows, tmp_path):
  one = follows[0] | {"evals": {}}
  measure = lambda run, fn, specs, _: program.measure(run, fn, specs)
  facts = main.train(one, str(tmp_path / "sum"), on_update=measure)
  alone = one | {"task": "classification"}
  of_one = main.train(alone, str(tmp_path / "one"), on_update=measure)
  assert facts["state_bytes"]["tasks"] > facts["parameter_bytes"] / 8
  assert "tasks" not in of_one["state_bytes"]
  assert facts["model_flops"] > 1.9 * of_one["model_flops"]


def test_parameters_txt_lists_the_state(follows):
  text = (follows[1] / "parameters.txt").read_text()
  assert "State of tasks" in text and "tasks/ema/teacher/head/kernel" in text


def test_a_run_that_is_interrupted_continues_bit_for_bit(follows, tmp_path):
  one, workdir = follows
  for stop in (1, 2, 4, None):
    main.train(one | {"stop_at_steps": stop}, str(tmp_path))
  tiny.assert_same(tiny.arrays(tmp_path), tiny.arrays(workdir))
  assert tiny.rows(tmp_path) == tiny.rows(workdir)


@pytest.mark.parametrize("task", ["tiny.following", "tiny.queueing"])
def test_meshes_and_microbatches_change_rounding_only(
  task, tiny_config, tmp_path
):
  states = []
  for changes in (
    {"mesh": dict(fsdp=8)},
    {"mesh": dict(replica=4, fsdp=2), "microbatches": 2},
  ):
    one = config(tiny_config, task, evals={}, **changes)
    folder = tmp_path / str(len(states))
    main.train(one, str(folder))
    states.append(tiny.arrays(folder))
  assert any(name.startswith("tasks/") for name in states[0])
  for name, x in states[0].items():
    np.testing.assert_allclose(
      states[1][name], x, rtol=1e-5, atol=1e-5 * np.abs(x).max(), err_msg=name
    )


def test_a_queue_has_the_newest_embeddings_first(tiny_config, tmp_path):
  one = config(tiny_config, "tiny.queueing", evals={}, loss=dict(queue_size=40))
  main.train(one, str(tmp_path))
  queues = [tiny.arrays(tmp_path, s)["tasks/queue_QC"] for s in (1, 2, 3)]
  assert np.abs(queues[0][:16]).max() > 0 and not queues[0][16:].any()
  np.testing.assert_array_equal(queues[1][16:32], queues[0][:16])
  np.testing.assert_array_equal(queues[2][32:], queues[0][:8])


def test_a_teacher_begins_with_the_parameters_that_are_loaded(
  tiny_config, follows, tmp_path
):
  source = follows[1]
  one = config(
    tiny_config,
    "tiny.following",
    evals={},
    model_init=dict(path=str(source)),
    save_at_start=True,
    stop_at_steps=1,
  )
  main.train(one, str(tmp_path))
  arrays = tiny.arrays(tmp_path, 0)
  tiny.assert_same(
    of(arrays, "tasks/teacher/"), of(tiny.arrays(source), "params/")
  )


@pytest.mark.parametrize(
  "loss, message",
  [
    (dict(momentun=0.9), "config.loss.momentun: unknown key.*'momentum'"),
    (dict(teacher_has="nothing"), "config.loss: the teacher has no parameters"),
    (dict(teacher_has="others"), "teacher has another/.*no such parameter"),
    (dict(teacher_has="larger"), r"head/\w+ has the shape \(2, .*student's"),
    (dict(forgets=True), "update_state: expected the arrays of init_state"),
    (
      dict(momentum=dict(at_steps=[3, 1], values=[0, 1])),
      "config.loss.momentum.at_steps: expected 2 ascending points",
    ),
  ],
)
def test_mistakes_have_their_line(tiny_config, tmp_path, loss, message):
  one = config(tiny_config, "tiny.following", evals={}, loss=loss)
  with pytest.raises(ConfigError, match=message):
    main.train(one, str(tmp_path))
  assert not list(tmp_path.glob("checkpoints/*"))
