"""The examples of docs/own_task.md train, resume, and are short."""

import pathlib
import re

import ml_collections
import numpy as np
import pytest
import tiny

from bigtrain import main
from bigtrain.tools import evaluate

PAGE = pathlib.Path(__file__).parents[2] / "docs/own_task.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
TEACHER, TEACHER_CONFIG, GAN, GAN_TASKS, GAN_CONFIG, *OTHERS = BLOCKS
DENOISER, DIFFUSION, DIFFUSION_CONFIG = OTHERS


@pytest.fixture
def modules(tmp_path, monkeypatch):
  """Writes the page's modules to a folder from which they can be imported."""
  monkeypatch.syspath_prepend(str(tmp_path))
  for name, code in (
    ("my_teacher", TEACHER),
    ("my_gan", GAN),
    ("my_gan_tasks", GAN_TASKS),
    ("my_denoiser", DENOISER),
    ("my_diffusion", DIFFUSION),
  ):
    # A dot makes it a user's module; the page has them in the project's root.
    folder = tmp_path / "page"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)


def config(tiny_config, code, changes):
  """The tiny run with the page's part of the config."""
  # Without the keys that the page sets.
  config = ml_collections.ConfigDict(tiny_config({"task": None}))
  exec(re.sub(r'"(my_\w+)"', r'"page.\1"', code), {"config": config})
  lengths = {"log_steps": 1, "ckpt_steps": 3, "keep_ckpts": 9}
  plain = config.to_dict() | lengths | changes
  return {key: x for key, x in plain.items() if x is not None}


def test_the_examples_are_shorter_than_80_lines():
  for code in (TEACHER, GAN + GAN_TASKS, DENOISER + DIFFUSION):
    assert len(code.splitlines()) < 80


def test_a_teacher_that_follows(modules, tiny_config, tmp_path):
  changes = {"total_steps": 12, "lr": 0.003}
  one = config(tiny_config, TEACHER_CONFIG, changes | {"evals": {}})
  main.train(one, str(tmp_path / "run"))
  rows = tiny.rows(tmp_path / "run")
  assert all(np.isfinite(row["loss"]) for row in rows.values())
  assert rows[12]["teacher_spread"] > 1e-3
  # The teacher is behind the student, and moves towards it.
  before, after = (tiny.arrays(tmp_path / "run", step) for step in (9, 12))
  name = "first/kernel"
  student, old = after[f"params/{name}"], before[f"tasks/teacher/{name}"]
  new = after[f"tasks/teacher/{name}"]
  distances = [np.linalg.norm(student - x) for x in (old, new)]
  assert distances[0] > distances[1] > 0
  main.train(one | {"stop_at_steps": 5}, str(tmp_path / "cut"))
  main.train(one, str(tmp_path / "cut"))
  assert tiny.rows(tmp_path / "cut") == rows
  two = one | {"microbatches": 2, "stop_at_steps": 1}
  main.train(two, str(tmp_path / "two"))
  expected = rows[1]["loss"]
  assert tiny.rows(tmp_path / "two")[1]["loss"] == pytest.approx(expected, 1e-5)


def test_the_teacher_can_be_evaluated(modules, tiny_config, tmp_path):
  data = tiny_config()["evals"]["val"]["data"]
  mean = dict(
    type="knn", pred="features", weights="teacher", label_key="labels"
  )
  mean |= dict(data=tiny_config()["input"]["data"], test_data=data, k=(5,))
  mean |= dict(log_steps=6, top_k=(1,))
  one = config(tiny_config, TEACHER_CONFIG, {"evals": {"knn": mean}})
  main.train(one, str(tmp_path / "run"))
  row = tiny.rows(tmp_path / "run")[6]
  assert (
    evaluate.evaluate(str(tmp_path / "run"))["knn/5nn_acc"]
    == row["knn/5nn_acc"]
  )


@pytest.mark.slow
def test_a_gan_with_two_optimizers(modules, tiny_config, tmp_path):
  changes = dict.fromkeys(("optimizer", "lr", "schedule"))
  changes |= {"evals": {}, "total_steps": 90, "ckpt_steps": 30}
  one = config(tiny_config, GAN_CONFIG, changes)
  main.train(one, str(tmp_path / "run"))
  rows = tiny.rows(tmp_path / "run")
  # Two steps of the critic, then one of the generator.
  assert "critic/loss" in rows[1] and "critic/loss" in rows[2]
  assert rows[3].keys() & {"critic/loss", "generator/loss"} == {
    "generator/loss"
  }
  first, last = (
    np.mean(
      [
        row["critic/loss"]
        for row in list(rows.values())[part]
        if "critic/loss" in row
      ]
    )
    for part in (slice(6), slice(-6, None))
  )
  assert last < first < 1.5, (first, last)
  assert rows[58]["lr/critic"] == pytest.approx(1e-3)
  arrays = tiny.arrays(tmp_path / "run")
  parts = {name.split("/")[1] for name in arrays if name.startswith("opt/")}
  assert parts == {"critic", "generator"}
  assert all(np.isfinite(x).all() for x in arrays.values())
  main.train(one | {"stop_at_steps": 31}, str(tmp_path / "cut"))
  main.train(one, str(tmp_path / "cut"))
  tiny.assert_same(tiny.arrays(tmp_path / "cut"), arrays)


def test_a_diffusion_model(modules, tiny_config, tmp_path):
  changes = {"total_steps": 60, "ckpt_steps": 30, "lr": 0.003}
  one = config(tiny_config, DIFFUSION_CONFIG, changes)
  main.train(one, str(tmp_path / "run"))
  rows = tiny.rows(tmp_path / "run")
  mean = lambda steps: np.mean([rows[step]["loss"] for step in steps])
  # A model that says nothing of the noise has its variance, 1.
  assert mean(range(50, 61)) < 0.95 < mean([1, 2])
  png = (tmp_path / "run" / rows[60]["made/samples"]).read_bytes()
  assert png[:4] == b"\x89PNG"
  two = one | {"microbatches": 2, "stop_at_steps": 1}
  main.train(two, str(tmp_path / "two"))
  expected = rows[1]["loss"]
  assert tiny.rows(tmp_path / "two")[1]["loss"] == pytest.approx(expected, 1e-5)


def test_a_problem_ends_the_run_with_its_reason(modules, tiny_config, tmp_path):
  one = config(tiny_config, TEACHER_CONFIG, {"evals": {}, "total_steps": 20})
  # All features of the teacher are equal: they are one.
  one["model"] = {"num_classes": 1}
  one["loss"] = one["loss"] | {"num_features": 1}
  with pytest.raises(RuntimeError, match="step 3: all features of the teacher"):
    main.train(one, str(tmp_path / "run"))
